// Python binding of the CUDA module: converts arguments, calls without the GIL, translates errors.
#include <pybind11/stl.h>

#include <optional>

#include "binding.h"
#include "block_copy_cuda.h"
#include "cuda_handles.h"

namespace tiered_kv {
namespace {

using NoGil = py::call_guard<py::gil_scoped_release>;

void translate_cuda_errors() {
  py::register_local_exception_translator([](std::exception_ptr thrown) {
    try {
      if (thrown) std::rethrow_exception(thrown);
    } catch (const NoDevice& error) {
      raise("NoDeviceError", error.what());
    } catch (const CudaFailure& error) {
      raise("CudaError", error.what());
    }
  });
}

std::unique_ptr<CudaBlockLayout> make_cuda_layout(int device, const py::object& addresses,
                                                  const py::object& block_strides,
                                                  const py::object& run_bytes,
                                                  const py::object& slot_offsets,
                                                  int64_t num_blocks) {
  BlockLayout layout = make_layout(addresses, block_strides, run_bytes, slot_offsets, num_blocks);
  const py::gil_scoped_release no_gil;
  return std::make_unique<CudaBlockLayout>(device, std::move(layout));
}

void copy_blocks(const CudaBlockLayout& layout, const py::object& block_ids, int64_t address,
                 int64_t nbytes, const py::object& slot_offsets, uint64_t stream_handle,
                 int64_t ctas, Direction direction, SlotPart part = {}) {
  const Batch batch = make_batch(block_ids, slot_offsets);
  check_batch(layout.layout(), batch, direction, "target", address, nbytes);
  const py::gil_scoped_release no_gil;
  layout.copy(batch, direction, uint64_t(address), stream_handle, ctas, part);
}

void gather(const CudaBlockLayout& layout, const py::object& block_ids, int64_t target_address,
            int64_t target_nbytes, const py::object& slot_offsets, uint64_t stream_handle,
            int64_t ctas) {
  copy_blocks(layout, block_ids, target_address, target_nbytes, slot_offsets, stream_handle, ctas,
              Direction::kGather);
}

void scatter(const CudaBlockLayout& layout, const py::object& block_ids, int64_t target_address,
             int64_t target_nbytes, const py::object& slot_offsets, uint64_t stream_handle,
             int64_t ctas, int64_t part_begin, std::optional<int64_t> part_end) {
  const SlotPart part{part_begin, part_end.value_or(INT64_MAX)};
  if (part.begin < 0 || part.end < part.begin)
    throw ArgumentError("part_end", "expected 0 <= part_begin <= part_end, got " +
                                        std::to_string(part.begin) + " and " +
                                        std::to_string(part.end));
  copy_blocks(layout, block_ids, target_address, target_nbytes, slot_offsets, stream_handle, ctas,
              Direction::kScatter, part);
}

void check_offsets(const char* name, const char* address_name, int64_t address,
                   const std::vector<int64_t>& offsets, int64_t nbytes_each) {
  checked_range(address_name, address, 0);
  const auto item = [name](size_t i) { return std::string(name) + "[" + std::to_string(i) + "]"; };
  for (size_t i = 0; i < offsets.size(); ++i) {
    if (offsets[i] < 0) throw ArgumentError(item(i), std::to_string(offsets[i]) + " is negative");
    if (offsets[i] > INT64_MAX - address || nbytes_each > INT64_MAX - address - offsets[i])
      throw ArgumentError(item(i), "ends beyond the address space");
  }
}

void copy_between(int64_t src_address, const py::object& src_offsets, int64_t dst_address,
                  const py::object& dst_offsets, int64_t nbytes_each, uint64_t stream_handle,
                  std::optional<int> device, int64_t host_piece_bytes, cudaMemcpyKind kind) {
  const auto from = to_vector<int64_t>(src_offsets, "src_offsets");
  const auto to = to_vector<int64_t>(dst_offsets, "dst_offsets");
  if (nbytes_each < 1)
    throw ArgumentError("nbytes_each", std::to_string(nbytes_each) + " is not positive");
  if (host_piece_bytes < 0)
    throw ArgumentError("host_piece_bytes", std::to_string(host_piece_bytes) + " is negative");
  if (from.size() != to.size())
    throw ArgumentError("dst_offsets", std::to_string(to.size()) + " entries for " +
                                           std::to_string(from.size()) + " src_offsets");
  check_offsets("src_offsets", "src_address", src_address, from, nbytes_each);
  check_offsets("dst_offsets", "dst_address", dst_address, to, nbytes_each);
  check_disjoint("dst_offsets", to, nbytes_each);
  const py::gil_scoped_release no_gil;
  copy_ranges(device.value_or(kCurrentDevice), uint64_t(src_address), from, uint64_t(dst_address),
              to, nbytes_each, kind, stream_handle, host_piece_bytes);
}

void copy_to_host(int64_t src_address, const py::object& src_offsets, int64_t dst_address,
                  const py::object& dst_offsets, int64_t nbytes_each, uint64_t stream_handle,
                  std::optional<int> device, int64_t host_piece_bytes) {
  copy_between(src_address, src_offsets, dst_address, dst_offsets, nbytes_each, stream_handle,
               device, host_piece_bytes, cudaMemcpyDeviceToHost);
}

void copy_to_device(int64_t src_address, const py::object& src_offsets, int64_t dst_address,
                    const py::object& dst_offsets, int64_t nbytes_each, uint64_t stream_handle,
                    std::optional<int> device, int64_t host_piece_bytes) {
  copy_between(src_address, src_offsets, dst_address, dst_offsets, nbytes_each, stream_handle,
               device, host_piece_bytes, cudaMemcpyHostToDevice);
}

}  // namespace
}  // namespace tiered_kv

