// The PPO losses on the CPU: loss, statistics and slopes in one pass over the tokens.
//
// Moves 4 bytes per token for each tensor per token, in or out, and 1 for a mask. A pass over the
// masks goes before, since a token's share in the loss takes their counts; with a ratio per
// sequence it reads the log-probs too. Tokens are cut into blocks that fit the first cache: each
// part of the loss passes over a block on its own, so that one that is off costs a branch per
// block. A block's sums are floats in lanes, a segment's are doubles, and segments are added up in
// their order, whatever thread made them.

#include <algorithm>
#include <limits>
#include <vector>

#include "ppo_loss/ppo_loss.h"

#ifdef PPOKERN_ISA  // read by for_each_isa.h

namespace ppokern::PPOKERN_ISA {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr int64_t kBlock = 16 * kLanes;  // so few, since roundings of equal numbers add up
constexpr int64_t kSegment = 1 << 14;

#include "ppo_loss/terms.h"

int threads_of(const PpoLossArgs& args) { return threads_for(args.tokens, args.threads); }

// Calls `use` with the place of each vector, and with how many of its lanes there are.
template <class Use>
PPOKERN_INLINE void for_each_vector(int64_t first, int64_t last, Use use) {
  for (; first + kLanes <= last; first += kLanes) use(first, All{});
  if (first < last) use(first, static_cast<int>(last - first));
}

template <class Use>
inline void for_each_block(int64_t first, int64_t last, Use use) {
  for (; first < last; first += kBlock) use(first, std::min(first + kBlock, last));
}

template <class Count>
inline Mask valid_at(Dense<const uint8_t> mask, int64_t at, Count count) {
  return mask ? load(mask.data + at, count) : first(count);
}

// What is masked counts as 0, whatever it is.
template <class Count>
inline Lanes take(Dense<const float> x, int64_t at, Count count, Mask mask) {
  return mask ? load(x.data + at, count) : Lanes{};
}

inline Lanes one_where(Mask mask) { return mask ? broadcast(1) : Lanes{}; }

inline double sum_of(Lanes x) { return reduce(x, Plus()); }

int64_t begin_of(const PpoLossArgs& args, int64_t sequence) {
  return args.cu_seqlens ? args.cu_seqlens.data[sequence]
                         : sequence * (args.tokens / args.sequences);
}

// Writes to each token what its sequence has.
void spread(const PpoLossArgs& args, const std::vector<float>& of_sequences, int64_t first,
            int64_t last, float* to) {
  const int64_t* begins = args.cu_seqlens.data;
  int64_t sequence = begins ? std::upper_bound(begins, begins + args.sequences, first) - begins - 1
                            : first / (args.tokens / args.sequences);
  while (first < last) {
    const int64_t end = std::min(begin_of(args, sequence + 1), last);
    std::fill(to, to + (end - first), of_sequences[sequence++]);
    to += end - first;
    first = end;
  }
}

template <class Term>
double sum_over(int64_t first, int64_t last, Term term) {
  double sum = 0;
  for_each_block(first, last, [&](int64_t begin, int64_t end) {
    Lanes lanes{};
    for_each_vector(begin, end, [&](int64_t at, auto count) { lanes += term(at, count); });
    sum += sum_of(lanes);
  });
  return sum;
}

// The unmasked tokens, in all and of each sequence.
struct Counts {
  std::vector<int64_t> of_sequences;
  int64_t tokens = 0, sequences = 0;

  Counts(const PpoLossArgs& args, Dense<const uint8_t> mask) : of_sequences(args.sequences) {
#pragma omp parallel for num_threads(threads_of(args))
    for (int64_t s = 0; s < args.sequences; ++s) {
      const int64_t begin = begin_of(args, s), end = begin_of(args, s + 1);
      of_sequences[s] = !mask ? end - begin : sum_over(begin, end, [&](int64_t at, auto count) {
        return one_where(load(mask.data + at, count));
      });
    }
    for (int64_t count : of_sequences) {
      tokens += count;
      sequences += count > 0;
    }
  }
};

// What a token's term is multiplied by in the aggregate's sum.
struct Scale {
  float of_all = 1;
  std::vector<float> of_sequences;  // empty: that of all

  Scale(const PpoLossArgs& args, const Counts& counts, std::optional<float> denominator) {
    if (args.aggregate == Aggregate::kSum || args.aggregate == Aggregate::kNone) return;
    const bool of_tokens = args.aggregate == Aggregate::kTokenMean;
    const int64_t count = of_tokens ? counts.tokens : counts.sequences;
    of_all = 1 / denominator.value_or(count);
    if (args.aggregate != Aggregate::kSequenceMean) return;
    for (int64_t length : counts.of_sequences) of_sequences.push_back(of_all / length);
  }

