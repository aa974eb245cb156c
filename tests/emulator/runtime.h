// What kernels ask of the emulator: the stand-in headers of include/ and ptx.h translate CUDA's names to these. README.md
// says how it works; threads.cpp, memory.cpp and together.cpp do it.
#pragma once

#include <cstddef>
#include <cstdint>

namespace emulator {

struct Index {
  unsigned x, y, z;
};

// Of the thread that runs; a kernel's code never spans two.
Index thread_index() noexcept __attribute__((const));
Index block_index() noexcept __attribute__((const));
Index block_size() noexcept __attribute__((const));
Index grid_size() noexcept __attribute__((const));

// ---- barriers and what lanes of a warp do together: each waits for the others --------------------------------------------

enum class Vote { none, any, all, count };
int block_barrier(Vote vote, int value);
void cluster_arrive(bool release);
void cluster_wait();
void previous_grid_wait();

enum class Lanes { sync, shuffle, shuffle_up, shuffle_down, shuffle_xor, ballot, any, all, add, min_unsigned, max_unsigned, min_signed, max_signed, bit_and, bit_or, bit_xor };
uint64_t together(Lanes operation, unsigned mask, uint64_t value, int argument, int width);

struct Matrices {
  uint32_t r[4];
};
Matrices load_matrices(uint32_t row, bool transposed);
struct Sums {
  float f[4];
};
Sums multiply_bf16(Sums sums, Matrices a, uint32_t b0, uint32_t b1);

// ---- memory --------------------------------------------------------------------------------------------------------------

enum class Atomic { add, add_float, min_unsigned, max_unsigned, min_signed, max_signed, bit_and, bit_or, bit_xor, exchange, compare };
uint32_t atomic(void* place, Atomic operation, uint32_t operand, uint32_t expected);

void check_constant(const void* place, size_t bytes);  // that no thread writes it: for loads that may go past the caches

constexpr uint32_t kOwnBlock = ~0u;
uint32_t shared_address(const void* shared, uint32_t rank);  // kOwnBlock, or of a block of the cluster
void* shared_pointer(const void* shared, uint32_t rank);
void store_shared(uint32_t to, uint64_t eight_bytes);

void copy16(uint32_t to, const void* from, bool there);
void commit_copies();
void wait_copies(int pending);  // -1: all, committed or not

// Bytes that a block expects once, counted at a word of its shared memory (mbarrier with expect_tx, st.async).
void expect_bytes(uint64_t* arrivals, uint32_t bytes);
void send_counted(uint32_t to, const void* from, uint32_t bytes, uint32_t arrivals);
void wait_for_bytes(uint64_t* arrivals);

// ---- host side ------------------------------------------------------------------------------------------------------------

[[noreturn]] void fail(const char* what, ...) __attribute__((format(printf, 1, 2)));

enum class Access { read, write };  // of device memory by kernels

// Global memory: `bytes` at a multiple of 256 plus `offset`, with nothing readable around it. Freed by free_all().
void* allocate(size_t bytes, size_t offset = 0);
// Kernels may read (and write) these bytes of an allocation; outside of all such ranges every access is an error.
void expose(const void* from, size_t bytes, Access access, bool initialized);
void free_all();

enum class Order { random, forward, backward };  // forward: the first warp goes as far as it can, then the next, and so do blocks
constexpr uint64_t kMaxSteps = uint64_t{1} << 28;  // accesses and switches of one cluster: more is a hang
void schedule(Order order, uint64_t seed, uint64_t max_steps = kMaxSteps);

struct Launch {
  Index grid, block;
  unsigned cluster;
  size_t shared_bytes;
  bool before_previous_ends;  // programmatic serialization: device memory must wait for previous_grid_wait
  void (*thread)(const void* parameters);
  const void* parameters;  // on the host, where threads may read them
  size_t parameter_bytes;
};
void launch(const Launch& launch);

// Registers a kernel's `extern __shared__` array, whose size is the launch's.
struct DynamicShared {
  DynamicShared(unsigned char* (*address)(), size_t bytes);
};

}  // namespace emulator

// `extern __shared__ unsigned char name[]` of kernels in namespace `space`: one such line in a driver.
#define EMULATED_DYNAMIC_SHARED(space, name)                                                   \
  namespace space {                                                                            \
  alignas(1024) thread_local unsigned char name[232448];                                       \
  static const ::emulator::DynamicShared emulated_##name([] { return name; }, sizeof(name));   \
  }
