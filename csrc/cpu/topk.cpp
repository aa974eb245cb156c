// Row-wise top-k on the CPU: an exact radix selection whose cost does not depend on the scores.
//
// A score becomes an unsigned key of the same order (-0 and +0 share one; NaN gets 0, below every number). Histograms of
// the key's digits, highest first, find the k-th largest key T; a last pass lists, in column order, every column above T
// and the first columns equal to T. No step branches on a score: each column costs the same in any row, and scratch is
// one fixed block a thread. Rows are independent and each is handled by one thread, so the result has one value.
#include "topk_checks.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <limits>
#include <memory>
#include <optional>
#include <tuple>
#include <vector>

namespace dsv4_ops {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

namespace {

struct Digit {
  int shift;
  int bits;
};

struct Float32 {
  using Bits = uint32_t;
  static constexpr Bits sign = 0x80000000u, infinity = 0x7f800000u, minus_infinity = 0xff800000u;
  static constexpr std::array<Digit, 3> digits{{{22, 10}, {11, 11}, {0, 11}}};
  static constexpr int copies = 8;
};

struct BFloat16 {
  using Bits = uint16_t;
  static constexpr Bits sign = 0x8000u, infinity = 0x7f80u, minus_infinity = 0xff80u;
  static constexpr std::array<Digit, 2> digits{{{5, 11}, {0, 5}}};
  static constexpr int copies = 16;
};

constexpr int kBins = 1 << 11;
// Neighbouring columns count into different histograms (`copies`): an increment waits for an earlier one of the same
// counter, so with a single histogram rows of few distinct scores would cost several times as much as others. Slowest
// over fastest of nine kinds of rows, 65536 columns, for 2, 4, 8 and 16 copies on an AMD EPYC: float32 1.44, 1.24, 1.17,
// 1.19; bfloat16 1.49, 1.28, 1.23, 1.16 (repeat: test_cost_does_not_depend_on_the_scores).
constexpr int kMaxCopies = 16;
constexpr int64_t kBlock = 1024;

struct Scratch {
  explicit Scratch(int64_t k) : selected(k + 1) {}