  void spread(const PpoLossArgs& args, int64_t first, int64_t last, float* to) const {
    if (of_sequences.empty()) {
      std::fill(to, to + (last - first), of_all);
    } else {
      PPOKERN_ISA::spread(args, of_sequences, first, last, to);
    }
  }
};

std::vector<float> mean_log_ratios(const PpoLossArgs& args, const Counts& counts) {
  std::vector<float> means(args.sequences);
#pragma omp parallel for num_threads(threads_of(args))
  for (int64_t s = 0; s < args.sequences; ++s) {
    const double sum = sum_over(begin_of(args, s), begin_of(args, s + 1), [&](int64_t at, auto n) {
      const Mask mask = valid_at(args.mask, at, n);
      return take(args.logprobs, at, n, mask) - take(args.old_logprobs, at, n, mask);
    });
    means[s] = sum / std::max<int64_t>(counts.of_sequences[s], 1);
  }
  return means;
}

struct Sums {
  double of[kSums] = {};
  float ratio_min = kInfinity, ratio_max = -kInfinity;

  void operator+=(const Sums& other) {
    for (int i = 0; i < kSums; ++i) of[i] += other.of[i];
    ratio_min = std::min(ratio_min, other.ratio_min);
    ratio_max = std::max(ratio_max, other.ratio_max);
  }
};

// Some tokens, with what their sequences give them.
struct Block {
  const PpoLossArgs& args;
  bool per_token;  // the loss is
  int64_t begin = 0, end = 0;
  float scales[kBlock], value_scales[kBlock], log_ratios[kBlock];

  // Of what is spread over this block.
  template <class Count>
  Lanes shared(const float* x, int64_t at, Count count, Mask mask) const {
    return mask ? load(x + (at - begin), count) : Lanes{};
  }

