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

#include "logprob/rows.cuh"

namespace ppokern::cuda {
namespace {

constexpr int kSegment = 4096;
constexpr int kThreads = 256, kWarps = kThreads / kWarp;
// blocks of a multiprocessor: more would leave a thread too few registers
template <bool kSoftcap>
constexpr int kReducing = kSoftcap ? 3 : 4;
constexpr int kWriting = 3;

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
__global__ void __launch_bounds__(kThreads, kReducing<kSoftcap>)
    reduce_kernel(TokenLogits tokens, int segments, float4* partials) {
  const int size = tokens.vocab_size;
  for (Items items(tokens.rows, segments); items.more(); items.next()) {
    if (!is_valid(tokens, items.row)) continue;
    const T* row = tokens.logits.at<const T>(items.row);
    const int own = token_of(tokens, items.row), end = min((items.piece + 1) * kSegment, size);
    const float in_bits = inverse_temperature(tokens, items.row) * kLog2E;
    Exps<kEntropy> exps;
    for (int first = items.piece * kSegment; first < end; first += kStep<T>) {
      reduce_step<kSoftcap, false>(row, size, first, own, tokens.softcap, in_bits, exps);
    }
    exps = exps.of_warp(in_bits);
    if (lane_of_thread() == 0) {
      partials[items.row * segments + items.piece] = {exps.top, exps.sum, exps.terms, 0};
    }
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    finish_kernel(LogprobForwardArgs args, int segments, const float4* partials) {
  const TokenLogits& tokens = args.tokens;
  for (Items items(tokens.rows, 1); items.more(); items.next()) {
    LogprobRow found = {0, 0, 0, 0};
    if (is_valid(tokens, items.row)) {
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

template <bool kEntropy, bool kSoftcap, class T>
__global__ void __launch_bounds__(kThreads, kWriting)
    gradient_kernel(LogprobBackwardArgs args, int pieces) {
  const TokenLogits& tokens = args.tokens;
  const int size = tokens.vocab_size, width = args.width;
  for (Items items(tokens.rows, pieces); items.more(); items.next()) {
    T* out = args.out.at<T>(items.row);
    const bool valid = is_valid(tokens, items.row);
    LogprobRow found = {0, 0, -kInfinity, 0};
    if (valid) found = *args.found.at(items.row, 0);
    const float grad_logprob = args.grad_logprobs.data ? *args.grad_logprobs.at(items.row, 0) : 0;
    const float grad_entropy = kEntropy ? *args.grad_entropy.at(items.row, 0) : 0;
    const Slope<kEntropy, kSoftcap> slope(found, inverse_temperature(tokens, items.row),
                                          tokens.softcap, grad_logprob, grad_entropy);
    const T* row = tokens.logits.at<const T>(items.row);
    const int own = valid ? token_of(tokens, items.row) : -1;
    const bool has_slope = found.max != -kInfinity;
    const int start = items.piece * kSegment - misalignment(out) / static_cast<int>(sizeof(T));
    const int end = min(start + kSegment, width);
    for (int first = start; first < end; first += kStep<T>) {
      gradient_step(slope, has_slope, row, size, own, out, width, first);
    }
  }
}

struct Unmasked {
  TokenLogits tokens;

  __device__ bool operator()(int64_t row) const { return is_valid(tokens, row); }
};

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
    const int blocks = blocks_for(tokens.rows * segments, kReducing<kSoftcap>);
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
    const int blocks = blocks_for(tokens.rows * pieces, kWriting);
    launch<gradient_kernel<kEntropy, kSoftcap, T>>(blocks, kThreads, 0, stream, args, pieces);
  });
  if (args.compact) {
    move_up(Unmasked{tokens}, tokens.rows, args.out, tokens.type, args.width, stream);
  }
}

}  // namespace ppokern
