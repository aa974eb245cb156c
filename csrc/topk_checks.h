// What the CPU and the CUDA top-k check of their arguments, devices apart.
#pragma once

#include "checks.h"

#include <cstdint>
#include <limits>
#include <optional>

namespace dsv4_ops {

inline void check_topk(
    const char* op, const torch::stable::Tensor& logits, const torch::stable::Tensor& lengths, int64_t k, std::optional<int64_t> max_seq_len, int64_t lane) {
  using torch::headeronly::ScalarType;
  DSV4_CHECK(logits.dim() == 2, op, ": logits must be 2-dimensional, got ", logits.dim(), " dimensions");
  DSV4_CHECK(logits.scalar_type() == ScalarType::Float || logits.scalar_type() == ScalarType::BFloat16, op, ": logits must be float32 or bfloat16");
  check_dense_last(op, "logits", logits);
  DSV4_CHECK(logits.size(1) <= std::numeric_limits<int32_t>::max(), op, ": logits must have less than 2**31 columns, got ", logits.size(1));
  check_index(op, "lengths", lengths);
  DSV4_CHECK(lengths.dim() == 1 || lengths.dim() == 2, op, ": lengths must be 1- or 2-dimensional, got ", lengths.dim(), " dimensions");
  DSV4_CHECK(lengths.numel() <= logits.size(0), op, ": lengths must have at most ", logits.size(0), " entries, one for each row of logits, got ", lengths.numel());
  DSV4_CHECK(k >= 1 && k <= 4096, op, ": k must be between 1 and 4096, got ", k);
  DSV4_CHECK(!max_seq_len || *max_seq_len >= 0, op, ": max_seq_len must be at least 0, got ", max_seq_len.value_or(0));
  check_lane(op, lane);
}

inline void check_topk_table(
    const char* op, const torch::stable::Tensor& logits, const torch::stable::Tensor& token_to_req_indices, const torch::stable::Tensor& is_valid_token,
    const torch::stable::Tensor& block_table, int64_t block_size) {
  using torch::headeronly::ScalarType;
  DSV4_CHECK(token_to_req_indices.scalar_type() == ScalarType::Int, op, ": token_to_req_indices must be int32");
  DSV4_CHECK(is_valid_token.scalar_type() == ScalarType::Bool, op, ": is_valid_token must be bool");
  DSV4_CHECK(block_table.scalar_type() == ScalarType::Int && block_table.dim() == 2, op, ": block_table must be int32 and 2-dimensional");
  for (const torch::stable::Tensor* tokens : {&token_to_req_indices, &is_valid_token}) {
    DSV4_CHECK(tokens->dim() == 1 && tokens->size(0) == logits.size(0), op, ": token_to_req_indices and is_valid_token must have one entry a row of logits (", logits.size(0), ")");
  }
  DSV4_CHECK(block_size >= 1 && block_size <= std::numeric_limits<int32_t>::max(), op, ": block_size must be between 1 and 2147483647, got ", block_size);
}

}  // namespace dsv4_ops