  alignas(64) std::array<std::array<uint32_t, kBins + 16>, kMaxCopies> counts;  // the bin after the last: keys of no interest
  alignas(64) std::array<uint32_t, kBlock> keys, bins;
  std::vector<int32_t> selected;  // one more than k: the last pass writes before it knows whether the column counts
};

template <class Format>
inline uint32_t key_of(typename Format::Bits raw) {
  using Bits = typename Format::Bits;
  const Bits magnitude = raw & static_cast<Bits>(~Format::sign);
  const Bits ordered = (raw & Format::sign) && magnitude ? static_cast<Bits>(~raw) : static_cast<Bits>(magnitude | Format::sign);
  return magnitude > Format::infinity ? 0u : ordered;
}

// Calls `use(keys, first column, count)` for each block of at most kBlock columns.
template <class Format, class Use>
void for_each_block(const typename Format::Bits* row, int64_t columns, Scratch& scratch, const Use& use) {
  for (int64_t first = 0; first < columns; first += kBlock) {
    const int64_t count = std::min(kBlock, columns - first);
    uint32_t* keys = scratch.keys.data();
    for (int64_t i = 0; i < count; ++i) keys[i] = key_of<Format>(row[first + i]);
    use(keys, first, count);
  }
}

// Histogram of one digit over the keys that agree with `prefix` above it; the sums end up in copy 0.
template <class Format>
void count_digit(const typename Format::Bits* row, int64_t columns, Digit digit, bool first_digit, uint32_t prefix, Scratch& scratch) {
  const int bins = 1 << digit.bits, above = first_digit ? 0 : digit.shift + digit.bits;
  const uint32_t mask = static_cast<uint32_t>(bins - 1);
  for (int copy = 0; copy < Format::copies; ++copy) std::fill_n(scratch.counts[copy].begin(), bins + 1, 0u);
  for_each_block<Format>(row, columns, scratch, [&](const uint32_t* keys, int64_t, int64_t count) {
    uint32_t* bin = scratch.bins.data();
    if (first_digit) {
      for (int64_t i = 0; i < count; ++i) bin[i] = keys[i] >> digit.shift;
    } else {
      for (int64_t i = 0; i < count; ++i) bin[i] = (keys[i] >> above) == prefix ? (keys[i] >> digit.shift) & mask : static_cast<uint32_t>(bins);
    }
    int64_t i = 0;
    for (; i + Format::copies <= count; i += Format::copies) {
      for (int copy = 0; copy < Format::copies; ++copy) ++scratch.counts[copy][bin[i + copy]];
    }
    for (; i < count; ++i) ++scratch.counts[0][bin[i]];
  });
  for (int i = 0; i < bins; ++i) {
    for (int copy = 1; copy < Format::copies; ++copy) scratch.counts[0][i] += scratch.counts[copy][i];
  }
}

struct Threshold {
  uint32_t key = 0;   // columns above it are selected
  int64_t equal = 0;  // and so many, the first ones, that are equal to it
};

template <class Format>
Threshold find_threshold(const typename Format::Bits* row, int64_t columns, int64_t k, Scratch& scratch) {
  Threshold threshold;
  if (columns <= k) return threshold;  // key 0 is NaN alone: everything else is above it
  int64_t wanted = k;
  for (std::size_t d = 0; d < Format::digits.size(); ++d) {
    const Digit digit = Format::digits[d];
    count_digit<Format>(row, columns, digit, d == 0, threshold.key, scratch);
    // No number's key has 0 as its first digit, so bin 0 holds the NaNs.
    static_assert(static_cast<typename Format::Bits>(~Format::minus_infinity) >> Format::digits[0].shift > 0);
    if (d == 0 && columns - scratch.counts[0][0] <= k) return Threshold{};
    int bin = (1 << digit.bits) - 1;
    while (bin > 0 && scratch.counts[0][bin] < wanted) wanted -= scratch.counts[0][bin--];
    threshold.key = (threshold.key << digit.bits) | static_cast<uint32_t>(bin);
  }
  threshold.equal = wanted;
  return threshold;
}

// Writes the selected columns, ascending, and returns their number.
template <class Format>
int64_t select(const typename Format::Bits* row, int64_t columns, int64_t k, Scratch& scratch) {
  const Threshold threshold = find_threshold<Format>(row, columns, k, scratch);
  int32_t* selected = scratch.selected.data();
  int64_t found = 0, equal_left = threshold.equal;
  for_each_block<Format>(row, columns, scratch, [&](const uint32_t* keys, int64_t first, int64_t count) {
    int64_t i = 0;
    if (equal_left > 0) {
      int32_t equal = 0;
      for (int64_t j = 0; j < count; ++j) equal += keys[j] == threshold.key;
      // The block where the last equal column stands, one a row: column by column up to it.
      for (; equal > equal_left && equal_left > 0; ++i) {
        selected[found] = static_cast<int32_t>(first + i);
        found += keys[i] >= threshold.key;
        equal_left -= keys[i] == threshold.key;
      }
      if (i == 0) {
        equal_left -= equal;
        for (; i < count; ++i) {
          selected[found] = static_cast<int32_t>(first + i);
          found += keys[i] >= threshold.key;
        }
      }
    }
    for (; i < count; ++i) {
      selected[found] = static_cast<int32_t>(first + i);
      found += keys[i] > threshold.key;
    }
  });
  return found;
}

struct Lengths {
  const void* data;
  bool wide;
  int64_t count, inner, outer_stride, inner_stride;

  explicit Lengths(const Tensor& lengths)
      : data(lengths.const_data_ptr()),
        wide(lengths.scalar_type() == ScalarType::Long),
        count(lengths.numel()),
        inner(lengths.size(lengths.dim() - 1)),
        outer_stride(lengths.dim() == 2 ? lengths.stride(0) : 0),
        inner_stride(lengths.stride(lengths.dim() - 1)) {}

