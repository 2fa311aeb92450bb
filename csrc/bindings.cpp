// The module ppokern._native: one line per function.

#include "bindings.h"

#include <cstdlib>

PYBIND11_MODULE(_native, m) {
  const py::call_guard<py::gil_scoped_release> release;
  m.def("cpu_capability", &cpu_capability);
  m.def("getenv", &std::getenv);
  m.def("gae", gae_fields(&gae_cpu), release);
  m.def("token_ids_fit", takes<Ints, Bools, int64_t, int64_t>(&token_ids_fit), release);
  m.def("logprob_forward", logprob_forward_fields(&logprob_forward_cpu), release);
  m.def("logprob_backward", logprob_backward_fields(&logprob_backward_cpu), release);
  m.def("ppo_loss", ppo_loss_fields(&ppo_loss_cpu), release);
}
