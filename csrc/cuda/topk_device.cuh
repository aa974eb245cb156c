// What the top-k kernels share: score formats, keys, arguments, histograms, and the places where a selected column goes.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "../topk_plan.h"
#include "ptx.cuh"

namespace dsv4_ops::topk_kernels {

constexpr unsigned kAll = 0xffffffffu;
constexpr uint32_t kNaN = 0x7fffffffu;
constexpr uint32_t kLowest = 0x007fffffu;  // key of -inf
constexpr uint32_t kHighest = 0xff800000u;  // of +inf
constexpr int kBins = kTopkBins;
constexpr int kFew = 32;  // candidates that are ranked by comparing all pairs, one in a lane

struct Float32 {
  using Bits = uint32_t;
  using Vector = uint4;
  static constexpr Bits minus_infinity = 0xff800000u;
  static __device__ uint32_t widen(Bits raw) { return raw; }
  static __device__ void split(Vector v, float (&score)[kTopkColumns]) {
    score[0] = __uint_as_float(v.x), score[1] = __uint_as_float(v.y), score[2] = __uint_as_float(v.z), score[3] = __uint_as_float(v.w);
  }
};

struct BFloat16 {
  using Bits = uint16_t;
  using Vector = uint2;
  static constexpr Bits minus_infinity = 0xff80u;
  static __device__ uint32_t widen(Bits raw) { return uint32_t{raw} << 16; }
  static __device__ void split(Vector v, float (&score)[kTopkColumns]) {
    score[0] = __uint_as_float(v.x << 16), score[1] = __uint_as_float(v.x & 0xffff0000u);
    score[2] = __uint_as_float(v.y << 16), score[3] = __uint_as_float(v.y & 0xffff0000u);
  }
};

// An int32 or int64 vector, or a matrix read row by row.
struct Lengths {
  const void* data;
  bool wide;
  uint32_t count, inner;  // inner 0: one stride reaches all
  int64_t outer_stride, inner_stride;
};

// From a selected column to a slot of the cache; `table` null: columns are the result.
struct Slots {
  const int32_t* table;
  int64_t requests, pages, request_stride, page_stride;
  const int32_t* request_of;
  const bool* valid;
  int64_t request_of_stride, valid_stride;
  int block_size;
  int32_t* lens;
};

struct Args {
  const void* logits;
  int64_t row_stride;
  Lengths lengths;
  Slots slots;
  int32_t* indices;
  void* values;  // or null
  int limit, k, cluster, listed, bitmap_words;
  bool eager;  // read a row before its length is known
};


__device__ __forceinline__ uint32_t key_of(float score) {  // of the same order; -0 and +0 share one, NaN is 0
  const uint32_t ordered = __float_as_uint(score + 0.0f);  // -0 becomes +0
  const uint32_t key = ordered ^ (static_cast<uint32_t>(static_cast<int32_t>(ordered) >> 31) | 0x80000000u);
  return score == score ? key : 0u;
}

// The score of a key other than 0.
__device__ __forceinline__ float score_of(uint32_t key) { return __uint_as_float((key & 0x80000000u) != 0 ? key ^ 0x80000000u : ~key); }

__device__ __forceinline__ int scan(int value, int lane) {  // inclusive, over a warp
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) {
    const int other = __shfl_up_sync(kAll, value, offset);
    if (lane >= offset) value += other;
  }
  return value;
}

// ---- one row: what goes in and out -----------------------------------------------------------------------------------

template <class Format>
struct Row {
  using Bits = typename Format::Bits;

  const Bits* scores;
  int64_t number;
  int length;
  bool aligned;  // to vectors
  const int32_t* pages;  // of the row's request, or null

  // `length` is a load from memory; all else is known at once.
  __device__ __forceinline__ Row(const Args& args, int64_t row) : number(row), pages(nullptr) {
    scores = static_cast<const Bits*>(args.logits) + row * args.row_stride;
    aligned = (reinterpret_cast<uintptr_t>(scores) & (sizeof(typename Format::Vector) - 1)) == 0;
    const Lengths& lengths = args.lengths;
    int64_t found = 0;
    if (row < lengths.count) {
      int64_t offset = row * lengths.inner_stride;
      if (lengths.inner != 0) {
        const uint32_t outer = static_cast<uint32_t>(row) / lengths.inner;
        offset = outer * lengths.outer_stride + (row - int64_t{outer} * lengths.inner) * lengths.inner_stride;
      }
      found = lengths.wide ? static_cast<const int64_t*>(lengths.data)[offset] : static_cast<const int32_t*>(lengths.data)[offset];
    }
    if (args.slots.request_of != nullptr) {  // padding and unknown requests see nothing, so that nothing of them is loaded
      const Slots& slots = args.slots;
      const int64_t request = slots.valid[row * slots.valid_stride] ? slots.request_of[row * slots.request_of_stride] : -1;
      if (request < 0 || request >= slots.requests) {
        found = 0;
      } else {
        pages = slots.table + request * slots.request_stride;
      }
    }
    length = static_cast<int>(found < 0 ? 0 : found > args.limit ? args.limit : found);
  }

