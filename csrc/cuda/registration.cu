// The module dsv4_ops._C_cuda: which CUDA kernel serves which op, in one table (as csrc/registration.cpp does for CPU).
#include <Python.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <optional>
#include <tuple>

namespace dsv4_ops {

using torch::stable::Tensor;

Tensor topk_cuda(const Tensor& logits, const Tensor& lengths, int64_t k, std::optional<int64_t> max_seq_len, int64_t lane);
std::tuple<Tensor, Tensor> topk_slots_cuda(
    const Tensor& logits, const Tensor& lengths, const Tensor& token_to_req_indices, const Tensor& is_valid_token, const Tensor& block_table, int64_t k,
    int64_t block_size, std::optional<int64_t> max_seq_len, int64_t lane);
std::tuple<Tensor, Tensor> sparse_mla_decode_cluster_cuda(
    const Tensor& q, const Tensor& swa_cache, const Tensor& swa_indices, const Tensor& swa_lens, const std::optional<Tensor>& extra_cache,
    const std::optional<Tensor>& extra_indices, const std::optional<Tensor>& extra_lens, const std::optional<Tensor>& attn_sink, double scale);
std::tuple<Tensor, Tensor> topk_values_cuda(const Tensor& logits, const Tensor& lengths, int64_t k, std::optional<int64_t> max_seq_len, int64_t lane);

}  // namespace dsv4_ops

STABLE_TORCH_LIBRARY_IMPL(dsv4_ops, CUDA, m) {
  m.impl("topk", TORCH_BOX(&dsv4_ops::topk_cuda));
  m.impl("topk_slots", TORCH_BOX(&dsv4_ops::topk_slots_cuda));
  m.impl("topk_values", TORCH_BOX(&dsv4_ops::topk_values_cuda));
}

// Back ends of ops that Python chooses: see define_kernel in dsv4_ops/_registry.py.
STABLE_TORCH_LIBRARY_IMPL(dsv4_ops_kernels, CUDA, kernels) { kernels.impl("sparse_mla_decode_cluster", TORCH_BOX(&dsv4_ops::sparse_mla_decode_cluster_cuda)); }

PyMODINIT_FUNC PyInit__C_cuda(void) {
  static PyModuleDef module = {PyModuleDef_HEAD_INIT, "dsv4_ops._C_cuda", "CUDA kernels of dsv4_ops; importing registers them.", -1, nullptr, nullptr, nullptr, nullptr, nullptr};
  return PyModule_Create(&module);
}
