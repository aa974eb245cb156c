// Instructions that CUDA C++ has no name for, each behind a function: all inline assembly of csrc/cuda is here.
//
// tests/emulator/ has another file of the same functions, in C++, which runs the kernels on a CPU. It goes first and defines
// the guard below; whoever adds an instruction here adds it there.
#ifndef DSV4_OPS_PTX
#define DSV4_OPS_PTX

#include <cuda_runtime.h>

#include <cstdint>

namespace dsv4_ops::ptx {

// ---- grids and clusters: before capability 9.0 there is one block in a cluster, and no launch before its time ----------

// The launch may begin while the kernel before it ends: nothing in device memory is touched before this.
__device__ __forceinline__ void wait_for_previous_grid() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

__device__ __forceinline__ void allow_next_grid() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

// By whole warps. What was written before a releasing arrival can be read behind the wait.
__device__ __forceinline__ void cluster_arrive_release() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#endif
}

__device__ __forceinline__ void cluster_arrive_relaxed() {  // publishes nothing
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.relaxed.aligned;");
#endif
}

__device__ __forceinline__ void cluster_wait_acquire() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

// ---- shared memory -----------------------------------------------------------------------------------------------------

// A place in this block's shared memory, as instructions that name the state space take it.
__device__ __forceinline__ uint32_t address(const void* shared) { return static_cast<uint32_t>(__cvta_generic_to_shared(shared)); }

// The same place in the block of that rank in the cluster.
__device__ __forceinline__ uint32_t address_in(const void* shared, uint32_t rank) {
#if __CUDA_ARCH__ >= 900
  uint32_t result;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(result) : "r"(address(shared)), "r"(rank));
  return result;
#else
  return address(shared);
#endif
}

template <class T>
__device__ __forceinline__ T* pointer_in(T* shared, uint32_t rank) {
#if __CUDA_ARCH__ >= 900
  uint64_t result;
  asm volatile("mapa.u64 %0, %1, %2;" : "=l"(result) : "l"(shared), "r"(rank));
  return reinterpret_cast<T*>(result);
#else
  return shared;
#endif
}

// Eight bytes to a place that address_in named.
__device__ __forceinline__ void send(uint32_t to, float a, float b) {
#if __CUDA_ARCH__ >= 900
  asm volatile("st.shared::cluster.v2.f32 [%0], {%1, %2};" ::"r"(to), "f"(a), "f"(b) : "memory");
#else
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(to), "f"(a), "f"(b) : "memory");
#endif
}

__device__ __forceinline__ void send(uint32_t to, uint2 pair) { send(to, __uint_as_float(pair.x), __uint_as_float(pair.y)); }

// Sends that are counted where they arrive: a block expects so many bytes, once, and waits for them. `arrivals` is a word of shared memory
// that one thread of the block makes ready before it arrives at a cluster barrier; behind that barrier other blocks may send, and the block
// itself. In a cluster of one block st.async is undefined. From capability 9.0.
__device__ __forceinline__ void expect_bytes(uint64_t* arrivals, uint32_t bytes) {
#if __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(address(arrivals)) : "memory");
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(address(arrivals)), "r"(bytes) : "memory");
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#else
  __trap();
#endif
}

// Both addresses by address_in, of one block.
__device__ __forceinline__ void send_counted(uint32_t to, uint4 words, uint32_t arrivals) {
#if __CUDA_ARCH__ >= 900
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(to), "r"(words.x), "r"(words.y), "r"(words.z), "r"(words.w), "r"(arrivals)
               : "memory");
#else
  __trap();
#endif
}

__device__ __forceinline__ void send_counted(uint32_t to, uint32_t word, uint32_t arrivals) {
#if __CUDA_ARCH__ >= 900
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(to), "r"(word), "r"(arrivals) : "memory");
#else
  __trap();
#endif
}

// By all threads of a block, once. The bytes can be read behind it.
__device__ __forceinline__ void wait_for_bytes(uint64_t* arrivals) {
#if __CUDA_ARCH__ >= 900
  uint32_t there = 0;
  while (there == 0) {
    asm volatile("{.reg .pred p; mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], 0; selp.u32 %0, 1, 0, p;}" : "=r"(there) : "r"(address(arrivals)) : "memory");
  }
#else
  __trap();
#endif
}

// target[at++] = value where `condition` is not 0: a store under a predicate, where the compiler would branch.
__device__ __forceinline__ void append_if(uint32_t condition, int32_t* target, int& at, int value) {
  asm volatile("{.reg .pred p; setp.ne.u32 p, %1, 0; @p st.s32 [%2], %3; @p add.s32 %0, %0, 1;}" : "+r"(at) : "r"(condition), "l"(target + at), "r"(value) : "memory");
}

