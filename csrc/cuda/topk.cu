// Row-wise top-k on NVIDIA GPUs: exact, the same bits every time, and free of waits that another block could miss.
//
// A block, or a cluster of blocks that exchange through distributed shared memory and the hardware's cluster barrier,
// ranks one row. Scores stay in registers, so a row is read once; compared as keys, unsigned numbers of the same order
// (-0 and +0 share one; NaN and columns past the length get 0, below every number).
//   1. Every warp contributes its few largest scores, k in all; the smallest is a lower bound of the k-th largest.
//   2. Columns above the bound, a few times k in most rows, are listed in column order; the rest of the row is done with.
//   3. A histogram over equal parts of [low, high], largest keys first, finds the part that holds the k-th largest key;
//      it is the next interval. 3 or 4 passes of 11 to 8 bits reach one key whatever the scores are, most rows need 2.
//   4. Prefix sums of the selected, in column order, give each its place: ascending, ties to the lowest column, unsorted.
// Fewer than k above the bound: it is the k-th largest itself, and step 4 runs on the registers. More than the list
// holds: steps 3 and 4 run on the registers. A pass uses a histogram of its own, all cleared at the start, and nothing is
// carried from one row or launch to the next.
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
  int limit, k, cluster, bin_bits, listed;
};

struct Shared {
  alignas(16) uint32_t histogram[kTopkHistogramWords];
  uint32_t warp_low[32], warp_high[32], warp_total[32];
  int warp_above[32], warp_selected[32], warp_equal[32];  // each written once a row, or with a barrier after the last reader
  uint32_t low[kMaxCluster], high[kMaxCluster];  // of each block of the cluster, written by it
  int listed[kMaxCluster], above[kMaxCluster], equal[kMaxCluster];
  int bin, before, count;
};
static_assert(sizeof(Shared) <= kTopkFixedBytes && kTopkFixedBytes % 8 == 0);

// [low, high] holds the wanted-th largest key, until it is one key or all of an interval is wanted.
struct Search {
  uint32_t low, high;
  int wanted;
  uint32_t threshold = 0;  // every key above it is selected
  int equal = 0;           // and so many columns at it, the first ones
};

__device__ __forceinline__ uint32_t key_of(float score) {
  const uint32_t ordered = __float_as_uint(score + 0.0f);  // -0 becomes +0
  const uint32_t key = ordered ^ (static_cast<uint32_t>(static_cast<int32_t>(ordered) >> 31) | 0x80000000u);
  return score == score ? key : 0u;
}

// The score of a key other than 0.
__device__ __forceinline__ float score_of(uint32_t key) { return __uint_as_float((key & 0x80000000u) != 0 ? key ^ 0x80000000u : ~key); }

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

__device__ __forceinline__ int scan(int value, int lane) {  // inclusive, over a warp
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) {
    const int other = __shfl_up_sync(kAll, value, offset);
    if (lane >= offset) value += other;
  }
  return value;
}