  // Scores of columns [column, column + 4), NaN from `end` on.
  __device__ __forceinline__ void load(float (&score)[kTopkColumns], int64_t column, int64_t end) const {
    const int left = static_cast<int>(max(int64_t{0}, min(int64_t{kTopkColumns}, end - column)));
    const Bits* const from = scores + column;
    if (aligned && left == kTopkColumns) {
      Format::split(ptx::load_global(reinterpret_cast<const typename Format::Vector*>(from)), score);
    } else {
#pragma unroll
      for (int j = 0; j < kTopkColumns; ++j) score[j] = __uint_as_float(j < left ? Format::widen(ptx::load_global(from + j)) : kNaN);
    }
  }

  // The same where a vector is aligned and inside.
  __device__ __forceinline__ void load_whole(float (&score)[kTopkColumns], int64_t column) const {
    Format::split(ptx::load_global(reinterpret_cast<const typename Format::Vector*>(scores + column)), score);
  }

  __device__ __forceinline__ float score_at(int column) const { return __uint_as_float(Format::widen(ptx::load_global(scores + column))); }

  // Where the selected columns go, in order: to the result itself, or to `staged` where write() has more to do with them.
  __device__ __forceinline__ int32_t* target(const Args& args, int32_t* staged) const {
    return args.values == nullptr && args.slots.request_of == nullptr ? args.indices + number * args.k : staged;
  }

  // The rest of the results, by all threads of a block, once; the columns are written and a barrier lies behind.
  template <int kThreads>
  __device__ __forceinline__ void write(const Args& args, const int32_t* staged, int selected) const {
    selected = min(selected, args.k);
    const bool plain = args.values == nullptr && args.slots.request_of == nullptr;
#pragma unroll 1
    for (int i = threadIdx.x + (plain ? selected : 0); i < args.k; i += kThreads) {
      const int64_t at = number * args.k + i;
      const int column = i < selected ? staged[i] : -1;
      int32_t result = column;
      if (args.slots.request_of != nullptr && column >= 0) {
        const int page = column / args.slots.block_size;
        const int64_t block = page < args.slots.pages ? ptx::load_global(pages + page * args.slots.page_stride) : 0;
        const int64_t slot = block * args.slots.block_size + column % args.slots.block_size;
        result = block > 0 && slot <= 0x7fffffff ? static_cast<int32_t>(slot) : -1;
      }
      args.indices[at] = result;
      if (args.values != nullptr) static_cast<Bits*>(args.values)[at] = column >= 0 ? ptx::load_global(scores + column) : Format::minus_infinity;
    }
    if (args.slots.lens != nullptr && threadIdx.x == 0) args.slots.lens[number] = selected;
  }
};

// ---- histograms -------------------------------------------------------------------------------------------------------

struct Found {
  int bin;     // that holds the wanted one; -1: fewer than wanted were counted
  int before;  // counted in the bins before it; -1: all that were counted
  int count;   // and in it
};

struct Shared {
  union {
    alignas(16) uint32_t histogram[3][kBins + 4];  // one in use, the next one clear, one still being read
    int32_t columns[3 * kBins];                    // at the end: the selected, in order
  };
  uint32_t totals[32], warp_low[32], warp_high[32];
  int counts[32];
  Found found;
  uint2 few[kFew];  // (key, column)
  int few_count, cut_column;
};

template <int kThreads>
__device__ __forceinline__ void clear_histogram(Shared& shared, int turn) {
  static_assert(kThreads >= kBins / 4);
  if (threadIdx.x < kBins / 4) reinterpret_cast<uint4*>(shared.histogram[turn % 3])[threadIdx.x] = uint4{0, 0, 0, 0};
}

// Among counts of this turn, largest scores first, the bin of the wanted-th. By all threads.
template <int kThreads>
__device__ __forceinline__ Found find_bin(Shared& shared, int turn, int wanted) {
  constexpr int kShare = kBins / kThreads;
  static_assert(kShare == 2 || kShare == 4);
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const uint32_t* const histogram = shared.histogram[turn % 3] + threadIdx.x * kShare;
  __syncthreads();
  int bins[kShare];
  if constexpr (kShare == 2) {
    const int2 two = *reinterpret_cast<const int2*>(histogram);
    bins[0] = two.x, bins[1] = two.y;
  } else {
    const int4 four = *reinterpret_cast<const int4*>(histogram);
    bins[0] = four.x, bins[1] = four.y, bins[2] = four.z, bins[3] = four.w;
  }
  int sum = 0;
#pragma unroll
  for (int i = 0; i < kShare; ++i) sum += bins[i];
  const int through = scan(sum, lane);
  if (lane == 31) shared.totals[warp] = through;
  __syncthreads();
  int before = static_cast<int>(__reduce_add_sync(kAll, lane < warp ? shared.totals[lane] : 0)) + through - sum;
  if (before < wanted && wanted <= before + sum) {
    int bin = threadIdx.x * kShare;
#pragma unroll
    for (int i = 0; i < kShare - 1; ++i) {
      if (before + bins[i] >= wanted) break;
      before += bins[i], ++bin;
    }
    shared.found = Found{bin, before, static_cast<int>(histogram[bin - threadIdx.x * kShare])};
  } else if (threadIdx.x == kThreads - 1 && before + sum < wanted) {
    shared.found = Found{-1, before + sum, 0};
  }
  __syncthreads();
  return shared.found;  // written again after two more barriers
}

