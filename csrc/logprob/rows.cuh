// Rows of logits on CUDA: what the kernels of log-probs and of the loss from hidden states share.

#pragma once

#include <algorithm>
#include <stdexcept>

#include "logprob/logprob.h"
#include "reduce.cuh"

namespace ppokern::cuda {
namespace {

constexpr int kWidest = 1 << 30;   // columns are ints
constexpr float kLargest = 2e38f;  // its product with log2(e) is finite

inline void check_width(int64_t width) {
  if (width > kWidest) throw std::invalid_argument("logits: expected at most 2^30 columns");
}

// 1 / temperature, finite where the temperature is above 0.
__device__ inline float inverse_temperature(const TokenLogits& tokens, int64_t row) {
  const float inverse = 1 / temperature_of(tokens, row);
  return inverse > kLargest ? kLargest : inverse;
}

// Puts a number in the place of the token's own, which it returns; a place of -1 is none.
template <int kCount>
__device__ inline float exchange_own(float (&x)[kCount], int place, float number) {
  float own = 0;
  if (place < 0) return own;  // in all lanes but one of a row
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    if (i != place) continue;
    own = x[i];
    x[i] = number;
  }
  return own;
}

// Adds a step of a row to `exps`, but for the token's own logit.
template <bool kSoftcap, bool kAgain, class T, bool kEntropy>
__device__ inline void reduce_step(const T* row, int size, int first, int own, float softcap,
                                   float in_bits, Exps<kEntropy>& exps) {
  float logits[kLaneLogits<T>];
  read_step<kAgain>(row, size, first, logits);
  exchange_own(logits, place_in_step<T>(own, first), -kInfinity);
  if (kSoftcap) {
#pragma unroll
    for (float& logit : logits) logit = softcap_logit(logit, softcap);
  }
  exps.add(logits, in_bits);
}

// What a row's partial results and its token's own logit come to.
__device__ inline LogprobRow found_of(const Exps<true>& rest, float own, float inverse,
                                      bool with_entropy) {
  const float top = fmaxf(rest.top, own), base = finite_top(top), in_bits = inverse * kLog2E;
  const float own_bits = tempered_logit(own, base, in_bits), own_exp = exp2f(own_bits);
  Exps<true> others = rest;
  others.raise(top, in_bits);
  const float sum = others.sum + own_exp;
  if (sum == 0) return {-kInfinity, 0, -kInfinity, 0};
  const float log_sum = own_exp == 1 ? log1pf(others.sum) : logf(sum);
  const float mean_bits = entropy_term(own_exp, own_bits, others.terms) / sum;
  return {tempered_logit(own, base, inverse) - log_sum,
          with_entropy ? log_sum + kLn2 * mean_bits : 0, top, log_sum};
}

// The gradient of a row's logits.
template <bool kEntropy, bool kSoftcap>
struct Slope {
  float base, in_bits, log_sum_bits, inverse, softcap;
  float grad_logprob, grad_entropy, entropy;
  float own;  // the token's, before the softcap's slope

  __device__ Slope(const LogprobRow& found, float inverse, float softcap, float grad_logprob,
                   float grad_entropy)
      : base(finite_top(found.max)),
        in_bits(inverse * kLog2E),
        log_sum_bits(found.log_sum * kLog2E),
        inverse(inverse),
        softcap(softcap),
        grad_logprob(grad_logprob),
        grad_entropy(grad_entropy),
        entropy(found.entropy) {
    own = grad_logprob * own_logprob_slope(found.logprob);
    if (kEntropy) own += grad_entropy * entropy_slope(expf(found.logprob), found.logprob, entropy);
    own *= inverse;
  }

  __device__ float of(float logit) const {
    const float z = kSoftcap ? softcap_logit(logit, softcap) : logit;
    const float bits = tempered_logit(z, base, in_bits) - log_sum_bits, prob = exp2_near(bits);
    float slope = -grad_logprob * prob;
    if (kEntropy) slope += grad_entropy * entropy_slope(prob, bits * kLn2, entropy);
    return through_softcap(logit, slope * inverse);
  }

