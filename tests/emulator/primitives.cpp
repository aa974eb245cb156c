// The emulator's own test: instructions by themselves, and a kernel with one fault at a time.
#include "driver.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "cuda/ptx.cuh"

namespace primitives {

using namespace dsv4_ops;
constexpr unsigned kAll = 0xffffffffu;

// d = c + a * b: a 16 x 16 and b 16 x 8, row by row in bfloat16. As kernels do it: copies, ldmatrix, mma.
__global__ void product(const uint16_t* a, const uint16_t* b, const float* c, float* d) {
  __shared__ __align__(16) uint16_t tile_a[16][16];
  __shared__ __align__(16) uint16_t tile_b[16][8];
  const int lane = threadIdx.x;
  ptx::copy16_async(ptx::address(&tile_a[lane / 2][lane % 2 * 8]), a + lane * 8, true);
  ptx::commit_copies();
  if (lane < 16) ptx::copy16_async(ptx::address(&tile_b[lane][0]), b + lane * 8, true);
  ptx::commit_copies();
  ptx::wait_copies<0>();
  __syncwarp();
  uint32_t of_a[4], of_b[4];
  ptx::load_matrices(of_a, ptx::address(&tile_a[lane % 16][lane / 16 * 8]));
  ptx::load_matrices_transposed(of_b, ptx::address(&tile_b[lane % 16][0]));  // twice the same two
  float sums[4];
  for (int i = 0; i < 4; ++i) sums[i] = c[(lane / 4 + i / 2 * 8) * 8 + lane % 4 * 2 + i % 2];
  ptx::multiply_bf16(sums, of_a, of_b[0], of_b[1]);
  for (int i = 0; i < 4; ++i) d[(lane / 4 + i / 2 * 8) * 8 + lane % 4 * 2 + i % 2] = sums[i];
}

// Registers of ldmatrix: from[m][row][column], into[transposed][lane][m].
__global__ void matrices(const uint16_t* from, uint32_t* into) {
  __shared__ __align__(16) uint16_t tile[4][8][8];
  const int lane = threadIdx.x;
  ptx::copy16_async(ptx::address(&tile[lane / 8][lane % 8][0]), from + lane * 8, true);
  ptx::wait_copies();
  __syncwarp();
  uint32_t r[4];
  ptx::load_matrices(r, ptx::address(&tile[lane / 8][lane % 8][0]));
  for (int m = 0; m < 4; ++m) into[lane * 4 + m] = r[m];
  ptx::load_matrices_transposed(r, ptx::address(&tile[lane / 8][lane % 8][0]));
  for (int m = 0; m < 4; ++m) into[128 + lane * 4 + m] = r[m];
}

// All codes of float8 e4m3 as float32; pairs of floats as float16, as bfloat16, and their products in bfloat16.
__global__ void numbers(const float* from, float* decoded, uint32_t* half, uint32_t* brain, uint32_t* products, int count) {
  for (int i = threadIdx.x; i < 64; i += blockDim.x) {
    const uint32_t first = i * 4, codes = first | (first + 1) << 8 | (first + 2) << 16 | (first + 3) << 24;
    const uint2 pairs = ptx::decode_e4m3x4(codes);
    for (int j = 0; j < 4; ++j) decoded[i * 4 + j] = __half2float(__half{static_cast<uint16_t>((j < 2 ? pairs.x : pairs.y) >> (j % 2 * 16))});
  }
  for (int i = threadIdx.x; i < count / 2; i += blockDim.x) {
    const float low = from[i * 2], high = from[i * 2 + 1];
    half[i] = ptx::pack_f16(low, high);
    brain[i] = emulated_bits<uint32_t>(__floats2bfloat162_rn(low, high));
    products[i] = ptx::multiply_bf16x2(brain[i], brain[i] >> 16 | brain[i] << 16);
  }
}

// What lanes of a warp give each other: into[which][lane].
__global__ void lanes(const int* from, int* into) {
  const int lane = threadIdx.x, value = from[lane];
  const int results[] = {
      __shfl_sync(kAll, value, 37), __shfl_up_sync(kAll, value, 3), __shfl_down_sync(kAll, value, 5), __shfl_xor_sync(kAll, value, 17), __shfl_sync(kAll, value, lane + 1, 8),
      static_cast<int>(__ballot_sync(kAll, value > 0)), __any_sync(kAll, value == 1000), __all_sync(kAll, value < 1000), __reduce_add_sync(kAll, value),
      __reduce_min_sync(kAll, value), __reduce_max_sync(kAll, value), static_cast<int>(__reduce_min_sync(kAll, static_cast<unsigned>(value))),
      static_cast<int>(__reduce_max_sync(kAll, static_cast<unsigned>(value))), lane < 8 ? __reduce_add_sync(0xffu, value) : __reduce_add_sync(0xffffff00u, value)};
  for (int i = 0; i < static_cast<int>(sizeof results / sizeof *results); ++i) into[i * 32 + lane] = results[i];
}

enum Fault {
  none, no_barrier, no_warp_barrier, barrier_in_a_branch, barrier_for_some, lane_left, lane_outside, past_shared, past_row, uninitialized, misaligned, too_early, no_cluster_barrier,
  relaxed, arrival_twice, block_left, no_copy_wait, written_by_two, endless, constant_written, input_written, too_few_bytes, too_many_bytes, no_bytes_wait, reused_while_read, shuffle_outside,
  other_collective, part_arrives, not_allowed, spinning
};

// Rows of 64 numbers, one a block: out[b] is the next block's row of the cluster, reversed, each number plus the sum of the
// block's own row. Or `fault` says what goes wrong on the way (names: tests/test_emulator.py, in this order).
__global__ void rotate(const int* rows, int row_stride, int* out, int blocks, int fault) {
  extern __shared__ __align__(16) unsigned char memory[];
  int* const own = reinterpret_cast<int*>(memory);       // 64: the row
  int* const theirs = own + 64;                          // 64: what the next block sends
  int* const reversed = theirs + 64;                     // 64
  uint64_t* const arrivals = reinterpret_cast<uint64_t*>(reversed + 64);
  int* const total = reinterpret_cast<int*>(arrivals + 1), * const sums = total + 1;  // 1 and 2
  const int thread = threadIdx.x, lane = thread & 31, warp = thread >> 5, rank = blockIdx.x % blocks;
  if (thread == 0) {
    *total = 0;
    ptx::expect_bytes(arrivals, fault == too_few_bytes ? 63 * 4 : fault == too_many_bytes ? 65 * 4 : 64 * 4);
  }
  if (fault != too_early) ptx::wait_for_previous_grid();
  const int* const row = rows + blockIdx.x * row_stride;
  if (thread < 16) ptx::copy16_async(ptx::address(own + thread * 4), row + thread * 4, true);
  if (fault != no_copy_wait) ptx::wait_copies();
  if (fault == lane_left && thread == 40) return;
  if (fault != no_barrier) __syncthreads();
  if (fault == barrier_in_a_branch && warp == 1) __syncthreads();
  if (fault == barrier_for_some && lane < 16) __syncthreads();
  reversed[63 - thread] = own[fault == uninitialized ? 64 + thread : thread];
  const int sum = __reduce_add_sync(fault == lane_outside && lane == 31 ? 0x7fffffffu : kAll, own[thread]);
  if (lane == 0) sums[warp] = sum;
  if (fault == no_warp_barrier ? lane == 1 : lane == 0) atomicAdd(total, sums[warp]);
  if (fault == past_shared) memory[64 * 12 + 8 + 12 + thread] = 1;
  if (fault == past_row && thread == 63) own[thread] = row[64];
  if (fault == misaligned) own[thread] = *reinterpret_cast<const int*>(memory + 2);
  if (fault == endless && thread == 0) {
    while (*static_cast<volatile int*>(total) >= 0) sums[0] = *total;
  }
  if (fault == shuffle_outside) *sums = __shfl_sync(lane < 16 ? 0xffffu : 0xffff0000u, sum, 20);
  if (fault == other_collective) *sums = lane < 16 ? __any_sync(kAll, sum > 0) : static_cast<int>(__ballot_sync(kAll, sum > 0));
  if (fault == part_arrives && lane == 0) return;
  if (fault == spinning) {
    for (volatile int own_memory = 1; own_memory != 0;) {
    }
  }
  if (fault == input_written) const_cast<int*>(row)[thread] = 1;
  if (fault == constant_written) out[thread] = __ldg(out + thread);
  if (fault == no_cluster_barrier) {
    __syncthreads();
  } else {
    if (fault == relaxed) {
      ptx::cluster_arrive_relaxed();
    } else {
      ptx::cluster_arrive_release();
    }
    if (fault == arrival_twice) ptx::cluster_arrive_release();
    ptx::cluster_wait_acquire();
  }
  const unsigned before = (rank + blocks - 1) % blocks;
  ptx::send_counted(ptx::address_in(theirs + thread, before), static_cast<uint32_t>(reversed[thread]), ptx::address_in(arrivals, before));
  if (fault == relaxed) *ptx::pointer_in(total, before) += 0;
  if (fault != no_bytes_wait) ptx::wait_for_bytes(arrivals);
  if (fault == reused_while_read) {
    out[(blockIdx.x * 64 + thread)] = theirs[63 - thread] + *total;
    theirs[thread] = 0;
  }
  out[fault == written_by_two ? thread : blockIdx.x * 64 + thread] = theirs[thread] + *total;
  ptx::cluster_arrive_release();
  if (fault == block_left && rank == 0) return;
  ptx::cluster_wait_acquire();
  if (fault == block_left && rank == 1) *ptx::pointer_in(theirs, 0) = 1;
}

}  // namespace primitives

