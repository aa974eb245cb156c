// Row-wise top-k on NVIDIA GPUs: exact, the same bits every time, and free of waits that another block could miss.
//
// A block, or a cluster of blocks that exchange through distributed shared memory and the hardware's cluster barrier,
// ranks one row. Scores become unsigned keys of the same order (-0 and +0 share one; NaN and columns past the length get
// 0, below every number) and stay in registers, so a row is read once. Then
//   1. The row falls into at least k groups; the smallest of the groups' maxima is a lower bound of the k-th largest
//      key and the largest key an upper one. In long rows few keys lie between them.
//   2. A histogram over equal parts of [low, high], largest keys first, finds the part that holds the k-th largest key;
//      it is the next interval. 3 or 4 passes of 11 to 8 bits reach one key whatever the scores are, most rows need 2.
//   3. Every warp counts its columns above and at the threshold. Prefix sums of the counts, in column order, give each
//      selected column its place: ascending, ties to the lowest column, without sorting.
// A pass uses a histogram of its own, all cleared at the start: nothing is carried from one row or launch to the next.
#include "../checks.h"
#include "../topk_plan.h"

#include <cuda_runtime.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/macros.h>
#include <torch/csrc/stable/ops.h>

#include <array>
#include <limits>
#include <mutex>
#include <optional>
#include <tuple>

namespace dsv4_ops {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

namespace {

constexpr unsigned kAll = 0xffffffffu;
constexpr uint32_t kNaN = 0x7fffffffu;
constexpr int kMaxCluster = 16;
constexpr int kStep = 32 * kTopkColumns;  // columns that a warp reads at once

struct Float32 {
  using Bits = uint32_t;
  using Vector = uint4;
  static constexpr Bits minus_infinity = 0xff800000u;
  static __device__ uint32_t widen(Bits raw) { return raw; }
  static __device__ void split(Vector v, uint32_t (&raw)[kTopkColumns]) { raw[0] = v.x, raw[1] = v.y, raw[2] = v.z, raw[3] = v.w; }
};

struct BFloat16 {
  using Bits = uint16_t;
  using Vector = uint2;
  static constexpr Bits minus_infinity = 0xff80u;
  static __device__ uint32_t widen(Bits raw) { return uint32_t{raw} << 16; }
  static __device__ void split(Vector v, uint32_t (&raw)[kTopkColumns]) {
    raw[0] = v.x << 16, raw[1] = v.x & 0xffff0000u, raw[2] = v.y << 16, raw[3] = v.y & 0xffff0000u;
  }
};

struct Lengths {
  const void* data;
  bool wide;
  int64_t count, inner, outer_stride, inner_stride;
};

struct Args {
  const void* logits;
  int64_t row_stride;
  Lengths lengths;
  int32_t* indices;
  void* values;  // or null
  int limit, k, cluster, bin_bits;
};

template <int kThreads>
struct Shared {
  alignas(16) uint32_t histogram[kTopkHistogramWords];
  uint32_t warp_low[32], warp_high[32], warp_total[32];
  int warp_above[32], warp_equal[32];
  uint32_t low[kMaxCluster], high[kMaxCluster];  // of each block of the cluster, written by it
  int above[kMaxCluster], equal[kMaxCluster];
  int bin, before, count;
};

// Score bits (of float32) to a key.
__device__ __forceinline__ uint32_t key_of(uint32_t bits) {
  const float score = __uint_as_float(bits) + 0.0f;  // -0 becomes +0
  const uint32_t ordered = __float_as_uint(score);
  const uint32_t key = ordered ^ (static_cast<uint32_t>(static_cast<int32_t>(ordered) >> 31) | 0x80000000u);
  return score == score ? key : 0u;
}

__device__ __forceinline__ uint32_t shared_address(const void* pointer) { return static_cast<uint32_t>(__cvta_generic_to_shared(pointer)); }

__device__ __forceinline__ void cluster_arrive() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#endif
}

__device__ __forceinline__ void cluster_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

__device__ __forceinline__ void store_at(const void* local, uint32_t rank, uint32_t value) {
#if __CUDA_ARCH__ >= 900
  uint32_t remote;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(shared_address(local)), "r"(rank));
  asm volatile("st.shared::cluster.u32 [%0], %1;" ::"r"(remote), "r"(value) : "memory");
#endif
}

