// csrc/cuda/topk.cu, host side and kernels, on a CPU: "topk", "topk_values" and "topk_slots".
#include "driver.h"

#include "cuda/topk.cu"

EMULATED_DYNAMIC_SHARED(dsv4_ops::topk_kernels, memory)

int main() {
  // As an H200, a workstation's chip with clusters of 8, one without clusters, and one whose shared memory forces passes.
  emulator::devices = {{232448, 132, 9}, {101376, 84, 12}, {166912, 108, 8}, {49152, 20, 7}};
  return emulator::serve_requests([](const emulator::Request& request) -> std::vector<emulator::Tensor> {
    const auto& t = request.tensors;
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
