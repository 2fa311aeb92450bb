// Log-probs of selected tokens on CUDA.
//
// Bytes moved per logit: forward one read; backward one read and one write, and compact once more
// those of rows that move. Beyond these a row costs 16 bytes per segment, written and read.
//
// A row is reduced over segments of 4096 logits, each by a warp, whose partial results a second
// kernel combines in their order: so few rows fill the device as many do, no warp waits for
// another, and who reduces a segment changes no bit. The token's own logit is left out of the sums
// and added last, so that a nearly certain token's log-prob is -log1p(rest).

#include <algorithm>
#include <cstdint>
#include <stdexcept>

#include "logprob/logprob.h"
#include "reduce.cuh"

namespace ppokern::cuda {
namespace {

constexpr int kSegment = 4096;
constexpr int kThreads = 256, kWarps = kThreads / kWarp;
template <bool kSoftcap>
constexpr int kResident =
    kSoftcap ? 3 : 4;              // blocks of a multiprocessor: that tanh finds registers
constexpr int kWidest = 1 << 30;   // columns are ints
constexpr float kLargest = 2e38f;  // its product with log2(e) is finite

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

// 1 / temperature, finite where the temperature is above 0.
__device__ inline float inverse_temperature(const TokenLogits& tokens, int64_t row) {
  const float inverse = 1 / temperature_of(tokens, row);
  return inverse > kLargest ? kLargest : inverse;
}

// What the warps of a grid do in turn: pieces of rows, row by row.
struct Items {
  int64_t row, rows, row_step;
  int piece, pieces, piece_step;

  __device__ Items(int64_t rows, int pieces) : rows(rows), pieces(pieces) {
    const int64_t first = int64_t{blockIdx.x} * kWarps + threadIdx.x / kWarp;
    const int64_t step = int64_t{gridDim.x} * kWarps;
    row = first / pieces, piece = first % pieces;
    row_step = step / pieces, piece_step = step % pieces;
  }

  __device__ bool more() const { return row < rows; }