__device__ __forceinline__ uint32_t load_at(const void* local, uint32_t rank) {
  uint32_t value = 0;
#if __CUDA_ARCH__ >= 900
  uint32_t remote;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(shared_address(local)), "r"(rank));
  asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(value) : "r"(remote) : "memory");
#endif
  return value;
}

__device__ __forceinline__ int length_of(const Args& args, int64_t row) {
  const Lengths& lengths = args.lengths;
  if (row >= lengths.count) return 0;
  const int64_t offset = lengths.outer_stride == 0 ? row * lengths.inner_stride : row / lengths.inner * lengths.outer_stride + row % lengths.inner * lengths.inner_stride;
  const int64_t length = lengths.wide ? static_cast<const int64_t*>(lengths.data)[offset] : static_cast<const int32_t*>(lengths.data)[offset];
  return static_cast<int>(length < 0 ? 0 : length > args.limit ? args.limit : length);
}

// kVectors > 0: the row's keys stay in registers. 0: rows of any length, read again in each pass (from L2 where it fits).
template <class Format, int kThreads, int kVectors>
__global__ void __launch_bounds__(kThreads) topk_rows(const __grid_constant__ Args args) {
  using Bits = typename Format::Bits;
  using Vector = typename Format::Vector;
  constexpr int kWarps = kThreads / 32;
  constexpr bool kResident = kVectors > 0;
  constexpr int kHeld = kResident ? kVectors : 4;  // vectors in registers at a time
  static_assert(sizeof(Shared<kThreads>) <= kTopkSharedBytes);
  __shared__ Shared<kThreads> shared;

  const int thread = threadIdx.x, lane = thread & 31, warp = thread >> 5;
  const int rank = args.cluster == 1 ? 0 : blockIdx.x % args.cluster;
  const int64_t row = blockIdx.x / args.cluster;
  if (args.cluster > 1) cluster_arrive();  // waited for before the first store into another block

  const Bits* scores = static_cast<const Bits*>(args.logits) + row * args.row_stride;
  const bool aligned = (reinterpret_cast<uintptr_t>(scores) & (sizeof(Vector) - 1)) == 0;
  const int length = length_of(args, row);

  // Only as many blocks as the row needs take part; the others leave, and the barrier no longer counts them.
  const int64_t least = int64_t{kThreads} * kTopkColumns * (kResident ? kVectors : 4);
  const int blocks = static_cast<int>(min(int64_t{args.cluster}, max(int64_t{1}, (length + least - 1) / least)));
  if (rank >= blocks) return;
  const int64_t at_once = int64_t{blocks} * kThreads * kTopkColumns;
  const int vectors = static_cast<int>((length + at_once - 1) / at_once);
  // A warp owns consecutive columns: prefix sums over warps are prefix sums over columns.
  const int64_t first = (int64_t{rank} * kWarps + warp) * vectors * kStep;
  const int mine = static_cast<int>(max(int64_t{0}, min(int64_t{vectors} * kStep, length - first)));
  const Bits* source = scores + first + lane * kTopkColumns;

  for (int i = thread; i < kTopkHistogramWords / 4; i += kThreads) reinterpret_cast<uint4*>(shared.histogram)[i] = uint4{0, 0, 0, 0};

  uint32_t keys[kHeld][kTopkColumns];

  // Loads first, then arithmetic: all loads of a thread are in flight together.
  const auto load = [&](int start) {
    if (aligned && start * kStep + kHeld * kStep <= mine) {
#pragma unroll
      for (int i = 0; i < kHeld; ++i) Format::split(__ldg(reinterpret_cast<const Vector*>(source + (start + i) * kStep)), keys[i]);
    } else {
#pragma unroll
      for (int i = 0; i < kHeld; ++i) {
        const int offset = (start + i) * kStep, left = mine - offset - lane * kTopkColumns;
        if (aligned && left >= kTopkColumns) {
          Format::split(__ldg(reinterpret_cast<const Vector*>(source + offset)), keys[i]);
        } else {
#pragma unroll
          for (int j = 0; j < kTopkColumns; ++j) keys[i][j] = j < left ? Format::widen(__ldg(source + offset + j)) : kNaN;
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
#pragma unroll
      for (int j = 0; j < kTopkColumns; ++j) keys[i][j] = key_of(keys[i][j]);
    }
  };
  // Calls use(vector, its keys) for all vectors of the warp, in column order.
  const auto each_vector = [&](const auto& use) {
    if constexpr (kResident) {
#pragma unroll
      for (int i = 0; i < kHeld; ++i) {
        if (i < vectors) use(i, keys[i]);
      }
    } else {
      for (int start = 0; start < vectors; start += kHeld) {
        load(start);
#pragma unroll
        for (int i = 0; i < kHeld; ++i) {
          if (start + i < vectors) use(start + i, keys[i]);
        }
      }
    }
  };
  if constexpr (kResident) load(0);

  int wanted = args.k, equal = 0;  // `equal` columns at the threshold are selected, the first ones
  uint32_t threshold = 0;          // and every column above it
  bool waited = false;
  const auto wait_for_start = [&] {
    if (blocks > 1 && !waited) cluster_wait();
    waited = true;
  };

  if (length > args.k) {
    uint32_t largest = 0;
    each_vector([&](int, const uint32_t(&key)[kTopkColumns]) { largest = max(largest, max(max(key[0], key[1]), max(key[2], key[3]))); });
    const int groups = (args.k + blocks * kWarps - 1) / (blocks * kWarps);  // that a warp must contribute
    uint32_t group = largest;
    int lanes = 1;
    for (; 2 * lanes * groups <= 32; lanes *= 2) group = max(group, __shfl_xor_sync(kAll, group, lanes));
    const uint32_t warp_low = groups <= 32 ? __reduce_min_sync(kAll, group) : 0, warp_high = __reduce_max_sync(kAll, largest);
    if (lane == 0) shared.warp_low[warp] = warp_low, shared.warp_high[warp] = warp_high;
    __syncthreads();
    uint32_t low = __reduce_min_sync(kAll, lane < kWarps ? shared.warp_low[lane] : kAll);
    uint32_t high = __reduce_max_sync(kAll, lane < kWarps ? shared.warp_high[lane] : 0);
    if (blocks > 1) {
      wait_for_start();
      if (warp == 0 && lane < blocks) store_at(&shared.low[rank], lane, low), store_at(&shared.high[rank], lane, high);
      cluster_arrive();
      cluster_wait();
      low = __reduce_min_sync(kAll, lane < blocks ? shared.low[lane] : kAll);
      high = __reduce_max_sync(kAll, lane < blocks ? shared.high[lane] : 0);
    }

    const int bins = 1 << args.bin_bits, share = max(1, bins / kThreads);  // bins that a thread adds up
    for (int pass = 0;; ++pass) {
      if (high == low) {
        threshold = low;
        equal = low == 0 ? 0 : wanted;
        break;
      }
      const uint32_t range = high - low;
      const int shift = max(0, 32 - __clz(range) - args.bin_bits);
      uint32_t* histogram = shared.histogram + (pass << args.bin_bits);
      each_vector([&](int, const uint32_t(&key)[kTopkColumns]) {
#pragma unroll
        for (int j = 0; j < kTopkColumns; ++j) {
          const uint32_t distance = high - key[j], bin = distance >> shift;
          const bool inside = distance <= range;
          const unsigned active = __ballot_sync(kAll, inside);
          if (active == 0) continue;
          // Increments of one counter queue up. Lanes that agree with the first one are counted by it, so that a sea of
          // equal scores costs as little as scattered ones.
          const uint32_t leading = __shfl_sync(kAll, bin, __ffs(active) - 1);
          const unsigned same = __ballot_sync(kAll, inside && bin == leading);
          if (inside && (bin != leading || lane == __ffs(active) - 1)) atomicAdd(&histogram[bin], bin == leading ? __popc(same) : 1);
        }
      });
      if (blocks == 1) {
        __syncthreads();
      } else {
        cluster_arrive();
        cluster_wait();
      }
      uint32_t counts[4] = {0, 0, 0, 0};
      if (thread * share < bins) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          if (i >= share) break;
          if (blocks == 1) {
            counts[i] = histogram[thread * share + i];
          } else {
#pragma unroll 8
            for (int other = 0; other < blocks; ++other) counts[i] += load_at(&histogram[thread * share + i], other);
          }
        }
      }
      const uint32_t sum = counts[0] + counts[1] + counts[2] + counts[3];
      uint32_t before = sum;
#pragma unroll
      for (int offset = 1; offset < 32; offset *= 2) {
        const uint32_t other = __shfl_up_sync(kAll, before, offset);
        if (lane >= offset) before += other;
      }
      if (lane == 31) shared.warp_total[warp] = before;
      __syncthreads();
      before += __reduce_add_sync(kAll, lane < warp ? shared.warp_total[lane] : 0u) - sum;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (before < static_cast<uint32_t>(wanted) && static_cast<uint32_t>(wanted) <= before + counts[i]) {
          shared.bin = thread * share + i, shared.before = static_cast<int>(before), shared.count = static_cast<int>(counts[i]);
        }
        before += counts[i];
      }
      __syncthreads();  // the next writes of bin, before and count come after two more barriers
      wanted -= shared.before;
      const int count = shared.count;
      high -= static_cast<uint32_t>(shared.bin) << shift;
      const uint32_t span = (1u << shift) - 1;
      low = high - low > span ? high - span : low;
      if (wanted == count) {  // all of this part, and nothing below it
        threshold = low == 0 ? 0 : low - 1;
        break;
      }
    }
  }

  int above = 0, at = 0;
  each_vector([&](int, const uint32_t(&key)[kTopkColumns]) {
#pragma unroll
    for (int j = 0; j < kTopkColumns; ++j) above += key[j] > threshold, at += key[j] == threshold;
  });
  above = __reduce_add_sync(kAll, above), at = equal > 0 ? __reduce_add_sync(kAll, at) : 0;
  if (lane == 0) shared.warp_above[warp] = above, shared.warp_equal[warp] = at;
  __syncthreads();
  const int warps_above = lane < kWarps ? shared.warp_above[lane] : 0, warps_equal = lane < kWarps ? shared.warp_equal[lane] : 0;
  int total_above = __reduce_add_sync(kAll, warps_above), total_equal = __reduce_add_sync(kAll, warps_equal);
  int above_before = __reduce_add_sync(kAll, lane < warp ? warps_above : 0), equal_before = __reduce_add_sync(kAll, lane < warp ? warps_equal : 0);
  if (blocks > 1) {
    wait_for_start();
    if (warp == 0 && lane < blocks) store_at(&shared.above[rank], lane, total_above), store_at(&shared.equal[rank], lane, total_equal);
    cluster_arrive();
    cluster_wait();  // also the last access to another block: from here on each may leave
    const int blocks_above = lane < blocks ? shared.above[lane] : 0, blocks_equal = lane < blocks ? shared.equal[lane] : 0;
    total_above = __reduce_add_sync(kAll, blocks_above), total_equal = __reduce_add_sync(kAll, blocks_equal);
    above_before += __reduce_add_sync(kAll, lane < rank ? blocks_above : 0), equal_before += __reduce_add_sync(kAll, lane < rank ? blocks_equal : 0);
  }

  int32_t* indices = args.indices + row * args.k;
  Bits* values = args.values == nullptr ? nullptr : static_cast<Bits*>(args.values) + row * args.k;
  if (above > 0 || (at > 0 && equal_before < equal)) {
    each_vector([&](int i, const uint32_t(&key)[kTopkColumns]) {
      int counts = 0;
#pragma unroll
      for (int j = 0; j < kTopkColumns; ++j) counts += key[j] > threshold ? 1 : equal > 0 && key[j] == threshold ? 1 << 16 : 0;
      if (!__any_sync(kAll, counts != 0)) return;
      int before = counts;
#pragma unroll
      for (int offset = 1; offset < 32; offset *= 2) {
        const int other = __shfl_up_sync(kAll, before, offset);
        if (lane >= offset) before += other;
      }
      const int all = __shfl_sync(kAll, before, 31);
      before -= counts;
      int larger = above_before + (before & 0xffff), same = equal_before + (before >> 16);
#pragma unroll
      for (int j = 0; j < kTopkColumns; ++j) {
        const bool is_larger = key[j] > threshold, is_same = equal > 0 && key[j] == threshold;
        if (is_larger || (is_same && same < equal)) {
          const int place = larger + min(same, equal), offset = i * kStep + j;
          indices[place] = static_cast<int32_t>(first + lane * kTopkColumns + offset);
          if (values != nullptr) values[place] = __ldg(source + offset);
        }
        larger += is_larger, same += is_same;
      }
      above_before += all & 0xffff, equal_before += all >> 16;
    });
  }
  for (int place = total_above + min(total_equal, equal) + rank * kThreads + thread; place < args.k; place += blocks * kThreads) {
    indices[place] = -1;
    if (values != nullptr) values[place] = Format::minus_infinity;
  }
}

