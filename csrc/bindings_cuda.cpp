// The module ppokern._cuda: one line per function. It loads where there is no driver; the first
// kernel says what is missing. Each takes what its namesake in ppokern._native does, then addresses
// of memory to work in and of a stream of the current device.

#include "bindings.h"

PYBIND11_MODULE(_cuda, m) {
  m.def("logprob_segments", &logprob_segments_cuda);
  m.def("ppo_loss_work", &ppo_loss_work_cuda);
  define(m, "gae", &gae_cuda);
  define(m, "logprob_forward", &logprob_forward_cuda);
  define(m, "logprob_backward", &logprob_backward_cuda);
  define(m, "linear_loss", &linear_loss_cuda);
  define(m, "move_up", &move_up_cuda);
  define(m, "ppo_loss", &ppo_loss_cuda);
}
