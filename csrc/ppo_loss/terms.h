// What the losses' kernels have in common on every device: read, as token_math.h is, by what has
// F's functions, inside its namespace.

// Those of the first line as they enter the loss; the others plain.
// clang-format off
enum Sum {
  kPolicy, kScaledEntropy, kScaledKl, kValue,
  kRatio, kK1, kK2, kK3, kOutside, kFlat, kEntropy, kKl, kLarger,
  kSums,
};
// clang-format on

// The surrogate of a token, from the log-ratio that counts for it. A log-prob of -inf makes a ratio
// of 0 without a slope; any other value that is not finite makes the loss NaN.
template <class F, class Args>
PPOKERN_HOST_DEVICE inline Clipped<F> surrogate(const Args& args, F log_ratio, F logprob,
                                                F old_logprob, F advantage, F weight, F& ratio) {
  const float limit = args.log_ratio_limit;
  const auto forbidden = log_ratio == -kInfinity;
  const auto above = log_ratio > limit, below = log_ratio < -limit;
  ratio = forbidden ? F{} : exp(clamp(log_ratio, -limit, limit));
  Clipped<F> result = clip_surrogate(ratio, advantage, args.low, args.high, args.dual_clip);
  const F spoilt = (old_logprob - old_logprob) + (advantage - advantage) + (weight - weight);
  const auto sound = (spoilt == 0) & (logprob < kInfinity);
  result.loss = weight == 0 ? F{} : weight * result.loss;
  result.loss = sound ? result.loss : F{} + kNan;
  result.slope = (above | below | forbidden | (weight == 0)) ? F{} : weight * result.slope;
  result.slope = sound ? result.slope : F{} + kNan;
  return result;
}

// The estimate of a kind.
template <class F>
PPOKERN_HOST_DEVICE inline F kl(KlKind kind, F log_ratio) {
  return kind == KlKind::kK1   ? kl_k1(log_ratio)
         : kind == KlKind::kK2 ? kl_k2(log_ratio)
                               : kl_k3(log_ratio);
}

// Its slope; k3+ is k3 with the slope of k2.
template <class F>
PPOKERN_HOST_DEVICE inline F kl_slope(KlKind kind, F log_ratio) {
  return kind == KlKind::kK1   ? kl_k1_slope(log_ratio)
         : kind == KlKind::kK3 ? kl_k3_slope(log_ratio)
                               : kl_k2_slope(log_ratio);
}

// What was added up over all tokens.
struct Totals {
  const double* sums;  // kSums
  double ratio_min, ratio_max;
  int64_t tokens, sequences, valued_tokens;

  PPOKERN_HOST_DEVICE double mean(int sum) const {
    const int64_t count = sum == kValue || sum == kLarger ? valued_tokens : tokens;
    return count ? sums[sum] / count : 0;
  }
};

// Writes the statistics, and the loss unless it is per token; returns the statistics' end.
PPOKERN_HOST_DEVICE inline float* finish(const PpoLossArgs& args, const Totals& totals) {
  const bool per_token = args.aggregate == Aggregate::kNone;
  const double* const sums = totals.sums;
  float* to = args.stats.data;
  if (args.logprobs) {
    const bool any = totals.tokens != 0;
    const float lost = sums[kRatio] != sums[kRatio] ? kNan : 0;  // no comparison sees it
    *to++ = per_token ? totals.mean(kPolicy) : sums[kPolicy];
    *to++ = totals.mean(kRatio);
    *to++ = any ? totals.ratio_min + lost : 0;
    *to++ = any ? totals.ratio_max + lost : 0;
    for (int i = kK1; i <= kFlat; ++i) *to++ = totals.mean(i);
  }
  if (args.entropy) *to++ = totals.mean(kEntropy);
  if (args.ref_logprobs) *to++ = totals.mean(kKl);
  if (args.values) *to++ = per_token ? totals.mean(kValue) : sums[kValue];
  if (args.old_values) *to++ = totals.mean(kLarger);
  *to++ = totals.tokens;
  *to++ = totals.sequences;
  if (per_token) return to;
  double loss = sums[kPolicy];
  if (args.entropy_coef != 0) loss -= args.entropy_coef * sums[kScaledEntropy];
  if (args.kl_coef != 0) loss += args.kl_coef * sums[kScaledKl];
  if (args.value_coef != 0) loss += args.value_coef * sums[kValue];
  *args.loss.data = loss;
  return to;
}
