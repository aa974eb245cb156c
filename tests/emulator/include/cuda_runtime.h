// Stand-in for CUDA's header: the part of CUDA C++ that csrc/cuda uses, on a CPU (../README.md).
#pragma once

#include <math.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <map>
#include <tuple>
#include <type_traits>

#include "../runtime.h"

#define __CUDA_ARCH__ 900
#define __device__
#define __host__
#define __global__
#define __constant__ static const
#define __shared__ thread_local  // a block is an OS thread, and its threads are fibres of that one
#define __launch_bounds__(...)
#define __grid_constant__
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__  // the attribute has this name in headers of the library
#define __align__(n) __attribute__((aligned(n)))
#define __restrict__ __restrict

#define threadIdx (::emulator::thread_index())
#define blockIdx (::emulator::block_index())

// No macros: launch configurations have members of these names.
template <emulator::Index (*size)() noexcept>
struct EmulatedSize {
  struct X { operator unsigned() const { return size().x; } } x;
  struct Y { operator unsigned() const { return size().y; } } y;
  struct Z { operator unsigned() const { return size().z; } } z;
};
inline constexpr EmulatedSize<&emulator::block_size> blockDim{};
inline constexpr EmulatedSize<&emulator::grid_size> gridDim{};

// ---- types ------------------------------------------------------------------------------------------------------------

#define EMULATED_VECTORS(name, T)                                              \
  struct alignas(2 * sizeof(T)) name##2 { T x, y; };                           \
  struct name##3 { T x, y, z; };                                               \
  struct alignas(4 * sizeof(T)) name##4 { T x, y, z, w; };                     \
  inline name##2 make_##name##2(T x, T y) { return {x, y}; }                   \
  inline name##3 make_##name##3(T x, T y, T z) { return {x, y, z}; }           \
  inline name##4 make_##name##4(T x, T y, T z, T w) { return {x, y, z, w}; }
EMULATED_VECTORS(int, int)
EMULATED_VECTORS(uint, unsigned)
EMULATED_VECTORS(float, float)
EMULATED_VECTORS(short, short)
EMULATED_VECTORS(ushort, unsigned short)
#undef EMULATED_VECTORS

struct alignas(16) longlong2 { long long x, y; };
struct alignas(16) ulonglong2 { unsigned long long x, y; };

struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

// ---- numbers ------------------------------------------------------------------------------------------------------------

template <class To, class From>
inline To emulated_bits(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  memcpy(&to, &from, sizeof to);
  return to;
}
inline unsigned __float_as_uint(float v) { return emulated_bits<unsigned>(v); }
inline int __float_as_int(float v) { return emulated_bits<int>(v); }
inline float __uint_as_float(unsigned v) { return emulated_bits<float>(v); }
inline float __int_as_float(int v) { return emulated_bits<float>(v); }
inline int __popc(unsigned v) { return __builtin_popcount(v); }
inline int __clz(int v) { return v == 0 ? 32 : __builtin_clz(static_cast<unsigned>(v)); }
inline int __ffs(int v) { return __builtin_ffs(v); }
inline float __fdividef(float a, float b) { return a / b; }
inline float __frcp_rn(float a) { return 1.0f / a; }

// As the machine has them: a NaN of any kind gives way to a number (the C library lets signalling ones win), and -0 < +0.
inline float emulated_fmaxf(float a, float b) {
  if (a != a) return b != b ? __uint_as_float(0x7fffffffu) : b;
  return b != b || a > b || (a == b && !signbit(a)) ? a : b;
}
inline float emulated_fminf(float a, float b) { return a != a && b != b ? __uint_as_float(0x7fffffffu) : -emulated_fmaxf(-a, -b); }
#define fmaxf emulated_fmaxf
#define fminf emulated_fminf

#define EMULATED_LEAST_AND_MOST(T)                        \
  inline T min(T a, T b) { return b < a ? b : a; }        \
  inline T max(T a, T b) { return a < b ? b : a; }
EMULATED_LEAST_AND_MOST(int)
EMULATED_LEAST_AND_MOST(unsigned)
EMULATED_LEAST_AND_MOST(long)
EMULATED_LEAST_AND_MOST(unsigned long)
EMULATED_LEAST_AND_MOST(long long)
EMULATED_LEAST_AND_MOST(unsigned long long)
#undef EMULATED_LEAST_AND_MOST
inline unsigned min(int a, unsigned b) { return min(static_cast<unsigned>(a), b); }
inline unsigned min(unsigned a, int b) { return min(a, static_cast<unsigned>(b)); }
inline unsigned max(int a, unsigned b) { return max(static_cast<unsigned>(a), b); }
inline unsigned max(unsigned a, int b) { return max(a, static_cast<unsigned>(b)); }
inline float min(float a, float b) { return fminf(a, b); }
inline float max(float a, float b) { return fmaxf(a, b); }

