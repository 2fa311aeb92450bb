// The maths page: every formula once, under the names and in the order of ppokern/token_math.py.
// F is a float or a vector of them; `?:` selects lane by lane.
//
// No include guard: for_each_isa.h reads this file once for each instruction set.

namespace ppokern::PPOKERN_ISA {
namespace {

// softcap * tanh(logit / softcap); a forbidden token (-inf) stays forbidden.
// Gemma 2 (2024), section 2.
template <class F>
inline F softcap_logit(F logit, float softcap) {
  return logit == -std::numeric_limits<float>::infinity() ? logit : softcap * tanh(logit / softcap);
}

// 1 - tanh(logit / softcap)^2.
template <class F>
inline F softcap_slope(F logit, float softcap) {
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

}  // namespace
}  // namespace ppokern::PPOKERN_ISA
