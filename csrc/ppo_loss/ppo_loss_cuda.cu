// The PPO losses on CUDA: loss, statistics and slopes in one pass over the tokens.
//
// Moves 4 bytes per token for each tensor per token, in or out, and 1 for a mask. A kernel over the
// masks goes before, since a token's share in the loss takes their counts; with a ratio per
// sequence it reads the log-probs too. A block adds up its tokens' terms, and a last, small kernel
// the blocks' sums in their order: which tokens a block has depends on how many there are alone.

#include <algorithm>
#include <cstdint>

#include "ppo_loss/ppo_loss.h"
#include "reduce.cuh"

namespace ppokern::cuda {
namespace {

#include "ppo_loss/terms.h"

constexpr int kThreads = 256, kWarps = kThreads / kWarp;
constexpr int kCounters = 128;                                          // blocks that count
constexpr int kMostBlocks = 1 << 13;                                    // that add up terms
constexpr int64_t kBlockTokens = 512;                                   // while there are fewer
constexpr int kRatioMin = kSums, kRatioMax = kSums + 1, kColumns = 16;  // of a block's sums
constexpr int64_t kLongSequence = 1 << 12;                              // that a whole block counts

struct Count {
  int64_t tokens, sequences, valued_tokens, valued_sequences, malformed;
};

// Memory that one kernel writes and the next ones read.
struct Work {
  Count* counts;     // of kCounters blocks
  int64_t* lengths;  // unmasked tokens of each sequence
  int64_t* value_lengths;
  float* mean_log_ratios;  // of each sequence
  float* sums;             // (blocks, kColumns)

