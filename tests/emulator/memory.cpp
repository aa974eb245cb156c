// Device and shared memory: which bytes there are, who touched them, and what the kernels' instructions do with them.
#include "state.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace emulator {
namespace {

std::map<const char*, Range> ranges;  // by their begin
std::vector<void*> allocations;

// ---- what happened before what -------------------------------------------------------------------------------------------

bool before(const Touch& touch) {  // the running thread's next access
  const Thread& self = *current;
  if (touch.counter != 0) return std::find(self.counters.begin(), self.counters.end(), touch.counter) != self.counters.end();
  if (touch.block == self.block->number) {
    if (touch.thread == self.number) return true;
    if (self.barriers > touch.barriers) return true;
    if (touch.thread / kWarp == self.warp && self.warp_barriers > touch.warp_barriers) return true;
  } else if (touch.block / in_cluster != self.block->number / in_cluster) {
    return false;
  }
  const Thread& other = blocks[touch.block % in_cluster].threads[touch.thread];
  for (uint32_t i = touch.arrivals; i < self.waits; ++i) {
    if (i >= other.relaxed.size() || !other.relaxed[i]) return true;
  }
  return false;
}

[[noreturn]] void race(const Touch& other, bool other_writes, bool writes, const char* where, Place place) {
  say("emulator: race: %s and %s of %s without a barrier between them:\n", other_writes ? "write" : "read", writes ? "write" : "read", where);
  say("  first by thread %u (warp %u lane %u) of block %u at @%x\n  then", other.thread, other.thread / kWarp, other.thread % kWarp, other.block, other.place);
  say_thread(*current);
  say(" at @%x\n", place);
  stop();
}

void remember(Touch (&touches)[2], Touch touch) {
  for (Touch& known : touches) {
    const bool own = known.block == touch.block && known.thread == touch.thread && known.counter == touch.counter;
    if (known.bytes == 0 || own) {
      if (own && known.barriers == touch.barriers && known.warp_barriers == touch.warp_barriers && known.arrivals == touch.arrivals && known.atomic == touch.atomic) touch.bytes |= known.bytes;
      known = touch;
      return;
    }
  }
  for (Touch& known : touches) {
    if (before(known)) {
      known = touch;
      return;
    }
  }
}

void touch_word(Word& word, uint32_t run, uint8_t& initialized, unsigned bytes, bool writes, bool atomic, uint32_t counter, const char* where, Place place) {
  if (word.run != run) {
    memset(&word, 0, sizeof word);
    word.run = run;
  }
  const Thread& self = *current;
  for (const Touch& other : word.written) {
    if ((other.bytes & bytes) != 0 && !(atomic && other.atomic) && !before(other)) race(other, true, writes, where, place);
  }
  if (writes) {
    for (const Touch& other : word.read) {
      if ((other.bytes & bytes) != 0 && !before(other)) race(other, false, true, where, place);
    }
  }
  if (!writes && (initialized & bytes) != bytes) report(place, "uninitialized %s is read", where);
  if (writes && !atomic) initialized |= static_cast<uint8_t>(bytes);  // to add to garbage is no fault before that is read
  remember(writes ? word.written : word.read, Touch{self.block->number, static_cast<uint16_t>(self.number), static_cast<uint8_t>(bytes), atomic, self.barriers, self.warp_barriers, self.arrivals, counter, place});
}

template <class Use>
void each_word(size_t offset, size_t bytes, const Use& use) {
  for (const size_t end = offset + bytes; offset < end;) {
    const size_t in_word = std::min<size_t>(4 - offset % 4, end - offset);
    use(offset / 4, ((1u << in_word) - 1) << (offset % 4));
    offset += in_word;
  }
}

Block* block_of(const char* address, size_t* offset) {
  for (unsigned i = 0; i < in_cluster; ++i) {
    Block& block = blocks[(current->block->rank + i) % in_cluster];
    *offset = static_cast<size_t>(address - block.shared);
    if (*offset < thread_local_bytes()) return &block;
  }
  return nullptr;
}

Range* range_of(const char* address) {
  auto after = ranges.upper_bound(address);
  if (after == ranges.begin()) return nullptr;
  Range& range = (--after)->second;
  return address < range.end ? &range : nullptr;
}

}  // namespace