// Equal parts of [low, high], as scores: the bin of a score by one subtraction and one multiplication, each of which keeps
// the order. Scores below `low`, and NaN, fall into no bin but the last.
struct Linear {
  float high, scale;

  __device__ __forceinline__ Linear(float low, float high) : high(high), scale((kBins - 2) / (high - low)) {}
  __device__ __forceinline__ bool usable() const { return scale > 0.0f && scale < 3e38f; }  // the interval is finite and more than a score
  __device__ __forceinline__ uint32_t bin(float score) const { return __float_as_uint(fmaf(high - score, scale, 8388608.0f)) - 0x4b000000u; }  // score <= high, or NaN
  __device__ __forceinline__ uint32_t bin_of_number(float score) const { return bin(fminf(score, high)); }
};

// Past the last bin there is one that nobody reads: a branch around the increment would cost more than it saves. Lanes of
// one bin are counted at once by the hardware.
__device__ __forceinline__ void count_bin(uint32_t* histogram, uint32_t bin) { atomicAdd(&histogram[min(bin, static_cast<uint32_t>(kBins))], 1u); }

// Smallest and largest over all threads of a block, through places that were last read before the last barrier.
template <int kThreads>
__device__ __forceinline__ void block_range(Shared& shared, uint32_t& smallest, uint32_t& largest) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  smallest = __reduce_min_sync(kAll, smallest), largest = __reduce_max_sync(kAll, largest);
  if (lane == 0) shared.warp_low[warp] = smallest, shared.warp_high[warp] = largest;
  __syncthreads();
  smallest = __reduce_min_sync(kAll, lane < kThreads / 32 ? shared.warp_low[lane] : kAll);
  largest = __reduce_max_sync(kAll, lane < kThreads / 32 ? shared.warp_high[lane] : 0u);
}

// The search by keys, for scores that Linear does not tell apart: 2048 equal parts of an interval of keys, at most three turns.
struct Search {
  uint32_t low, high;
  int wanted, turn;
  int count = -1;  // keys in [low, high], when known; fewer than wanted: there is no such key
};

// `each_key(use)` calls use(key) for the thread's keys. Ends with one key, with an interval of which all are wanted, or
// without a key. The histogram of search.turn is clear.
template <int kThreads, class EachKey>
__device__ __forceinline__ void search_keys(Shared& shared, Search& search, const EachKey& each_key) {
#pragma unroll 1
  while (search.low < search.high) {
    const int shift = max(0, 32 - __clz(search.high - search.low) - kTopkBinBits);
    clear_histogram<kThreads>(shared, search.turn + 1);
    uint32_t* const histogram = shared.histogram[search.turn % 3];
    each_key([&](uint32_t key) { count_bin(histogram, key >= search.low && key <= search.high ? (search.high - key) >> shift : kAll); });
    const Found found = find_bin<kThreads>(shared, search.turn++, search.wanted);
    search.count = found.bin < 0 ? found.before : found.count;
    if (found.bin < 0) return;
    search.wanted -= found.before;
    search.high -= static_cast<uint32_t>(found.bin) << shift;
    const uint32_t span = (1u << shift) - 1;
    if (search.high - search.low > span) search.low = search.high - span;
    if (search.count == search.wanted) return;
  }
}

// Selected are all keys above the cut's, and of those equal to it the columns up to the cut's.
struct Cut {
  uint32_t key;
  int column;

  __device__ __forceinline__ bool selects(uint32_t other_key, int other_column) const { return other_key > key || (other_key == key && other_column <= column); }
};

// The cut at the wanted-th of few keys, by a warp. `own` of the lane is (key, column) of one of them.
__device__ __forceinline__ Cut rank_few(const Shared& shared, int count, int wanted, int lane, uint2& own) {
  own = lane < count ? shared.few[lane] : uint2{0, 0x7fffffffu};
  int rank = 0;
#pragma unroll 4
  for (int other = 0; other < count; ++other) {
    const uint2 its = shared.few[other];
    rank += its.x > own.x || (its.x == own.x && its.y < own.y);
  }
  const int last = __ffs(__ballot_sync(kAll, lane < count && rank == wanted - 1)) - 1;
  return Cut{__shfl_sync(kAll, own.x, last), static_cast<int>(__shfl_sync(kAll, own.y, last))};
}

}  // namespace dsv4_ops::topk_kernels