PYBIND11_MODULE(_cuda, module) {
  using namespace tiered_kv;
  translate_argument_errors();
  translate_cuda_errors();

  module.attr("RUNTIME_VERSION") = CUDART_VERSION;
  module.def("device_count", &device_count, NoGil());
  module.def(
      "host_register",
      [](int64_t address, int64_t nbytes, std::optional<int> device) {
        host_register(device.value_or(kCurrentDevice), address, nbytes);
      },
      py::arg("address"), py::arg("nbytes"), py::arg("device") = py::none(), NoGil());
  module.def(
      "host_unregister",
      [](int64_t address, std::optional<int> device) {
        host_unregister(device.value_or(kCurrentDevice), address);
      },
      py::arg("address"), py::arg("device") = py::none(), NoGil());

  py::class_<Event>(module, "Event")
      .def(py::init<int>(), py::arg("device"), NoGil())
      .def("record", &Event::record, py::arg("stream_handle"), NoGil())
      .def("wait_in", &Event::wait_in, py::arg("stream_handle"), NoGil())
      .def("query", &Event::query, NoGil())
      .def("synchronize", &Event::synchronize, NoGil())
      .def("close", &Event::close, NoGil());

  py::class_<Stream>(module, "Stream")
      .def(py::init<int, bool>(), py::arg("device"), py::arg("low_priority") = true, NoGil())
      .def_property_readonly("handle", &Stream::handle)
      .def("wait", &Stream::wait, py::arg("event"), NoGil())
      .def("synchronize", &Stream::synchronize, NoGil())
      .def("close", &Stream::close, NoGil());

  py::class_<DeviceBuffer>(module, "DeviceBuffer")
      .def(py::init<int, int64_t>(), py::arg("device"), py::arg("nbytes"), NoGil())
      .def_property_readonly("address", &DeviceBuffer::address)
      .def_property_readonly("nbytes", &DeviceBuffer::nbytes)
      .def("close", &DeviceBuffer::close, NoGil());

  py::class_<CudaBlockLayout>(module, "CudaBlockLayout")
      .def(py::init(&make_cuda_layout), py::arg("device"), py::arg("addresses"),
           py::arg("block_strides"), py::arg("run_bytes"), py::arg("slot_offsets"),
           py::arg("num_blocks"))
      .def_property_readonly("num_blocks",
                             [](const CudaBlockLayout& self) { return self.layout().num_blocks(); })
      .def_property_readonly(
          "num_runs", [](const CudaBlockLayout& self) { return self.layout().runs().size(); })
      .def_property_readonly(
          "block_bytes", [](const CudaBlockLayout& self) { return self.layout().block_bytes(); })
      .def_property_readonly("alignment", &CudaBlockLayout::alignment);

  module.def("gather", &gather, py::arg("layout"), py::arg("block_ids"), py::arg("target_address"),
             py::arg("target_nbytes"), py::arg("slot_offsets"), py::arg("stream_handle"),
             py::arg("ctas") = 0);
  module.def("scatter", &scatter, py::arg("layout"), py::arg("block_ids"),
             py::arg("target_address"), py::arg("target_nbytes"), py::arg("slot_offsets"),
             py::arg("stream_handle"), py::arg("ctas") = 0, py::arg("part_begin") = 0,
             py::arg("part_end") = py::none());
  module.def("copy_to_host", &copy_to_host, py::arg("src_address"), py::arg("src_offsets"),
             py::arg("dst_address"), py::arg("dst_offsets"), py::arg("nbytes_each"),
             py::arg("stream_handle"), py::arg("device") = py::none(),
             py::arg("host_piece_bytes") = 0);
  module.def("copy_to_device", &copy_to_device, py::arg("src_address"), py::arg("src_offsets"),
             py::arg("dst_address"), py::arg("dst_offsets"), py::arg("nbytes_each"),
             py::arg("stream_handle"), py::arg("device") = py::none(),
             py::arg("host_piece_bytes") = 0);
}
