// The module ppokern._cuda: one line per function. It loads where there is no driver; the first
// kernel says what is missing. Each takes what its namesake in ppokern._native does, then addresses
// of memory to work in and of a stream of the current device.

#include "bindings.h"

PYBIND11_MODULE(_cuda, m) {
  const py::call_guard<py::gil_scoped_release> release;
  m.def("gae", gae_fields(&gae_cuda), release);
  m.def("logprob_segments", &logprob_segments_cuda);
  m.def("logprob_forward", logprob_forward_fields(&logprob_forward_cuda), release);
  m.def("logprob_backward", logprob_backward_fields(&logprob_backward_cuda), release);
  m.def("linear_loss",
        takes<Rows, int, Ints, Bools, Floats, float, float, int64_t, int64_t, int,
              Dense<const int64_t>, int64_t, In, In, In, In, In, double, double, float, float,
              float, float, KlKind, int, Out, Out, Dense<uint8_t>>(&linear_loss_cuda),
        release);
  m.def("move_up", takes<Rows, int, int64_t, int64_t, Flags>(&move_up_cuda), release);
  m.def("ppo_loss_work", &ppo_loss_work_cuda);
  m.def("ppo_loss", ppo_loss_fields(&ppo_loss_cuda), release);
}