  int64_t operator()(int64_t row) const {
    if (row >= count) return 0;
    const int64_t offset = row / inner * outer_stride + row % inner * inner_stride;
    return wide ? static_cast<const int64_t*>(data)[offset] : static_cast<const int32_t*>(data)[offset];
  }
};

// Ranks every row: `length_of(i)` columns of row i at most, and `write(i, its scores, selected columns, their number)`.
template <class Format, class LengthOf, class Write>
void run(const Tensor& logits, int64_t k, int64_t limit, const LengthOf& length_of, const Write& write) {
  using Bits = typename Format::Bits;
  const int64_t rows = logits.size(0), row_stride = logits.stride(0);
  const Bits* scores = static_cast<const Bits*>(logits.const_data_ptr());
  // A second thread costs more than it saves below some 32 Ki columns; the histograms cost a row as much as 2 Ki columns.
  const int64_t rows_a_thread = std::max<int64_t>(1, (int64_t{1} << 15) / (limit + 2048));
  torch::stable::parallel_for(0, rows, rows_a_thread, [&](int64_t begin, int64_t end) {
    const auto scratch = std::make_unique<Scratch>(k);
    for (int64_t i = begin; i < end; ++i) {
      const Bits* row = scores + i * row_stride;
      const int64_t found = select<Format>(row, std::clamp<int64_t>(length_of(i), 0, limit), k, *scratch);
      write(i, row, scratch->selected.data(), found);
    }
  });
}

template <class Use>
void for_format(const char* op, const Tensor& logits, const Use& use) {
  if (logits.scalar_type() == ScalarType::Float) {
    use(Float32{});
  } else {
    DSV4_CHECK(logits.scalar_type() == ScalarType::BFloat16, op, ": logits must be float32 or bfloat16");
    use(BFloat16{});
  }
}

int64_t limit_of(const Tensor& logits, std::optional<int64_t> max_seq_len) { return max_seq_len ? std::min(logits.size(1), *max_seq_len) : logits.size(1); }

// Pages of each token's request.
struct BlockTable {
  const int32_t* blocks;
  const int32_t* requests;
  const bool* valid;
  int64_t num_requests, num_blocks, request_stride, block_stride, token_stride, valid_stride, block_size;

  // The token's request, or -1.
  int64_t request_of(int64_t token) const {
    if (!valid[token * valid_stride]) return -1;
    const int64_t request = requests[token * token_stride];
    return request >= 0 && request < num_requests ? request : -1;
  }

