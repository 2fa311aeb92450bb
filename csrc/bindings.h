// How Python's arguments become those of the kernels, by name. A tensor arrives as (address,
// sequence stride, step stride), or its address alone where it is dense; logits arrive as (address,
// address of row offsets, row stride), so that nothing here knows of torch.

#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <iterator>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>

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
    if (!PyTuple_Check(source.ptr())) return false;
    const auto [address, sequence, step] = source.cast<std::tuple<uintptr_t, int64_t, int64_t>>();
    value = {reinterpret_cast<T*>(address), sequence, step};
    return true;
  }
};

template <class T>
struct py::detail::type_caster<Dense<T>> {
  PYBIND11_TYPE_CASTER(Dense<T>, const_name("int"));

  bool load(handle source, bool) {
    if (!PyLong_Check(source.ptr())) return false;
    value = {reinterpret_cast<T*>(source.cast<uintptr_t>())};
    return true;
  }
};

template <>
struct py::detail::type_caster<Rows> {
  PYBIND11_TYPE_CASTER(Rows, const_name("tuple[int, int, int]"));

  bool load(handle source, bool) {
    if (!PyTuple_Check(source.ptr())) return false;
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
    if (!PyUnicode_Check(source.ptr())) return false;
    value = named<Aggregate>("aggregate", kAggregates, source);
    return true;
  }
};

template <>
struct py::detail::type_caster<KlKind> {
  PYBIND11_TYPE_CASTER(KlKind, const_name("str"));

  bool load(handle source, bool) {
    if (!PyUnicode_Check(source.ptr())) return false;
    value = named<KlKind>("kl_kind", kKlKinds, source);
    return true;
  }
};

// Returns the value of a field as the kernels take it.
template <class T>
T field_of(const py::dict& values, PyObject* name) {
  PyObject* const value = PyDict_GetItemWithError(values.ptr(), name);
  if (!value) throw py::key_error(py::cast<std::string>(name) + ": expected a value, got none");
  py::detail::make_caster<T> caster;
  if (!caster.load(value, true)) {
    throw py::type_error(py::cast<std::string>(name) + ": expected " + decltype(caster)::name.text +
                         ", got " + Py_TYPE(value)->tp_name);
  }
  return py::detail::cast_op<T>(std::move(caster));
}

template <class Args, class... Types, size_t... I>
Args fields_of(const py::dict& values, PyObject* const* names, FieldTypes<void, Types...>,
               std::index_sequence<I...>) {
  return Args{field_of<Types>(values, names[I])...};
}

template <class T>
using Passed = std::conditional_t<std::is_pointer_v<T>, uintptr_t, T>;

// Defines a function of an argument struct and more: in Python of a dict that has the struct's
// fields, which the module lists in `fields`, and of the rest, pointers as addresses.
template <class Args, class Result, class... Rest>
void define(py::module_& m, const char* name, Result (*function)(const Args&, Rest...)) {
  constexpr size_t kCount = std::size(Args::kNames);
  static PyObject* names[kCount];  // Python's own copies: a look-up compares addresses
  py::tuple listed(kCount);
  for (size_t i = 0; i < kCount; ++i) {
    names[i] = PyUnicode_InternFromString(Args::kNames[i]);
    listed[i] = py::reinterpret_borrow<py::str>(names[i]);
  }
  m.def(name, [function](const py::dict& values, Passed<Rest>... rest) {
    const Args args =
        fields_of<Args>(values, names, typename Args::Types{}, std::make_index_sequence<kCount>());
    const py::gil_scoped_release released;
    return function(args, (Rest)rest...);
  });
  if (!py::hasattr(m, "fields")) m.attr("fields") = py::dict();
  m.attr("fields")[name] = listed;
}
