// csrc/cuda/topk.cu, host side and kernels, on a CPU: "topk", "topk_values", "topk_slots", and "plan", which gives the launch of a size.
#include "driver.h"

#include "cuda/topk.cu"

EMULATED_DYNAMIC_SHARED(dsv4_ops::topk_kernels, memory)

int main() {
  // As an H200, a workstation's chip with clusters of 8, one without clusters, and one whose shared memory forces passes.
  emulator::devices = {{232448, 132, 9}, {101376, 84, 12}, {166912, 108, 8}, {49152, 20, 7}};
  return emulator::serve_requests([](const emulator::Request& request) -> std::vector<emulator::Tensor> {
    const auto& t = request.tensors;
    if (request.op == "plan") {
      const emulator::DeviceSizes& sizes = emulator::devices.at(static_cast<size_t>(t.at(0).get_device_index()));
      const auto* const size = static_cast<const int64_t*>(t[0].const_data_ptr());  // rows, width, k
      const dsv4_ops::TopkDevice device{sizes.shared_bytes, sizes.processors, sizes.major < 9 ? 1 : sizes.major <= 10 ? 16 : 8};
      emulator::Tensor found = new_empty(t[0], {t[0].size(0), 4});
      for (int64_t i = 0; i < t[0].size(0); ++i) {
        const dsv4_ops::TopkPlan plan = dsv4_ops::topk_plan(device, size[i * 3], size[i * 3 + 1], size[i * 3 + 2]);
        const int64_t numbers[] = {static_cast<int64_t>(plan.kernel), plan.threads, plan.vectors, plan.cluster};
        std::copy_n(numbers, 4, static_cast<int64_t*>(found.mutable_data_ptr()) + i * 4);
      }
      return {found};
    }
    const int64_t k = request.integers.at(0);
    const std::optional<int64_t> limit = request.integers.at(1) < 0 ? std::nullopt : std::optional<int64_t>(request.integers.at(1));
    if (request.op == "topk") return {dsv4_ops::topk_cuda(t.at(0), t.at(1), k, limit, 0)};
    if (request.op == "topk_values") {
      const auto [values, indices] = dsv4_ops::topk_values_cuda(t.at(0), t.at(1), k, limit, 0);
      return {values, indices};
    }
    if (request.op != "topk_slots") emulator::fail("no op %s", request.op.c_str());
    const auto [slots, lens] = dsv4_ops::topk_slots_cuda(t.at(0), t.at(1), t.at(2), t.at(3), t.at(4), k, request.integers.at(2), limit, 0);
    return {slots, lens};
  });
}
