// Short rows: one block holds all scores of a row in registers.
//
//   1. The smallest of at least k disjoint groups' maxima bounds the k-th largest score from below.
//   2. A histogram of equal parts between the bound and the largest score finds the part that holds the k-th largest; the
//      few columns in that part are ranked by comparing all pairs. More than a few: histograms of keys, three at most.
//   3. Prefix sums in column order give each selected column its place.
#pragma once

#include "topk_device.cuh"

namespace dsv4_ops::topk_kernels {

constexpr int kSegment = 32 * kTopkColumns;  // columns that a warp reads at once

// The column of the wanted-th key that equals `equal`. `each_vector(use)` calls use(first column of the lane's four, their
// keys) for the warp's vectors in column order, and earlier warps have lower columns.
template <int kThreads, class EachVector>
__device__ __forceinline__ int column_of_equal(Shared& shared, uint32_t equal, int wanted, const EachVector& each_vector) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  int count = 0;
  each_vector([&](int, const uint32_t(&key)[kTopkColumns]) {
#pragma unroll
    for (int j = 0; j < kTopkColumns; ++j) count += key[j] == equal;
  });
  count = __reduce_add_sync(kAll, count);
  if (lane == 0) shared.warp_low[warp] = count;
  __syncthreads();
  int before = __reduce_add_sync(kAll, lane < warp ? shared.warp_low[lane] : 0);
  if (before < wanted && wanted <= before + count) {
    each_vector([&](int column, const uint32_t(&key)[kTopkColumns]) {
      int own = 0;
#pragma unroll
      for (int j = 0; j < kTopkColumns; ++j) own += key[j] == equal;
      const int through = scan(own, lane);
      int at = before + through - own;
#pragma unroll
      for (int j = 0; j < kTopkColumns; ++j) {
        if (key[j] == equal && ++at == wanted) shared.cut_column = column + j;
      }
      before += __shfl_sync(kAll, through, 31);
    });
  }
  __syncthreads();
  return shared.cut_column;
}

// Where a search by keys has ended: the cut.
template <int kThreads, class EachVector>
__device__ __forceinline__ Cut cut_of(Shared& shared, const Search& search, const EachVector& each_vector) {
  if (search.count >= 0 && search.count < search.wanted) return Cut{1, 0x7fffffff};  // all numbers
  if (search.count == search.wanted) return Cut{search.low, 0x7fffffff};             // all of the interval
  return Cut{search.low, column_of_equal<kThreads>(shared, search.low, search.wanted, each_vector)};
}

// Bits of a warp's vectors (four a vector, of each lane): use(i, how many of the warp's come before the lane's own of vector
// i, in column order) for each vector.
template <int kVectors, class Use>
__device__ __forceinline__ void each_start(uint32_t mask, int lane, const Use& use) {
  constexpr int kPacked = 4;  // counts of that many vectors fit one word: 128 columns at most each
  int start = 0;
#pragma unroll
  for (int from = 0; from < kVectors; from += kPacked) {
    uint32_t own = 0;
#pragma unroll
    for (int i = from; i < from + kPacked && i < kVectors; ++i) own |= __popc((mask >> (kTopkColumns * i)) & 15u) << (8 * (i - from));
    const uint32_t through = scan(static_cast<int>(own), lane), all = __shfl_sync(kAll, through, 31), before = through - own;
#pragma unroll
    for (int i = from; i < from + kPacked && i < kVectors; ++i) {
      use(i, start + static_cast<int>((before >> (8 * (i - from))) & 255u));
      start += static_cast<int>((all >> (8 * (i - from))) & 255u);
    }
  }
}

// The columns that the bits of `mask` name, in order from `place` on.
template <int kVectors>
__device__ __forceinline__ void place_columns(int32_t* target, uint32_t mask, int place, int first, int lane) {
  each_start<kVectors>(mask, lane, [&](int i, int start) {
    int at = place + start;
#pragma unroll
    for (int j = 0; j < kTopkColumns; ++j) ptx::append_if(mask & (1u << (kTopkColumns * i + j)), target, at, first + i * kSegment + j);
  });
}

// The first `left` bits in column order.
template <int kVectors>
__device__ __forceinline__ uint32_t first_bits(uint32_t mask, int left, int lane) {
  uint32_t kept = 0;
  each_start<kVectors>(mask, lane, [&](int i, int start) {
#pragma unroll
    for (int j = 0; j < kTopkColumns; ++j) {
      const uint32_t bit = mask & (1u << (kTopkColumns * i + j));
      if (start < left) kept |= bit;
      start += bit != 0;
    }
  });
  return kept;
}

