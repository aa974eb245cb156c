// csrc/cuda/sparse_decode.cu, host side and kernels, on a CPU: integers are the bits of the scale (float64), then which of the
// optional arguments there are (extra segment, sink).
#include "driver.h"

#include "cuda/sparse_decode.cu"

EMULATED_DYNAMIC_SHARED(dsv4_ops::cluster_attention, memory)

int main() {
  // An H200, chips that run two clusters of 8 at once and one, one without clusters, one with little shared memory.
  emulator::devices = {{232448, 132, 9}, {232448, 16, 9}, {232448, 8, 10}, {166912, 108, 8}, {101376, 84, 12}};
  return emulator::serve_requests([](const emulator::Request& request) -> std::vector<emulator::Tensor> {
    const auto& t = request.tensors;
    const bool extra = request.integers.at(1) != 0, sink = request.integers.at(2) != 0;
    const auto optional = [&](bool there, size_t i) { return there ? std::optional<emulator::Tensor>(t.at(i)) : std::nullopt; };
    const auto [out, lse] = dsv4_ops::sparse_mla_decode_cluster_cuda(
        t.at(0), t.at(1), t.at(2), t.at(3), optional(extra, 4), optional(extra, 5), optional(extra, 6), optional(sink, extra ? 7 : 4), emulated_bits<double>(request.integers.at(0)));
    return {out, lse};
  });
}
