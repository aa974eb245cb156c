// Long rows: a block, or a cluster of blocks that write into each other's shared memory, ranks one row, and each score is
// read from memory once.
//
//   1. The row is cut into chunks of 32 columns (a line of memory), dealt out to the blocks in turn. Each block looks at all
//      of its chunks where they fit into registers, at a sample spread over them where not, and takes as bound a score that
//      at least k columns of the row should reach: the r-th largest of its groups' maxima, found by one histogram.
//   2. Columns above the bound are listed in shared memory, as they come; columns equal to it set bits of a bitmap.
//   3. The first block, to which the others send theirs, goes on alone. It finds the k-th largest score of the listed as
//      topk_direct.cuh does. Fewer than k columns above the highest bound: that bound is the k-th largest score, and the
//      first columns that equal it fill up.
//   4. Bits of the selected columns, prefix sums of their counts: the places, in column order.
//
// A bound from a sample is only a guess: when fewer columns than k reach it, or more than a segment holds exceed it, the
// first block ranks the row by histograms of all of it (three). So the answer never depends on the sample. A row that fits
// the registers of one block is ranked by the first alone, as in topk_direct.cuh.
#pragma once

#include "topk_direct.cuh"

namespace dsv4_ops::topk_kernels {

constexpr int kMaxCluster = 16;
constexpr int kChunk = 32, kChunkLanes = kChunk / kTopkColumns;
constexpr int kFewEqual = 8;  // columns equal to the bound that are listed, not marked

struct ListedShared : Shared {
  uint32_t bound;  // key
  int above, listed, equal, equal_listed;  // of `equal` columns that equal the bound, at most so many are listed
  int32_t equal_columns[kMaxCluster][kFewEqual];  // the first ones; each block's in the first block
  // Of each block of the cluster, in the first one.
  uint32_t block_bound[kMaxCluster], block_most[kMaxCluster];
  int block_listed[kMaxCluster], block_equal[kMaxCluster], block_equal_listed[kMaxCluster];
};
static_assert(sizeof(ListedShared) <= kTopkFixedBytes && kTopkFixedBytes % 16 == 0);

// Of a warp's vectors, the columns equal to the bound: listed apart, while a block has few of them, else marked.
// `column_of(i)` is the lane's first column of vector i.
template <int kVectors, class ColumnOf>
__device__ __forceinline__ void mark_equal(ListedShared& shared, uint32_t* bitmap, float bound, const float (&score)[kVectors][kTopkColumns], int lane, const ColumnOf& column_of) {
  uint32_t bits = 0;
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
#pragma unroll
    for (int j = 0; j < kTopkColumns; ++j) bits |= score[i][j] == bound ? 1u << (kTopkColumns * i + j) : 0u;
  }
  const int own = __popc(bits), count = __reduce_add_sync(kAll, own);
  int start = 0;
  if (lane == 0) start = atomicAdd(&shared.equal, count);
  start = __shfl_sync(kAll, start, 0);
  if (start + count <= kFewEqual) {
    int place = start + scan(own, lane) - own;
#pragma unroll 1
    for (; bits != 0; bits &= bits - 1) {
      const int bit = __ffs(bits) - 1;
      shared.equal_columns[0][place++] = static_cast<int>(column_of(bit / kTopkColumns)) + bit % kTopkColumns;
    }
  } else {
    if (lane == 0 && start < kFewEqual) shared.equal_listed = start;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const uint32_t four = (bits >> (kTopkColumns * i)) & 15u;
      const int column = static_cast<int>(column_of(i));
      if (four != 0) atomicOr(&bitmap[column / 32], four << (column % 32));
    }
  }
}

// Of a warp's vectors, the columns above the bound to the block's list and those equal to it to its bitmap.
template <int kVectors, class ColumnOf>
__device__ __forceinline__ void list_columns(ListedShared& shared, uint2* list, int size, uint32_t* bitmap, float bound, const float (&score)[kVectors][kTopkColumns], int lane, const ColumnOf& column_of) {
  uint32_t mask = 0;
  bool equal = false;
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
#pragma unroll
    for (int j = 0; j < kTopkColumns; ++j) {
      mask |= score[i][j] > bound ? 1u << (kTopkColumns * i + j) : 0u;
      equal = equal || score[i][j] == bound;
    }
  }
  if (__any_sync(kAll, mask != 0)) {
    const int own = __popc(mask), through = scan(own, lane);
    int start = 0;
    if (lane == 31) start = atomicAdd(&shared.listed, through);
    start = __shfl_sync(kAll, start, 31) + through - own;
    if (start + own > size) mask = 0;  // too many: the count tells
    uint32_t at = ptx::address(list + start);
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const int column = static_cast<int>(column_of(i));
#pragma unroll
      for (int j = 0; j < kTopkColumns; ++j) ptx::append_if(mask & (1u << (kTopkColumns * i + j)), at, uint2{__float_as_uint(score[i][j]), static_cast<uint32_t>(column + j)});
    }
  }
  if (__any_sync(kAll, equal)) mark_equal(shared, bitmap, bound, score, lane, column_of);
}

