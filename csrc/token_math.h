// The maths page: every formula once, under the names and in the order of ppokern/token_math.py.
// F is a float or a vector of them; `?:` selects lane by lane.
//
// No include guard: for_each_isa.h reads this file once for each instruction set.

namespace ppokern::PPOKERN_ISA {
namespace {

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
