// How Python's arguments become those of the kernels, by name. A tensor arrives as (address,
// sequence stride, step stride), or its address alone where it is dense; logits arrive as (address,
// address of row offsets, row stride), so that nothing here knows of torch.

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

// Returns which of `names` a Python string is.
template <class Enum, size_t kCount>
Enum named(const char* argument, const char* const (&names)[kCount], py::handle source) {
  const auto name = source.cast<std::string>();
  std::string known;
  for (size_t i = 0; i < kCount; ++i) {
    if (name == names[i]) return static_cast<Enum>(i);
    known += (i ? ", " : "") + std::string(names[i]);
  }
  throw py::value_error(argument + std::string(": expected one of ") + known + ", got " + name);
}

template <>
struct py::detail::type_caster<Aggregate> {
  PYBIND11_TYPE_CASTER(Aggregate, const_name("str"));

  bool load(handle source, bool) {
    value = named<Aggregate>("aggregate", kAggregates, source);
    return true;
  }
};

template <>
struct py::detail::type_caster<KlKind> {
  PYBIND11_TYPE_CASTER(KlKind, const_name("str"));

  bool load(handle source, bool) {
    value = named<KlKind>("kl_kind", kKlKinds, source);
    return true;
  }
};

template <class T>
using Passed = std::conditional_t<std::is_pointer_v<T>, uintptr_t, T>;

template <class Args, class Result, class... Rest, class... Types>
auto takes(Result (*function)(const Args&, Rest...), FieldTypes<void, Types...>) {
  return [function](Types... fields, Passed<Rest>... rest) {
    return function(Args{fields...}, (Rest)rest...);
  };
}

// Defines a function of an argument struct and more: in Python one of the struct's fields, in the
// order that the module's `fields` has, and of the rest, pointers as addresses.
template <class Args, class Result, class... Rest>
void define(py::module_& m, const char* name, Result (*function)(const Args&, Rest...)) {
  m.def(name, takes(function, typename Args::Types{}), py::call_guard<py::gil_scoped_release>());
  py::list names;
  for (const char* field : Args::kNames) names.append(field);
  if (!py::hasattr(m, "fields")) m.attr("fields") = py::dict();
  m.attr("fields")[name] = py::tuple(names);
}
