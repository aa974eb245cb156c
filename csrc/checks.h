// Checks of the C++ kernels. Full validation, with the messages users see, is in Python (`_check` of each op); these
// repeat what memory safety needs, for callers that reach a kernel through torch.ops directly (compiled graphs do).
#pragma once

#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#define DSV4_CHECK(condition, ...) STD_TORCH_CHECK(condition, __VA_ARGS__)

namespace dsv4_ops {

inline void check_cpu(const char* op, const char* name, const torch::stable::Tensor& tensor) {
  DSV4_CHECK(tensor.is_cpu(), op, ": ", name, " must be on cpu, like the other arguments");
}

inline void check_index(const char* op, const char* name, const torch::stable::Tensor& tensor) {
  using torch::headeronly::ScalarType;
  DSV4_CHECK(tensor.scalar_type() == ScalarType::Int || tensor.scalar_type() == ScalarType::Long, op, ": ", name, " must be int32 or int64");
}

// A workspace lane, or -1 for the ambient one (MAX_LANES in dsv4_ops/lane_context.py), also where a kernel takes no scratch.
inline void check_lane(const char* op, int64_t lane) { DSV4_CHECK(lane >= -1 && lane < 16, op, ": lane must be between -1 and 15, got ", lane); }

// The last dimension is dense; every other stride is free.
inline void check_dense_last(const char* op, const char* name, const torch::stable::Tensor& tensor) {
  const int64_t last = tensor.dim() - 1;
  DSV4_CHECK(tensor.size(last) <= 1 || tensor.stride(last) == 1, op, ": ", name, " must be dense in its last dimension (stride 1), got stride ", tensor.stride(last));
}

}  // namespace dsv4_ops