struct Device {
  TopkDevice sizes;
  int index;
};

// Sizes of the chip, asked for once.
Device device_of(const Tensor& tensor) {
  constexpr int kMany = 64;
  static std::array<std::once_flag, kMany> asked;
  static std::array<TopkDevice, kMany> known;
  const int index = tensor.get_device_index();
  DSV4_CHECK(index >= 0 && index < kMany, "topk: device index ", index, " is beyond ", kMany);
  std::call_once(asked[index], [&] {
    int shared = 0, processors = 0, clusters = 0;
    STD_CUDA_CHECK(cudaDeviceGetAttribute(&shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, index));
    STD_CUDA_CHECK(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, index));
    STD_CUDA_CHECK(cudaDeviceGetAttribute(&clusters, cudaDevAttrClusterLaunch, index));
    known[index] = TopkDevice{shared, processors, clusters != 0};
  });
  return {known[index], index};
}

template <class Format, int kThreads, int kVectors>
void launch(const Args& args, int64_t rows, cudaStream_t stream) {
  const auto kernel = &topk_rows<Format, kThreads, kVectors>;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(rows * args.cluster));
  config.blockDim = dim3(kThreads);
  config.stream = stream;
  cudaLaunchAttribute attribute = {};
  if (args.cluster > 1) {
    if (args.cluster > 8) STD_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1));
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim.x = args.cluster, attribute.val.clusterDim.y = 1, attribute.val.clusterDim.z = 1;
    config.attrs = &attribute, config.numAttrs = 1;
  }
  STD_CUDA_CHECK(cudaLaunchKernelEx(&config, kernel, args));
}

