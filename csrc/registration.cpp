// The module dsv4_ops._C: which CPU kernel serves which op, in one table.
//
// Schemas are defined in Python (dsv4_ops/_registry.py); this library only fills dispatcher slots, so the package works
// the same, slower, where it is missing. A kernel appears here, in its file, and nowhere else.
#include <Python.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <optional>
#include <string>
#include <tuple>

namespace dsv4_ops {

using torch::stable::Tensor;

Tensor topk_cpu(const Tensor& logits, const Tensor& lengths, int64_t k, std::optional<int64_t> max_seq_len, int64_t lane);
std::tuple<Tensor, Tensor> topk_values_cpu(const Tensor& logits, const Tensor& lengths, int64_t k, std::optional<int64_t> max_seq_len, int64_t lane);
std::tuple<Tensor, Tensor> topk_slots_cpu(
    const Tensor& logits, const Tensor& lengths, const Tensor& token_to_req_indices, const Tensor& is_valid_token, const Tensor& block_table, int64_t k,
    int64_t block_size, std::optional<int64_t> max_seq_len, int64_t lane);

std::tuple<Tensor, Tensor> sparse_mla_decode_cpu(
    const Tensor& q, const Tensor& swa_cache, const Tensor& swa_indices, const Tensor& swa_lens, const std::optional<Tensor>& extra_cache,
    const std::optional<Tensor>& extra_indices, const std::optional<Tensor>& extra_lens, const std::optional<Tensor>& attn_sink, double scale, int64_t lane,
    std::string backend);

}  // namespace dsv4_ops

STABLE_TORCH_LIBRARY_IMPL(dsv4_ops, CPU, m) {
  m.impl("sparse_mla_decode", TORCH_BOX(&dsv4_ops::sparse_mla_decode_cpu));
  m.impl("topk", TORCH_BOX(&dsv4_ops::topk_cpu));
  m.impl("topk_slots", TORCH_BOX(&dsv4_ops::topk_slots_cpu));
  m.impl("topk_values", TORCH_BOX(&dsv4_ops::topk_values_cpu));
}

PyMODINIT_FUNC PyInit__C(void) {
  static PyModuleDef module = {PyModuleDef_HEAD_INIT, "dsv4_ops._C", "CPU kernels of dsv4_ops; importing registers them.", -1, nullptr, nullptr, nullptr, nullptr, nullptr};
  return PyModule_Create(&module);
}