void check_access(const void* where, size_t bytes, bool writes, bool atomic, Place place, uint32_t counter) {
  const char* const address = static_cast<const char*>(where);
  const Thread& self = *current;
  step(place);
  if (bytes <= 16 && (bytes & (bytes - 1)) == 0 && reinterpret_cast<uintptr_t>(address) % bytes != 0) report(place, "misaligned %s of %zu bytes", writes ? "write" : "read", bytes);
  size_t offset = 0;
  if (Block* const block = block_of(address, &offset)) {
    if (block != self.block && self.waits == 0) report(place, "shared memory of block %u is used before a cluster barrier has shown that it runs,", block->number);
    if (block->ended) report(place, "shared memory of block %u is used, which has ended,", block->number);
    if (offset + bytes > block->dynamic_end && offset < block->dynamic_begin + block->dynamic_room) {
      report(place, "%s of %zu bytes at %zd, outside of the launch's %zu bytes of shared memory,", writes ? "write" : "read", bytes, static_cast<ssize_t>(offset - block->dynamic_begin), launched->shared_bytes);
    }
    each_word(offset, bytes, [&](size_t word, unsigned mask) { touch_word(block->words[word], cluster_run, block->initialized[word], mask, writes, atomic, counter, "shared memory", place); });
    return;
  }
  if (Range* const range = range_of(address)) {
    if (address + bytes > range->end) report(place, "%s of %zu bytes goes %zd past the end of device memory", writes ? "write" : "read", bytes, address + bytes - range->end);
    if (launched->before_previous_ends && !self.waited) report(place, "device memory is used before griddepcontrol.wait");
    if (writes && !range->writable) report(place, "an input is written");
    if (!range->writable) return;
    each_word(static_cast<size_t>(address - range->begin), bytes, [&](size_t word, unsigned mask) { touch_word(range->words[word], launch_number, range->initialized[word], mask, writes, atomic, 0, "device memory", place); });
    return;
  }
  if (!writes) {
    if (address >= static_cast<const char*>(launched->parameters) && address + bytes <= static_cast<const char*>(launched->parameters) + launched->parameter_bytes) return;
    if (address >= &__executable_start && address + bytes <= &_end) return;
  }
  say("emulator: %s of %zu bytes outside of all memory", writes ? "write" : "read", bytes);
  say_thread(self);
  say(" at @%x\n", place);
  auto after = ranges.upper_bound(address);
  if (after != ranges.begin()) {
    const Range& range = std::prev(after)->second;
    say("  %zd bytes past the end of a buffer of %zd\n", address - range.end, range.end - range.begin);
  }
  if (after != ranges.end()) say("  %zd bytes before one of %zd\n", after->second.begin - address, after->second.end - after->second.begin);
  stop();
}

// ---- what kernels ask ----------------------------------------------------------------------------------------------------

void previous_grid_wait() { current->waited = true; }

uint32_t atomic(void* place, Atomic operation, uint32_t operand, uint32_t expected) {
  const Place here = HERE;
  may_switch(here);
  if (!on_a_stack(place)) check_access(place, 4, true, true, here);
  uint32_t old, result = 0;
  memcpy(&old, place, 4);
  float a, b;
  memcpy(&a, &old, 4), memcpy(&b, &operand, 4);
  const float sum = a + b;
  switch (operation) {
    case Atomic::add: result = old + operand; break;
    case Atomic::add_float: memcpy(&result, &sum, 4); break;
    case Atomic::min_unsigned: result = std::min(old, operand); break;
    case Atomic::max_unsigned: result = std::max(old, operand); break;
    case Atomic::min_signed: result = static_cast<uint32_t>(std::min(static_cast<int32_t>(old), static_cast<int32_t>(operand))); break;
    case Atomic::max_signed: result = static_cast<uint32_t>(std::max(static_cast<int32_t>(old), static_cast<int32_t>(operand))); break;
    case Atomic::bit_and: result = old & operand; break;
    case Atomic::bit_or: result = old | operand; break;
    case Atomic::bit_xor: result = old ^ operand; break;
    case Atomic::exchange: result = operand; break;
    case Atomic::compare: result = old == expected ? operand : old; break;
  }
  memcpy(place, &result, 4);
  return old;
}

void check_constant(const void* place, size_t) {
  const Range* const range = range_of(static_cast<const char*>(place));
  if (range != nullptr && range->writable) report(HERE, "__ldg of memory that the kernel may write");
}

// An address: rank + 1 of the block in the upper 5 bits, place in its shared memory below. One may name a place outside, as
// long as nothing is there to be read or written.
uint32_t shared_address(const void* shared, uint32_t rank) {
  const Block& own = *current->block;
  if (rank == kOwnBlock) rank = own.rank;
  if (rank >= in_cluster) report(HERE, "there is no block %u in a cluster of %u", rank, in_cluster);
  return (rank + 1) << kPlaceBits | (static_cast<uint32_t>(static_cast<const char*>(shared) - own.shared) & kPlaces);
}