  __device__ float through_softcap(float logit, float slope) const {
    return kSoftcap ? slope * softcap_slope(logit, softcap) : slope;
  }
};

// Writes what a lane has of a step, which begins at a boundary of 16 bytes.
template <class T>
__device__ inline void write_step(T* row, int width, int first,
                                  const float (&from)[kLaneLogits<T>]) {
  const int begin = first + lane_of_thread() * kVector<T>;
#pragma unroll
  for (int i = 0; i < kLaneLogits<T>; i += kVector<T>) {
    const int at = begin + i * kWarp;
    T near[kVector<T>];
#pragma unroll
    for (int j = 0; j < kVector<T>; ++j) near[j] = narrow<T>(from[i + j]);
    if (0 <= at && at + kVector<T> <= width) {
      uint4 raw;
      memcpy(&raw, near, sizeof raw);
      *reinterpret_cast<uint4*>(row + at) = raw;
    } else {
#pragma unroll
      for (int j = 0; j < kVector<T>; ++j) {
        if (0 <= at + j && at + j < width) row[at + j] = near[j];
      }
    }
  }
}

// Writes the gradient of a step, which begins at a boundary of 16 bytes of `out`, a row of `width`;
// what lies beyond the row of logits becomes 0, as all does where the row has no slope.
template <bool kEntropy, bool kSoftcap, class T>
__device__ inline void gradient_step(const Slope<kEntropy, kSoftcap>& slope, bool has_slope,
                                     const T* row, int size, int own, T* out, int width,
                                     int first) {
  float x[kLaneLogits<T>] = {};
  if (has_slope) {
    read_step(row, size, first, x);
    const int own_place = place_in_step<T>(own, first);
    const float own_logit = exchange_own(x, own_place, 0);
#pragma unroll
    for (float& logit : x) logit = slope.of(logit);
    if (own_place >= 0) {
      exchange_own(x, own_place, slope.through_softcap(own_logit, slope.own));
    }
    if (first + kStep<T> > size) {
#pragma unroll
      for (int i = 0; i < kLaneLogits<T>; ++i) {
        if (column_in_step<T>(i, first) >= size) x[i] = 0;
      }
    }
  }
  write_step(out, width, first, x);
}

constexpr int kMovers = 256;

// Moves the valid rows up to the first ones, a thread a column: reads go before the writes
// of rows above them, so that no row is overwritten before it is read.
template <class Unit, class Valid>
__global__ void __launch_bounds__(kMovers, 4)
    move_up_kernel(Valid is_valid, int64_t rows, Rows out, int element_bytes, int64_t units) {
  constexpr int kRows = 8;
  const int64_t column = int64_t{blockIdx.x} * kMovers + threadIdx.x;
  if (column >= units) return;
  const auto at = [&](int64_t row) {
    const int64_t start = out.offsets ? out.offsets[row] : row * out.stride;
    char* const from = static_cast<char*>(out.data) + start * element_bytes;
    return reinterpret_cast<Unit*>(from) + column;
  };
  int64_t to = 0;
  for (int64_t first = 0; first < rows; first += kRows) {
    Unit read[kRows];
    bool valid[kRows];
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      valid[i] = first + i < rows && is_valid(first + i);
      if (valid[i]) read[i] = *at(first + i);
    }
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      if (valid[i]) *at(to++) = read[i];
    }
  }
}

inline bool is_aligned(const Rows& rows, int64_t element_bytes) {
  return !rows.offsets && misalignment(rows.data) == 0 && rows.stride * element_bytes % 16 == 0;
}

template <class Valid>
void move_up(const Valid& valid, int64_t rows, const Rows& out, int type, int64_t width,
             void* stream) {
  const int element = type == kFloat ? 4 : 2;
  const int64_t bytes = width * element;
  const bool whole = is_aligned(out, element) && bytes % 16 == 0;
  const auto move =
      whole ? &launch<move_up_kernel<uint4, Valid>, Valid, int64_t, Rows, int, int64_t>
            : &launch<move_up_kernel<uint16_t, Valid>, Valid, int64_t, Rows, int, int64_t>;
  const int64_t units = bytes / (whole ? 16 : 2);
  move((units + kMovers - 1) / kMovers, kMovers, 0, stream, valid, rows, out, element, units);
}

}  // namespace
}  // namespace ppokern::cuda