// ---- threads together ---------------------------------------------------------------------------------------------------

inline void __syncthreads() { emulator::block_barrier(emulator::Vote::none, 0); }
inline int __syncthreads_or(int value) { return emulator::block_barrier(emulator::Vote::any, value); }
inline int __syncthreads_and(int value) { return emulator::block_barrier(emulator::Vote::all, value); }
inline int __syncthreads_count(int value) { return emulator::block_barrier(emulator::Vote::count, value); }
inline void __syncwarp(unsigned mask = ~0u) { emulator::together(emulator::Lanes::sync, mask, 0, 0, 32); }
[[noreturn]] inline void __trap() { emulator::fail("__trap()"); }

template <class T>
inline T emulated_shuffle(emulator::Lanes operation, unsigned mask, T value, int argument, int width) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8);
  uint64_t in = 0;
  memcpy(&in, &value, sizeof value);
  in = emulator::together(operation, mask, in, argument, width);
  memcpy(&value, &in, sizeof value);
  return value;
}
template <class T>
inline T __shfl_sync(unsigned mask, T value, int lane, int width = 32) { return emulated_shuffle(emulator::Lanes::shuffle, mask, value, lane, width); }
template <class T>
inline T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32) { return emulated_shuffle(emulator::Lanes::shuffle_up, mask, value, static_cast<int>(delta), width); }
template <class T>
inline T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32) { return emulated_shuffle(emulator::Lanes::shuffle_down, mask, value, static_cast<int>(delta), width); }
template <class T>
inline T __shfl_xor_sync(unsigned mask, T value, int lanes, int width = 32) { return emulated_shuffle(emulator::Lanes::shuffle_xor, mask, value, lanes, width); }

inline unsigned __ballot_sync(unsigned mask, int value) { return static_cast<unsigned>(emulator::together(emulator::Lanes::ballot, mask, value != 0, 0, 32)); }
inline int __any_sync(unsigned mask, int value) { return static_cast<int>(emulator::together(emulator::Lanes::any, mask, value != 0, 0, 32)); }
inline int __all_sync(unsigned mask, int value) { return static_cast<int>(emulator::together(emulator::Lanes::all, mask, value != 0, 0, 32)); }

#define EMULATED_REDUCE(name, T, operation) \
  inline T name(unsigned mask, T value) { return static_cast<T>(emulator::together(emulator::Lanes::operation, mask, static_cast<unsigned>(value), 0, 32)); }
EMULATED_REDUCE(__reduce_add_sync, unsigned, add)
EMULATED_REDUCE(__reduce_add_sync, int, add)
EMULATED_REDUCE(__reduce_min_sync, unsigned, min_unsigned)
EMULATED_REDUCE(__reduce_min_sync, int, min_signed)
EMULATED_REDUCE(__reduce_max_sync, unsigned, max_unsigned)
EMULATED_REDUCE(__reduce_max_sync, int, max_signed)
EMULATED_REDUCE(__reduce_and_sync, unsigned, bit_and)
EMULATED_REDUCE(__reduce_or_sync, unsigned, bit_or)
EMULATED_REDUCE(__reduce_xor_sync, unsigned, bit_xor)
#undef EMULATED_REDUCE

// ---- memory -------------------------------------------------------------------------------------------------------------

template <class T>
__forceinline__ T __ldg(const T* place) {
  emulator::check_constant(place, sizeof(T));
  return *place;
}

#define EMULATED_ATOMIC(name, T, operation) \
  inline T name(T* place, T value) { return emulated_bits<T>(emulator::atomic(place, emulator::Atomic::operation, emulated_bits<uint32_t>(value), 0)); }