template <class Format>
void launch_plan(const TopkPlan& plan, const Args& args, int64_t rows, cudaStream_t stream) {
  switch (plan.threads * 16 + plan.vectors) {
    case 512 * 16 + 1: return launch<Format, 512, 1>(args, rows, stream);
    case 512 * 16 + 2: return launch<Format, 512, 2>(args, rows, stream);
    case 512 * 16 + 4: return launch<Format, 512, 4>(args, rows, stream);
    case 512 * 16 + 8: return launch<Format, 512, 8>(args, rows, stream);
    case 1024 * 16 + 1: return launch<Format, 1024, 1>(args, rows, stream);
    case 1024 * 16 + 2: return launch<Format, 1024, 2>(args, rows, stream);
    case 1024 * 16 + 4: return launch<Format, 1024, 4>(args, rows, stream);
    case 1024 * 16 + 0: return launch<Format, 1024, 0>(args, rows, stream);
    default: DSV4_CHECK(false, "topk: no kernel for ", plan.threads, " threads of ", plan.vectors, " vectors");
  }
}

void check_cuda(const char* op, const char* name, const Tensor& tensor, int device) {
  DSV4_CHECK(tensor.is_cuda() && tensor.get_device_index() == device, op, ": ", name, " must be on the CUDA device of logits");
}

