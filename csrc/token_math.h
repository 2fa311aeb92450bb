// The maths page: every formula once, under the names and in the order of ppokern/token_math.py.
// F is a float or a vector of them; `?:` selects lane by lane.
//
// No include guard: for_each_isa.h reads this file once for each instruction set.

namespace ppokern::PPOKERN_ISA {
namespace {

// softcap * tanh(logit / softcap); a forbidden token (-inf) stays forbidden.
// Gemma 2 (2024), section 2.
template <class F>
PPOKERN_HOST_DEVICE inline F softcap_logit(F logit, float softcap) {
  return logit == -std::numeric_limits<float>::infinity() ? logit : softcap * tanh(logit / softcap);
}

// 1 - tanh(logit / softcap)^2.
template <class F>
PPOKERN_HOST_DEVICE inline F softcap_slope(F logit, float softcap) {
  const F t = tanh(logit / softcap);
  return 1 - t * t;
}

// (logit - row_max) / temperature: in this order extreme logits stay exact. The factor is
// 1 / temperature; times log2(e), the result is in bits.
template <class F>
PPOKERN_HOST_DEVICE inline F tempered_logit(F logit, F row_max, F factor) {
  return (logit - row_max) * factor;
}

// The same as one operation, with shift = -row_max * factor. Rounding that moves all logits of the
// row alike, which the caller makes good; in rows that lie high it would be a large one.
template <class F>
PPOKERN_HOST_DEVICE inline F shifted_logit(F logit, F factor, F shift) {
  return fma(logit, factor, shift);
}

// 1 - exp(logprob): the slope of a token's log-prob in its own logit, exact near 0.
template <class F>
PPOKERN_HOST_DEVICE inline F own_logprob_slope(F logprob) {
  return -std::expm1(logprob);
}

// -prob * logprob, added to a total; 0 log 0 = 0, for which any finite log-prob will do.
template <class F>
PPOKERN_HOST_DEVICE inline F entropy_term(F prob, F logprob, F total) {
  return fma(-prob, at_least(logprob, -1e4f), total);
}

// -prob * (logprob + entropy), the slope of a row's entropy in one of its logits.
template <class F>
PPOKERN_HOST_DEVICE inline F entropy_slope(F prob, F logprob, F entropy) {
  return -prob * ((prob == 0 ? F{} : logprob) + entropy);
}

// r_t + gamma V(s_{t+1}) - V(s_t); next_value is 0 where nothing is bootstrapped.
// Schulman et al. 2016 (arXiv 1506.02438), equation 10.
template <class F>
PPOKERN_HOST_DEVICE inline F gae_delta(F reward, F value, F next_value, float gamma) {
  return reward + gamma * next_value - value;
}

// A_t = delta_t + decay_t A_{t+1}; a decay of 0 shuts out whatever comes next.
// Schulman et al. 2016 (arXiv 1506.02438), equation 16.
template <class F>
PPOKERN_HOST_DEVICE inline F gae_step(F delta, F decay, F next_advantage) {
  return decay == 0 ? delta : delta + decay * next_advantage;
}

// d, with d = log p - log q of a token sampled from p: unbiased. Schulman 2020.
template <class F>
PPOKERN_HOST_DEVICE inline F kl_k1(F log_ratio) {
  return log_ratio;
}

// d^2 / 2: biased, of low variance. Schulman 2020, "Approximating KL divergence".
template <class F>
PPOKERN_HOST_DEVICE inline F kl_k2(F log_ratio) {
  return log_ratio * log_ratio / 2;
}

// exp(-d) - 1 + d: unbiased, never negative. Schulman 2020.
template <class F>
PPOKERN_HOST_DEVICE inline F kl_k3(F log_ratio) {
  return expm1(-log_ratio) + log_ratio;
}

// 1.
template <class F>
PPOKERN_HOST_DEVICE inline F kl_k1_slope(F) {
  return F{} + 1;
}

// d.
template <class F>
PPOKERN_HOST_DEVICE inline F kl_k2_slope(F log_ratio) {
  return log_ratio;
}

// 1 - exp(-d).
template <class F>
PPOKERN_HOST_DEVICE inline F kl_k3_slope(F log_ratio) {
  return -expm1(-log_ratio);
}

// A token's loss, its slope, and whether it has none because of clipping.
template <class F>
struct Clipped {
  F loss, slope;
  decltype(F{} < F{}) flat;
};

// -min(r A, clip(r, 1 - low, 1 + high) A), for A < 0 not above -dual_clip A; the slope is that in
// log r. The ratio that counts is chosen before it is multiplied, so that an infinite ratio meets
// no zero.
// Schulman et al. 2017 (arXiv 1707.06347), equation 7; dual clip: Ye et al. 2020 (arXiv
// 1912.09729), equation 3.
template <class F>
PPOKERN_HOST_DEVICE inline Clipped<F> clip_surrogate(F ratio, F advantage, double low, double high,
                                                     float dual_clip) {
  const F floor = F{} + static_cast<float>(1 - low), ceiling = F{} + static_cast<float>(1 + high);
  const auto above = (advantage > 0) & (ratio > ceiling);
  const auto below = (advantage < 0) & (ratio < floor);
  const auto bound = (advantage < 0) & (ratio > dual_clip);
  F used = advantage == 0 ? F{} + 1 : ratio;
  used = above ? ceiling : below ? floor : bound ? F{} + dual_clip : used;
  const F loss = -used * advantage;
  const decltype(F{} < F{}) flat = above | below | bound;
  return {loss, flat ? F{} : loss, flat};
}

// max((v - R)^2, (clip(v, v_old - e, v_old + e) - R)^2) / 2; flat where the clipped error is the
// larger one.
// Schulman et al. 2016, as in OpenAI baselines' ppo2.
template <class F>
PPOKERN_HOST_DEVICE inline Clipped<F> clip_value(F value, F old_value, F target, float clip_range) {
  const F low = old_value - clip_range, high = old_value + clip_range;
  const F error = value - target;
  const F clipped = (value < low ? low : value <= high ? value : high) - target;  // NaN if old is
  const F own = error * error, other = clipped * clipped;
  const auto larger = other > own;
  return {(larger | (other != other) ? other : own) / 2, larger ? F{} : error, larger};
}

// (v - R)^2 / 2 and its slope v - R.
template <class F>
PPOKERN_HOST_DEVICE inline Clipped<F> value_error(F value, F target) {
  const F error = value - target;
  return {error * error / 2, error, F{} < F{}};
}

}  // namespace
}  // namespace ppokern::PPOKERN_ISA