// A warp's equal share of the words of a bitmap, and how many bits are set in it. By all threads.
struct Share {
  int begin, end, count;
};

template <int kThreads>
__device__ __forceinline__ Share share_of(ListedShared& shared, const uint32_t* bitmap, int words) {  // counts: in shared.counts
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int each = (words + kThreads / 32 - 1) / (kThreads / 32), begin = warp * each, end = min(begin + each, words);
  int count = 0;
#pragma unroll 1
  for (int i = begin + lane; i < end; i += 32) count += __popc(bitmap[i]);
  count = __reduce_add_sync(kAll, count);
  if (lane == 0) shared.counts[warp] = count;
  __syncthreads();
  return {begin, end, count};
}

// The first `wanted` set bits stay.
template <int kThreads>
__device__ __noinline__ void keep_first(ListedShared& shared, uint32_t* bitmap, int words, int wanted) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const Share share = share_of<kThreads>(shared, bitmap, words);
  int before = __reduce_add_sync(kAll, lane < warp ? shared.counts[lane] : 0);
  if (before + share.count <= wanted) return;
#pragma unroll 1
  for (int i = share.begin; i < share.end; i += 32) {
    uint32_t word = i + lane < share.end ? bitmap[i + lane] : 0;
    const int own = __popc(word), through = scan(own, lane);
    int left = min(own, max(0, wanted - (before + through - own)));
    before += __shfl_sync(kAll, through, 31);
    uint32_t kept = 0;
#pragma unroll 1
    for (; left > 0; --left, word &= word - 1) kept |= word & (0 - word);
    if (i + lane < share.end) bitmap[i + lane] = kept;
  }
}

// Set bits of the bitmap, in order, to the results.
template <class Format, int kThreads>
__device__ __noinline__ void emit_bitmap(ListedShared& shared, const Args& args, const Row<Format>& row, const uint32_t* bitmap) {  // the first k
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const Share share = share_of<kThreads>(shared, bitmap, (row.length + 31) / 32);
  const int counts = lane < kThreads / 32 ? shared.counts[lane] : 0;
  int place = __reduce_add_sync(kAll, lane < warp ? counts : 0);
  int32_t* const target = row.target(args, shared.columns);
#pragma unroll 1
  for (int i = share.begin; i < share.end; i += 32) {
    uint32_t word = i + lane < share.end ? bitmap[i + lane] : 0;
    if (!__any_sync(kAll, word != 0)) continue;
    const int own = __popc(word), through = scan(own, lane);
    int at = place + through - own;
    place += __shfl_sync(kAll, through, 31);
#pragma unroll 1
    for (; word != 0 && at < args.k; word &= word - 1) target[at++] = (i + lane) * 32 + __ffs(word) - 1;
  }
  __syncthreads();
  row.template write<kThreads>(args, shared.columns, __reduce_add_sync(kAll, counts));
}

