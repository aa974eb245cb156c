// Sparse MLA decode in one launch: a cluster of 2 to 8 blocks for each token and 16, 32 or 64 of its heads.
//
// Keys of both segments, in tiles of 8, are dealt out evenly to the blocks of the cluster, so that a block has all of its keys under way
// at once. 8 pairs of warps own 64 columns each, one scale group of the FP8 layout; either warp of a pair has half of the keys. What
// a lane loads of them is, decoded, its operand of `keys * Q`; the partial logits of all columns meet in shared memory, where a warp takes
// the softmax of a head. Then each warp multiplies the weights by 32 columns of all keys, and sends its sums to the block of the
// cluster that owns these columns, which adds up what the blocks sent in the order of their ranks. No scratch, no second launch.
//
// Sums travel as float16 beside one power of two for each head and 32 columns: rounded to 2^-12, an eighth of what a bfloat16 result is.
//
// A row's bits depend on its own inputs and on widths alone: how keys are dealt out follows from widths, and how many heads a block has
// changes nothing in what is computed for one head. Blocks wait for each other at the hardware's barriers only: once before
// they send (all have started), once for the bytes that all must send.
#pragma once

#include "sparse_decode_rows.cuh"

namespace dsv4_ops::cluster_attention {

// Rows are padded so that the accesses of a warp spread over all banks. In each 32 columns of `keys`, 2 t and 2 t + 1 of every 8 stand
// together for t = 0, 1, 2, 3: then a lane's sums are of 8 neighbours. `sums` is indexed by sender and by 32 columns of those that this block owns.
template <int kHeadTiles, int kTiles>
struct Shared {
  static constexpr int kHeads = kHeadTiles * kHeadTile, kKeys = kHalves * kTiles * kKeyTile;

  alignas(16) __nv_bfloat16 keys[kKeys][kDim + 8];
  float parts[kGroups][kHeadTile][kKeys + 8];  // logits, of the columns of one group
  __nv_bfloat16 weights[kHeads][kKeys + 8];
  uint4 sums[kWarps][kHeads][4];
  float factors[kWarps][kHeads];
  float4 states[kLargestCluster][kHeads];  // the softmax of each block
  Row rows[kKeys];
  float sink[kHeads], rescale[kHeads];
  uint64_t arrivals;

  // What all blocks of a cluster send to one.
  static __device__ constexpr uint32_t bytes(int cluster) { return kHeads * (kWarps * (sizeof(uint4) * 4 + sizeof(float)) + cluster * sizeof(float4)); }
};

#if __CUDA_ARCH__ >= 900

// Logits of a tile of heads and the warp's keys, of its columns alone. The order of columns inside a product is the lanes' own.
template <int kTiles>
__device__ __forceinline__ void multiply_keys(const Query& q, const Keys<kTiles>& keys, float (&logits)[kTiles][4]) {
  __syncwarp();  // lanes without a key or a head come back
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    const uint32_t a[4] = {q.words[0][2 * k], q.words[1][2 * k], q.words[0][2 * k + 1], q.words[1][2 * k + 1]};
#pragma unroll
    for (int t = 0; t < kTiles; ++t) ptx::multiply_bf16(logits[t], a, keys.words[t][2 * k], keys.words[t][2 * k + 1]);
  }
}

template <class Memory, int kTiles>
__device__ __forceinline__ void store_parts(Memory& shared, int group, int half, const float (&logits)[kTiles][4]) {
  const int lane = static_cast<int>(threadIdx.x % 32);
#pragma unroll
  for (int t = 0; t < kTiles; ++t) {
    const int key = (half * kTiles + t) * kKeyTile + lane % 4 * 2;
    *reinterpret_cast<float2*>(&shared.parts[group][lane / 4][key]) = {logits[t][0], logits[t][1]};
    *reinterpret_cast<float2*>(&shared.parts[group][lane / 4 + 8][key]) = {logits[t][2], logits[t][3]};
  }
}

__device__ __forceinline__ float sum_of_warp(float value) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) value += __shfl_xor_sync(kAll, value, offset);
  return value;
}

// The largest of a warp, none of which is NaN: integers of the same order, by one instruction.
__device__ __forceinline__ float largest_of_warp(float value) {
  const auto ordered = [](int bits) { return bits ^ (bits >> 31 & 0x7fffffff); };
  return __int_as_float(ordered(__reduce_max_sync(kAll, ordered(__float_as_int(value)))));
}