// A row whose scores the threads hold, NaN past its end: thread `warp * 32 + lane` has kVectors times four columns, from
// `first` on at distances of a segment. Histograms 0 and 1 are clear.
template <class Format, int kThreads, int kVectors>
__device__ __forceinline__ void rank_direct(Shared& shared, const Args& args, const Row<Format>& row, const float (&score)[kVectors][kTopkColumns], int first) {
  constexpr int kWarps = kThreads / 32, kWarpColumns = kVectors * kSegment;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;

  // Threads with a column in the row are groups of columns, each with a maximum; so are halves of a thread's vectors, and
  // vectors, where k is more than the threads. Where it is more than those, the smallest score serves. (-inf aside: many
  // rows have it, and it has no distance to anything.)
  constexpr int kHalf = (kVectors + 1) / 2;
  const int whole = row.length / kWarpColumns * 32, rest = row.length % kWarpColumns;  // warps' lanes; columns of the next warp
  const auto lanes = [](int columns) { return max(0, min(32, (columns + kTopkColumns - 1) / kTopkColumns)); };
  const int threads = whole + lanes(rest), halves = threads + whole + lanes(rest - kHalf * kSegment);
  float of_half[2] = {__uint_as_float(kNaN), __uint_as_float(kNaN)};
  const auto of_vector = [&](int i) { return fmaxf(fmaxf(score[i][0], score[i][1]), fmaxf(score[i][2], score[i][3])); };
#pragma unroll
  for (int i = 0; i < kVectors; ++i) of_half[i / kHalf] = fmaxf(of_half[i / kHalf], of_vector(i));
  uint32_t largest = key_of(fmaxf(of_half[0], of_half[1])), smallest = largest > kLowest ? largest : kAll;
  if (threads < args.k) {
    float least = __uint_as_float(0x7f800000u);
    const auto consider = [&](float one) {
      if (one > score_of(kLowest)) least = fminf(least, one);
    };
    if (kVectors > 1 && halves >= args.k) {
      consider(of_half[0]), consider(of_half[1]);
    } else if ((row.length + kTopkColumns - 1) / kTopkColumns >= args.k) {
#pragma unroll
      for (int i = 0; i < kVectors; ++i) consider(of_vector(i));
    } else {
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
#pragma unroll
        for (int j = 0; j < kTopkColumns; ++j) consider(score[i][j]);
      }
    }
    smallest = key_of(least);
  }
  block_range<kThreads>(shared, smallest, largest);

  int32_t* const target = row.target(args, shared.columns);
  uint32_t mask = 0;  // selected of the thread's columns
  int place = 0, selected = args.k;
  Found found{-1, 0, 0};
  const Linear linear(score_of(smallest), score_of(largest));
  if (row.length > args.k && smallest < largest && linear.usable()) {
    uint32_t* const histogram = shared.histogram[0];
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
#pragma unroll
      for (int j = 0; j < kTopkColumns; ++j) count_bin(histogram, linear.bin(score[i][j]));
    }
    found = find_bin<kThreads>(shared, 0, args.k);
  }
  const uint32_t bin = found.bin;
  const bool one_score = smallest == largest;  // -inf aside
  uint32_t inside = 0;                         // in the part that holds the k-th largest; `mask`: above it
  if (one_score) {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
#pragma unroll
      for (int j = 0; j < kTopkColumns; ++j) inside |= score[i][j] == score_of(largest) ? 1u << (kTopkColumns * i + j) : 0u;
    }
    __syncthreads();  // block_range is called again
  } else if (found.bin >= 0) {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
#pragma unroll
      for (int j = 0; j < kTopkColumns; ++j) {
        const uint32_t own = linear.bin(score[i][j]);
        mask |= own < bin ? 1u << (kTopkColumns * i + j) : 0u;
        inside |= own == bin ? 1u << (kTopkColumns * i + j) : 0u;
      }
    }
  }
  bool done = false;
  if (found.bin >= 0 && found.count <= kFew) {
#pragma unroll 1
    for (; inside != 0; inside &= inside - 1) {  // few threads have any: a short loop, with a load that the cache holds
      const int vector = (__ffs(inside) - 1) / kTopkColumns, column = first + vector * kSegment + (__ffs(inside) - 1) % kTopkColumns;
      shared.few[atomicAdd(&shared.few_count, 1)] = uint2{key_of(row.score_at(column)), static_cast<uint32_t>(column)};
    }
    const int above = __reduce_add_sync(kAll, __popc(mask));
    if (lane == 0) shared.counts[warp] = above;
    __syncthreads();
    uint2 own;
    const Cut cut = rank_few(shared, found.count, args.k - found.before, lane, own);
    const bool chosen = lane < found.count && cut.selects(own.x, own.y);
    const int at = static_cast<int>(own.y) - warp * kWarpColumns;  // in the warp's columns
    place = __reduce_add_sync(kAll, lane < warp ? shared.counts[lane] : 0) + __popc(__ballot_sync(kAll, chosen && at < 0));
#pragma unroll 1
    for (unsigned mine = __ballot_sync(kAll, chosen && at >= 0 && at < kWarpColumns); mine != 0; mine &= mine - 1) {
      const int its = __shfl_sync(kAll, at, __ffs(mine) - 1);
      if (its % kSegment / kTopkColumns == lane) mask |= 1u << (its / kSegment * kTopkColumns + its % kTopkColumns);
    }
    done = true;
  } else if (found.bin >= 0 || one_score) {  // equal scores? then the first columns of them
    uint32_t low = kAll, high = 0;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
#pragma unroll
      for (int j = 0; j < kTopkColumns; ++j) {
        if ((inside >> (kTopkColumns * i + j)) & 1u) low = min(low, key_of(score[i][j])), high = max(high, key_of(score[i][j]));
      }
    }
    const int above = __reduce_add_sync(kAll, __popc(mask)), equal = __reduce_add_sync(kAll, __popc(inside));
    if (lane == 0) shared.counts[warp] = above, shared.totals[warp] = equal;
    block_range<kThreads>(shared, low, high);
    const int wanted = args.k - found.before, equals = lane < kWarps ? static_cast<int>(shared.totals[lane]) : 0;
    if (low == high && __reduce_add_sync(kAll, equals) >= wanted) {
      const int equal_before = __reduce_add_sync(kAll, lane < warp ? equals : 0);
      place = __reduce_add_sync(kAll, lane < warp ? shared.counts[lane] : 0) + min(equal_before, wanted);
      mask |= first_bits<kVectors>(inside, wanted - equal_before, lane);
      done = true;
    }
    smallest = low, largest = high;
  }
  if (!done) {  // many scores close together, infinities, few of one score, or no more numbers than k
    const auto each_vector = [&](const auto& use) {
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
        const uint32_t key[kTopkColumns] = {key_of(score[i][0]), key_of(score[i][1]), key_of(score[i][2]), key_of(score[i][3])};
        use(first + i * kSegment, key);
      }
    };
    Search search{1, kAll, args.k, 1};
    if (found.bin >= 0) search.low = smallest, search.high = largest, search.wanted -= found.before;
    mask = 0;
    Cut cut{1, 0x7fffffff};
    if (row.length > args.k) {
      __syncthreads();
      search_keys<kThreads>(shared, search, [&](const auto& use) {
        each_vector([&](int, const uint32_t(&key)[kTopkColumns]) {
#pragma unroll
          for (int j = 0; j < kTopkColumns; ++j) use(key[j]);
        });
      });
      cut = cut_of<kThreads>(shared, search, each_vector);
    }
    each_vector([&](int column, const uint32_t(&key)[kTopkColumns]) {
#pragma unroll
      for (int j = 0; j < kTopkColumns; ++j) mask |= static_cast<uint32_t>(cut.selects(key[j], column + j)) << ((column - first) / kSegment * kTopkColumns + j);
    });
    const int count = __reduce_add_sync(kAll, __popc(mask));
    if (lane == 0) shared.counts[warp] = count;  // not in `totals`, which a slower warp may still read
    __syncthreads();
    const int counts = lane < kWarps ? shared.counts[lane] : 0;
    place = __reduce_add_sync(kAll, lane < warp ? counts : 0), selected = __reduce_add_sync(kAll, counts);
  }
  place_columns<kVectors>(target, mask, place, first, lane);
  if (target == shared.columns) __syncthreads();
  row.template write<kThreads>(args, shared.columns, selected);
}