// By histograms of the whole row, read again for each.
template <class Format, int kThreads>
__device__ __noinline__ void rank_by_passes(Shared& shared, const Args& args, const Row<Format>& row, int turn) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int vectors = static_cast<int>((int64_t{row.length} + kThreads * kTopkColumns - 1) / (kThreads * kTopkColumns));
  const int64_t first = int64_t{warp} * vectors * kSegment + lane * kTopkColumns;
  const auto each_vector = [&](const auto& use) {
    constexpr int kAtOnce = 4;
#pragma unroll 1
    for (int start = 0; start < vectors; start += kAtOnce) {
      float score[kAtOnce][kTopkColumns];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) row.load(score[i], first + int64_t{start + i} * kSegment, start + i < vectors ? row.length : 0);
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const uint32_t key[kTopkColumns] = {key_of(score[i][0]), key_of(score[i][1]), key_of(score[i][2]), key_of(score[i][3])};
        use(static_cast<int>(first + int64_t{start + i} * kSegment), key);
      }
    }
  };
  Search search{1, kAll, args.k, turn};
  __syncthreads();
  clear_histogram<kThreads>(shared, turn);
  __syncthreads();
  search_keys<kThreads>(shared, search, [&](const auto& use) {
    each_vector([&](int, const uint32_t(&key)[kTopkColumns]) {
#pragma unroll
      for (int j = 0; j < kTopkColumns; ++j) use(key[j]);
    });
  });
  const Cut cut = cut_of<kThreads>(shared, search, each_vector);
  int count = 0;
  each_vector([&](int column, const uint32_t(&key)[kTopkColumns]) {
#pragma unroll
    for (int j = 0; j < kTopkColumns; ++j) count += cut.selects(key[j], column + j);
  });
  count = __reduce_add_sync(kAll, count);
  if (lane == 0) shared.counts[warp] = count;
  __syncthreads();
  const int counts = lane < kThreads / 32 ? shared.counts[lane] : 0;
  int place = __reduce_add_sync(kAll, lane < warp ? counts : 0);
  int32_t* const target = row.target(args, shared.columns);
  if (count > 0) {
    each_vector([&](int column, const uint32_t(&key)[kTopkColumns]) {
      uint32_t mask = 0;
#pragma unroll
      for (int j = 0; j < kTopkColumns; ++j) mask |= static_cast<uint32_t>(cut.selects(key[j], column + j)) << j;
      if (!__any_sync(kAll, mask != 0)) return;
      place_columns<1>(target, mask, place, column, lane);
      place += __reduce_add_sync(kAll, __popc(mask));
    });
  }
  __syncthreads();
  row.template write<kThreads>(args, shared.columns, __reduce_add_sync(kAll, counts));
}

// A row that fits the registers of this block.
template <class Format, int kThreads, int kVectors>
__device__ __noinline__ void load_and_rank(Shared& shared, const Args& args, const Row<Format>& row) {
  const int first = (threadIdx.x >> 5) * kVectors * kSegment + (threadIdx.x & 31) * kTopkColumns;
  float score[kVectors][kTopkColumns];
#pragma unroll
  for (int i = 0; i < kVectors; ++i) row.load(score[i], first + i * kSegment, row.length);
  rank_direct<Format, kThreads, kVectors>(shared, args, row, score, first);
}

template <class Format, int kThreads>
__global__ void __launch_bounds__(kThreads, 1) topk_passes(const __grid_constant__ Args args) {
  __shared__ Shared shared;
  ptx::wait_for_previous_grid();
  const Row<Format> row(args, blockIdx.x);
  rank_by_passes<Format, kThreads>(shared, args, row, 0);
}