// The running softmax of one head; base-2 logarithms. Each lane adds the weights of its own keys, and `rounded` those weights as bfloat16 has
// them: what sums are divided by, so that keys that are all the same come out as they are.
struct Softmax {
  float top = -kInfinity, total = 0.0f, rounded = 0.0f;

  template <bool kRunning, class Memory>
  __device__ __forceinline__ void add(Memory& shared, int warp, int head, float scale) {
    constexpr int kSteps = (Memory::kKeys + 31) / 32;
    const int lane = static_cast<int>(threadIdx.x % 32);
    float logits[kSteps], largest = top;
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      const int key = lane + 32 * i;
      logits[i] = -kInfinity;
      if (key >= Memory::kKeys) continue;
      float sum = shared.parts[0][warp][key];
#pragma unroll
      for (int g = 1; g < kGroups; ++g) sum += shared.parts[g][warp][key];
      if (shared.rows[key].data != nullptr) logits[i] = sum * scale;
      largest = fmaxf(largest, logits[i]);
    }
    largest = largest_of_warp(largest);
    const float finite = largest == -kInfinity ? 0.0f : largest;
    if constexpr (kRunning) {
      const float rescale = exp2f(top - finite);
      if (lane == 0) shared.rescale[head] = rescale;
      total *= rescale, rounded *= rescale;
    }
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      const int key = lane + 32 * i;
      if (key >= Memory::kKeys) continue;
      const float weight = exp2f(logits[i] - finite);
      const __nv_bfloat16 bits = __float2bfloat16_rn(weight);
      shared.weights[head][key] = bits;
      total += weight, rounded += __bfloat162float(bits);
    }
    top = largest;
  }

  __device__ __forceinline__ uint4 of_warp() const { return {__float_as_uint(top), __float_as_uint(sum_of_warp(total)), __float_as_uint(sum_of_warp(rounded)), 0}; }
};

// Sums of weights times keys, of 32 columns and all heads of the block.
template <int kHeadTiles>
struct Sums {
  float values[kHeadTiles][4][4] = {};

  template <bool kRunning, class Memory>
  __device__ __forceinline__ void add(const Memory& shared, int warp) {
    const int lane = static_cast<int>(threadIdx.x % 32);
    if constexpr (kRunning) {
#pragma unroll
      for (int m = 0; m < kHeadTiles; ++m) {
        const float upper = shared.rescale[m * kHeadTile + lane / 4], lower = shared.rescale[m * kHeadTile + lane / 4 + 8];
#pragma unroll
        for (int n = 0; n < 4; ++n) values[m][n][0] *= upper, values[m][n][1] *= upper, values[m][n][2] *= lower, values[m][n][3] *= lower;
      }
    }
    const uint32_t keys = ptx::address(&shared.keys[lane % 16][kOwnColumns * warp + lane / 16 * 8]);
    const uint32_t weights = ptx::address(&shared.weights[lane % 16][lane / 16 * 8]);
#pragma unroll
    for (int k = 0; k < Memory::kKeys / 16; ++k) {
      uint32_t left[4], right[4];
      ptx::load_matrices_transposed(left, keys + k * 16 * sizeof(shared.keys[0]));
      ptx::load_matrices_transposed(right, keys + k * 16 * sizeof(shared.keys[0]) + 32);
#pragma unroll
      for (int m = 0; m < kHeadTiles; ++m) {
        uint32_t a[4];
        ptx::load_matrices(a, weights + m * kHeadTile * sizeof(shared.weights[0]) + k * 32);
        ptx::multiply_bf16(values[m][0], a, left[0], left[1]);
        ptx::multiply_bf16(values[m][1], a, left[2], left[3]);
        ptx::multiply_bf16(values[m][2], a, right[0], right[1]);
        ptx::multiply_bf16(values[m][3], a, right[2], right[3]);
      }
    }
  }