// Narrows the search by histograms. `each_key(use)` calls use(key) for each key, by whole warps, 0 where there is none.
template <int kThreads, class EachKey>
__device__ __forceinline__ void narrow(Shared& shared, Search& search, int bin_bits, int blocks, const EachKey& each_key) {
  const int thread = threadIdx.x, lane = thread & 31, warp = thread >> 5;
  const int bins = 1 << bin_bits, share = max(1, bins / kThreads);  // bins that a thread adds up
  for (int pass = 0;; ++pass) {
    if (search.high == search.low) {
      search.threshold = search.low;
      search.equal = search.low == 0 ? 0 : search.wanted;
      return;
    }
    const uint32_t high = search.high, range = high - search.low;
    const int shift = max(0, 32 - __clz(range) - bin_bits);
    uint32_t* histogram = shared.histogram + (pass << bin_bits);
    each_key([&](uint32_t key) {
      const uint32_t distance = high - key, bin = distance >> shift;
      const bool inside = distance <= range;
      const unsigned active = __ballot_sync(kAll, inside);
      if (active == 0) return;
      // Increments of one counter queue up. Lanes that agree with the first one are counted by it, so that a sea of equal
      // scores costs as little as scattered ones.
      const int first = __ffs(active) - 1;
      const uint32_t leading = __shfl_sync(kAll, bin, first);
      const unsigned same = __ballot_sync(kAll, inside && bin == leading);
      if (inside && (bin != leading || lane == first)) atomicAdd(&histogram[bin], bin == leading ? __popc(same) : 1);
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
    const int sum = counts[0] + counts[1] + counts[2] + counts[3];
    int before = scan(sum, lane);
    if (lane == 31) shared.warp_total[warp] = before;
    __syncthreads();
    before += __reduce_add_sync(kAll, lane < warp ? shared.warp_total[lane] : 0) - sum;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int count = counts[i];
      if (before < search.wanted && search.wanted <= before + count) shared.bin = thread * share + i, shared.before = before, shared.count = count;
      before += count;
    }
    __syncthreads();  // the next writes of bin, before and count come after two more barriers
    search.wanted -= shared.before;
    search.high -= static_cast<uint32_t>(shared.bin) << shift;
    const uint32_t span = (1u << shift) - 1;
    if (search.high - search.low > span) search.low = search.high - span;
    if (search.wanted == shared.count) {  // all of this part, and nothing below it
      search.threshold = search.low == 0 ? 0 : search.low - 1;
      return;
    }
  }
}

// kVectors > 0: the row's scores stay in registers. 0: rows of any length, read again in each pass (from L2 where it fits).
template <class Format, int kThreads, int kVectors>
__global__ void __launch_bounds__(kThreads) topk_rows(const __grid_constant__ Args args) {
  using Bits = typename Format::Bits;
  using Vector = typename Format::Vector;
  constexpr int kWarps = kThreads / 32;
  constexpr bool kResident = kVectors > 0;
  constexpr int kHeld = kResident ? kVectors : 4;  // vectors in registers at a time
  extern __shared__ __align__(16) unsigned char memory[];
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  uint2* const list = reinterpret_cast<uint2*>(memory + kTopkFixedBytes);  // (key, column) of candidates

  const int thread = threadIdx.x, lane = thread & 31, warp = thread >> 5;
  const int rank = args.cluster == 1 ? 0 : blockIdx.x % args.cluster;
  const int64_t row = blockIdx.x / args.cluster;
  if (args.cluster > 1) cluster_arrive();  // waited for before the first store into another block

  const Bits* scores = static_cast<const Bits*>(args.logits) + row * args.row_stride;
  const bool aligned = (reinterpret_cast<uintptr_t>(scores) & (sizeof(Vector) - 1)) == 0;
  const int length = length_of(args, row);

  // Rows of one block are read up to the limit, so that the scores need not wait for the length. Others by their length:
  // only as many blocks as the row needs take part; the others leave, and the barrier no longer counts them.
  const int64_t readable = kResident && args.cluster == 1 ? args.limit : length;
  const int64_t least = int64_t{kThreads} * kTopkColumns * (kResident ? kVectors : 4);
  const int blocks = static_cast<int>(min(int64_t{args.cluster}, max(int64_t{1}, (readable + least - 1) / least)));
  if (rank >= blocks) return;
  const int64_t at_once = int64_t{blocks} * kThreads * kTopkColumns;
  const int vectors = static_cast<int>((readable + at_once - 1) / at_once);
  // A warp owns consecutive columns: prefix sums over warps are prefix sums over columns.
  const int64_t first = (int64_t{rank} * kWarps + warp) * vectors * kStep;
  const int mine = static_cast<int>(max(int64_t{0}, min(int64_t{vectors} * kStep, readable - first)));
  const Bits* source = scores + first + lane * kTopkColumns;

  float held[kHeld][kTopkColumns];  // NaN past the row's end

  // All loads of a thread are in flight together.
  const auto load = [&](int start) {
    uint32_t raw[kHeld][kTopkColumns];
    if (aligned && start * kStep + kHeld * kStep <= mine) {
#pragma unroll
      for (int i = 0; i < kHeld; ++i) Format::split(__ldg(reinterpret_cast<const Vector*>(source + (start + i) * kStep)), raw[i]);
    } else {
#pragma unroll
      for (int i = 0; i < kHeld; ++i) {
        const int offset = (start + i) * kStep, left = mine - offset - lane * kTopkColumns;
        if (aligned && left >= kTopkColumns) {
          Format::split(__ldg(reinterpret_cast<const Vector*>(source + offset)), raw[i]);
        } else {
#pragma unroll
          for (int j = 0; j < kTopkColumns; ++j) raw[i][j] = j < left ? Format::widen(__ldg(source + offset + j)) : kNaN;
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
#pragma unroll
      for (int j = 0; j < kTopkColumns; ++j) held[i][j] = __uint_as_float(raw[i][j]);
    }
  };
  // Calls use(vector, its scores) for all vectors of the warp, in column order.
  const auto each_vector = [&](const auto& use) {
    if constexpr (kResident) {
#pragma unroll
      for (int i = 0; i < kHeld; ++i) {
        if (i < vectors) use(i, held[i]);
      }
    } else {
      for (int start = 0; start < vectors; start += kHeld) {
        load(start);
#pragma unroll
        for (int i = 0; i < kHeld; ++i) {
          if (start + i < vectors) use(start + i, held[i]);
        }
      }
    }
  };
  if constexpr (kResident) load(0);
  for (int i = thread; i < kTopkHistogramWords / 4; i += kThreads) reinterpret_cast<uint4*>(shared.histogram)[i] = uint4{0, 0, 0, 0};
  if constexpr (kResident) {
    if (length < readable) {
      const int64_t left = length - first - lane * kTopkColumns;
#pragma unroll
      for (int i = 0; i < kHeld; ++i) {
#pragma unroll
        for (int j = 0; j < kTopkColumns; ++j) {
          if (i * kStep + j >= left) held[i][j] = __uint_as_float(kNaN);
        }
      }
    }
  }

  int32_t* const indices = args.indices + row * args.k;
  Bits* const values = args.values == nullptr ? nullptr : static_cast<Bits*>(args.values) + row * args.k;
  Search search{0, 0, args.k};
  bool waited = false;
  const auto wait_for_start = [&] {
    if (blocks > 1 && !waited) cluster_wait();
    waited = true;
  };

  if (length > args.k) {
    float top = __uint_as_float(kNaN);
    each_vector([&](int, const float(&score)[kTopkColumns]) { top = fmaxf(top, fmaxf(fmaxf(score[0], score[1]), fmaxf(score[2], score[3]))); });
    const uint32_t largest = key_of(top);
    // Each warp whose columns are all in the row contributes `need` keys; the smallest contribution bounds the row's
    // k-th largest key from below.
    const int full = static_cast<int>(min(int64_t{blocks} * kWarps, int64_t{length} / (max(vectors, 1) * kStep)));
    const int need = full == 0 ? 33 : (args.k + full - 1) / full;
    uint32_t warp_low = 0;
    const uint32_t warp_high = __reduce_max_sync(kAll, largest);
    if (need <= 8) {
      uint32_t rest = largest;
      warp_low = warp_high;
      for (int i = 1; i < need; ++i) {
        if (lane == __ffs(__ballot_sync(kAll, rest == warp_low)) - 1) rest = 0;
        warp_low = __reduce_max_sync(kAll, rest);
      }
    } else if (need <= 32) {
      uint32_t group = largest;
      for (int lanes = 1; 2 * lanes * need <= 32; lanes *= 2) group = max(group, __shfl_xor_sync(kAll, group, lanes));
      warp_low = __reduce_min_sync(kAll, group);
    }
    if (need <= 32 && rank * kWarps + warp >= full) warp_low = kAll;
    if (lane == 0) shared.warp_low[warp] = warp_low, shared.warp_high[warp] = warp_high;
    __syncthreads();
    search.low = __reduce_min_sync(kAll, lane < kWarps ? shared.warp_low[lane] : kAll);
    search.high = __reduce_max_sync(kAll, lane < kWarps ? shared.warp_high[lane] : 0);
    if (blocks > 1) {
      wait_for_start();
      if (warp == 0 && lane < blocks) store_at(&shared.low[rank], lane, search.low), store_at(&shared.high[rank], lane, search.high);
      cluster_arrive();
      cluster_wait();
      search.low = __reduce_min_sync(kAll, lane < blocks ? shared.low[lane] : kAll);
      search.high = __reduce_max_sync(kAll, lane < blocks ? shared.high[lane] : 0);
    }

    int candidates = -1;
    if ((kHeld > 1 || args.cluster > 1) && search.low > 0 && search.low < search.high) {
      // Columns above the bound are listed in column order in the shared memory of the first block, which goes on alone.
      // Fewer than k: the bound is the k-th largest key. Too many for the list: the search goes on in registers.
      const float bound = score_of(search.low);
      int count = 0;
      each_vector([&](int, const float(&score)[kTopkColumns]) {
#pragma unroll
        for (int j = 0; j < kTopkColumns; ++j) count += score[j] > bound;
      });
      const int warp_count = __reduce_add_sync(kAll, count);
      if (lane == 0) shared.warp_above[warp] = warp_count;
      __syncthreads();
      const int warps = lane < kWarps ? shared.warp_above[lane] : 0;
      candidates = __reduce_add_sync(kAll, warps);
      int place = __reduce_add_sync(kAll, lane < warp ? warps : 0);
      if (blocks > 1) {
        if (warp == 0 && lane < blocks) store_at(&shared.listed[rank], lane, candidates);
        cluster_arrive();
        cluster_wait();
        const int others = lane < blocks ? shared.listed[lane] : 0;
        candidates = __reduce_add_sync(kAll, others);
        place += __reduce_add_sync(kAll, lane < rank ? others : 0);
      }
      if (candidates >= args.k && candidates <= args.listed) {
        if (warp_count > 0) {
          each_vector([&](int i, const float(&score)[kTopkColumns]) {
            int some = 0;
#pragma unroll
            for (int j = 0; j < kTopkColumns; ++j) some += score[j] > bound;
            if (!__any_sync(kAll, some)) return;
            const int through = scan(some, lane);
            int at = place + through - some;
            place += __shfl_sync(kAll, through, 31);
#pragma unroll
            for (int j = 0; j < kTopkColumns; ++j) {
              if (score[j] > bound) {
                const uint32_t key = key_of(score[j]), column = static_cast<uint32_t>(first + i * kStep + lane * kTopkColumns + j);
                if (blocks == 1) {
                  list[at] = uint2{key, column};
                } else {
                  store_at(&list[at].x, 0, key), store_at(&list[at].y, 0, column);
                }
                ++at;
              }
            }
          });
        }
        if (blocks == 1) {
          __syncthreads();
        } else {
          cluster_arrive();
          if (rank > 0) return;
          cluster_wait();
        }
        search.low += 1;
        narrow<kThreads>(shared, search, 11, 1, [&](const auto& use) {
          for (int i = thread; i - lane < candidates; i += kThreads) use(i < candidates ? list[i].x : 0u);
        });
        // In list order, which is column order.
        const int share = (candidates + kThreads - 1) / kThreads, begin = min(thread * share, candidates), end = min(begin + share, candidates);
        int counts = 0;
        for (int i = begin; i < end; ++i) counts += list[i].x > search.threshold ? 1 : search.equal > 0 && list[i].x == search.threshold ? 1 << 16 : 0;
        int before = scan(counts, lane);
        if (lane == 31) shared.warp_above[warp] = before;
        __syncthreads();
        before += __reduce_add_sync(kAll, lane < warp ? shared.warp_above[lane] : 0) - counts;
        int larger = before & 0xffff, same = before >> 16;
        for (int i = begin; i < end; ++i) {
          const bool is_larger = list[i].x > search.threshold, is_same = search.equal > 0 && list[i].x == search.threshold;
          if (is_larger || (is_same && same < search.equal)) {
            const int at = larger + min(same, search.equal);
            indices[at] = static_cast<int32_t>(list[i].y);
            if (values != nullptr) values[at] = __ldg(scores + list[i].y);
          }
          larger += is_larger, same += is_same;
        }
        return;
      }
    }
    if (candidates >= 0 && candidates < args.k) {
      search.threshold = search.low, search.equal = args.k - candidates;
    } else {
      narrow<kThreads>(shared, search, args.bin_bits, blocks, [&](const auto& use) {
        each_vector([&](int, const float(&score)[kTopkColumns]) {
#pragma unroll
          for (int j = 0; j < kTopkColumns; ++j) use(key_of(score[j]));
        });
      });
    }
  }

  const uint32_t threshold = search.threshold;
  const int equal = search.equal;
  int above = 0, at = 0;
  each_vector([&](int, const float(&score)[kTopkColumns]) {
#pragma unroll
    for (int j = 0; j < kTopkColumns; ++j) {
      const uint32_t key = key_of(score[j]);
      above += key > threshold, at += key == threshold;
    }
  });
  above = __reduce_add_sync(kAll, above), at = equal > 0 ? __reduce_add_sync(kAll, at) : 0;
  if (lane == 0) shared.warp_selected[warp] = above, shared.warp_equal[warp] = at;
  __syncthreads();
  const int warps_above = lane < kWarps ? shared.warp_selected[lane] : 0, warps_equal = lane < kWarps ? shared.warp_equal[lane] : 0;
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

  if (above > 0 || (at > 0 && equal_before < equal)) {
    each_vector([&](int i, const float(&score)[kTopkColumns]) {
      uint32_t key[kTopkColumns];
      int counts = 0;
#pragma unroll
      for (int j = 0; j < kTopkColumns; ++j) {
        key[j] = key_of(score[j]);
        counts += key[j] > threshold ? 1 : equal_before < equal && key[j] == threshold ? 1 << 16 : 0;
      }
      if (!__any_sync(kAll, counts != 0)) return;
      const int through = scan(counts, lane), all = __shfl_sync(kAll, through, 31), before = through - counts;
      int larger = above_before + (before & 0xffff), same = equal_before + (before >> 16);
#pragma unroll
      for (int j = 0; j < kTopkColumns; ++j) {
        const bool is_larger = key[j] > threshold, is_same = key[j] == threshold;
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
  config.dynamicSmemBytes = kTopkFixedBytes + 8 * args.listed;
  config.stream = stream;
  if (config.dynamicSmemBytes > 48 * 1024) {
    STD_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(config.dynamicSmemBytes)));
  }
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
  args.limit = static_cast<int>(limit), args.k = static_cast<int>(k), args.cluster = plan.cluster, args.bin_bits = plan.bin_bits, args.listed = plan.listed;
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