// The same for pairs, at an address in this block's shared memory.
__device__ __forceinline__ void append_if(uint32_t condition, uint32_t& at, uint2 pair) {
  asm volatile("{.reg .pred p; setp.ne.u32 p, %1, 0; @p st.shared.v2.b32 [%0], {%2, %3}; @p add.u32 %0, %0, 8;}" : "+r"(at) : "r"(condition), "r"(pair.x), "r"(pair.y) : "memory");
}

// ---- copies from global memory -----------------------------------------------------------------------------------------

// 16 bytes to an address in shared memory, both aligned; zeros, and no read, where `there` is false. Arrived after a wait.
__device__ __forceinline__ void copy16_async(uint32_t to, const void* from, bool there) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(__cvta_generic_to_global(from)), "r"(there ? 16 : 0) : "memory");
}

__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// The thread's own copies; those of the newest `pending` groups may still be under way.
template <int pending>
__device__ __forceinline__ void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
}

__device__ __forceinline__ void wait_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// A plain load, known to be from global memory. Not __ldg, which promises that nobody writes there while the grid runs: a grid that was launched
// early runs while its inputs are written, so such a load may be moved before wait_for_previous_grid() or find what a cache held before.
template <class T>
__device__ __forceinline__ T load_global(const T* from) {
  __builtin_assume(__isGlobal(from));
  return *from;
}

// From global memory into registers, in program order; zeros, and no read, where `there` is false. Without a branch, and although the
// compiler may not know that the address is a global one.
__device__ __forceinline__ uint4 load16_if(bool there, const void* from) {
  uint4 words;
  asm volatile(
      "{.reg .pred p; setp.ne.u32 p, %5, 0; mov.b32 %0, 0; mov.b32 %1, 0; mov.b32 %2, 0; mov.b32 %3, 0; @p ld.global.v4.b32 {%0, %1, %2, %3}, [%4];}"
      : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
      : "l"(__cvta_generic_to_global(from)), "r"(static_cast<uint32_t>(there))
      : "memory");
  return words;
}

__device__ __forceinline__ uint32_t load_byte_if(bool there, const void* from) {
  uint32_t byte;
  asm volatile("{.reg .pred p; setp.ne.u32 p, %2, 0; mov.b32 %0, 0; @p ld.global.u8 %0, [%1];}" : "=r"(byte) : "l"(__cvta_generic_to_global(from)), "r"(static_cast<uint32_t>(there)) : "memory");
  return byte;
}

__device__ __forceinline__ void prefetch(const void* line) { asm volatile("prefetch.global.L2 [%0];" ::"l"(__cvta_generic_to_global(line))); }

// ---- matrices, by a whole warp -----------------------------------------------------------------------------------------

// Four 8 x 8 matrices of 16-bit elements. Lane 8 m + i gives the address of row i of matrix m, 16 aligned bytes; r[m] of lane
// 4 i + j holds columns 2 j and 2 j + 1 of its row i, the lower column in the lower half.
__device__ __forceinline__ void load_matrices(uint32_t (&r)[4], uint32_t row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];" : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(row) : "memory");
}

// The same of their transposes: r[m] of lane 4 i + j holds rows 2 j and 2 j + 1 of column i.
__device__ __forceinline__ void load_matrices_transposed(uint32_t (&r)[4], uint32_t row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];" : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(row) : "memory");
}

// sums += a * b, of bfloat16 matrices 16 x 16 and 16 x 8, in fragments of mma.m16n8k16: for lane 4 i + j, a[0] has row i and
// columns 2 j, 2 j + 1; a[1] row i + 8; a[2] and a[3] the same rows, columns + 8. b0 has column i and rows 2 j, 2 j + 1, b1
// rows + 8. sums[0], sums[1] are row i and columns 2 j, 2 j + 1; sums[2], sums[3] row i + 8.
__device__ __forceinline__ void multiply_bf16(float (&sums)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// ---- numbers -----------------------------------------------------------------------------------------------------------

// Four float8 e4m3 codes, lowest byte first, to two pairs of float16: exact. From capability 8.9.
__device__ __forceinline__ uint2 decode_e4m3x4(uint32_t codes) {
  uint2 pairs = {};
#if __CUDA_ARCH__ >= 890
  asm("{.reg .b16 low, high; mov.b32 {low, high}, %2; cvt.rn.f16x2.e4m3x2 %0, low; cvt.rn.f16x2.e4m3x2 %1, high;}" : "=r"(pairs.x), "=r"(pairs.y) : "r"(codes));
#else
  __trap();
#endif
  return pairs;
}

// Two float32 as a pair of float16, to nearest even.
__device__ __forceinline__ uint32_t pack_f16(float low, float high) {
  uint32_t pair;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

// Products of two pairs of bfloat16, subnormal numbers too. From capability 9.0.
__device__ __forceinline__ uint32_t multiply_bf16x2(uint32_t a, uint32_t b) {
  uint32_t product = 0;
#if __CUDA_ARCH__ >= 900
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
#else
  __trap();
#endif
  return product;
}

}  // namespace dsv4_ops::ptx

#endif
