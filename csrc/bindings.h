// How Python's arguments become those of the kernels. A tensor arrives as (address, sequence
// stride, step stride), or its address alone where it is dense; logits arrive as (address, address
// of row offsets, row stride), so that nothing here knows of torch.

#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <optional>
#include <string>
#include <tuple>
#include <type_traits>

#include "gae/gae.h"
#include "linear/linear_loss.h"
#include "logprob/logprob.h"
#include "ppo_loss/ppo_loss.h"

namespace py = pybind11;

using namespace ppokern;

template <class T>
struct py::detail::type_caster<View<T>> {
  PYBIND11_TYPE_CASTER(View<T>, const_name("int | tuple[int, int, int]"));

  bool load(handle source, bool) {
    if (PyLong_Check(source.ptr())) {
      value = {reinterpret_cast<T*>(source.cast<uintptr_t>()), 1, 0};
      return true;
    }
    const auto [address, sequence, step] = source.cast<std::tuple<uintptr_t, int64_t, int64_t>>();
    value = {reinterpret_cast<T*>(address), sequence, step};
    return true;
  }
};

template <class T>
struct py::detail::type_caster<Dense<T>> {
  PYBIND11_TYPE_CASTER(Dense<T>, const_name("int"));

  bool load(handle source, bool) {
    value = {reinterpret_cast<T*>(source.cast<uintptr_t>())};
    return true;
  }
};

template <>
struct py::detail::type_caster<Rows> {
  PYBIND11_TYPE_CASTER(Rows, const_name("tuple[int, int, int]"));

  bool load(handle source, bool) {
    const auto [data, offsets, stride] = source.cast<std::tuple<uintptr_t, uintptr_t, int64_t>>();
    value = {reinterpret_cast<void*>(data), reinterpret_cast<const int64_t*>(offsets), stride};
    return true;
  }
};

template <>
struct py::detail::type_caster<Aggregate> {
  PYBIND11_TYPE_CASTER(Aggregate, const_name("str"));

  bool load(handle source, bool) {
    const auto name = source.cast<std::string>();
    value = name == "token_mean"      ? Aggregate::kTokenMean
            : name == "sequence_mean" ? Aggregate::kSequenceMean
            : name == "sequence_sum"  ? Aggregate::kSequenceSum
            : name == "sum"           ? Aggregate::kSum
                                      : Aggregate::kNone;
    return true;
  }
};

template <>
struct py::detail::type_caster<KlKind> {
  PYBIND11_TYPE_CASTER(KlKind, const_name("str"));

  bool load(handle source, bool) {
    const auto name = source.cast<std::string>();
    value = name == "k1" ? KlKind::kK1 : name == "k2" ? KlKind::kK2 : KlKind::kK3;
    return true;
  }
};

template <class T>
using Passed = std::conditional_t<std::is_pointer_v<T>, uintptr_t, T>;

// A function of an argument struct and more, as a Python function of the struct's fields in their
// order and of the rest, pointers as addresses.
template <class... Fields, class Args, class Result, class... Rest>
auto takes(Result (*function)(const Args&, Rest...)) {
  return [function](Fields... fields, Passed<Rest>... rest) {
    return function(Args{fields...}, (Rest)rest...);
  };
}

using Floats = View<const float>;
using Bools = View<const uint8_t>;
using Ints = View<const int64_t>;
using Output = View<float>;
using In = Dense<const float>;
using Flags = Dense<const uint8_t>;
using Out = Dense<float>;
using Number = std::optional<float>;

// The fields of each op's arguments, on every device.
template <class Function>
auto gae_fields(Function function) {
  return takes<Floats, Floats, Bools, Bools, Bools, Floats, Floats, Output, Output, Ints, int64_t,
               int64_t, float, float, bool, int>(function);
}

template <class Function>
auto logprob_forward_fields(Function function) {
  return takes<Rows, int, Ints, Bools, Floats, float, float, int64_t, int64_t, int, Output, Output,
               View<LogprobRow>>(function);
}

template <class Function>
auto logprob_backward_fields(Function function) {
  return takes<Rows, int, Ints, Bools, Floats, float, float, int64_t, int64_t, int, Floats, Floats,
               View<const LogprobRow>, Rows, int64_t, bool>(function);
}

template <class Function>
auto ppo_loss_fields(Function function) {
  return takes<In, In, In, In, In, In, In, In, In, Flags, Flags, Dense<const int64_t>, Number,
               Number, int64_t, int64_t, double, double, float, float, Aggregate, float, float,
               KlKind, float, float, int, Out, Out, Out, Out, Out, Out>(function);
}