  // To the block that owns these columns. NaN leaves the scale to the others.
  template <class Memory>
  __device__ __forceinline__ void send(Memory& shared, int rank, int warp, int cluster_bits) const {
    const int lane = static_cast<int>(threadIdx.x % 32), owned_bits = kWarpBits - cluster_bits, owner = warp >> owned_bits;
    const int place = (rank << owned_bits) + warp - (owner << owned_bits);
    const uint32_t arrivals = ptx::address_in(&shared.arrivals, owner);
    const uint32_t sums = ptx::address_in(&shared.sums[place][lane / 4][lane % 4], owner), factors = ptx::address_in(&shared.factors[place][lane / 4], owner);
#pragma unroll
    for (int row = 0; row < Memory::kHeads; row += 8) {
      const auto& of_tile = values[row / kHeadTile];
      const int r = row % kHeadTile / 8 * 2;
      float largest = 0.0f;
#pragma unroll
      for (int n = 0; n < 4; ++n) largest = fmaxf(largest, fmaxf(fabsf(of_tile[n][r]), fabsf(of_tile[n][r + 1])));
      largest = fmaxf(largest, __shfl_xor_sync(kAll, largest, 1));
      largest = fmaxf(largest, __shfl_xor_sync(kAll, largest, 2));
      // The largest becomes 2^14 to 2^15, where float16 has all its bits; both factors are normal numbers.
      const uint32_t exponent = min(max(__float_as_uint(largest) >> 23, 15u), 254u);
      const float up = __uint_as_float((268 - exponent) << 23);
      uint32_t packed[4];
#pragma unroll
      for (int n = 0; n < 4; ++n) packed[n] = ptx::pack_f16(of_tile[n][r] * up, of_tile[n][r + 1] * up);
      ptx::send_counted(sums + row * sizeof(shared.sums[0][0]), {packed[0], packed[1], packed[2], packed[3]}, arrivals);
      if (lane % 4 == 0) ptx::send_counted(factors + row * sizeof(float), (exponent - 14) << 23, arrivals);
    }
  }
};

// The columns that this block owns, from all blocks in the order of their ranks.
template <int kCluster, class Memory>
__device__ __forceinline__ void combine(const Args& args, int64_t token, int first_head, int rank, const Memory& shared) {
  constexpr int kOwned = kWarps / kCluster, kQuads = kOwnColumns / 4;
  for (int task = static_cast<int>(threadIdx.x); task < Memory::kHeads * kQuads * kOwned; task += kThreads) {
    const int quad = task % kQuads, row = task / kQuads % Memory::kHeads, column = task / (kQuads * Memory::kHeads), head = first_head + row;
    if (head >= args.heads) continue;
    float4 states[kCluster];
    float top = -kInfinity, total = 0.0f, rounded = 0.0f, sums[4] = {};
#pragma unroll
    for (int from = 0; from < kCluster; ++from) states[from] = shared.states[from][row], top = fmaxf(top, states[from].x);
    const float finite = top == -kInfinity ? 0.0f : top;
#pragma unroll
    for (int from = 0; from < kCluster; ++from) {
      const float weight = exp2f(states[from].x - finite), factor = weight * shared.factors[from * kOwned + column][row];
      total = fmaf(weight, states[from].y, total), rounded = fmaf(weight, states[from].z, rounded);
      const uint2 packed = reinterpret_cast<const uint2*>(shared.sums[from * kOwned + column][row])[quad];
      const float2 low = unpack_f16(packed.x), high = unpack_f16(packed.y);
      sums[0] = fmaf(factor, low.x, sums[0]), sums[1] = fmaf(factor, low.y, sums[1]), sums[2] = fmaf(factor, high.x, sums[2]), sums[3] = fmaf(factor, high.y, sums[3]);
    }
    const float level = total == 0.0f ? -kInfinity : top + log2f(total);
    const float share = total == 0.0f ? 0.0f : __fdividef(1.0f, rounded * (1.0f + exp2f(kLog2E * shared.sink[row] - level)));
    const uint64_t low = pack(sums[0] * share, sums[1] * share), high = pack(sums[2] * share, sums[3] * share);
    // One store: nvcc makes two of a uint2.
    *reinterpret_cast<uint64_t*>(args.out + (token * args.heads + head) * kDim + kOwnColumns * (rank * kOwned + column) + 4 * quad) = high << 32 | low;
    if (rank == 0 && column == 0 && quad == 0) args.lse[token * args.heads + head] = kLn2 * level;
  }
}

__device__ __forceinline__ float sink_of(const Args& args, int head) {
  if (args.sink == nullptr || head >= args.heads) return -kInfinity;
  const int64_t at = head * args.sink_stride;
  return args.sink_is_bf16 ? __bfloat162float(static_cast<const __nv_bfloat16*>(args.sink)[at]) : static_cast<const float*>(args.sink)[at];
}

#endif

