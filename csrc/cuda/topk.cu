// Row-wise top-k on NVIDIA GPUs: exact, the same bits every time, and free of waits that another block could miss.
//
// Host side: checks, the plan (csrc/topk_plan.h) and the launch. The kernels: topk_direct.cuh for short rows,
// topk_listed.cuh for long ones, topk_device.cuh for what both use. Scores are compared as keys, unsigned numbers of the
// same order (-0 and +0 share one; NaN and columns past the length get 0, below every number). Nothing is carried from
// one row or launch to the next, and no block waits for another outside the hardware's cluster barrier.
#include "../topk_checks.h"
#include "../topk_plan.h"
#include "per_device.h"
#include "topk_listed.cuh"

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/macros.h>
#include <torch/csrc/stable/ops.h>

#include <limits>
#include <optional>
#include <tuple>

namespace dsv4_ops {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

namespace {

using namespace topk_kernels;

constexpr int64_t kEagerColumns = int64_t{1} << 20;  // of all rows: below, reading dead columns costs less than waiting for lengths

struct Device {
  TopkDevice sizes;
  int index;
};

// Sizes of the chip, asked for once.
Device device_of(const Tensor& tensor) {
  static PerDevice<TopkDevice> known;
  const int index = checked_device("topk", tensor);
  const TopkDevice& sizes = known.get(index, [&] {
    int shared = 0, processors = 0, major = 0;
    STD_CUDA_CHECK(cudaDeviceGetAttribute(&shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, index));
    STD_CUDA_CHECK(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, index));
    STD_CUDA_CHECK(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, index));
    return TopkDevice{shared, processors, major < 9 ? 1 : major <= 10 ? 16 : 8};
  });
  return {sizes, index};
}

// `kernel` may take all of a block's shared memory and the largest clusters: said once for each device, for good.
template <auto kernel>
void allow_all(const Device& device) {
  static PerDevice<bool> said;
  said.get(device.index, [&] {
    cudaFuncAttributes own = {};
    STD_CUDA_CHECK(cudaFuncGetAttributes(&own, kernel));
    STD_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(device.sizes.shared_bytes - static_cast<int64_t>(own.sharedSizeBytes))));
    if (device.sizes.largest_cluster > 8) STD_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1));
    return true;
  });
}

template <auto kernel>
void launch(const TopkPlan& plan, const Device& device, const Args& args, int64_t rows, cudaStream_t stream) {
  if (plan.shared_bytes > 0) allow_all<kernel>(device);
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(rows * plan.cluster));
  config.blockDim = dim3(plan.threads);
  config.dynamicSmemBytes = plan.shared_bytes;
  config.stream = stream;
  cudaLaunchAttribute attributes[2] = {};
  config.attrs = attributes;
  if (device.sizes.largest_cluster > 1) {  // may be launched while the kernel before it ends: see ptx::wait_for_previous_grid
    attributes[config.numAttrs].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[config.numAttrs++].val.programmaticStreamSerializationAllowed = 1;
  }
  if (plan.cluster > 1) {
    attributes[config.numAttrs].id = cudaLaunchAttributeClusterDimension;
    attributes[config.numAttrs++].val.clusterDim = {static_cast<unsigned>(plan.cluster), 1, 1};
  }
  STD_CUDA_CHECK(cudaLaunchKernelEx(&config, kernel, args));
}