  __device__ void next() {
    row += row_step;
    piece += piece_step;
    if (piece < pieces) return;
    piece -= pieces;
    ++row;
  }
};

template <bool kEntropy, bool kSoftcap, class T>
__global__ void __launch_bounds__(kThreads, kResident<kSoftcap>)
    reduce_kernel(TokenLogits tokens, int segments, float4* partials) {
  const int size = tokens.vocab_size;
  for (Items items(tokens.rows, segments); items.more(); items.next()) {
    if (!is_taken(tokens, items.row)) continue;
    const T* row = tokens.logits.at<const T>(items.row);
    const int own = token_of(tokens, items.row), end = min((items.piece + 1) * kSegment, size);
    const float in_bits = inverse_temperature(tokens, items.row) * kLog2E;
    Exps<kEntropy> exps;
    for (int first = items.piece * kSegment; first < end; first += kStep<T>) {
      float logits[kLaneLogits<T>];
      read_step(row, size, first, logits);
      exchange_own(logits, place_in_step<T>(own, first), -kInfinity);
      if (kSoftcap) {
#pragma unroll
        for (float& logit : logits) logit = softcap_logit(logit, tokens.softcap);
      }
      exps.add(logits, in_bits);
    }
    exps = exps.of_warp(in_bits);
    if (lane_of_thread() == 0) {
      partials[items.row * segments + items.piece] = {exps.top, exps.sum, exps.terms, 0};
    }
  }
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

template <class T>
__global__ void __launch_bounds__(kThreads)
    finish_kernel(LogprobForwardArgs args, int segments, const float4* partials) {
  const TokenLogits& tokens = args.tokens;
  for (Items items(tokens.rows, 1); items.more(); items.next()) {
    LogprobRow found = {0, 0, 0, 0};
    if (is_taken(tokens, items.row)) {
      const int64_t own = token_of(tokens, items.row);
      const float inverse = inverse_temperature(tokens, items.row), in_bits = inverse * kLog2E;
      Exps<true> exps;
      for (int i = lane_of_thread(); i < segments; i += kWarp) {
        const float4 partial = partials[items.row * segments + i];
        exps.add(Exps<true>{partial.x, partial.y, partial.z}, in_bits);
      }
      exps = exps.of_warp(in_bits);
      if (own < 0) {
        found = {kNan, kNan, 0, kNan};
      } else {
        const float logit = widen(tokens.logits.at<const T>(items.row)[own]);
        const float z = tokens.softcap != 0 ? softcap_logit(logit, tokens.softcap) : logit;
        found = found_of(exps, z, inverse, args.entropy.data);
      }
    }
    if (lane_of_thread() != 0) continue;
    *args.logprobs.at(items.row, 0) = found.logprob;
    if (args.entropy.data) *args.entropy.at(items.row, 0) = found.entropy;
    *args.found.at(items.row, 0) = found;
  }
}

// The gradient of a row's logits.
template <bool kEntropy, bool kSoftcap>
struct Slope {
  float base, in_bits, log_sum_bits, inverse, softcap;
  float grad_logprob, grad_entropy, entropy;
  float own;  // the token's, before the softcap's slope

  __device__ Slope(const LogprobBackwardArgs& args, int64_t row, const LogprobRow& found)
      : base(finite_top(found.max)),
        log_sum_bits(found.log_sum * kLog2E),
        inverse(inverse_temperature(args.tokens, row)),
        softcap(args.tokens.softcap),
        grad_logprob(args.grad_logprobs.data ? *args.grad_logprobs.at(row, 0) : 0),
        grad_entropy(kEntropy ? *args.grad_entropy.at(row, 0) : 0),
        entropy(found.entropy) {
    in_bits = inverse * kLog2E;
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

template <bool kEntropy, bool kSoftcap, class T>
__global__ void __launch_bounds__(kThreads, kResident<kSoftcap>)
    gradient_kernel(LogprobBackwardArgs args, int pieces) {
  const TokenLogits& tokens = args.tokens;
  const int size = tokens.vocab_size, width = args.width;
  for (Items items(tokens.rows, pieces); items.more(); items.next()) {
    T* out = args.out.at<T>(items.row);
    const bool taken = is_taken(tokens, items.row);
    LogprobRow found = {0, 0, -kInfinity, 0};
    if (taken) found = *args.found.at(items.row, 0);
    const Slope<kEntropy, kSoftcap> slope(args, items.row, found);
    const T* row = tokens.logits.at<const T>(items.row);
    const int own = taken ? token_of(tokens, items.row) : -1;
    const int start = items.piece * kSegment - misalignment(out) / static_cast<int>(sizeof(T));
    const int end = min(start + kSegment, width);
    for (int first = start; first < end; first += kStep<T>) {
      float x[kLaneLogits<T>] = {};
      if (found.max != -kInfinity) {
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
  }
}

// Moves unmasked rows up to the first ones, a thread a column: reads go before the writes of rows
// above them, so that no row is overwritten before it is read.
template <class Unit>
__global__ void __launch_bounds__(kThreads)
    move_up_kernel(TokenLogits tokens, Rows out, int element_bytes, int64_t units) {
  constexpr int kRows = 8;
  const int64_t column = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (column >= units) return;
  const auto at = [&](int64_t row) {
    const int64_t start = out.offsets ? out.offsets[row] : row * out.stride;
    char* const from = static_cast<char*>(out.data) + start * element_bytes;
    return reinterpret_cast<Unit*>(from) + column;
  };
  int64_t to = 0;
  for (int64_t first = 0; first < tokens.rows; first += kRows) {
    Unit read[kRows];
    bool taken[kRows];
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      taken[i] = first + i < tokens.rows && is_taken(tokens, first + i);
      if (taken[i]) read[i] = *at(first + i);
    }
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      if (taken[i]) *at(to++) = read[i];
    }
  }
}

int multiprocessors() {
  int device, count;
  check_cuda(cudaGetDevice(&device));
  check_cuda(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device));
  return count;
}

// As many blocks as have a warp for each item, or fill the device.
int blocks_for(int64_t items, int resident) {
  const int64_t most = int64_t{resident} * multiprocessors();
  return std::min((items + kWarps - 1) / kWarps, most);
}

bool is_aligned(const Rows& rows, int64_t element_bytes) {
  return !rows.offsets && misalignment(rows.data) == 0 && rows.stride * element_bytes % 16 == 0;
}

void move_up(const LogprobBackwardArgs& args, void* stream) {
  const int element = args.tokens.type == kFloat ? 4 : 2;
  const int64_t bytes = args.width * element;
  const bool whole = is_aligned(args.out, element) && bytes % 16 == 0;
  const auto move = whole ? &launch<move_up_kernel<uint4>, TokenLogits, Rows, int, int64_t>
                          : &launch<move_up_kernel<uint16_t>, TokenLogits, Rows, int, int64_t>;
  const int64_t units = bytes / (whole ? 16 : 2);
  move((units + kThreads - 1) / kThreads, kThreads, 0, stream, args.tokens, args.out, element,
       units);
}

void check_width(int64_t width) {
  if (width > kWidest) throw std::invalid_argument("logits: expected at most 2^30 columns");
}

}  // namespace
}  // namespace ppokern::cuda

namespace ppokern {

int64_t logprob_segments_cuda(int64_t vocab_size) {
  return std::max<int64_t>((vocab_size + cuda::kSegment - 1) / cuda::kSegment, 1);
}

void logprob_forward_cuda(const LogprobForwardArgs& args, float* partials, void* stream) {
  using namespace cuda;
  const TokenLogits& tokens = args.tokens;
  check_width(tokens.vocab_size);
  if (tokens.rows == 0) return;
  const int segments = logprob_segments_cuda(tokens.vocab_size);
  const auto to = reinterpret_cast<float4*>(partials);
  with_types(tokens, args.entropy.data, [&](auto entropy, auto softcap, auto type) {
    using T = decltype(type);
    constexpr bool kEntropy = decltype(entropy)::value, kSoftcap = decltype(softcap)::value;
    const int blocks = blocks_for(tokens.rows * segments, kResident<kSoftcap>);
    launch<reduce_kernel<kEntropy, kSoftcap, T>>(blocks, kThreads, 0, stream, tokens, segments, to);
    launch<finish_kernel<T>>(blocks_for(tokens.rows, 8), kThreads, 0, stream, args, segments, to);
  });
}

void logprob_backward_cuda(const LogprobBackwardArgs& args, void* stream) {
  using namespace cuda;
  const TokenLogits& tokens = args.tokens;
  check_width(args.width);
  if (tokens.rows == 0 || args.width == 0) return;
  with_types(tokens, args.grad_entropy.data, [&](auto entropy, auto softcap, auto type) {
    using T = decltype(type);
    constexpr bool kEntropy = decltype(entropy)::value, kSoftcap = decltype(softcap)::value;
    const bool aligned = is_aligned(args.out, sizeof(T));
    const int64_t columns = args.width + (aligned ? 0 : kVector<T> - 1);
    const int pieces = (columns + kSegment - 1) / kSegment;
    const int blocks = blocks_for(tokens.rows * pieces, kResident<kSoftcap>);
    launch<gradient_kernel<kEntropy, kSoftcap, T>>(blocks, kThreads, 0, stream, args, pieces);
  });
  if (args.compact) move_up(args, stream);
}

}  // namespace ppokern
