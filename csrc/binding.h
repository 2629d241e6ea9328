// Helpers of both binding files: convert Python arguments and translate errors.
#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <memory>
#include <string>
#include <vector>

#include "block_layout.h"

namespace tiered_kv {

namespace py = pybind11;

inline void raise(const char* error, const char* message) {
  const py::object type = py::module_::import("vllm_tiered_kv.errors").attr(error);
  PyErr_SetString(type.ptr(), message);
}

inline void translate_argument_errors() {
  py::register_local_exception_translator([](std::exception_ptr thrown) {
    try {
      if (thrown) std::rethrow_exception(thrown);
    } catch (const ArgumentError& error) {
      raise("NativeError", error.what());
    }
  });
}

// Copies a one-dimensional array of exactly this type. It does not convert other types: floats or
// narrower integers as ids or offsets are a mistake of the caller.
template <typename T>
std::vector<T> to_vector(const py::object& object, const char* name) {
  if (!py::isinstance<py::array>(object)) throw ArgumentError(name, "not a numpy array");
  const auto array = py::reinterpret_borrow<py::array>(object);
  if (array.ndim() != 1)
    throw ArgumentError(name, std::to_string(array.ndim()) + " dimensions, expected 1");
  if (!array.dtype().is(py::dtype::of<T>()) && !array.dtype().equal(py::dtype::of<T>()))
    throw ArgumentError(name, "dtype " + std::string(py::str(array.dtype())) + ", expected " +
                                  std::string(py::str(py::dtype::of<T>())));
  const auto values = py::reinterpret_borrow<py::array_t<T>>(array).template unchecked<1>();
  std::vector<T> copy(static_cast<size_t>(values.shape(0)));
  for (size_t i = 0; i < copy.size(); ++i) copy[i] = values(py::ssize_t(i));
  return copy;
}

inline BlockLayout make_layout(const py::object& addresses, const py::object& block_strides,
                               const py::object& run_bytes, const py::object& slot_offsets,
                               int64_t num_blocks) {
  return BlockLayout(to_vector<uint64_t>(addresses, "addresses"),
                     to_vector<int64_t>(block_strides, "block_strides"),
                     to_vector<int64_t>(run_bytes, "run_bytes"),
                     to_vector<int64_t>(slot_offsets, "slot_offsets"), num_blocks);
}

inline Batch make_batch(const py::object& block_ids, const py::object& slot_offsets) {
  return {to_vector<int64_t>(block_ids, "block_ids"),
          to_vector<int64_t>(slot_offsets, "slot_offsets")};
}

}  // namespace tiered_kv