EMULATED_ATOMIC(atomicAdd, int, add)
EMULATED_ATOMIC(atomicAdd, unsigned, add)
EMULATED_ATOMIC(atomicAdd, float, add_float)
EMULATED_ATOMIC(atomicMin, unsigned, min_unsigned)
EMULATED_ATOMIC(atomicMax, unsigned, max_unsigned)
EMULATED_ATOMIC(atomicMin, int, min_signed)
EMULATED_ATOMIC(atomicMax, int, max_signed)
EMULATED_ATOMIC(atomicAnd, unsigned, bit_and)
EMULATED_ATOMIC(atomicOr, unsigned, bit_or)
EMULATED_ATOMIC(atomicXor, unsigned, bit_xor)
EMULATED_ATOMIC(atomicExch, unsigned, exchange)
EMULATED_ATOMIC(atomicExch, int, exchange)
#undef EMULATED_ATOMIC
inline unsigned atomicCAS(unsigned* place, unsigned expected, unsigned value) { return emulator::atomic(place, emulator::Atomic::compare, value, expected); }

inline size_t __cvta_generic_to_shared(const void* shared) { return emulator::shared_address(shared, emulator::kOwnBlock); }
inline size_t __cvta_generic_to_global(const void* global) { return reinterpret_cast<size_t>(global); }

// ---- host side ------------------------------------------------------------------------------------------------------------

using cudaStream_t = void*;
enum cudaError_t { cudaSuccess = 0 };
enum cudaLaunchAttributeID { cudaLaunchAttributeClusterDimension = 4, cudaLaunchAttributeProgrammaticStreamSerialization = 6 };
union cudaLaunchAttributeValue {
  struct {
    unsigned x, y, z;
  } clusterDim;
  int programmaticStreamSerializationAllowed;
};
struct cudaLaunchAttribute {
  cudaLaunchAttributeID id;
  cudaLaunchAttributeValue val;
};
struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes;
  cudaStream_t stream;
  cudaLaunchAttribute* attrs;
  unsigned numAttrs;
};

// What a kernel has been allowed beyond 48 KB of dynamic shared memory and clusters of 8 blocks.
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize, cudaFuncAttributeNonPortableClusterSizeAllowed };
struct EmulatedAllowance {
  size_t shared_bytes = 48 << 10;
  bool large_clusters = false;
};
inline int emulated_device = 0;  // of the guard
inline std::map<std::pair<int, const void*>, EmulatedAllowance> emulated_allowances;

template <class Kernel>
cudaError_t cudaFuncSetAttribute(Kernel* kernel, cudaFuncAttribute attribute, int value) {
  EmulatedAllowance& allowance = emulated_allowances[{emulated_device, reinterpret_cast<const void*>(kernel)}];
  if (attribute == cudaFuncAttributeMaxDynamicSharedMemorySize) allowance.shared_bytes = static_cast<size_t>(value);
  if (attribute == cudaFuncAttributeNonPortableClusterSizeAllowed) allowance.large_clusters = value != 0;
  return cudaSuccess;
}

// Runs to the end before it returns.
template <class... Parameters, class... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...), Arguments&&... arguments) {
  struct Call {
    void (*kernel)(Parameters...);
    std::tuple<std::decay_t<Parameters>...> parameters;
  };
  const Call call{kernel, {std::forward<Arguments>(arguments)...}};
  const dim3 grid = config->gridDim, block = config->blockDim;
  emulator::Launch launch{{grid.x, grid.y, grid.z}, {block.x, block.y, block.z}, 1, config->dynamicSmemBytes, false, nullptr, &call, sizeof call};
  for (unsigned i = 0; i < config->numAttrs; ++i) {
    const cudaLaunchAttribute& attribute = config->attrs[i];
    if (attribute.id == cudaLaunchAttributeClusterDimension) launch.cluster = attribute.val.clusterDim.x;
    if (attribute.id == cudaLaunchAttributeProgrammaticStreamSerialization) launch.before_previous_ends = attribute.val.programmaticStreamSerializationAllowed != 0;
  }
  const EmulatedAllowance& allowed = emulated_allowances[{emulated_device, reinterpret_cast<const void*>(kernel)}];
  if (launch.shared_bytes > allowed.shared_bytes) emulator::fail("a launch with %zu bytes of shared memory, where %zu are allowed", launch.shared_bytes, allowed.shared_bytes);
  if (launch.cluster > 8 && !allowed.large_clusters) emulator::fail("a launch in clusters of %u, where 8 are allowed", launch.cluster);
  launch.thread = [](const void* given) { std::apply(static_cast<const Call*>(given)->kernel, static_cast<const Call*>(given)->parameters); };
  emulator::launch(launch);
  return cudaSuccess;
}

#include "../ptx.h"