  int32_t slot_of(int64_t request, int64_t position) const {
    const int64_t block = position / block_size;
    if (block >= num_blocks) return -1;
    const int64_t physical = blocks[request * request_stride + block * block_stride];  // 0: the null block
    const int64_t slot = physical * block_size + position % block_size;
    return physical > 0 && slot <= std::numeric_limits<int32_t>::max() ? static_cast<int32_t>(slot) : -1;
  }
};

void check(const char* op, const Tensor& logits, const Tensor& lengths, int64_t k, std::optional<int64_t> max_seq_len, int64_t lane) {
  check_cpu(op, "logits", logits);
  check_cpu(op, "lengths", lengths);
  check_topk(op, logits, lengths, k, max_seq_len, lane);
}

void check_table(const char* op, const Tensor& logits, const Tensor& token_to_req_indices, const Tensor& is_valid_token, const Tensor& block_table, int64_t block_size) {
  check_cpu(op, "token_to_req_indices", token_to_req_indices);
  check_cpu(op, "is_valid_token", is_valid_token);
  check_cpu(op, "block_table", block_table);
  check_topk_table(op, logits, token_to_req_indices, is_valid_token, block_table, block_size);
}

}  // namespace

// Scratch is the thread's own, so the lane has nothing to choose.
Tensor topk_cpu(const Tensor& logits, const Tensor& lengths, int64_t k, std::optional<int64_t> max_seq_len, int64_t lane) {
  check("topk", logits, lengths, k, max_seq_len, lane);
  Tensor indices = torch::stable::new_empty(logits, {logits.size(0), k}, ScalarType::Int);
  int32_t* out = static_cast<int32_t*>(indices.mutable_data_ptr());
  for_format("topk", logits, [&](auto format) {
    run<decltype(format)>(logits, k, limit_of(logits, max_seq_len), Lengths(lengths), [=](int64_t i, const auto*, const int32_t* selected, int64_t found) {
      std::fill_n(std::copy_n(selected, found, out + i * k), k - found, -1);
    });
  });
  return indices;
}

std::tuple<Tensor, Tensor> topk_values_cpu(const Tensor& logits, const Tensor& lengths, int64_t k, std::optional<int64_t> max_seq_len, int64_t lane) {
  check("topk_values", logits, lengths, k, max_seq_len, lane);
  Tensor indices = torch::stable::new_empty(logits, {logits.size(0), k}, ScalarType::Int);
  Tensor values = torch::stable::new_empty(logits, {logits.size(0), k});
  int32_t* out = static_cast<int32_t*>(indices.mutable_data_ptr());
  for_format("topk_values", logits, [&](auto format) {
    using Format = decltype(format);
    auto* value_out = static_cast<typename Format::Bits*>(values.mutable_data_ptr());
    run<Format>(logits, k, limit_of(logits, max_seq_len), Lengths(lengths), [=](int64_t i, const auto* row, const int32_t* selected, int64_t found) {
      std::fill_n(std::copy_n(selected, found, out + i * k), k - found, -1);
      std::fill_n(std::transform(selected, selected + found, value_out + i * k, [row](int32_t column) { return row[column]; }), k - found, Format::minus_infinity);
    });
  });
  return {std::move(values), std::move(indices)};
}

std::tuple<Tensor, Tensor> topk_slots_cpu(
    const Tensor& logits, const Tensor& lengths_tensor, const Tensor& token_to_req_indices, const Tensor& is_valid_token, const Tensor& block_table, int64_t k,
    int64_t block_size, std::optional<int64_t> max_seq_len, int64_t lane) {
  check("topk_slots", logits, lengths_tensor, k, max_seq_len, lane);
  check_table("topk_slots", logits, token_to_req_indices, is_valid_token, block_table, block_size);
  Tensor slots = torch::stable::new_empty(logits, {logits.size(0), k}, ScalarType::Int);
  Tensor lens = torch::stable::new_empty(logits, {logits.size(0)}, ScalarType::Int);
  int32_t* slots_out = static_cast<int32_t*>(slots.mutable_data_ptr());
  int32_t* lens_out = static_cast<int32_t*>(lens.mutable_data_ptr());
  const Lengths lengths(lengths_tensor);
  const BlockTable table{
      static_cast<const int32_t*>(block_table.const_data_ptr()), static_cast<const int32_t*>(token_to_req_indices.const_data_ptr()),
      static_cast<const bool*>(is_valid_token.const_data_ptr()), block_table.size(0), block_table.size(1), block_table.stride(0), block_table.stride(1),
      token_to_req_indices.stride(0), is_valid_token.stride(0), block_size};
  const auto length_of = [&](int64_t i) { return table.request_of(i) < 0 ? 0 : lengths(i); };
  for_format("topk_slots", logits, [&](auto format) {
    run<decltype(format)>(logits, k, limit_of(logits, max_seq_len), length_of, [&](int64_t i, const auto*, const int32_t* selected, int64_t found) {
      const int64_t request = table.request_of(i);
      const auto slot = [&](int32_t column) { return table.slot_of(request, column); };
      std::fill_n(std::transform(selected, selected + found, slots_out + i * k, slot), k - found, -1);
      lens_out[i] = static_cast<int32_t>(found);
    });
  });
  return {std::move(slots), std::move(lens)};
}

}  // namespace dsv4_ops