// kTiles: of a warp in one pass. kRunning: blocks have more keys than that, and take them in several.
template <int kHeadTiles, int kTiles, bool kRunning>
__global__ void __launch_bounds__(kThreads, 1) attend(const __grid_constant__ Args args) {
#if __CUDA_ARCH__ >= 900
  static_assert(!kRunning || kHeadTiles == 1, "the query stays in registers from pass to pass");
  extern __shared__ __align__(16) unsigned char memory[];
  using Memory = Shared<kHeadTiles, kTiles>;
  Memory& shared = *reinterpret_cast<Memory*>(memory);
  const int cluster = 1 << args.cluster_bits, rank = static_cast<int>(blockIdx.x) & (cluster - 1);
  const int64_t token = blockIdx.x >> args.cluster_bits;
  const int first_head = static_cast<int>(blockIdx.y) * Memory::kHeads, lane = static_cast<int>(threadIdx.x % 32);
  const int warp = __shfl_sync(kAll, static_cast<int>(threadIdx.x / 32), 0);  // one number, as the compiler then knows
  const int group = warp % kGroups, half = warp / kGroups;
  if (threadIdx.x == 0) ptx::expect_bytes(&shared.arrivals, Memory::bytes(cluster));
  __syncwarp();

  const Segment &window = args.segments[0], &records = args.segments[1];
  const int begin = rank * args.share, end = min(begin + args.share, window.tiles + records.tiles);
  const bool finds = threadIdx.x < Memory::kKeys;  // a key each
  const int tile = static_cast<int>(threadIdx.x) / kKeyTile;
  Place place;
  Number lengths[2];
  Query q;
  Keys<kTiles> keys;
  Softmax softmax[kHeadTiles];
  Sums<kHeadTiles> sums;
  place.aim(args, token, begin + tile, end);
  lengths[0].aim(window.lens, token * window.lens_stride, window.wide_lens, window.width > 0);
  lengths[1].aim(records.lens, token * records.lens_stride, records.wide_lens, records.width > 0);
  ptx::cluster_arrive_relaxed();

  // All that can be under way at once.
  ptx::wait_for_previous_grid();
  ptx::allow_next_grid();
  if (finds) place.index.ask();
  if (finds || kRunning) lengths[0].ask(), lengths[1].ask();
  q.load(args, token, first_head, group);
#pragma unroll
  for (int m = 1; m < kHeadTiles; ++m) Query::prefetch(args, token, first_head + m * kHeadTile, group, half);
  const int sink_head = static_cast<int>(threadIdx.x) - (kThreads - Memory::kHeads);  // by other warps than those that find keys
  const float sink = sink_head >= 0 ? sink_of(args, first_head + sink_head) : 0.0f;

  constexpr int kPass = kHalves * kTiles;
  for (int pass = 0, first = begin; pass < (kRunning ? args.passes : 1); ++pass, first += kPass) {
    const int last = min(end, first + kPass), live0 = kRunning ? live_tiles(window, lengths[0]) : 0, live1 = kRunning ? window.tiles + live_tiles(records, lengths[1]) : 0;
    const bool idle = kRunning && pass > 0 && first >= min(last, live0) && max(first, window.tiles) >= min(last, live1);  // nothing but masked columns
    if (!idle && finds) shared.rows[threadIdx.x] = place.find(place.second ? lengths[1].value() : lengths[0].value());
    if (kRunning && finds) place.aim(args, token, first + kPass + tile, end), place.index.ask();  // for the next pass
    if (idle) continue;
    __syncthreads();  // and all sums of the pass before are made
    keys.load(shared, half, group);
    keys.store(shared, half, group);
    if (pass == 0 && sink_head >= 0) shared.sink[sink_head] = sink;
#pragma unroll
    for (int m = 0; m < kHeadTiles; ++m) {
      float logits[kTiles][4] = {};
      multiply_keys(q, keys, logits);
      if (m > 0) __syncthreads();  // the logits of the heads before are read
      store_parts(shared, group, half, logits);
      __syncthreads();
      if (m + 1 < kHeadTiles) q.load(args, token, first_head + (m + 1) * kHeadTile, group);
      softmax[m].template add<kRunning>(shared, warp, m * kHeadTile + warp, args.scale);
    }
    __syncthreads();
    sums.template add<kRunning>(shared, warp);
  }

  ptx::cluster_wait_acquire();  // all blocks have started and expect their bytes
  sums.send(shared, rank, warp, args.cluster_bits);
#pragma unroll
  for (int m = 0; m < kHeadTiles; ++m) {
    const uint4 state = softmax[m].of_warp();
    if (lane < cluster) ptx::send_counted(ptx::address_in(&shared.states[rank][m * kHeadTile + warp], lane), state, ptx::address_in(&shared.arrivals, lane));
  }
  ptx::wait_for_bytes(&shared.arrivals);
  if (cluster == 8) return combine<8>(args, token, first_head, rank, shared);
  if (cluster == 4) return combine<4>(args, token, first_head, rank, shared);
  combine<2>(args, token, first_head, rank, shared);
#endif
}

}  // namespace dsv4_ops::cluster_attention