// kVectors of a thread: all that a block of the cluster has of a row, or (kStream) a sample of it.
template <class Format, int kThreads, int kVectors, bool kStream>
__global__ void __launch_bounds__(kThreads, kThreads <= 512 ? 2 : 1) topk_listed(const __grid_constant__ Args args) {
  constexpr int kWarps = kThreads / 32, kTile = kThreads * kTopkColumns;
  extern __shared__ __align__(16) unsigned char memory[];
  ListedShared& shared = *reinterpret_cast<ListedShared*>(memory);
  uint32_t* const bitmap = reinterpret_cast<uint32_t*>(memory + kTopkFixedBytes);  // a bit for each column of the row
  uint2* const list = reinterpret_cast<uint2*>(bitmap + args.bitmap_words);        // (score, column), a segment for each block
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int blocks = args.cluster, rank = blocks == 1 ? 0 : blockIdx.x % blocks, segment_size = args.listed / blocks;
  clear_histogram<kThreads>(shared, 0);
  clear_histogram<kThreads>(shared, 1);
#pragma unroll 1
  for (int i = threadIdx.x; i < args.bitmap_words / 4; i += kThreads) reinterpret_cast<uint4*>(bitmap)[i] = uint4{0, 0, 0, 0};
  if (threadIdx.x == 0) shared.bound = kAll, shared.above = 0, shared.listed = 0, shared.equal = 0, shared.equal_listed = kFewEqual, shared.few_count = 0;
  if (blocks > 1) ptx::cluster_arrive_release();  // waited for before the first store into another block: its bitmap is clear by then
  ptx::wait_for_previous_grid();
  const Row<Format> row(args, blockIdx.x / blocks);

  // Tile t of a block: four chunks for each warp. Chunk c of a block is chunk c * blocks + rank of the row.
  const auto column_of_chunk = [&](int64_t chunk) { return (chunk * blocks + rank) * kChunk + lane % kChunkLanes * kTopkColumns; };
  const auto column_of = [&](int tile) { return column_of_chunk((int64_t{tile} * kWarps + warp) * (32 / kChunkLanes) + lane / kChunkLanes); };
  const int64_t together = int64_t{kTile} * blocks;  // columns of a tile of all blocks
  float held[kVectors][kTopkColumns];
  if (!kStream && args.eager) {  // the row's loads do not wait for its length
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      if (row.aligned && (i + 1) * together <= args.limit) {
        row.load_whole(held[i], column_of(i));
      } else {
        row.load(held[i], column_of(i), args.limit);
      }
    }
  }
  const int length = row.length;
  if (length <= kTile * kVectors) {
    ptx::allow_next_grid();
    if (rank > 0) return;  // cluster barriers no longer count a block that has left
    constexpr int kFewVectors = kVectors < 2 ? kVectors : 2;
    return length <= kTile * kFewVectors ? load_and_rank<Format, kThreads, kFewVectors>(shared, args, row) : load_and_rank<Format, kThreads, kVectors>(shared, args, row);
  }
  const int mine = static_cast<int>((length + together - 1) / together);  // tiles
  if (!kStream && args.eager) {
    if (length < args.limit) {
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
        const int left = length - static_cast<int>(column_of(i));
        if (left < kTopkColumns) {
#pragma unroll
          for (int j = 0; j < kTopkColumns; ++j) held[i][j] = j < left ? held[i][j] : __uint_as_float(kNaN);
        }
      }
    }
  } else {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      // The chunks of a sample lie evenly over the block's.
      const int64_t looked = (i * kWarps + warp) * (32 / kChunkLanes) + lane / kChunkLanes, chunk = kStream && mine > kVectors ? looked * mine / kVectors : looked;
      row.load(held[i], column_of_chunk(chunk), i < mine ? length : 0);
    }
  }

  // The first tiles of the stream are on their way while the bound is sought.
  constexpr int kAhead = 4;
  using Vector = typename Format::Vector;
  Vector ahead[kAhead] = {};
  const int step = static_cast<int>(together), whole = kStream && row.aligned ? length / (step * kAhead) * kAhead : 0;  // tiles full of columns, in fours
  const Vector* next = reinterpret_cast<const Vector*>(row.scores + column_of(0));
  const auto take = [&] {
#pragma unroll
    for (int i = 0; i < kAhead; ++i, next += step / kTopkColumns) ahead[i] = ptx::load_global(next);
  };
  if (kStream && whole > 0) take();

  // The bound. `rank_wanted` winners at most should lie in what this block looked at: all of them, or as many as chance
  // (five standard deviations above the mean) and winners side by side (a chunk) may put there.
  int rank_wanted = args.k;
  const int own_columns = ((length + kChunk - 1) / kChunk - rank + blocks - 1) / blocks * kChunk, looked_columns = min(own_columns, kVectors * kTile);
  if (blocks > 1 || looked_columns < own_columns) {
    const float mean = static_cast<float>(args.k) * looked_columns / static_cast<float>(length);
    rank_wanted = min(args.k, static_cast<int>(mean + max(5.0f * sqrtf(mean), static_cast<float>(kChunk))) + 6);
  }
  const bool by_vector = rank_wanted * 2 > kThreads;  // groups of four columns, else all of a thread
  const auto each_group = [&](const auto& use) {
    float most = __uint_as_float(kNaN);
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const float largest = fmaxf(fmaxf(held[i][0], held[i][1]), fmaxf(held[i][2], held[i][3]));
      most = fmaxf(most, largest);
      if (by_vector) use(largest);
    }
    if (!by_vector) use(most);
  };
  uint32_t smallest = kAll, most = 0;
  each_group([&](float score) {
    const uint32_t key = key_of(score);
    if (key < kHighest) most = max(most, key);
    if (key > kLowest) smallest = min(smallest, key);
  });
  block_range<kThreads>(shared, smallest, most);
  uint32_t bound = kLowest;  // of -inf: fewer groups than wanted hold more
  if (smallest < most) {
    const Linear linear(score_of(smallest), score_of(most));
    uint32_t* const histogram = shared.histogram[0];
    each_group([&](float score) { count_bin(histogram, linear.bin(score)); });
    const Found found = find_bin<kThreads>(shared, 0, rank_wanted);
    if (found.bin >= 0) {  // down to the smallest maximum in that part, a score that exists
      each_group([&](float score) {
        if (linear.bin(score) == static_cast<uint32_t>(found.bin)) atomicMin(&shared.bound, key_of(score));
      });
      __syncthreads();
      bound = shared.bound;
    }
  } else if (smallest == most) {
    bound = most;
  }
  // Groups of winners side by side hide most of each other: where many more columns than wanted exceed that bound, the
  // r-th largest of them is the bound.
  {
    const float guess = score_of(bound);
    const auto each_above = [&](const auto& use) {
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
#pragma unroll
        for (int j = 0; j < kTopkColumns; ++j) use(held[i][j] > guess, held[i][j]);
      }
    };
    int above = 0;
    each_above([&](bool is, float) { above += is; });
    above = __reduce_add_sync(kAll, above);
    if (lane == 0 && above > 0) atomicAdd(&shared.above, above);
    __syncthreads();
    if (static_cast<float>(shared.above) * own_columns > 0.75f * looked_columns * segment_size && bound < most) {
      const Linear linear(guess, score_of(most));
      clear_histogram<kThreads>(shared, 2);
      if (threadIdx.x == 0) shared.bound = kAll;
      __syncthreads();
      each_above([&](bool is, float score) { count_bin(shared.histogram[2], is ? linear.bin(score) : kAll); });
      const Found found = find_bin<kThreads>(shared, 2, rank_wanted);
      if (found.bin >= 0) {
        each_above([&](bool is, float score) {
          if (is && linear.bin(score) == static_cast<uint32_t>(found.bin)) atomicMin(&shared.bound, key_of(score));
        });
        __syncthreads();
        bound = shared.bound;
      }
    }
  }
  const float bound_score = score_of(bound);

  if constexpr (kStream) {
#pragma unroll 1
    for (int tile = 0; tile < mine; tile += kAhead) {
      float now[kAhead][kTopkColumns];
#pragma unroll
      for (int i = 0; i < kAhead; ++i) Format::split(ahead[i], now[i]);
      if (tile >= whole) {
#pragma unroll
        for (int i = 0; i < kAhead; ++i) row.load(now[i], column_of(tile + i), tile + i < mine ? length : 0);
      } else if (tile + kAhead < whole) {
        take();
      }
      list_columns(shared, list, segment_size, bitmap, bound_score, now, lane, [&](int i) { return column_of(tile + i); });
    }
  } else {
    list_columns(shared, list, segment_size, bitmap, bound_score, held, lane, [&](int i) { return column_of(i); });
  }
  ptx::allow_next_grid();
  __syncthreads();
  const int own_equal = shared.equal;
  const uint32_t own_bound = bound;
  if (blocks > 1) ptx::cluster_wait_acquire();
  if (rank > 0) {  // to the first block
    ListedShared& first = *ptx::pointer_in(&shared, 0);
    const int equal_listed = min(shared.equal, shared.equal_listed);
    if (threadIdx.x == 0) {
      first.block_listed[rank] = shared.listed, first.block_bound[rank] = bound, first.block_most[rank] = most;
      first.block_equal[rank] = shared.equal, first.block_equal_listed[rank] = equal_listed;
    }
    if (threadIdx.x < equal_listed) first.equal_columns[rank][threadIdx.x] = shared.equal_columns[0][threadIdx.x];
    uint2* const first_list = ptx::pointer_in(list, 0) + rank * segment_size;
    const int listed = shared.listed <= segment_size ? shared.listed : 0;  // too many: some have no entry, and none is used
#pragma unroll 1
    for (int i = threadIdx.x; i < listed; i += kThreads) first_list[i] = list[i];
    if (shared.equal > equal_listed) {
      uint32_t* const first_bitmap = ptx::pointer_in(bitmap, 0);
#pragma unroll 1
      for (int word = threadIdx.x * blocks + rank; word < args.bitmap_words; word += kThreads * blocks) first_bitmap[word] = bitmap[word];
    }
    ptx::cluster_arrive_release();
    return;
  }
  // All blocks' findings, one of each lane.
  int block_listed = lane == 0 ? shared.listed : 0, block_equal = lane == 0 ? shared.equal : 0, block_equal_listed = lane == 0 ? min(shared.equal, shared.equal_listed) : 0;
  uint32_t block_bound = lane == 0 ? bound : 0u;
  if (blocks > 1) {
    ptx::cluster_arrive_release();
    ptx::cluster_wait_acquire();
    if (lane > 0 && lane < blocks) {
      block_listed = shared.block_listed[lane], block_bound = shared.block_bound[lane];
      block_equal = shared.block_equal[lane], block_equal_listed = shared.block_equal_listed[lane];
    }
    most = __reduce_max_sync(kAll, lane > 0 && lane < blocks ? shared.block_most[lane] : most);
  }
  bound = __reduce_max_sync(kAll, block_bound);
  const bool marks = __any_sync(kAll, block_equal > block_equal_listed);
  if (__any_sync(kAll, block_listed > segment_size)) return rank_by_passes<Format, kThreads>(shared, args, row, 1);
  // Some warps for each block's list.
  const int of = warp % blocks, of_listed = __shfl_sync(kAll, block_listed, of);
  const auto each_listed = [&](const auto& use) {
#pragma unroll 1
    for (int i = warp / blocks * 32 + lane; i < of_listed; i += kThreads / blocks) {
      const uint2 entry = list[of * segment_size + i];
      use(__uint_as_float(entry.x), static_cast<int>(entry.y));
    }
  };

  // The k-th largest of the listed.
  Found found{-1, 0, 0};
  const Linear linear(score_of(bound), score_of(most));
  if (bound < most && linear.usable()) {
    uint32_t* const histogram = shared.histogram[1];
    each_listed([&](float score, int) { count_bin(histogram, key_of(score) > bound ? linear.bin_of_number(score) : kAll); });
    found = find_bin<kThreads>(shared, 1, args.k);
  }
  const auto set = [&](int column) { atomicOr(&bitmap[column / 32], 1u << (column % 32)); };
  const bool few = found.bin >= 0 && found.count <= kFew;
  Search search{bound + 1, kAll, args.k, 2};
  if (!few) {  // ties, scores close together, infinities, few numbers
    if (found.bin >= 0) {
      search.low = kAll, search.high = 0, search.wanted -= found.before;
      each_listed([&](float score, int) {
        const uint32_t key = key_of(score);
        if (key > bound && linear.bin_of_number(score) == static_cast<uint32_t>(found.bin)) search.low = min(search.low, key), search.high = max(search.high, key);
      });
      block_range<kThreads>(shared, search.low, search.high);
    } else if (bound < most && linear.usable()) {
      search.low = search.high, search.count = found.before;  // of all that are listed: fewer than wanted
    }
    if (search.low < search.high) {
      clear_histogram<kThreads>(shared, 2);
      __syncthreads();
      search_keys<kThreads>(shared, search, [&](const auto& use) {
        each_listed([&](float score, int) { use(key_of(score)); });
      });
    }
  }
  const auto unmark = [&](uint32_t kept) {  // the words of blocks with another bound
#pragma unroll 1
    for (int base = warp * 32; base < args.bitmap_words; base += kThreads) {
      const uint32_t its_bound = __shfl_sync(kAll, block_bound, (base + lane) % blocks);
      if (its_bound != kept && base + lane < args.bitmap_words) bitmap[base + lane] = 0;
    }
  };
  if (!few && search.count >= 0 && search.count < search.wanted) {
    // All above the bound, and the first columns at it: marked, listed apart, or listed, where a block's bound is lower.
    __syncthreads();
    if (threadIdx.x == 0) shared.equal = 0;
    if (marks) unmark(bound);
    __syncthreads();
    if (threadIdx.x < blocks * kFewEqual) {
      const int block = threadIdx.x / kFewEqual, at = threadIdx.x % kFewEqual;
      const bool valid = (block == 0 ? min(own_equal, shared.equal_listed) : shared.block_equal_listed[block]) > at && (block == 0 ? own_bound : shared.block_bound[block]) == bound;
      if (valid) set(shared.equal_columns[block][at]);
    }
    each_listed([&](float score, int column) {
      if (key_of(score) == bound) set(column), atomicAdd(&shared.equal, 1);
    });
    __syncthreads();
    const int missing = args.k - search.count, equal = shared.equal + __reduce_add_sync(kAll, block_bound == bound ? block_equal : 0);
    if (equal < missing && bound != kLowest) return rank_by_passes<Format, kThreads>(shared, args, row, search.turn + 1);
    if (search.count > 0) {
      keep_first<kThreads>(shared, bitmap, (length + 31) / 32, missing);
      __syncthreads();
      each_listed([&](float score, int column) {
        if (key_of(score) > bound) set(column);
      });
      __syncthreads();
    }
    return emit_bitmap<Format, kThreads>(shared, args, row, bitmap);
  }

  // Before each run of words of the bitmap, how many bits; from there a column counts on to its own place. A barrier lies
  // before and behind.
  const int words = (length + 127) / 128 * 4, run_bits = max(2, 32 - __clz((words - 1) / kThreads));
  int32_t* const before_run = shared.columns + 4096;
  static_assert(4096 + kThreads <= 3 * kBins);
  const auto count_runs = [&] {
    int sum = 0;
#pragma unroll 1
    for (int i = threadIdx.x << run_bits; i < min(words, static_cast<int>((threadIdx.x + 1) << run_bits)); i += 4) {
      const uint4 four = *reinterpret_cast<const uint4*>(bitmap + i);
      sum += __popc(four.x) + __popc(four.y) + __popc(four.z) + __popc(four.w);
    }
    const int through = scan(sum, lane);
    if (lane == 31) shared.counts[warp] = through;
    __syncthreads();
    before_run[threadIdx.x] = __reduce_add_sync(kAll, lane < warp ? shared.counts[lane] : 0) + through - sum;
    __syncthreads();
  };
  const auto place_of = [&](int column) {
    const int word = column / 32;
    int place = before_run[word >> run_bits] + __popc(bitmap[word] & ((1u << (column % 32)) - 1));
#pragma unroll 1
    for (int i = word >> run_bits << run_bits; i < word; ++i) place += __popc(bitmap[i]);
    return place;
  };

  if (marks) {  // the bound is not the cut: none are wanted
    unmark(0);
    __syncthreads();
  }
  Cut cut{search.low, 0x7fffffff};
  uint32_t chosen_column = kAll;  // of the few, which have no bits
  int some = 0;
  if (few) {  // bits of what lies above the part; the few columns in it are ranked
    const uint32_t bin = found.bin;
    each_listed([&](float score, int column) {
      const uint32_t own = linear.bin_of_number(score);
      if (own < bin) {
        set(column);
      } else if (own == bin && key_of(score) > bound) {
        shared.few[atomicAdd(&shared.few_count, 1)] = uint2{key_of(score), static_cast<uint32_t>(column)};
      }
    });
    __syncthreads();
    uint2 own;
    cut = rank_few(shared, found.count, args.k - found.before, lane, own);
    const bool chosen = lane < found.count && cut.selects(own.x, own.y);
    if (chosen) chosen_column = own.y;
    some = 32 - __clz(__ballot_sync(kAll, chosen));
  } else {  // an interval of keys of which all are wanted, or equal keys, of which the first columns are
    if (search.count != search.wanted) {
      each_listed([&](float score, int column) {
        if (key_of(score) == cut.key) set(column);
      });
      __syncthreads();
      count_runs();
      each_listed([&](float score, int column) {
        if (key_of(score) == cut.key && place_of(column) == search.wanted - 1) shared.cut_column = column;
      });
      __syncthreads();
      cut.column = shared.cut_column;
    }
    each_listed([&](float score, int column) {
      const uint32_t key = key_of(score);
      if (cut.selects(key, column)) {
        set(column);
      } else if (key == cut.key) {
        atomicAnd(&bitmap[column / 32], ~(1u << (column % 32)));
      }
    });
    __syncthreads();
  }
  count_runs();
  int32_t* const target = row.target(args, shared.columns);
#pragma unroll 1
  for (int base = warp / blocks * 32; base < of_listed; base += kThreads / blocks) {  // by whole warps
    const uint2 entry = base + lane < of_listed ? list[of * segment_size + base + lane] : uint2{kNaN, 0};
    const int column = static_cast<int>(entry.y);
    int at = place_of(column);
#pragma unroll 4
    for (int i = 0; i < some; ++i) at += __shfl_sync(kAll, chosen_column, i) < entry.y;
    if (cut.selects(key_of(__uint_as_float(entry.x)), column)) target[at] = column;
  }
  if (target == shared.columns) __syncthreads();
  row.template write<kThreads>(args, shared.columns, args.k);
}

}  // namespace dsv4_ops::topk_kernels