  Work(void* memory, int64_t sequences) {
    counts = static_cast<Count*>(memory);
    lengths = reinterpret_cast<int64_t*>(counts + kCounters);
    value_lengths = lengths + sequences;
    sums = reinterpret_cast<float*>(value_lengths + sequences);
    mean_log_ratios = nullptr;
  }
};

struct Span {
  int64_t begin, end;
};

// Where a sequence lies; inside of the tensors even if cu_seqlens are malformed.
__device__ inline Span span_of(const PpoLossArgs& args, int64_t sequence) {
  if (!args.cu_seqlens) {
    const int64_t length = args.tokens / args.sequences;
    return {sequence * length, (sequence + 1) * length};
  }
  const int64_t begin = args.cu_seqlens.data[sequence], end = args.cu_seqlens.data[sequence + 1];
  if (begin < 0 || end < begin || end > args.tokens) return {0, 0};
  return {begin, end};
}

__device__ inline bool is_malformed(const PpoLossArgs& args, int64_t sequence) {
  if (!args.cu_seqlens) return false;
  const int64_t begin = args.cu_seqlens.data[sequence], end = args.cu_seqlens.data[sequence + 1];
  return begin < 0 || end < begin || end > args.tokens || (sequence == 0 && begin != 0) ||
         (sequence == args.sequences - 1 && end != args.tokens);
}

__device__ inline bool is_on(Dense<const uint8_t> mask, int64_t at) {
  return !mask || mask.data[at];
}

// Of the threads of a team.
template <bool kByBlock, class Number>
__device__ inline Number team_sum(Number x) {
  if constexpr (kByBlock) return block_sum(x);
  return warp_sum(x);
}

// Counts the tokens of one sequence after the other by a warp or by a block, and takes the means of
// their log-ratios where the ratio is that of a sequence.
template <bool kByBlock>
__global__ void __launch_bounds__(kThreads) count_kernel(PpoLossArgs args, Work work) {
  constexpr int kTeam = kByBlock ? kThreads : kWarp, kTeams = kThreads / kTeam;
  const int member = threadIdx.x % kTeam, team = threadIdx.x / kTeam;
  const bool same = args.mask.data == args.value_mask.data;
  Count count = {0, 0, 0, 0, args.sequences == 0};  // there are tokens, so there are sequences
  for (int64_t s = int64_t{blockIdx.x} * kTeams + team; s < args.sequences;
       s += int64_t{gridDim.x} * kTeams) {
    const Span span = span_of(args, s);
    int64_t length = 0, valued = 0;
    float log_ratio = 0;
    if (args.mask || args.value_mask || work.mean_log_ratios) {
      for (int64_t at = span.begin + member; at < span.end; at += kTeam) {
        const bool on = is_on(args.mask, at);
        length += on;
        if (!same) valued += is_on(args.value_mask, at);
        if (work.mean_log_ratios && on) {
          log_ratio += args.logprobs.data[at] - args.old_logprobs.data[at];
        }
      }
      length = team_sum<kByBlock>(length);
      if (!same) valued = team_sum<kByBlock>(valued);
      if (work.mean_log_ratios) log_ratio = team_sum<kByBlock>(log_ratio);
    } else {
      length = span.end - span.begin;
    }
    if (same) valued = length;
    if (member != 0) continue;
    work.lengths[s] = length;
    work.value_lengths[s] = valued;
    if (work.mean_log_ratios) work.mean_log_ratios[s] = log_ratio / (length ? length : 1);
    count.tokens += length;
    count.sequences += length > 0;
    count.valued_tokens += valued;
    count.valued_sequences += valued > 0;
    count.malformed += is_malformed(args, s);
  }
  count = {block_sum(count.tokens), block_sum(count.sequences), block_sum(count.valued_tokens),
           block_sum(count.valued_sequences), block_sum(count.malformed)};
  if (threadIdx.x == 0) work.counts[blockIdx.x] = count;
}

__device__ inline Count total(const Count* counts) {
  const Count own = threadIdx.x < kCounters ? counts[threadIdx.x] : Count{0, 0, 0, 0, 0};
  return {block_sum(own.tokens), block_sum(own.sequences), block_sum(own.valued_tokens),
          block_sum(own.valued_sequences), block_sum(own.malformed)};
}

// What a token's term is multiplied by in the aggregate's sum, but for its sequence's length.
__device__ inline float scale_of_all(const PpoLossArgs& args, int64_t tokens, int64_t sequences,
                                     std::optional<float> number, const float* denominator) {
  if (args.aggregate == Aggregate::kSum || args.aggregate == Aggregate::kNone) return 1;
  if (denominator) return 1 / *denominator;
  if (number.has_value()) return 1 / *number;
  return 1 / static_cast<float>(args.aggregate == Aggregate::kTokenMean ? tokens : sequences);
}

__device__ inline int64_t sequence_of(const PpoLossArgs& args, int64_t token) {
  if (!args.cu_seqlens) return token / (args.tokens / args.sequences);
  int64_t low = 0, high = args.sequences;  // the last one that begins at most there
  while (high - low > 1) {
    const int64_t middle = low + (high - low) / 2;
    (args.cu_seqlens.data[middle] <= token ? low : high) = middle;
  }
  return low;
}

__device__ inline float read(Dense<const float> x, int64_t at, bool on) {
  return on ? x.data[at] : 0;
}

// What a term counts in the loss.
__device__ inline float share(float scale, float term) { return scale == 0 ? 0 : scale * term; }

// What a thread has added up.
struct Sums {
  float of[kSums] = {};
  float ratio_min = kInfinity, ratio_max = -kInfinity;
};

// Adds a token's part of the policy's loss, and writes its slopes.
__device__ inline float add_policy(const PpoLossArgs& args, int64_t at, bool on, float scale,
                                   const float* mean_log_ratio, Sums& sums) {
  const float logprob = read(args.logprobs, at, on), old_logprob = read(args.old_logprobs, at, on);
  const float advantage = read(args.advantages, at, on);
  const float weight = args.weights ? read(args.weights, at, on) : 1;
  const float own = logprob - old_logprob;
  float ratio;
  const Clipped<float> token = surrogate(args, mean_log_ratio && on ? *mean_log_ratio : own,
                                         logprob, old_logprob, advantage, weight, ratio);
  const float policy = share(scale, token.loss);
  float loss = policy, slope = scale * token.slope;
  if (on) {
    sums.of[kPolicy] += policy;
    sums.of[kRatio] += ratio;
    sums.ratio_min = fminf(sums.ratio_min, ratio);
    sums.ratio_max = fmaxf(sums.ratio_max, ratio);
    const float floor = 1 - args.low, ceiling = 1 + args.high;
    sums.of[kOutside] += ratio < floor || ratio > ceiling;
    sums.of[kFlat] += token.flat;
    sums.of[kK1] += kl_k1(-own);
    sums.of[kK2] += kl_k2(-own);
    sums.of[kK3] += kl_k3(-own);
  }
  if (args.ratio_slopes) {
    args.ratio_slopes.data[at] = slope;
    slope = 0;
  }
  if (args.entropy) {
    const float entropy = read(args.entropy, at, on), bonus = share(scale, entropy);
    sums.of[kEntropy] += entropy;
    sums.of[kScaledEntropy] += bonus;
    if (args.entropy_coef != 0) loss -= args.entropy_coef * bonus;
    if (args.entropy_slopes) args.entropy_slopes.data[at] = -args.entropy_coef * scale;
  }
  if (args.ref_logprobs) {
    const float log_ratio = logprob - read(args.ref_logprobs, at, on);
    const float term = kl(args.kl_kind, log_ratio), penalty = share(scale, term);
    sums.of[kKl] += term;
    sums.of[kScaledKl] += penalty;
    if (args.kl_coef != 0) {
      loss += args.kl_coef * penalty;
      slope += share(args.kl_coef * scale, kl_slope(args.kl_kind, log_ratio));
    }
  }
  if (args.logprob_slopes) args.logprob_slopes.data[at] = slope;
  return loss;
}

// The same for the values.
__device__ inline float add_value(const PpoLossArgs& args, int64_t at, bool on, float scale,
                                  Sums& sums) {
  const float value = read(args.values, at, on), target = read(args.returns, at, on);
  const Clipped<float> token = args.old_values ? clip_value(value, read(args.old_values, at, on),
                                                            target, args.value_clip_range)
                                               : value_error(value, target);
  const float loss = share(scale, token.loss);
  sums.of[kValue] += loss;
  sums.of[kLarger] += token.flat;
  if (args.value_slopes) args.value_slopes.data[at] = args.value_coef * scale * token.slope;
  return args.value_coef != 0 ? args.value_coef * loss : 0;
}

// Writes a block's sums, added up in one order.
__device__ inline void write_sums(const Sums& sums, float* to) {
  __shared__ float of_warps[kWarps][kColumns];
  float* const own = of_warps[threadIdx.x / kWarp];
  for (int i = 0; i < kSums; ++i) {
    const float sum = warp_sum(sums.of[i]);
    if (lane_of_thread() == 0) own[i] = sum;
  }
  const float least = warp_min(sums.ratio_min), most = warp_max(sums.ratio_max);
  if (lane_of_thread() == 0) {
    own[kRatioMin] = least;
    own[kRatioMax] = most;
  }
  __syncthreads();
  const int column = threadIdx.x;
  if (column >= kRatioMax + 1) return;
  float x = of_warps[0][column];
  for (int i = 1; i < kWarps; ++i) {
    const float y = of_warps[i][column];
    x = column == kRatioMin ? fminf(x, y) : column == kRatioMax ? fmaxf(x, y) : x + y;
  }
  to[column] = x;
}

// All slopes are NaN where cu_seqlens are none.
__device__ inline void spoil(const PpoLossArgs& args, int64_t at) {
  if (args.logprob_slopes) args.logprob_slopes.data[at] = kNan;
  if (args.ratio_slopes) args.ratio_slopes.data[at] = kNan;
  if (args.entropy_slopes) args.entropy_slopes.data[at] = kNan;
  if (args.value_slopes) args.value_slopes.data[at] = kNan;
}

__global__ void __launch_bounds__(kThreads) loss_kernel(PpoLossArgs args, const float* denominator,
                                                        const float* value_denominator, Work work) {
  const Count count = total(work.counts);
  const float of_all =
      scale_of_all(args, count.tokens, count.sequences, args.denominator, denominator);
  const float of_values = scale_of_all(args, count.valued_tokens, count.valued_sequences,
                                       args.value_denominator, value_denominator);
  const bool by_length = args.aggregate == Aggregate::kSequenceMean;
  const bool by_sequence = by_length || work.mean_log_ratios;
  Sums sums;
  for (int64_t at = int64_t{blockIdx.x} * kThreads + threadIdx.x; at < args.tokens;
       at += int64_t{gridDim.x} * kThreads) {
    const int64_t sequence = by_sequence ? sequence_of(args, at) : 0;
    float loss = 0;
    if (args.logprobs) {
      const bool on = is_on(args.mask, at);
      const float each = by_length ? of_all / work.lengths[sequence] : of_all;
      loss = add_policy(args, at, on, on ? each : 0,
                        work.mean_log_ratios ? work.mean_log_ratios + sequence : nullptr, sums);
    }
    if (args.values) {
      const bool on = is_on(args.value_mask, at);
      const float each = by_length ? of_values / work.value_lengths[sequence] : of_values;
      loss += add_value(args, at, on, on ? each : 0, sums);
    }
    if (args.aggregate == Aggregate::kNone) args.loss.data[at] = count.malformed ? kNan : loss;
    if (count.malformed) spoil(args, at);
  }
  write_sums(sums, work.sums + int64_t{blockIdx.x} * kColumns);
}

// Adds up the blocks' sums, a thread a column of some of them, in one order.
__global__ void __launch_bounds__(kThreads) finish_kernel(PpoLossArgs args, int blocks, Work work) {
  constexpr int kGroups = kThreads / kColumns;
  __shared__ double of_groups[kGroups][kColumns];
  const Count count = total(work.counts);
  const int column = threadIdx.x % kColumns, group = threadIdx.x / kColumns;
  const auto join = [&](double x, double y) {
    return column == kRatioMin ? fmin(x, y) : column == kRatioMax ? fmax(x, y) : x + y;
  };
  double x = column == kRatioMin ? kInfinity : column == kRatioMax ? -kInfinity : 0;
  for (int i = group; i < blocks && column <= kRatioMax; i += kGroups) {
    x = join(x, work.sums[int64_t{i} * kColumns + column]);
  }
  of_groups[group][column] = x;
  __syncthreads();
  if (group == 0) {
    for (int i = 1; i < kGroups; ++i) x = join(x, of_groups[i][column]);
    of_groups[0][column] = x;
  }
  __syncthreads();
  if (threadIdx.x != 0) return;
  const double* const sums = of_groups[0];
  float* const end = finish(args, {sums, sums[kRatioMin], sums[kRatioMax], count.tokens,
                                   count.sequences, count.valued_tokens});
  if (!count.malformed) return;
  for (float* to = args.stats.data; to < end; ++to) *to = kNan;
  if (args.aggregate != Aggregate::kNone) *args.loss.data = kNan;
}

int blocks_for(int64_t tokens) {
  return std::min<int64_t>((tokens + kBlockTokens - 1) / kBlockTokens, kMostBlocks);
}

}  // namespace
}  // namespace ppokern::cuda

namespace ppokern {

int64_t ppo_loss_work_cuda(int64_t sequences, int64_t tokens) {
  using namespace cuda;
  return kCounters * sizeof(Count) + sequences * (2 * sizeof(int64_t) + sizeof(float)) +
         blocks_for(tokens) * kColumns * sizeof(float);
}

void ppo_loss_cuda(const PpoLossArgs& args, const float* denominator,
                   const float* value_denominator, void* memory, void* stream) {
  using namespace cuda;
  const int blocks = blocks_for(args.tokens);
  Work work(memory, args.sequences);
  if (args.ratio_slopes) work.mean_log_ratios = work.sums + blocks * kColumns;
  const bool is_long = args.tokens >= kLongSequence * args.sequences;
  const auto count = is_long ? &launch<count_kernel<true>, PpoLossArgs, Work>
                             : &launch<count_kernel<false>, PpoLossArgs, Work>;
  count(kCounters, kThreads, 0, stream, args, work);
  launch<loss_kernel>(blocks, kThreads, 0, stream, args, denominator, value_denominator, work);
  launch<finish_kernel>(1, kThreads, 0, stream, args, blocks, work);
}

}  // namespace ppokern