template <class Format, int kThreads, int kVectors>
__global__ void __launch_bounds__(kThreads, kThreads <= 512 ? 2 : 1) topk_direct(const __grid_constant__ Args args) {
  constexpr int kWarpColumns = kVectors * kSegment;
  __shared__ Shared shared;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  clear_histogram<kThreads>(shared, 0);
  clear_histogram<kThreads>(shared, 1);
  if (threadIdx.x == 0) shared.few_count = 0;
  ptx::wait_for_previous_grid();

  // A warp owns consecutive columns. All loads of a thread are in flight together, the length's too.
  const int first = warp * kWarpColumns + lane * kTopkColumns;
  const Row<Format> row(args, blockIdx.x);
  float score[kVectors][kTopkColumns];
  if (row.aligned && (warp + 1) * kWarpColumns <= args.limit) {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) row.load_whole(score[i], first + i * kSegment);
  } else {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) row.load(score[i], first + i * kSegment, args.limit);
  }
  ptx::allow_next_grid();
  if (row.length < args.limit) {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
#pragma unroll
      for (int j = 0; j < kTopkColumns; ++j) score[i][j] = first + i * kSegment + j < row.length ? score[i][j] : __uint_as_float(kNaN);
    }
  }
  rank_direct<Format, kThreads, kVectors>(shared, args, row, score, first);
}

}  // namespace dsv4_ops::topk_kernels
