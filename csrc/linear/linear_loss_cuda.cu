// The PPO loss from hidden states on CUDA: one kernel from a chunk of logits to their gradient.
//
// Bytes moved per logit: one read and one write of memory, and a read from the L2 cache; compact, a
// second read and write of the rows that move.
//
// A block takes one row after the other: its warps reduce the row a step each in turn, one barrier
// brings them together, each computes the token's slope, and they go through the row again, from
// its end, while that is still in the cache.

#include "linear/linear_loss.h"
#include "logprob/rows.cuh"

namespace ppokern::cuda {
namespace {

#include "ppo_loss/terms.h"

constexpr int kThreads = 512, kWarps = kThreads / kWarp;
constexpr int kResident = 2;  // blocks of a multiprocessor at most: their rows are to stay in cache

// The loss's slope in a token's log-prob.
__device__ inline float logprob_slope(const LinearLossArgs& args, int64_t token, float scale,
                                      float logprob) {
  const float old_logprob = args.old_logprobs.data[token];
  const float weight = args.weights ? args.weights.data[token] : 1;
  float ratio;
  const float own = surrogate(args, logprob - old_logprob, logprob, old_logprob,
                              args.advantages.data[token], weight, ratio)
                        .slope;
  if (!args.ref_logprobs) return scale * own;
  const float log_ratio = logprob - args.ref_logprobs.data[token], coef = args.kl_coef * scale;
  return scale * own + (coef == 0 ? 0 : coef * kl_slope(args.kl_kind, log_ratio));
}

// What all warps of a block have found of a row, in every thread.
template <bool kEntropy>
__device__ inline Exps<kEntropy> of_block(const Exps<kEntropy>& own, float in_bits) {
  __shared__ Exps<kEntropy> of_warps[kWarps];
  const Exps<kEntropy> mine = own.of_warp(in_bits);
  if (lane_of_thread() == 0) of_warps[threadIdx.x / kWarp] = mine;
  __syncthreads();
  Exps<kEntropy> all;
  if (lane_of_thread() < kWarps) all = of_warps[lane_of_thread()];
  all = all.of_warp(in_bits);
  __syncthreads();  // all have read it, and the next row may write it
  return all;
}

template <bool kEntropy, bool kSoftcap, class T>
__global__ void __launch_bounds__(kThreads, kSoftcap ? 1 : kResident)
    loss_rows_kernel(LinearLossArgs args) {
  const TokenLogits& tokens = args.tokens;
  const int size = tokens.vocab_size, warp = threadIdx.x / kWarp;
  for (int64_t i = blockIdx.x; i < tokens.rows; i += gridDim.x) {
    const int64_t token = args.numbers ? args.numbers.data[i] : args.first + i;
    T* const row = tokens.logits.at<T>(i);
    LogprobRow found = {0, 0, 0, 0};
    float in_logprob = 0, in_entropy = 0, inverse = 1;
    int own = -1;
    const bool valid = is_valid(tokens, token);
    if (valid) {
      own = token_of(tokens, token);
      inverse = inverse_temperature(tokens, token);
      const float in_bits = inverse * kLog2E;
      float own_logit = own < 0 ? 0 : widen(row[own]);  // before it is overwritten
      if (kSoftcap) own_logit = softcap_logit(own_logit, tokens.softcap);
      Exps<kEntropy> exps;
      for (int first = warp * kStep<T>; first < size; first += kWarps * kStep<T>) {
        reduce_step<kSoftcap, true>(row, size, first, own, tokens.softcap, in_bits, exps);
      }
      exps = of_block(exps, in_bits);
      found = {kNan, kNan, 0, kNan};
      if (own >= 0) {
        found = found_of({exps.top, exps.sum, exps.terms}, own_logit, inverse, kEntropy);
      }
      const float scale = args.scales.data[token];
      in_logprob = logprob_slope(args, token, scale, found.logprob);
      if (kEntropy) in_entropy = -args.entropy_coef * scale;
    }
    const bool live = valid && (in_logprob != 0 || in_entropy != 0);
    if (threadIdx.x == 0) {
      args.logprobs.data[token] = found.logprob;
      if (kEntropy) args.entropy.data[token] = found.entropy;
      if (args.used) args.used.data[i] = live;
    }
    if (args.used && !live) continue;
    const Slope<kEntropy, kSoftcap> slope(found, inverse, tokens.softcap, in_logprob, in_entropy);
    const bool has_slope = live && found.max != -kInfinity;
    const int start = -misalignment(row) / static_cast<int>(sizeof(T));
    const int steps = (size - start + kStep<T> - 1) / kStep<T>;
    // what was read last comes first
    for (int step = steps - 1 - warp; step >= 0; step -= kWarps) {
      const int first = start + step * kStep<T>;
      gradient_step(slope, has_slope, row, size, own, row, size, first);
    }
  }
}

struct Used {
  Dense<const uint8_t> rows;

  __device__ bool operator()(int64_t row) const { return rows.data[row]; }
};

}  // namespace
}  // namespace ppokern::cuda

namespace ppokern {

void linear_loss_cuda(const LinearLossArgs& args, void* stream) {
  using namespace cuda;
  const TokenLogits& tokens = args.tokens;
  check_width(tokens.vocab_size);
  if (tokens.rows == 0) return;
  const int blocks = std::min<int64_t>(tokens.rows, args.blocks);
  with_types(tokens, args.entropy.data, [&](auto entropy, auto softcap, auto type) {
    constexpr bool kEntropy = decltype(entropy)::value, kSoftcap = decltype(softcap)::value;
    launch<loss_rows_kernel<kEntropy, kSoftcap, decltype(type)>>(blocks, kThreads, 0, stream, args);
  });
}

void move_up_cuda(const MovedRows& args, void* stream) {
  cuda::move_up(cuda::Used{args.used}, args.rows, args.logits, args.type, args.width, stream);
}

}  // namespace ppokern