template <class Format>
void launch_plan(const TopkPlan& plan, const Device& device, const Args& args, int64_t rows, cudaStream_t stream) {
  const auto is = [&](TopkKernel kernel, int threads, int vectors) { return plan.kernel == kernel && plan.threads == threads && plan.vectors == vectors; };
  using K = TopkKernel;
  if (is(K::direct, 512, 1)) return launch<&topk_direct<Format, 512, 1>>(plan, device, args, rows, stream);
  if (is(K::direct, 512, 2)) return launch<&topk_direct<Format, 512, 2>>(plan, device, args, rows, stream);
  if (is(K::direct, 512, 4)) return launch<&topk_direct<Format, 512, 4>>(plan, device, args, rows, stream);
  if (is(K::direct, 512, 8)) return launch<&topk_direct<Format, 512, 8>>(plan, device, args, rows, stream);
  if (is(K::direct, 1024, 4)) return launch<&topk_direct<Format, 1024, 4>>(plan, device, args, rows, stream);
  if (is(K::direct, 1024, 8)) return launch<&topk_direct<Format, 1024, 8>>(plan, device, args, rows, stream);
  if (is(K::resident, 512, 2)) return launch<&topk_listed<Format, 512, 2, false>>(plan, device, args, rows, stream);
  if (is(K::resident, 512, 4)) return launch<&topk_listed<Format, 512, 4, false>>(plan, device, args, rows, stream);
  if (is(K::resident, 512, 8)) return launch<&topk_listed<Format, 512, 8, false>>(plan, device, args, rows, stream);
  if (is(K::resident, 1024, 2)) return launch<&topk_listed<Format, 1024, 2, false>>(plan, device, args, rows, stream);
  if (is(K::resident, 1024, 4)) return launch<&topk_listed<Format, 1024, 4, false>>(plan, device, args, rows, stream);
  if (is(K::resident, 1024, 8)) return launch<&topk_listed<Format, 1024, 8, false>>(plan, device, args, rows, stream);
  if (is(K::streamed, 512, 4)) return launch<&topk_listed<Format, 512, 4, true>>(plan, device, args, rows, stream);
  if (is(K::streamed, 1024, 2)) return launch<&topk_listed<Format, 1024, 2, true>>(plan, device, args, rows, stream);
  if (plan.kernel == K::passes) return launch<&topk_passes<Format, 1024>>(plan, device, args, rows, stream);
  DSV4_CHECK(false, "topk: no kernel for ", plan.threads, " threads of ", plan.vectors, " vectors");
}

void check_cuda(const char* op, const char* name, const Tensor& tensor, int device) {
  DSV4_CHECK(tensor.is_cuda() && tensor.get_device_index() == device, op, ": ", name, " must be on the CUDA device of logits");
}

// Results that are wanted: `values` null or not, `slots` null or not.
void run(const char* op, const Tensor& logits, const Tensor& lengths, int64_t k, std::optional<int64_t> max_seq_len, Tensor& indices, Tensor* values, const Slots* slots) {
  const int64_t rows = logits.size(0), limit = max_seq_len ? std::min(logits.size(1), *max_seq_len) : logits.size(1);
  if (rows == 0) return;
  const Device device = device_of(logits);
  const TopkPlan plan = topk_plan(device.sizes, rows, limit, k);
  DSV4_CHECK(rows * plan.cluster <= std::numeric_limits<int32_t>::max(), op, ": ", rows, " rows are more than one launch takes");
  Args args = {};
  args.logits = logits.const_data_ptr(), args.row_stride = logits.stride(0);
  args.lengths.data = lengths.const_data_ptr(), args.lengths.wide = lengths.scalar_type() == ScalarType::Long;
  args.lengths.count = static_cast<uint32_t>(lengths.numel());  // at most rows, which fit a launch
  args.lengths.inner_stride = lengths.stride(lengths.dim() - 1);
  if (lengths.dim() == 2 && lengths.size(0) > 1 && lengths.stride(0) != lengths.size(1) * lengths.stride(1)) {
    args.lengths.inner = static_cast<uint32_t>(lengths.size(1)), args.lengths.outer_stride = lengths.stride(0);
  }
  if (slots != nullptr) args.slots = *slots;
  args.indices = static_cast<int32_t*>(indices.mutable_data_ptr());
  args.values = values == nullptr ? nullptr : values->mutable_data_ptr();
  args.limit = static_cast<int>(limit), args.k = static_cast<int>(k), args.cluster = plan.cluster;
  args.listed = plan.listed, args.bitmap_words = plan.bitmap_words;
  args.eager = rows * limit <= kEagerColumns;
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device.index, &stream));
  if (logits.scalar_type() == ScalarType::Float) {
    launch_plan<Float32>(plan, device, args, rows, static_cast<cudaStream_t>(stream));
  } else {
    launch_plan<BFloat16>(plan, device, args, rows, static_cast<cudaStream_t>(stream));
  }
}