  // Returns what a term counts in the loss, and adds it there, times `coef`, if that is per token.
  template <class Count>
  Lanes add(int64_t at, Count count, Lanes scale, Lanes term, float coef) const {
    const Lanes share = scale == 0 ? Lanes{} : scale * term;
    if (per_token && coef != 0) {
      store(args.loss.data + at, load(args.loss.data + at, count) + coef * share, count);
    }
    return share;
  }
};

void add_policy(const Block& block, Sums& sums) {
  const PpoLossArgs& args = block.args;
  const bool of_sequence = args.ratio_slopes.data != nullptr;
  float* slopes = of_sequence ? args.ratio_slopes.data : args.logprob_slopes.data;
  const float floor = 1 - args.low, ceiling = 1 + args.high;
  Lanes loss{}, ratios{}, k1{}, k2{}, k3{}, outside{}, flat{};
  Lanes least = broadcast(kInfinity), most = broadcast(-kInfinity);
  for_each_vector(block.begin, block.end, [&](int64_t at, auto count) {
    const Mask mask = valid_at(args.mask, at, count);
    const Lanes logprob = take(args.logprobs, at, count, mask);
    const Lanes old_logprob = take(args.old_logprobs, at, count, mask);
    const Lanes advantage = take(args.advantages, at, count, mask);
    const Lanes weight = args.weights ? take(args.weights, at, count, mask) : broadcast(1);
    const Lanes own = logprob - old_logprob;
    const Lanes used = of_sequence ? block.shared(block.log_ratios, at, count, mask) : own;
    Lanes ratio;
    const Clipped<Lanes> token =
        surrogate(args, used, logprob, old_logprob, advantage, weight, ratio);
    const Lanes scale = block.shared(block.scales, at, count, mask);
    loss += block.add(at, count, scale, token.loss, 1);
    store(slopes + at, scale * token.slope, count);
    ratios += mask ? ratio : Lanes{};
    least = min(mask ? ratio : broadcast(kInfinity), least);
    most = max(mask ? ratio : broadcast(-kInfinity), most);
    outside += one_where((ratio < floor) | (ratio > ceiling));
    flat += one_where(token.flat);
    k1 += kl_k1(-own);
    k2 += kl_k2(-own);
    k3 += kl_k3(-own);
  });
  sums.of[kPolicy] += sum_of(loss);
  sums.of[kRatio] += sum_of(ratios);
  sums.ratio_min = std::min(sums.ratio_min, reduce(least, Min()));
  sums.ratio_max = std::max(sums.ratio_max, reduce(most, Max()));
  sums.of[kOutside] += sum_of(outside);
  sums.of[kFlat] += sum_of(flat);
  sums.of[kK1] += sum_of(k1);
  sums.of[kK2] += sum_of(k2);
  sums.of[kK3] += sum_of(k3);
}

void add_entropy(const Block& block, Sums& sums) {
  const PpoLossArgs& args = block.args;
  Lanes plain{}, total{};
  for_each_vector(block.begin, block.end, [&](int64_t at, auto count) {
    const Mask mask = valid_at(args.mask, at, count);
    const Lanes scale = block.shared(block.scales, at, count, mask);
    const Lanes entropy = take(args.entropy, at, count, mask);
    plain += entropy;
    total += block.add(at, count, scale, entropy, -args.entropy_coef);
    if (args.entropy_slopes)
      store(args.entropy_slopes.data + at, -args.entropy_coef * scale, count);
  });
  sums.of[kEntropy] += sum_of(plain);
  sums.of[kScaledEntropy] += sum_of(total);
}

template <KlKind kKind>
void add_kl(const Block& block, Sums& sums) {
  const PpoLossArgs& args = block.args;
  float* slopes = args.kl_coef != 0 ? args.logprob_slopes.data : nullptr;
  Lanes plain{}, total{};
  for_each_vector(block.begin, block.end, [&](int64_t at, auto count) {
    const Mask mask = valid_at(args.mask, at, count);
    const Lanes scale = block.shared(block.scales, at, count, mask);
    const Lanes log_ratio =
        take(args.logprobs, at, count, mask) - take(args.ref_logprobs, at, count, mask);
    const Lanes estimate = kl(kKind, log_ratio);
    plain += estimate;
    total += block.add(at, count, scale, estimate, args.kl_coef);
    if (slopes == nullptr) return;
    const Lanes slope = scale == 0 ? Lanes{} : args.kl_coef * scale * kl_slope(kKind, log_ratio);
    const Lanes of_policy = args.ratio_slopes ? Lanes{} : load(slopes + at, count);
    store(slopes + at, slope + of_policy, count);
  });
  sums.of[kKl] += sum_of(plain);
  sums.of[kScaledKl] += sum_of(total);
}

void add_value(const Block& block, Sums& sums) {
  const PpoLossArgs& args = block.args;
  Lanes loss{}, larger{};
  for_each_vector(block.begin, block.end, [&](int64_t at, auto count) {
    const Mask mask = valid_at(args.value_mask, at, count);
    const Lanes scale = block.shared(block.value_scales, at, count, mask);
    const Lanes value = take(args.values, at, count, mask);
    const Lanes target = take(args.returns, at, count, mask);
    const Clipped<Lanes> token = args.old_values
                                     ? clip_value(value, take(args.old_values, at, count, mask),
                                                  target, args.value_clip_range)
                                     : value_error(value, target);
    loss += block.add(at, count, scale, token.loss, args.value_coef);
    larger += one_where(token.flat);
    if (args.value_slopes) {
      store(args.value_slopes.data + at, args.value_coef * scale * token.slope, count);
    }
  });
  sums.of[kValue] += sum_of(loss);
  sums.of[kLarger] += sum_of(larger);
}

void add_parts(const Block& block, Sums& sums) {
  const PpoLossArgs& args = block.args;
  if (block.per_token) std::fill(args.loss.data + block.begin, args.loss.data + block.end, 0.0f);
  if (args.logprobs) add_policy(block, sums);
  if (args.entropy) add_entropy(block, sums);
  if (args.ref_logprobs) {
    constexpr decltype(&add_kl<KlKind::kK1>) kOfKind[] = {
        add_kl<KlKind::kK1>, add_kl<KlKind::kK2>, add_kl<KlKind::kK3>, add_kl<KlKind::kK3Plus>};
    kOfKind[static_cast<int>(args.kl_kind)](block, sums);
  }
  if (args.values) add_value(block, sums);
}

void run(const PpoLossArgs& args) {
  const Counts counts(args, args.mask);
  const bool same = args.value_mask.data == args.mask.data;
  const Counts value_counts = same ? counts : Counts(args, args.value_mask);
  const Scale scale(args, counts, args.denominator);
  const Scale value_scale(args, value_counts, args.value_denominator);
  std::vector<float> log_ratios;
  if (args.ratio_slopes) log_ratios = mean_log_ratios(args, counts);
  std::vector<Sums> segments((args.tokens + kSegment - 1) / kSegment);
#pragma omp parallel for num_threads(threads_of(args))
  for (int64_t i = 0; i < static_cast<int64_t>(segments.size()); ++i) {
    Block block = {args, args.aggregate == Aggregate::kNone};
    const int64_t last = std::min((i + 1) * kSegment, args.tokens);
    for_each_block(i * kSegment, last, [&](int64_t begin, int64_t end) {
      block.begin = begin;
      block.end = end;
      scale.spread(args, begin, end, block.scales);
      if (args.values) value_scale.spread(args, begin, end, block.value_scales);
      if (args.ratio_slopes) spread(args, log_ratios, begin, end, block.log_ratios);
      add_parts(block, segments[i]);
    });
  }
  Sums sums;
  for (const Sums& segment : segments) sums += segment;
  finish(args, {sums.of, sums.ratio_min, sums.ratio_max, counts.tokens, counts.sequences,
                value_counts.tokens});
}

}  // namespace
}  // namespace ppokern::PPOKERN_ISA

#else

#define PPOKERN_KERNELS "ppo_loss/ppo_loss_cpu.cpp"
#include "for_each_isa.h"

namespace ppokern {

void ppo_loss_cpu(const PpoLossArgs& args) {
  if (args.cu_seqlens) check_boundaries(args.cu_seqlens.data, args.sequences, args.tokens);
  PPOKERN_BEST(run)(args);
}

}  // namespace ppokern

#endif
