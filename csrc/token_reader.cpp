#include "token_reader.h"

#include <cstring>
#include <limits>
#include <string>

#include "block_layout.h"

namespace tiered_kv {
namespace {

namespace py = pybind11;

std::string at(int64_t position) { return "tokens[" + std::to_string(position) + "]"; }

uint32_t checked_token(long long value, int64_t position) {
  if (value < 0 || value > std::numeric_limits<uint32_t>::max())
    throw ArgumentError(at(position), std::to_string(value) + " is not in [0, 2**32)");
  return uint32_t(value);
}

void check_range(int64_t start, int64_t stop, int64_t length) {
  if (start < 0) throw ArgumentError("start", std::to_string(start) + " is negative");
  if (stop < start)
    throw ArgumentError("stop",
                        std::to_string(stop) + " is less than start " + std::to_string(start));
  if (stop > length)
    throw ArgumentError(
        "stop", std::to_string(stop) + " is beyond the " + std::to_string(length) + " tokens");
}

// Converts an item that is not a plain int, such as a numpy scalar. It runs Python code, which may
// change the sequence, so the caller checks the length again.
uint32_t convert(PyObject* item, int64_t position) {
  const auto held = py::reinterpret_borrow<py::object>(item);
  const auto number = py::reinterpret_steal<py::object>(PyNumber_Index(held.ptr()));
  if (!number) {
    PyErr_Clear();
    throw ArgumentError(at(position), "not an integer");
  }
  int overflow = 0;
  const long long value = PyLong_AsLongLongAndOverflow(number.ptr(), &overflow);
  if (overflow != 0) throw ArgumentError(at(position), "not in [0, 2**32)");
  return checked_token(value, position);
}

uint32_t token_of(PyObject* item, int64_t position) {
  if (!PyLong_CheckExact(item)) return convert(item, position);
#if PY_VERSION_HEX >= 0x030C0000
  const auto* number = reinterpret_cast<PyLongObject*>(item);
  if (PyUnstable_Long_IsCompact(number))
    return checked_token(PyUnstable_Long_CompactValue(number), position);
#endif
  int overflow = 0;
  const long long value = PyLong_AsLongLongAndOverflow(item, &overflow);
  if (overflow != 0) throw ArgumentError(at(position), "not in [0, 2**32)");
  return checked_token(value, position);
}

std::vector<uint32_t> read_sequence(const py::object& tokens, int64_t start, int64_t stop) {
  const auto sequence = py::reinterpret_steal<py::object>(PySequence_Fast(tokens.ptr(), "tokens"));
  if (!sequence) {
    PyErr_Clear();
    throw ArgumentError("tokens", "neither a sequence of ints nor an int32 or int64 array");
  }
  check_range(start, stop, PySequence_Fast_GET_SIZE(sequence.ptr()));
  std::vector<uint32_t> values(static_cast<size_t>(stop - start));
  for (int64_t i = start; i < stop; ++i) {
    if (i >= PySequence_Fast_GET_SIZE(sequence.ptr()))
      throw ArgumentError("tokens", "shrank while it was read");
    values[size_t(i - start)] = token_of(PySequence_Fast_GET_ITEM(sequence.ptr(), i), i);
  }
  return values;
}

template <typename T>
std::vector<uint32_t> read_buffer(const py::buffer_info& info, int64_t start, int64_t stop) {
  check_range(start, stop, info.shape[0]);
  std::vector<uint32_t> values(static_cast<size_t>(stop - start));
  const char* item = static_cast<const char*>(info.ptr) + start * info.strides[0];
  for (int64_t i = start; i < stop; ++i, item += info.strides[0]) {
    T value;
    std::memcpy(&value, item, sizeof(value));
    values[size_t(i - start)] = checked_token(value, i);
  }
  return values;
}

}  // namespace

std::vector<uint32_t> read_tokens(const py::object& tokens, int64_t start, int64_t stop) {
  if (PyList_Check(tokens.ptr()) || !PyObject_CheckBuffer(tokens.ptr()))
    return read_sequence(tokens, start, stop);
  const py::buffer_info info = py::reinterpret_borrow<py::buffer>(tokens).request();
  if (info.ndim != 1)
    throw ArgumentError("tokens", std::to_string(info.ndim) + " dimensions, expected 1");
  const std::string& format = info.format;
  const bool native =
      format.size() == 1 || (format.size() == 2 && std::strchr("@=<", format[0]) != nullptr);
  if (native && std::strchr("ilq", format.back()) != nullptr) {
    if (info.itemsize == 4) return read_buffer<int32_t>(info, start, stop);
    if (info.itemsize == 8) return read_buffer<int64_t>(info, start, stop);
  }
  throw ArgumentError("tokens", "items of format '" + format + "', expected int32 or int64");
}

}  // namespace tiered_kv
