// What the kernels of sparse MLA decode read: their arguments, where the rows of keys lie, and keys and queries as operands of matrix products.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "ptx.cuh"

namespace dsv4_ops::cluster_attention {

constexpr int kWarpBits = 4, kWarps = 1 << kWarpBits, kThreads = 32 * kWarps, kLargestCluster = 8;
constexpr int kDim = 512, kGroups = 8, kHalves = 2, kColumns = kDim / kGroups, kOwnColumns = kDim / kWarps;
constexpr int kHeadTile = 16, kKeyTile = 8;  // of one instruction
constexpr int kRowBytes = 576, kScaleBytes = 8, kCodeBytes = 448;
constexpr unsigned kAll = 0xffffffffu;
constexpr float kInfinity = __builtin_huge_valf(), kLog2E = 1.4426950408889634f, kLn2 = 0.6931471805599453f;

static_assert(kWarps == kGroups * kHalves && kWarps == kHeadTile && kColumns == 64 && kOwnColumns == 32, "lanes are assigned by these");

struct Segment {
  const uint8_t* cache;
  const void *indices, *lens;
  int64_t indices_stride, lens_stride;
  uint32_t slots_end, block_size, page_stride, row;  // slots are below 2^31; bytes of a page and of a row of data
  uint32_t magic;                                    // slot / block_size is (2 * slot * magic >> 32) >> shift
  int shift, width, tiles;
  bool codes, wide_indices, wide_lens;  // FP8 pages, not bfloat16; int64, not int32
};

struct Args {
  const __nv_bfloat16* q;  // rows of it lie on 16 bytes, as rows of the caches do
  int64_t q_stride, q_head_stride;
  Segment segments[2];
  const void* sink;  // or null
  int64_t sink_stride;
  bool sink_is_bf16;
  __nv_bfloat16* out;
  float* lse;
  float scale;  // of base-2 logarithms
  int heads, cluster_bits;  // blocks of a cluster: 2, 4 or 8
  int share, passes;        // tiles of a block, and in how many parts it takes them
};

struct alignas(16) Row {
  const uint8_t *data, *scales;  // null: no key; no codes, but bfloat16
};

#if __CUDA_ARCH__ >= 900

__device__ __forceinline__ uint32_t pack(float low, float high) {
  const __nv_bfloat162 both = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&both);
}

__device__ __forceinline__ float2 unpack_f16(uint32_t pair) { return __half22float2(*reinterpret_cast<const __half2*>(&pair)); }

// A number of 32 or 64 bits, -1 where there is none: nothing waits for it until its value is asked.
struct Number {
  const int32_t* from;
  bool wide, there;
  int32_t low, high;

  __device__ __forceinline__ void aim(const void* data, int64_t at, bool is_wide, bool is_there) {
    from = static_cast<const int32_t*>(data) + (is_wide ? 2 * at : at), wide = is_wide, there = is_there, low = high = -1;
  }
  __device__ __forceinline__ void ask() {
    if (there) low = from[0];
    if (there && wide) high = from[1];
  }
  __device__ __forceinline__ int64_t value() const { return static_cast<int64_t>(wide ? high : low >> 31) << 32 | static_cast<uint32_t>(low); }
};

// Where a key's row lies: one thread asks for its index, as if rows were full (lengths are still under way), and finds it.
struct Place {
  const Segment* segment;
  int column;
  bool second;
  Number index;

  __device__ __forceinline__ void aim(const Args& args, int64_t token, int tile, int end) {
    second = tile >= args.segments[0].tiles;
    segment = &args.segments[second];
    column = (second ? tile - args.segments[0].tiles : tile) * kKeyTile + static_cast<int>(threadIdx.x % kKeyTile);
    index.aim(segment->indices, token * segment->indices_stride + column, segment->wide_indices, tile < end && column < segment->width);
  }

  __device__ __forceinline__ Row find(int64_t length) const {
    const uint64_t slot = index.value();
    if (column >= length || slot >= segment->slots_end) return {nullptr, nullptr};
    const uint32_t page = static_cast<uint32_t>(2 * slot * segment->magic >> 32) >> segment->shift;
    const uint64_t offset = static_cast<uint32_t>(slot) - page * segment->block_size;
    const uint8_t* const start = segment->cache + uint64_t{page} * segment->page_stride;
    return {start + offset * segment->row, segment->codes ? start + uint64_t{segment->block_size} * kRowBytes + offset * kScaleBytes : nullptr};
  }
};

__device__ __forceinline__ int live_tiles(const Segment& segment, const Number& length) {
  return static_cast<int>((max(int64_t{0}, min(length.value(), int64_t{segment.width})) + kKeyTile - 1) / kKeyTile);
}

