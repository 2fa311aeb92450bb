// The module ppokern._native: one line per function. A tensor arrives as (address, sequence stride,
// step stride), so that nothing here knows of torch.

#include <pybind11/pybind11.h>

#include <tuple>

#include "gae/gae.h"

namespace py = pybind11;
using namespace ppokern;

template <class T>
struct py::detail::type_caster<View<T>> {
  PYBIND11_TYPE_CASTER(View<T>, const_name("tuple[int, int, int]"));

  bool load(handle source, bool) {
    const auto [address, sequence, step] = source.cast<std::tuple<uintptr_t, int64_t, int64_t>>();
    value = {reinterpret_cast<T*>(address), sequence, step};
    return true;
  }
};

// A function of an argument struct, as a Python function of the struct's fields in their order.
template <class... Fields, class Args, class Result>
auto takes(Result (*function)(const Args&)) {
  return [function](Fields... fields) { return function(Args{fields...}); };
}

using Floats = View<const float>;
using Bools = View<const uint8_t>;
using Ints = View<const int64_t>;
using Output = View<float>;

PYBIND11_MODULE(_native, m) {
  const py::call_guard<py::gil_scoped_release> release;
  m.def("cpu_capability", &cpu_capability);
  m.def("gae",
        takes<Floats, Floats, Bools, Bools, Bools, Floats, Floats, Output, Output, Ints, int64_t,
              int64_t, float, float, bool, int>(&gae_cpu),
        release);
}