void* shared_pointer(const void* shared, uint32_t rank_or_address) {
  const uint32_t address = shared != nullptr ? shared_address(shared, rank_or_address) : rank_or_address;
  const uint32_t rank = (address >> kPlaceBits) - 1;
  if (rank >= in_cluster) report(HERE, "%08x is no address of shared memory", address);
  return blocks[rank].shared + (address & kPlaces);
}

void store_shared(uint32_t to, uint64_t eight_bytes) {
  void* const target = shared_pointer(nullptr, to);
  check_access(target, 8, true, false, HERE);
  memcpy(target, &eight_bytes, 8);
}

void copy16(uint32_t to, const void* from, bool there) {
  const Place place = HERE;
  char* const target = static_cast<char*>(shared_pointer(nullptr, to));
  if (there) check_access(from, 16, false, false, place);
  if (reinterpret_cast<uintptr_t>(from) % 16 != 0) report(place, "misaligned cp.async");
  check_access(target, 16, true, false, place);  // it may come at once, or with the wait
  size_t offset = 0;
  Block* const block = block_of(target, &offset);
  if (block != current->block) report(place, "cp.async to another block");
  for (size_t i = 0; i < 4; ++i) block->initialized[offset / 4 + i] = 0;  // until the wait
  memset(target, 0xa5, 16);
  if (current->copies.empty()) current->copies.emplace_back();
  current->copies.back().push_back(Copy{to, there ? static_cast<const char*>(from) : nullptr, place});
}

void commit_copies() {
  if (current->copies.empty()) current->copies.emplace_back();
  current->copies.emplace_back();
}

void wait_copies(int pending) {
  auto& groups = current->copies;
  const size_t left = pending < 0 ? 0 : static_cast<size_t>(pending) + 1;  // the open group is not committed
  while (groups.size() > left) {
    for (const Copy& copy : groups.front()) {
      void* const target = shared_pointer(nullptr, copy.to);
      check_access(target, 16, true, false, copy.place);
      if (copy.from != nullptr) memcpy(target, copy.from, 16);
      if (copy.from == nullptr) memset(target, 0, 16);
    }
    groups.pop_front();
  }
}

// ---- host side -----------------------------------------------------------------------------------------------------------

void* allocate(size_t bytes, size_t offset) {
  constexpr size_t kAround = 4096;
  char* const memory = static_cast<char*>(aligned_alloc(256, (bytes + offset + 2 * kAround + 255) / 256 * 256));
  if (memory == nullptr) fail("no memory for %zu bytes", bytes);
  memset(memory, 0xa5, (bytes + offset + 2 * kAround + 255) / 256 * 256);
  allocations.push_back(memory);
  return memory + kAround + offset;
}

void expose(const void* from, size_t bytes, Access access, bool initialized) {
  if (bytes == 0) return;
  const char* const begin = static_cast<const char*>(from);
  const bool writable = access == Access::write;
  if (writable && reinterpret_cast<uintptr_t>(begin) % 4 != 0) fail("expose: memory to write must be aligned to 4 bytes");
  Range range{begin, begin + bytes, writable, {}, {}};
  if (writable) range.initialized.assign(bytes / 4 + 1, initialized ? 15 : 0), range.words.resize(bytes / 4 + 1);
  ranges[begin] = std::move(range);
}

void free_all() {
  for (void* const memory : allocations) free(memory);
  allocations.clear();
  ranges.clear();
}

}  // namespace emulator

// ---- what the compiler calls at each access of instrumented code: see README.md ------------------------------------------

namespace {
inline void seen(void* address, size_t bytes, bool writes, void* from) {
  using namespace emulator;
  if (current == nullptr || on_a_stack(address)) return;
  check_access(address, bytes, writes, false, place_of(from));
}
}  // namespace

extern "C" {
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_vptr_update(void**, void*) {}
void __tsan_vptr_read(void**) {}
#define ACCESS(n)                                                                                  \
  void __tsan_read##n(void* a) { seen(a, n, false, __builtin_return_address(0)); }                 \
  void __tsan_write##n(void* a) { seen(a, n, true, __builtin_return_address(0)); }                 \
  void __tsan_unaligned_read##n(void* a) { seen(a, n, false, __builtin_return_address(0)); }       \
  void __tsan_unaligned_write##n(void* a) { seen(a, n, true, __builtin_return_address(0)); }
ACCESS(1)
ACCESS(2)
ACCESS(4)
ACCESS(8)
ACCESS(16)
void __tsan_read_range(void* a, size_t bytes) { seen(a, bytes, false, __builtin_return_address(0)); }
void __tsan_write_range(void* a, size_t bytes) { seen(a, bytes, true, __builtin_return_address(0)); }
}