EMULATED_DYNAMIC_SHARED(primitives, memory)

namespace {

using emulator::ScalarType;
using emulator::Tensor;

template <class... Parameters, class... Arguments>
void launch(unsigned blocks, unsigned threads, unsigned cluster, size_t shared_bytes, void (*kernel)(Parameters...), Arguments... arguments) {
  cudaLaunchAttribute attributes[2] = {};
  attributes[0].id = cudaLaunchAttributeClusterDimension, attributes[0].val.clusterDim = {cluster, 1, 1};
  attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization, attributes[1].val.programmaticStreamSerializationAllowed = cluster > 1;
  const cudaLaunchConfig_t config{dim3(blocks), dim3(threads), shared_bytes, nullptr, attributes, 2};
  cudaLaunchKernelEx(&config, kernel, arguments...);
}

template <class T>
T* data(const Tensor& tensor) {
  return static_cast<T*>(tensor.mutable_data_ptr());
}

std::vector<Tensor> answer(const emulator::Request& request) {
  const auto& t = request.tensors;
  if (request.op == "product") {
    Tensor d = new_empty(t[2], {16, 8});
    launch(1, 32, 1, 0, primitives::product, data<const uint16_t>(t[0]), data<const uint16_t>(t[1]), data<const float>(t[2]), data<float>(d));
    return {d};
  }
  if (request.op == "matrices") {
    Tensor into = new_empty(t[0], {2, 32, 4}, ScalarType::Int);
    launch(1, 32, 1, 0, primitives::matrices, data<const uint16_t>(t[0]), data<uint32_t>(into));
    return {into};
  }
  if (request.op == "numbers") {
    const int64_t pairs = t[0].size(0) / 2;
    Tensor decoded = new_empty(t[0], {256}), half = new_empty(t[0], {pairs}, ScalarType::Int), brain = new_empty(t[0], {pairs}, ScalarType::Int), products = new_empty(t[0], {pairs}, ScalarType::Int);
    launch(1, 64, 1, 0, primitives::numbers, data<const float>(t[0]), data<float>(decoded), data<uint32_t>(half), data<uint32_t>(brain), data<uint32_t>(products), static_cast<int>(pairs * 2));
    return {decoded, half, brain, products};
  }
  if (request.op == "lanes") {
    Tensor into = new_empty(t[0], {14, 32});
    launch(1, 32, 1, 0, primitives::lanes, data<const int>(t[0]), data<int>(into));
    return {into};
  }
  if (request.op != "rotate") emulator::fail("no op %s", request.op.c_str());
  Tensor out = new_empty(t[0], {t[0].size(0), 64});
  const int blocks = static_cast<int>(request.integers.at(0)), fault = static_cast<int>(request.integers.at(1));
  launch(static_cast<unsigned>(t[0].size(0)), 64, static_cast<unsigned>(blocks), fault == primitives::not_allowed ? 50000 : 3 * 256 + 8 + 12, primitives::rotate, data<const int>(t[0]), static_cast<int>(t[0].stride(0)), data<int>(out), blocks, fault);
  return {out};
}

}  // namespace

int main() { return emulator::serve_requests(answer); }
