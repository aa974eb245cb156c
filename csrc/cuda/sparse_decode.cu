// Sparse MLA decode on NVIDIA GPUs of capability 9.0 to 11.x, host side: checks, the plan and the launch of
// sparse_decode_cluster.cuh. dsv4_ops/_decode_backends.py says, in words for users, what the checks here repeat.
#include "per_device.h"
#include "sparse_decode_cluster.cuh"

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/macros.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <array>
#include <limits>
#include <optional>
#include <tuple>

namespace dsv4_ops {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

namespace {

using namespace cluster_attention;

constexpr const char* kOp = "sparse_mla_decode_cluster";
constexpr int64_t kMostTiles = 1 << 26;  // of a row: 2^29 columns, so that nothing about columns overflows

// ---- plan --------------------------------------------------------------------------------------------------------------

struct Plan {
  int cluster_bits, share, passes;  // as Args has them
  int tiles;                        // of the kernel
  bool running;
};

// How keys are dealt out follows from widths alone: to the smallest cluster whose blocks hold all their keys at once, because more clusters then
// run side by side (64 heads, 128 columns, 32 tokens on an H200: 10 us by clusters of two, 21 by clusters of four, which are faster by 1 us
// where one token has the GPU to itself). A block of the largest cluster that has more keys takes them in several passes. Two blocks at
// least: counted sends are for clusters of more than one.
Plan plan_of(int64_t tiles) {
  Plan plan = {};
  plan.cluster_bits = 1;
  while (plan.cluster_bits < 3 && tiles > 12 << plan.cluster_bits) ++plan.cluster_bits;
  plan.share = static_cast<int>((tiles + (1 << plan.cluster_bits) - 1) >> plan.cluster_bits);
  plan.running = plan.share > 12;
  plan.tiles = plan.running ? 5 : std::max(3, (plan.share + 1) / 2);
  plan.passes = plan.running ? (plan.share + 9) / 10 : 1;
  return plan;
}

// Of the tiles of heads that a block may have, all of which give the same bits: the fewest with which all clusters run at once.
int head_tiles_of(const Plan& plan, int64_t tokens, int64_t heads, int64_t clusters_at_once) {
  const int most = plan.running ? 1 : plan.tiles == 6 ? 2 : 4;
  int head_tiles = 1;
  while (head_tiles < most && heads > kHeadTile * head_tiles && tokens * ((heads - 1) / (kHeadTile * head_tiles) + 1) > clusters_at_once) head_tiles *= 2;
  return head_tiles;
}

// ---- launch ------------------------------------------------------------------------------------------------------------

// The GPU of a tensor, whose generation is asked for once.
int device_of(const Tensor& tensor) {
  static PerDevice<int> known;
  const int index = checked_device(kOp, tensor);
  const int major = known.get(index, [&] {
    int found = 0;
    STD_CUDA_CHECK(cudaDeviceGetAttribute(&found, cudaDevAttrComputeCapabilityMajor, index));
    return found;
  });
  DSV4_CHECK(major >= 9 && major < 12, kOp, ": needs a GPU of capability 9.0 to 11.x, whose blocks have the shared memory that this takes");
  return index;
}

struct Configuration {
  cudaLaunchConfig_t config = {};
  cudaLaunchAttribute attributes[2] = {};