// The keys of a warp. Lane 4 i + p has columns 16 p to 16 p + 15 of the warp's group, of key i of each tile.
template <int kTiles>
struct Keys {
  uint32_t words[kTiles][8];  // pairs of columns

  // All loads before any result is needed; zeros where there is no key.
  template <class Memory>
  __device__ __forceinline__ void load(const Memory& shared, int half, int group) {
    const int lane = static_cast<int>(threadIdx.x % 32), part = lane % 4;
    const bool decodes = group < kGroups - 1;
    const int of_codes = decodes ? kColumns * group + 16 * part : kCodeBytes + 32 * part, of_numbers = 2 * kColumns * group + 32 * part;
    Row rows[kTiles];
    uint32_t exponents[kTiles];
#pragma unroll
    for (int t = 0; t < kTiles; ++t) rows[t] = shared.rows[(half * kTiles + t) * kKeyTile + lane / 4];
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      const bool there = rows[t].data != nullptr, has_codes = rows[t].scales != nullptr;
      const uint8_t* const from = rows[t].data + (has_codes ? of_codes : of_numbers);
      const uint4 found = ptx::load16_if(there, from), more = ptx::load16_if(there && !(decodes && has_codes), from + 16);
      exponents[t] = ptx::load_byte_if(decodes && has_codes, rows[t].scales + group);
      words[t][0] = found.x, words[t][1] = found.y, words[t][2] = found.z, words[t][3] = found.w;
      words[t][4] = more.x, words[t][5] = more.y, words[t][6] = more.z, words[t][7] = more.w;
    }
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      if (decodes && rows[t].scales != nullptr) decode(words[t], exponents[t]);
    }
  }

  // Codes times their power of two, UE8M0: exact in bfloat16.
  static __device__ __forceinline__ void decode(uint32_t (&words)[8], uint32_t exponent) {
    const uint32_t scale = exponent == 0 ? 0x00400040u : exponent == 255 ? 0x7fc07fc0u : exponent * 0x00800080u;
#pragma unroll
    for (int w = 3; w >= 0; --w) {
      const uint2 halves = ptx::decode_e4m3x4(words[w]);
      const float2 low = unpack_f16(halves.x), high = unpack_f16(halves.y);
      words[2 * w] = ptx::multiply_bf16x2(pack(low.x, low.y), scale);
      words[2 * w + 1] = ptx::multiply_bf16x2(pack(high.x, high.y), scale);
    }
  }

  template <class Memory>
  __device__ __forceinline__ void store(Memory& shared, int half, int group) const {
    const int lane = static_cast<int>(threadIdx.x % 32), part = lane % 4;
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      __nv_bfloat16* const to = &shared.keys[(half * kTiles + t) * kKeyTile + lane / 4][kColumns * group + part / 2 * 32 + part % 2 * 4];
#pragma unroll
      for (int w = 0; w < 4; ++w) *reinterpret_cast<uint2*>(to + 8 * w) = {words[t][w], words[t][w + 4]};
    }
  }
};

// 16 columns of two heads, for each lane: rows lane / 4 and lane / 4 + 8 of a tile of heads, columns as Keys has them.
struct Query {
  uint32_t words[2][8];

  __device__ __forceinline__ void load(const Args& args, int64_t token, int first_head, int group) {
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      const int head = first_head + static_cast<int>(threadIdx.x % 32 / 4) + 8 * row;
#pragma unroll
      for (int w = 0; w < 8; ++w) words[row][w] = 0;
      if (head >= args.heads) continue;
      const __nv_bfloat16* const from = args.q + token * args.q_stride + head * args.q_head_stride + kColumns * group + 16 * static_cast<int>(threadIdx.x % 4);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const uint4 found = reinterpret_cast<const uint4*>(from)[i];
        words[row][4 * i] = found.x, words[row][4 * i + 1] = found.y, words[row][4 * i + 2] = found.z, words[row][4 * i + 3] = found.w;
      }
    }
  }

  // What a later load() will ask for, a line by every fourth lane: into L2, because registers are for keys by then.
  static __device__ __forceinline__ void prefetch(const Args& args, int64_t token, int first_head, int group, int half) {
    const int lane = static_cast<int>(threadIdx.x % 32), head = first_head + 8 * half + lane / 4;
    if (lane % 4 == 0 && head < args.heads) ptx::prefetch(args.q + token * args.q_stride + head * args.q_head_stride + kColumns * group);
  }
};

#endif

}  // namespace dsv4_ops::cluster_attention
