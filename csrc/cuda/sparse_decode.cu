// Sparse MLA decode on NVIDIA GPUs of capability 9.0 to 11.x, host side: checks, the plan and the launch of
// sparse_decode_cluster.cuh. dsv4_ops/_decode_backends.py says, in words for users, what the checks here repeat.
#include "../checks.h"
#include "sparse_decode_cluster.cuh"

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/macros.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <array>
#include <limits>
#include <mutex>
#include <optional>
#include <tuple>

namespace dsv4_ops {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

namespace {

using namespace cluster_attention;

constexpr const char* kOp = "sparse_mla_decode_cluster";
constexpr int kDevices = 64;
constexpr int64_t kMostTiles = 1 << 26;  // of a row: 2^29 columns, so that nothing about columns overflows

// ---- plan --------------------------------------------------------------------------------------------------------------

struct Plan {
  int cluster_bits, share, passes;  // as Args has them
  int tiles, head_tiles;            // of the kernel
  bool running;
};

// How keys are dealt out follows from widths alone. A block of the largest cluster that has more keys than it holds takes them in
// several passes; elsewhere, clusters are as small as leaves 6 tiles a block, since what blocks send grows with their number.
//
// Of the head counts that a block may have, all of which give the same bits: the fewest whose blocks run at once.
Plan plan_of(int64_t tokens, int64_t heads, int64_t tiles, int processors) {
  Plan plan = {};
  while (plan.cluster_bits < 3 && tiles > 6 << plan.cluster_bits) ++plan.cluster_bits;
  plan.share = static_cast<int>((tiles + (1 << plan.cluster_bits) - 1) >> plan.cluster_bits);
  plan.running = plan.share > 12;
  plan.tiles = plan.running ? 5 : plan.share <= 4 ? 2 : plan.share <= 6 ? 3 : plan.share <= 10 ? 5 : 6;
  plan.passes = plan.running ? (plan.share + 9) / 10 : 1;
  const int most = plan.running ? 1 : plan.tiles == 6 ? 2 : 4, at_once = processors / 16 * 16;  // a cluster fills half a group of 16 processors
  plan.head_tiles = 1;
  while (plan.head_tiles < most && heads > kHeadTile * plan.head_tiles && (tokens * ((heads - 1) / (kHeadTile * plan.head_tiles) + 1) << plan.cluster_bits) > at_once) plan.head_tiles *= 2;
  return plan;
}

// ---- launch ------------------------------------------------------------------------------------------------------------

struct Device {
  int index, processors, major;
};

// What the chip has, asked for once.
Device device_of(const Tensor& tensor) {
  static std::array<std::once_flag, kDevices> asked;
  static std::array<Device, kDevices> known;
  const int index = tensor.get_device_index();
  DSV4_CHECK(index >= 0 && index < kDevices, kOp, ": device index ", index, " is beyond ", kDevices);
  std::call_once(asked[index], [&] {
    Device device = {index, 0, 0};
    STD_CUDA_CHECK(cudaDeviceGetAttribute(&device.processors, cudaDevAttrMultiProcessorCount, index));
    STD_CUDA_CHECK(cudaDeviceGetAttribute(&device.major, cudaDevAttrComputeCapabilityMajor, index));
    known[index] = device;
  });
  return known[index];
}

template <int head_tiles, int tiles, bool running>
void launch(const Device& device, const Args& args, dim3 grid, cudaStream_t stream) {
  constexpr auto kernel = &attend<head_tiles, tiles, running>;
  constexpr int bytes = static_cast<int>(sizeof(Shared<head_tiles, tiles>));
  static_assert(bytes <= 227 << 10, "more than a block of capability 9.0 may have");
  static std::array<std::once_flag, kDevices> said;
  std::call_once(said[device.index], [&] { STD_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes)); });
  cudaLaunchConfig_t config = {};
  config.gridDim = grid, config.blockDim = dim3(kThreads), config.dynamicSmemBytes = bytes, config.stream = stream;
  cudaLaunchAttribute attributes[2] = {};
  attributes[0].id = cudaLaunchAttributeClusterDimension;
  attributes[0].val.clusterDim = {1u << args.cluster_bits, 1, 1};
  attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;  // may be launched while the kernel before it ends
  attributes[1].val.programmaticStreamSerializationAllowed = 1;
  config.attrs = attributes, config.numAttrs = 2;
  STD_CUDA_CHECK(cudaLaunchKernelEx(&config, kernel, args));
}

void launch_plan(const Plan& plan, const Device& device, const Args& args, dim3 grid, cudaStream_t stream) {
  if (plan.running) return launch<1, 5, true>(device, args, grid, stream);
  switch (10 * plan.head_tiles + plan.tiles) {
    case 12: return launch<1, 2, false>(device, args, grid, stream);
    case 13: return launch<1, 3, false>(device, args, grid, stream);
    case 15: return launch<1, 5, false>(device, args, grid, stream);
    case 16: return launch<1, 6, false>(device, args, grid, stream);
    case 22: return launch<2, 2, false>(device, args, grid, stream);
    case 23: return launch<2, 3, false>(device, args, grid, stream);
    case 25: return launch<2, 5, false>(device, args, grid, stream);
    case 26: return launch<2, 6, false>(device, args, grid, stream);
    case 42: return launch<4, 2, false>(device, args, grid, stream);
    case 43: return launch<4, 3, false>(device, args, grid, stream);
    case 45: return launch<4, 5, false>(device, args, grid, stream);
    default: DSV4_CHECK(false, kOp, ": no kernel for ", plan.head_tiles, " tiles of heads and ", plan.tiles, " of keys");
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
  const Device device = device_of(q);
  DSV4_CHECK(device.major >= 9 && device.major < 12, kOp, ": needs a GPU of capability 9.0 to 11.x, whose blocks have the shared memory that this takes");
  const torch::stable::accelerator::DeviceGuard guard(device.index);
  Tensor out = torch::stable::new_empty(q, {tokens, heads, kDim});
  Tensor lse = torch::stable::new_empty(q, {tokens, heads}, ScalarType::Float);
  if (tokens == 0 || heads == 0) return {std::move(out), std::move(lse)};
  args.out = static_cast<__nv_bfloat16*>(out.mutable_data_ptr()), args.lse = static_cast<float*>(lse.mutable_data_ptr());
  args.scale = static_cast<float>(scale) * kLog2E;
  DSV4_CHECK(heads <= (1 << 19) && tokens <= std::numeric_limits<int32_t>::max() / kLargestCluster, kOp, ": ", tokens, " tokens of ", heads, " heads are more than one launch takes");
  const Plan plan = plan_of(tokens, heads, args.segments[0].tiles + args.segments[1].tiles, device.processors);
  args.heads = static_cast<int>(heads), args.cluster_bits = plan.cluster_bits, args.share = plan.share, args.passes = plan.passes;
  const int64_t own_heads = kHeadTile * plan.head_tiles;
  const dim3 grid(static_cast<unsigned>(tokens << plan.cluster_bits), static_cast<unsigned>((heads + own_heads - 1) / own_heads));
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device.index, &stream));
  launch_plan(plan, device, args, grid, static_cast<cudaStream_t>(stream));
  return {std::move(out), std::move(lse)};
}

}  // namespace dsv4_ops
