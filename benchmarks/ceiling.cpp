// The machine's own speed: rows read, or read and written, as four streams a quarter of a row
// apart, with nothing done to the bytes.

#include <cstdint>

#define STREAMS 4
typedef uint64_t Line __attribute__((vector_size(64)));

template <class Use>
static inline void for_each_line(char* data, int64_t rows, int64_t bytes, Use use) {
  const int64_t stream = bytes / STREAMS & ~int64_t{63};
  for (; rows > 0; --rows, data += bytes) {
    for (int64_t i = 0; i < stream; i += 64) {
#pragma GCC unroll 4
      for (int s = 0; s < STREAMS; ++s) use(s, data + s * stream + i);
    }
  }
}

extern "C" uint64_t read_rows(char* data, int64_t rows, int64_t bytes) {
  Line all[STREAMS] = {};
  for_each_line(data, rows, bytes, [&](int s, char* line) {
    Line x;
    __builtin_memcpy(&x, line, sizeof x);
    all[s] |= x;
  });
  const Line x = all[0] | all[1] | all[2] | all[3];
  return x[0] | x[1] | x[2] | x[3] | x[4] | x[5] | x[6] | x[7];
}

extern "C" void write_rows(char* data, int64_t rows, int64_t bytes) {
  for_each_line(data, rows, bytes, [&](int, char* line) {
    Line x;
    __builtin_memcpy(&x, line, sizeof x);
    x ^= 1;  // twice makes the same again
    __builtin_memcpy(line, &x, sizeof x);
  });
}