void run(const char* op, const Tensor& logits, const Tensor& lengths, int64_t k, std::optional<int64_t> max_seq_len, Tensor& indices, Tensor* values) {
  const int64_t rows = logits.size(0), limit = max_seq_len ? std::min(logits.size(1), *max_seq_len) : logits.size(1);
  if (rows == 0) return;
  const Device device = device_of(logits);
  const TopkPlan plan = topk_plan(device.sizes, rows, limit);
  DSV4_CHECK(rows * plan.cluster <= std::numeric_limits<int32_t>::max(), op, ": ", rows, " rows are more than one launch takes");
  Args args = {};
  args.logits = logits.const_data_ptr(), args.row_stride = logits.stride(0);
  args.lengths.data = lengths.const_data_ptr(), args.lengths.wide = lengths.scalar_type() == ScalarType::Long;
  args.lengths.count = lengths.numel();
  args.lengths.inner = lengths.size(lengths.dim() - 1), args.lengths.inner_stride = lengths.stride(lengths.dim() - 1);
  args.lengths.outer_stride = lengths.dim() == 2 ? lengths.stride(0) : 0;
  if (lengths.dim() == 2 && args.lengths.outer_stride == args.lengths.inner * args.lengths.inner_stride) args.lengths.outer_stride = 0;  // as one row
  args.indices = static_cast<int32_t*>(indices.mutable_data_ptr());
  args.values = values == nullptr ? nullptr : values->mutable_data_ptr();
  args.limit = static_cast<int>(limit), args.k = static_cast<int>(k), args.cluster = plan.cluster, args.bin_bits = plan.bin_bits;
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device.index, &stream));
  if (logits.scalar_type() == ScalarType::Float) {
    launch_plan<Float32>(plan, args, rows, static_cast<cudaStream_t>(stream));
  } else {
    launch_plan<BFloat16>(plan, args, rows, static_cast<cudaStream_t>(stream));
  }
}

