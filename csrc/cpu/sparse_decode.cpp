// Sparse MLA decode on the CPU: one query token at a time, tiles of keys, a running softmax.
//
// A token's keys are listed first (valid slots of both segments, in column order), then taken in tiles: rows are decoded to
// fp32 once a tile and serve all heads. Nothing depends on another token, so a row's bits never depend on its batch,
// and tokens are spread over threads. What masked entries point at is never read.
#include "checks.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
// One body for each instruction set, chosen when the library is loaded.
#define DSV4_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define DSV4_CLONES
#endif

namespace dsv4_ops {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

namespace {

constexpr int kDim = 512, kGroup = 64, kGroups = 7, kNope = kGroup * kGroups;
constexpr int kRowBytes = kNope + 2 * (kDim - kNope), kScaleBytes = kGroups + 1, kTokenBytes = kRowBytes + kScaleBytes;
constexpr int kTile = 32;  // 64 KB of fp32 keys: with the queries of some heads, what a second-level cache holds
constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

typedef float Lanes __attribute__((vector_size(64), aligned(4), may_alias));
constexpr int kLanes = 16;

float widen(uint16_t bits) {
  const uint32_t word = static_cast<uint32_t>(bits) << 16;
  float value;
  std::memcpy(&value, &word, sizeof value);
  return value;
}

uint16_t narrow(float value) {  // to nearest even; NaN stays NaN
  uint32_t word;
  std::memcpy(&word, &value, sizeof word);
  if (std::isnan(value)) return static_cast<uint16_t>((word >> 16) | 0x40);
  return static_cast<uint16_t>((word + 0x7fff + ((word >> 16) & 1)) >> 16);
}

struct Tables {
  std::array<float, 256> e4m3, ue8m0;

  Tables() {
    for (int code = 0; code < 256; ++code) {
      const int exponent = (code >> 3) & 15, mantissa = code & 7;
      float value = exponent ? std::ldexp(1.0f + mantissa / 8.0f, exponent - 7) : std::ldexp(mantissa / 8.0f, -6);
      if (exponent == 15 && mantissa == 7) value = std::numeric_limits<float>::quiet_NaN();
      e4m3[code] = code & 128 ? -value : value;
      ue8m0[code] = code == 255 ? std::numeric_limits<float>::quiet_NaN() : std::ldexp(1.0f, code - 127);
    }
  }
};

const Tables& tables() {
  static const Tables instance;
  return instance;
}

// One segment of keys: a cache and the index rows into it.
struct Segment {
  const uint8_t* cache;
  ScalarType dtype;
  int64_t slots, block_size, page_bytes, width;
  const uint8_t* indices;
  const uint8_t* lens;
  bool wide_indices, wide_lens;
  int64_t index_row_stride, index_stride, lens_stride;

  Segment(const Tensor& cache_tensor, const Tensor& index_tensor, const Tensor& lens_tensor)
      : cache(static_cast<const uint8_t*>(cache_tensor.const_data_ptr())),
        dtype(cache_tensor.scalar_type()),
        slots(cache_tensor.size(0) * cache_tensor.size(1)),
        block_size(cache_tensor.size(1)),
        page_bytes(cache_tensor.stride(0) * (dtype == ScalarType::Byte ? 1 : dtype == ScalarType::BFloat16 ? 2 : 4)),
        width(index_tensor.size(1)),
        indices(static_cast<const uint8_t*>(index_tensor.const_data_ptr())),
        lens(static_cast<const uint8_t*>(lens_tensor.const_data_ptr())),
        wide_indices(index_tensor.scalar_type() == ScalarType::Long),
        wide_lens(lens_tensor.scalar_type() == ScalarType::Long),
        index_row_stride(index_tensor.stride(0)),
        index_stride(index_tensor.stride(1)),
        lens_stride(lens_tensor.stride(0)) {}

  static int64_t load(const uint8_t* data, bool wide, int64_t at) {
    return wide ? reinterpret_cast<const int64_t*>(data)[at] : reinterpret_cast<const int32_t*>(data)[at];
  }