  Configuration(dim3 grid, int cluster_bits, int bytes, cudaStream_t stream) {
    config.gridDim = grid, config.blockDim = dim3(kThreads), config.dynamicSmemBytes = static_cast<size_t>(bytes), config.stream = stream;
    attributes[0].id = cudaLaunchAttributeClusterDimension;
    attributes[0].val.clusterDim = {1u << cluster_bits, 1, 1};
    attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;  // may be launched while the kernel before it ends
    attributes[1].val.programmaticStreamSerializationAllowed = 1;
    config.attrs = attributes, config.numAttrs = 2;
  }
  Configuration(const Configuration&) = delete;
};

// The bytes of shared memory that the kernel takes on this device, which it has been allowed.
template <int head_tiles, int tiles, bool running>
int allowed_bytes(int device) {
  constexpr int bytes = static_cast<int>(sizeof(Shared<head_tiles, tiles>));
  static_assert(bytes <= 227 << 10, "more than a block of capability 9.0 may have");
  static PerDevice<bool> said;
  said.get(device, [] {
    STD_CUDA_CHECK(cudaFuncSetAttribute(&attend<head_tiles, tiles, running>, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
    return true;
  });
  return bytes;
}

// With one block on a processor, as these kernels have. Asked for once: it follows from how the chip groups its processors.
int clusters_at_once(int device, int cluster_bits) {
  static std::array<PerDevice<int>, 4> known;  // by cluster_bits
  return known[cluster_bits].get(device, [&] {
    int count = 0;
    Configuration one(dim3(1u << cluster_bits), cluster_bits, allowed_bytes<4, 5, false>(device), nullptr);
    one.config.numAttrs = 1;  // the cluster's
    STD_CUDA_CHECK(cudaOccupancyMaxActiveClusters(&count, &attend<4, 5, false>, &one.config));
    return count;
  });
}

template <int head_tiles, int tiles, bool running>
void launch(int device, const Args& args, dim3 grid, cudaStream_t stream) {
  const Configuration configuration(grid, args.cluster_bits, allowed_bytes<head_tiles, tiles, running>(device), stream);
  STD_CUDA_CHECK(cudaLaunchKernelEx(&configuration.config, &attend<head_tiles, tiles, running>, args));
}

void launch_plan(const Plan& plan, int head_tiles, int device, const Args& args, dim3 grid, cudaStream_t stream) {
  if (plan.running) return launch<1, 5, true>(device, args, grid, stream);
  switch (10 * head_tiles + plan.tiles) {
    case 13: return launch<1, 3, false>(device, args, grid, stream);
    case 14: return launch<1, 4, false>(device, args, grid, stream);
    case 15: return launch<1, 5, false>(device, args, grid, stream);
    case 16: return launch<1, 6, false>(device, args, grid, stream);
    case 23: return launch<2, 3, false>(device, args, grid, stream);
    case 24: return launch<2, 4, false>(device, args, grid, stream);
    case 25: return launch<2, 5, false>(device, args, grid, stream);
    case 26: return launch<2, 6, false>(device, args, grid, stream);
    case 43: return launch<4, 3, false>(device, args, grid, stream);
    case 44: return launch<4, 4, false>(device, args, grid, stream);
    case 45: return launch<4, 5, false>(device, args, grid, stream);
    default: DSV4_CHECK(false, kOp, ": no kernel for ", head_tiles, " tiles of heads and ", plan.tiles, " of keys");
  }
}

// ---- arguments ---------------------------------------------------------------------------------------------------------

void check_on(const char* name, const Tensor& tensor, const Tensor& q) {
  DSV4_CHECK(tensor.is_cuda() && tensor.get_device_index() == q.get_device_index(), kOp, ": ", name, " must be on the CUDA device of q");
}

// A stride that nothing is multiplied by may be any.
void check_aligned(const char* name, const void* data, std::initializer_list<std::array<int64_t, 2>> counts_and_bytes) {
  auto bits = reinterpret_cast<uintptr_t>(data);
  for (const auto& [count, bytes] : counts_and_bytes) bits |= static_cast<uintptr_t>(count > 1 ? bytes : 0);
  DSV4_CHECK(bits % 16 == 0, kOp, ": rows of ", name, " must start at multiples of 16 bytes");
}

Segment segment_of(const Tensor& q, const Tensor& cache, const Tensor& indices, const Tensor& lens) {
  check_on("a cache", cache, q), check_on("indices", indices, q), check_on("lens", lens, q);
  check_index(kOp, "indices", indices), check_index(kOp, "lens", lens);
  const bool codes = cache.scalar_type() == ScalarType::Byte;
  DSV4_CHECK(codes || cache.scalar_type() == ScalarType::BFloat16, kOp, ": a cache must be of uint8 or bfloat16");
  const int64_t last = cache.dim() - 1, entries = codes ? kRowBytes + kScaleBytes : kDim, row = codes ? kRowBytes : 2 * kDim;
  DSV4_CHECK((cache.dim() == 3 || (cache.dim() == 4 && cache.size(2) == 1)) && cache.size(last) == entries && cache.size(1) > 0, kOp, ": a cache must be of shape [blocks, block size, ", entries, "]");
  DSV4_CHECK(cache.stride(last) == 1 && (cache.size(1) == 1 || cache.stride(1) == entries), kOp, ": rows of a page must lie one after the other");
  DSV4_CHECK(indices.dim() == 2 && indices.size(0) == q.size(0) && lens.dim() == 1 && lens.size(0) == q.size(0), kOp, ": indices must be [tokens, width] and lens [tokens]");
  check_dense_last(kOp, "indices", indices);
  const int64_t blocks = cache.size(0), block_size = cache.size(1), page = blocks > 1 ? cache.stride(0) * (codes ? 1 : 2) : 0;
  DSV4_CHECK(block_size <= std::numeric_limits<int32_t>::max() && blocks <= std::numeric_limits<int32_t>::max() / block_size, kOp, ": a cache must have less than 2^31 slots");
  DSV4_CHECK(page >= 0 && page <= std::numeric_limits<uint32_t>::max(), kOp, ": pages must start less than 4 GiB apart");
  DSV4_CHECK(indices.size(1) <= kMostTiles * kKeyTile, kOp, ": rows must have at most ", kMostTiles * kKeyTile, " columns");
  check_aligned("a cache", cache.const_data_ptr(), {{blocks, page}});
  Segment segment = {};
  segment.cache = static_cast<const uint8_t*>(cache.const_data_ptr());
  segment.slots_end = static_cast<uint32_t>(blocks * block_size), segment.block_size = static_cast<uint32_t>(block_size);
  segment.page_stride = static_cast<uint32_t>(page), segment.row = static_cast<uint32_t>(row);
  while (int64_t{1} << segment.shift < block_size) ++segment.shift;
  segment.magic = static_cast<uint32_t>(((uint64_t{1} << (31 + segment.shift)) + static_cast<uint64_t>(block_size) - 1) / static_cast<uint64_t>(block_size));
  segment.indices = indices.const_data_ptr(), segment.indices_stride = indices.stride(0), segment.wide_indices = indices.scalar_type() == ScalarType::Long;
  segment.lens = lens.const_data_ptr(), segment.lens_stride = lens.stride(0), segment.wide_lens = lens.scalar_type() == ScalarType::Long;
  segment.width = static_cast<int>(indices.size(1)), segment.tiles = (segment.width + kKeyTile - 1) / kKeyTile, segment.codes = codes;
  return segment;
}

}  // namespace

std::tuple<Tensor, Tensor> sparse_mla_decode_cluster_cuda(
    const Tensor& q, const Tensor& swa_cache, const Tensor& swa_indices, const Tensor& swa_lens, const std::optional<Tensor>& extra_cache,
    const std::optional<Tensor>& extra_indices, const std::optional<Tensor>& extra_lens, const std::optional<Tensor>& attn_sink, double scale) {
  DSV4_CHECK(q.is_cuda() && q.scalar_type() == ScalarType::BFloat16 && q.dim() == 3 && q.size(2) == kDim, kOp, ": q must be bfloat16 [tokens, heads, ", kDim, "] on CUDA");
  check_dense_last(kOp, "q", q);
  const int64_t tokens = q.size(0), heads = q.size(1);
  check_aligned("q", q.const_data_ptr(), {{tokens, 2 * q.stride(0)}, {heads, 2 * q.stride(1)}});
  Args args = {};
  args.q = static_cast<const __nv_bfloat16*>(q.const_data_ptr()), args.q_stride = q.stride(0), args.q_head_stride = q.stride(1);
  args.segments[0] = segment_of(q, swa_cache, swa_indices, swa_lens);
  DSV4_CHECK(extra_cache.has_value() == extra_indices.has_value() && extra_cache.has_value() == extra_lens.has_value(), kOp, ": the second segment is given whole or not at all");
  if (extra_cache) args.segments[1] = segment_of(q, *extra_cache, *extra_indices, *extra_lens);
  if (attn_sink) {
    check_on("attn_sink", *attn_sink, q);
    args.sink_is_bf16 = attn_sink->scalar_type() == ScalarType::BFloat16;
    DSV4_CHECK(attn_sink->dim() == 1 && attn_sink->size(0) == heads && (args.sink_is_bf16 || attn_sink->scalar_type() == ScalarType::Float), kOp, ": attn_sink must be float32 or bfloat16 [heads]");
    args.sink = attn_sink->const_data_ptr(), args.sink_stride = attn_sink->stride(0);
  }
  const int device = device_of(q);
  const torch::stable::accelerator::DeviceGuard guard(device);
  Tensor out = torch::stable::new_empty(q, {tokens, heads, kDim});
  Tensor lse = torch::stable::new_empty(q, {tokens, heads}, ScalarType::Float);
  if (tokens == 0 || heads == 0) return {std::move(out), std::move(lse)};
  args.out = static_cast<__nv_bfloat16*>(out.mutable_data_ptr()), args.lse = static_cast<float*>(lse.mutable_data_ptr());
  args.scale = static_cast<float>(scale) * kLog2E;
  DSV4_CHECK(heads <= (1 << 19) && tokens <= std::numeric_limits<int32_t>::max() / kLargestCluster, kOp, ": ", tokens, " tokens of ", heads, " heads are more than one launch takes");
  const Plan plan = plan_of(args.segments[0].tiles + args.segments[1].tiles);
  const int head_tiles = head_tiles_of(plan, tokens, heads, clusters_at_once(device, plan.cluster_bits)), own_heads = kHeadTile * head_tiles;
  args.heads = static_cast<int>(heads), args.cluster_bits = plan.cluster_bits, args.share = plan.share, args.passes = plan.passes;
  const dim3 grid(static_cast<unsigned>(tokens << plan.cluster_bits), static_cast<unsigned>((heads + own_heads - 1) / own_heads));
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device, &stream));
  launch_plan(plan, head_tiles, device, args, grid, static_cast<cudaStream_t>(stream));
  return {std::move(out), std::move(lse)};
}

}  // namespace dsv4_ops