void check(const char* op, const Tensor& logits, const Tensor& lengths, int64_t k, std::optional<int64_t> max_seq_len) {
  DSV4_CHECK(logits.dim() == 2, op, ": logits must be 2-dimensional, got ", logits.dim(), " dimensions");
  check_cuda(op, "logits", logits, logits.get_device_index());
  check_cuda(op, "lengths", lengths, logits.get_device_index());
  DSV4_CHECK(logits.scalar_type() == ScalarType::Float || logits.scalar_type() == ScalarType::BFloat16, op, ": logits must be float32 or bfloat16");
  check_dense_last(op, "logits", logits);
  DSV4_CHECK(logits.size(1) <= std::numeric_limits<int32_t>::max(), op, ": logits must have less than 2**31 columns, got ", logits.size(1));
  check_index(op, "lengths", lengths);
  DSV4_CHECK(lengths.dim() == 1 || lengths.dim() == 2, op, ": lengths must be 1- or 2-dimensional, got ", lengths.dim(), " dimensions");
  DSV4_CHECK(lengths.numel() <= logits.size(0), op, ": lengths must have at most ", logits.size(0), " entries, one for each row of logits, got ", lengths.numel());
  DSV4_CHECK(k >= 1 && k <= 4096, op, ": k must be between 1 and 4096, got ", k);
  DSV4_CHECK(!max_seq_len || *max_seq_len >= 0, op, ": max_seq_len must be at least 0, got ", max_seq_len.value_or(0));
}

}  // namespace

// Scratch is on chip, so the lane has nothing to choose.
Tensor topk_cuda(const Tensor& logits, const Tensor& lengths, int64_t k, std::optional<int64_t> max_seq_len, int64_t /*lane*/) {
  check("topk", logits, lengths, k, max_seq_len);
  const torch::stable::accelerator::DeviceGuard guard(logits.get_device_index());
  Tensor indices = torch::stable::new_empty(logits, {logits.size(0), k}, ScalarType::Int);
  run("topk", logits, lengths, k, max_seq_len, indices, nullptr);
  return indices;
}

std::tuple<Tensor, Tensor> topk_values_cuda(const Tensor& logits, const Tensor& lengths, int64_t k, std::optional<int64_t> max_seq_len, int64_t /*lane*/) {
  check("topk_values", logits, lengths, k, max_seq_len);
  const torch::stable::accelerator::DeviceGuard guard(logits.get_device_index());
  Tensor indices = torch::stable::new_empty(logits, {logits.size(0), k}, ScalarType::Int);
  Tensor values = torch::stable::new_empty(logits, {logits.size(0), k});
  run("topk_values", logits, lengths, k, max_seq_len, indices, &values);
  return {std::move(values), std::move(indices)};
}

}  // namespace dsv4_ops