  void list_keys(int64_t token, int segment, std::vector<std::pair<int, int64_t>>& keys) const {
    const int64_t length = std::clamp<int64_t>(load(lens, wide_lens, token * lens_stride), 0, width);
    for (int64_t column = 0; column < length; ++column) {
      const int64_t slot = load(indices, wide_indices, token * index_row_stride + column * index_stride);
      if (slot >= 0 && slot < slots) keys.emplace_back(segment, slot);
    }
  }

  void read(int64_t slot, float* row) const {
    const int64_t offset = slot % block_size;
    const uint8_t* page = cache + slot / block_size * page_bytes;
    if (dtype == ScalarType::Float) {
      std::memcpy(row, page + offset * kDim * 4, kDim * 4);
    } else if (dtype == ScalarType::BFloat16) {
      read_bfloat16(page + offset * kDim * 2, kDim, row);
    } else {
      const uint8_t* codes = page + offset * kRowBytes;
      const uint8_t* scales = page + block_size * kRowBytes + offset * kScaleBytes;
      const Tables& table = tables();
      for (int g = 0; g < kGroups; ++g) {
        const float scale = table.ue8m0[scales[g]];
        for (int i = g * kGroup; i < (g + 1) * kGroup; ++i) row[i] = table.e4m3[codes[i]] * scale;
      }
      read_bfloat16(codes + kNope, kDim - kNope, row + kNope);
    }
  }

  static void read_bfloat16(const uint8_t* data, int count, float* row) {
    for (int i = 0; i < count; ++i) {
      uint16_t bits;  // pages of odd strides leave rows unaligned
      std::memcpy(&bits, data + 2 * i, 2);
      row[i] = widen(bits);
    }
  }
};

// logits[h][j] = query[h] . keys[j]
DSV4_CLONES void scores(const float* query, int64_t heads, const float* keys, int count, float* logits) {
  for (int64_t h = 0; h < heads; ++h) {
    const float* q = query + h * kDim;
    int j = 0;
    for (; j + 4 <= count; j += 4) {
      Lanes sum[4] = {};
      for (int i = 0; i < kDim; i += kLanes) {
        const Lanes a = *reinterpret_cast<const Lanes*>(q + i);
        for (int n = 0; n < 4; ++n) sum[n] += a * *reinterpret_cast<const Lanes*>(keys + (j + n) * kDim + i);
      }
      for (int n = 0; n < 4; ++n) {
        float total = 0;
        for (int lane = 0; lane < kLanes; ++lane) total += sum[n][lane];
        logits[h * kTile + j + n] = total;
      }
    }
    for (; j < count; ++j) {
      Lanes sum = {};
      for (int i = 0; i < kDim; i += kLanes) sum += *reinterpret_cast<const Lanes*>(q + i) * *reinterpret_cast<const Lanes*>(keys + j * kDim + i);
      float total = 0;
      for (int lane = 0; lane < kLanes; ++lane) total += sum[lane];
      logits[h * kTile + j] = total;
    }
  }
}

// weighted[h] = weighted[h] * rescale[h] + sum over j of weights[h][j] * keys[j]
DSV4_CLONES void accumulate(float* weighted, int64_t heads, const float* rescale, const float* weights, const float* keys, int count) {
  for (int64_t h = 0; h < heads; ++h) {
    for (int i = 0; i < kDim; i += 4 * kLanes) {
      float* out = weighted + h * kDim + i;
      Lanes sum[4];
      for (int n = 0; n < 4; ++n) sum[n] = *reinterpret_cast<const Lanes*>(out + n * kLanes) * rescale[h];
      for (int j = 0; j < count; ++j) {
        const float weight = weights[h * kTile + j];
        for (int n = 0; n < 4; ++n) sum[n] += weight * *reinterpret_cast<const Lanes*>(keys + j * kDim + i + n * kLanes);
      }
      for (int n = 0; n < 4; ++n) *reinterpret_cast<Lanes*>(out + n * kLanes) = sum[n];
    }
  }
}

struct Scratch {
  explicit Scratch(int64_t heads) : query(heads * kDim), weighted(heads * kDim), keys(kTile * kDim), logits(heads * kTile), largest(heads), total(heads), rescale(heads) {}

