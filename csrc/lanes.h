// A vector of floats, as wide as the instruction set has them, by the compilers' vector extension:
// operators and `?:` work lane by lane on every processor. Where g++ makes slow code of that,
// intrinsics stand.
//
// No include guard: for_each_isa.h reads this file once for each instruction set.

namespace ppokern::PPOKERN_ISA {
namespace {

constexpr int kLanes = PPOKERN_LANES;
typedef float Lanes __attribute__((vector_size(4 * kLanes)));
typedef int32_t Mask __attribute__((vector_size(4 * kLanes)));  // -1 (True) or 0 in each lane

inline Lanes load(const float* from) {
  Lanes x;
  std::memcpy(&x, from, sizeof x);
  return x;
}

inline Mask load(const uint8_t* from) {
#if PPOKERN_LANES == 16
  return (Mask)_mm512_maskz_cvtepu8_epi32(0xffff, _mm_loadu_si128((const __m128i*)from)) != 0;
#elif PPOKERN_LANES == 8
  return (Mask)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)from)) != 0;
#else
  return Mask{from[0], from[1], from[2], from[3]} != 0;
#endif
}

inline void store(float* to, Lanes x) { std::memcpy(to, &x, sizeof x); }

inline bool any(Mask mask) {
  bool any = false;
  for (int lane = 0; lane < kLanes; ++lane) any |= mask[lane] != 0;
  return any;
}

// Lanes by number, first those of a, then those of b.
template <int... kFrom, class V>
inline V shuffle(V a, V b) {
#if defined(__clang__)
  return __builtin_shufflevector(a, b, kFrom...);
#else
  return __builtin_shuffle(a, b, Mask{kFrom...});
#endif
}

template <int kBlock, class V, int... kLane>
inline void exchange_blocks(V* rows, std::integer_sequence<int, kLane...> lanes) {
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i) {
    if (i & kBlock) continue;
    const V upper = rows[i], lower = rows[i + kBlock];
    rows[i] = shuffle<(kLane & kBlock ? kLanes + kLane - kBlock : kLane)...>(upper, lower);
    rows[i + kBlock] = shuffle<(kLane & kBlock ? kLanes + kLane : kLane + kBlock)...>(upper, lower);
  }
  if constexpr (kBlock > 1) exchange_blocks<kBlock / 2>(rows, lanes);
}

// Transposes kLanes vectors: at each size of block, those off the diagonal change places.
template <class V>
__attribute__((noinline)) void transpose(V* x) {
  V rows[kLanes];  // in registers, which the stores to x would not allow
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i) rows[i] = x[i];
  exchange_blocks<kLanes / 2>(rows, std::make_integer_sequence<int, kLanes>());
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i) x[i] = rows[i];
}

}  // namespace
}  // namespace ppokern::PPOKERN_ISA
