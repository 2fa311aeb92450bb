// The module ppokern._native: one line per function.

#include "bindings.h"

#include <cstdlib>

PYBIND11_MODULE(_native, m) {
  m.def("cpu_capability", &cpu_capability);
  m.def("getenv", &std::getenv);
  define(m, "gae", &gae_cpu);
  define(m, "token_ids_fit", &token_ids_fit);
  define(m, "logprob_forward", &logprob_forward_cpu);
  define(m, "logprob_backward", &logprob_backward_cpu);
  define(m, "ppo_loss", &ppo_loss_cpu);
}