void check(const char* op, const Tensor& logits, const Tensor& lengths, int64_t k, std::optional<int64_t> max_seq_len, int64_t lane) {
  check_cuda(op, "logits", logits, logits.get_device_index());
  check_cuda(op, "lengths", lengths, logits.get_device_index());
  check_topk(op, logits, lengths, k, max_seq_len, lane);
}

}  // namespace

// Scratch is on chip, so the lane has nothing to choose.
Tensor topk_cuda(const Tensor& logits, const Tensor& lengths, int64_t k, std::optional<int64_t> max_seq_len, int64_t lane) {
  check("topk", logits, lengths, k, max_seq_len, lane);
  const torch::stable::accelerator::DeviceGuard guard(logits.get_device_index());
  Tensor indices = torch::stable::new_empty(logits, {logits.size(0), k}, ScalarType::Int);
  run("topk", logits, lengths, k, max_seq_len, indices, nullptr, nullptr);
  return indices;
}

std::tuple<Tensor, Tensor> topk_values_cuda(const Tensor& logits, const Tensor& lengths, int64_t k, std::optional<int64_t> max_seq_len, int64_t lane) {
  check("topk_values", logits, lengths, k, max_seq_len, lane);
  const torch::stable::accelerator::DeviceGuard guard(logits.get_device_index());
  Tensor indices = torch::stable::new_empty(logits, {logits.size(0), k}, ScalarType::Int);
  Tensor values = torch::stable::new_empty(logits, {logits.size(0), k});
  run("topk_values", logits, lengths, k, max_seq_len, indices, &values, nullptr);
  return {std::move(values), std::move(indices)};
}

std::tuple<Tensor, Tensor> topk_slots_cuda(
    const Tensor& logits, const Tensor& lengths, const Tensor& token_to_req_indices, const Tensor& is_valid_token, const Tensor& block_table, int64_t k,
    int64_t block_size, std::optional<int64_t> max_seq_len, int64_t lane) {
  const char* const op = "topk_slots";
  check(op, logits, lengths, k, max_seq_len, lane);
  const int device = logits.get_device_index();
  check_cuda(op, "token_to_req_indices", token_to_req_indices, device);
  check_cuda(op, "is_valid_token", is_valid_token, device);
  check_cuda(op, "block_table", block_table, device);
  check_topk_table(op, logits, token_to_req_indices, is_valid_token, block_table, block_size);
  const torch::stable::accelerator::DeviceGuard guard(device);
  Tensor found = torch::stable::new_empty(logits, {logits.size(0), k}, ScalarType::Int);
  Tensor lens = torch::stable::new_empty(logits, {logits.size(0)}, ScalarType::Int);
  Slots slots = {};
  slots.table = static_cast<const int32_t*>(block_table.const_data_ptr());
  slots.requests = block_table.size(0), slots.pages = block_table.size(1);
  slots.request_stride = block_table.stride(0), slots.page_stride = block_table.stride(1);
  slots.request_of = static_cast<const int32_t*>(token_to_req_indices.const_data_ptr()), slots.request_of_stride = token_to_req_indices.stride(0);
  slots.valid = static_cast<const bool*>(is_valid_token.const_data_ptr()), slots.valid_stride = is_valid_token.stride(0);
  slots.block_size = static_cast<int>(block_size), slots.lens = static_cast<int32_t*>(lens.mutable_data_ptr());
  run(op, logits, lengths, k, max_seq_len, found, nullptr, &slots);
  return {std::move(found), std::move(lens)};
}

}  // namespace dsv4_ops