  std::vector<float> query, weighted, keys, logits, largest, total, rescale;
  std::vector<std::pair<int, int64_t>> listed;
};

void attend(const std::vector<Segment>& segments, int64_t token, int64_t heads, Scratch& s) {
  s.listed.clear();
  for (std::size_t i = 0; i < segments.size(); ++i) segments[i].list_keys(token, static_cast<int>(i), s.listed);
  std::fill(s.weighted.begin(), s.weighted.end(), 0.0f);
  std::fill(s.largest.begin(), s.largest.end(), kMinusInfinity);
  std::fill(s.total.begin(), s.total.end(), 0.0f);
  const int64_t number = static_cast<int64_t>(s.listed.size());
  for (int64_t first = 0; first < number; first += kTile) {
    const int count = static_cast<int>(std::min<int64_t>(kTile, number - first));
    for (int j = 0; j < count; ++j) {
      const auto& [segment, slot] = s.listed[first + j];
      segments[segment].read(slot, s.keys.data() + j * kDim);
    }
    scores(s.query.data(), heads, s.keys.data(), count, s.logits.data());
    for (int64_t h = 0; h < heads; ++h) {
      float* logits = s.logits.data() + h * kTile;
      float largest = s.largest[h];
      for (int j = 0; j < count; ++j) largest = std::max(largest, logits[j]);
      // While every logit is -inf, subtracting the maximum would make NaN of -inf - -inf.
      const float finite = largest == kMinusInfinity ? 0.0f : largest;
      s.rescale[h] = std::exp(s.largest[h] - finite);
      float total = s.total[h] * s.rescale[h];
      for (int j = 0; j < count; ++j) {
        logits[j] = std::exp(logits[j] - finite);
        total += logits[j];
      }
      s.total[h] = total;
      s.largest[h] = largest;
    }
    accumulate(s.weighted.data(), heads, s.rescale.data(), s.logits.data(), s.keys.data(), count);
  }
}

void check_segment(const char* name, const Tensor& cache, const Tensor& indices, const Tensor& lens, int64_t tokens) {
  constexpr const char* op = "sparse_mla_decode";
  check_cpu(op, name, cache);
  check_cpu(op, name, indices);
  check_cpu(op, name, lens);
  const ScalarType dtype = cache.scalar_type();
  DSV4_CHECK(dtype == ScalarType::Byte || dtype == ScalarType::BFloat16 || dtype == ScalarType::Float, op, ": ", name, "_cache must be uint8, bfloat16 or float32");
  const int64_t row = dtype == ScalarType::Byte ? kTokenBytes : kDim;
  DSV4_CHECK(cache.dim() == 3 || (cache.dim() == 4 && cache.size(2) == 1), op, ": ", name, "_cache must be [blocks, B, ", row, "] or [blocks, B, 1, ", row, "]");
  const int64_t last = cache.dim() - 1;
  DSV4_CHECK(cache.size(last) == row && cache.size(1) >= 1, op, ": ", name, "_cache must have rows of ", row, " and at least one token a block");
  DSV4_CHECK(cache.stride(last) == 1 && (cache.size(1) == 1 || cache.stride(1) == row), op, ": ", name, "_cache must be dense inside a page");
  DSV4_CHECK(cache.size(0) <= 1 || cache.stride(0) >= cache.size(1) * row, op, ": ", name, "_cache must have pages that do not overlap");
  check_index(op, "indices", indices);
  check_index(op, "lens", lens);
  DSV4_CHECK(indices.dim() == 2 && indices.size(0) == tokens, op, ": ", name, "_indices must be [tokens, width] with ", tokens, " tokens as in q");
  DSV4_CHECK(lens.dim() == 1 && lens.size(0) == tokens, op, ": ", name, "_lens must be [tokens] with ", tokens, " tokens as in q");
}

}  // namespace

// Scratch is each thread's own, so the lane has nothing to choose. Back ends for GPUs are refused with their reasons in Python.
std::tuple<Tensor, Tensor> sparse_mla_decode_cpu(
    const Tensor& q, const Tensor& swa_cache, const Tensor& swa_indices, const Tensor& swa_lens, const std::optional<Tensor>& extra_cache,
    const std::optional<Tensor>& extra_indices, const std::optional<Tensor>& extra_lens, const std::optional<Tensor>& attn_sink, double scale, int64_t lane,
    std::string backend) {
  check_lane("sparse_mla_decode", lane);
  constexpr const char* op = "sparse_mla_decode";
  DSV4_CHECK(backend == "auto" || backend == "fastest" || backend == "reference", op, ": backend ", backend, " does not run on a CPU");
  check_cpu(op, "q", q);
  const bool bfloat = q.scalar_type() == ScalarType::BFloat16;
  DSV4_CHECK(bfloat || q.scalar_type() == ScalarType::Float, op, ": q must be float32 or bfloat16");
  DSV4_CHECK(q.dim() == 3 && q.size(2) == kDim, op, ": q must be [tokens, heads, 512]");
  check_dense_last(op, "q", q);
  const int64_t tokens = q.size(0), heads = q.size(1);
  DSV4_CHECK(extra_cache.has_value() == extra_indices.has_value() && extra_cache.has_value() == extra_lens.has_value(), op, ": extra_cache, extra_indices, extra_lens must be all given or all None");
  check_segment("swa", swa_cache, swa_indices, swa_lens, tokens);
  std::vector<Segment> segments{Segment(swa_cache, swa_indices, swa_lens)};
  if (extra_cache) {
    check_segment("extra", *extra_cache, *extra_indices, *extra_lens, tokens);
    segments.emplace_back(*extra_cache, *extra_indices, *extra_lens);
  }
  std::vector<float> sink;
  if (attn_sink) {
    check_cpu(op, "attn_sink", *attn_sink);
    const bool narrow_sink = attn_sink->scalar_type() == ScalarType::BFloat16;
    DSV4_CHECK(narrow_sink || attn_sink->scalar_type() == ScalarType::Float, op, ": attn_sink must be float32 or bfloat16");
    DSV4_CHECK(attn_sink->dim() == 1 && attn_sink->size(0) == heads, op, ": attn_sink must be [heads] with ", heads, " heads as in q");
    const int64_t stride = attn_sink->stride(0);
    for (int64_t h = 0; h < heads; ++h) {
      sink.push_back(narrow_sink ? widen(static_cast<const uint16_t*>(attn_sink->const_data_ptr())[h * stride]) : static_cast<const float*>(attn_sink->const_data_ptr())[h * stride]);
    }
  }

  Tensor out = torch::stable::new_empty(q, {tokens, heads, kDim});
  Tensor lse = torch::stable::new_empty(q, {tokens, heads}, ScalarType::Float);
  const void* query = q.const_data_ptr();
  void* result = out.mutable_data_ptr();
  float* lse_out = static_cast<float*>(lse.mutable_data_ptr());
  const int64_t token_stride = q.stride(0), head_stride = q.stride(1);
  const float factor = static_cast<float>(scale);
  torch::stable::parallel_for(0, tokens, 1, [&](int64_t begin, int64_t end) {
    Scratch scratch(heads);
    for (int64_t t = begin; t < end; ++t) {
      for (int64_t h = 0; h < heads; ++h) {
        const int64_t from = t * token_stride + h * head_stride;
        float* row = scratch.query.data() + h * kDim;
        for (int i = 0; i < kDim; ++i) row[i] = factor * (bfloat ? widen(static_cast<const uint16_t*>(query)[from + i]) : static_cast<const float*>(query)[from + i]);
      }
      attend(segments, t, heads, scratch);
      for (int64_t h = 0; h < heads; ++h) {
        const float total = scratch.total[h];
        const float logsum = scratch.largest[h] + std::log(total);
        const bool none = logsum == kMinusInfinity;
        // exp(lse) / (exp(lse) + exp(sink)), in the one form that neither overflows nor meets inf - inf.
        const float share = none ? 0.0f : (sink.empty() ? 1.0f : 1.0f / (1.0f + std::exp(sink[h] - logsum))) / total;
        const float* row = scratch.weighted.data() + h * kDim;
        const int64_t to = (t * heads + h) * kDim;
        for (int i = 0; i < kDim; ++i) {
          const float value = none ? 0.0f : row[i] * share;
          if (bfloat) {
            static_cast<uint16_t*>(result)[to + i] = narrow(value);
          } else {
            static_cast<float*>(result)[to + i] = value;
          }
        }
        lse_out[t * heads + h] = logsum;
      }
    }
  });
  return {std::move(out), std::move(lse)};
}

}  // namespace dsv4_ops
