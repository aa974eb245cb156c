// What the three parts of the emulator share: threads.cpp runs fibres and reports, memory.cpp sees accesses, together.cpp has
// barriers and warps.
#pragma once

#include "runtime.h"

#include <setjmp.h>
#include <ucontext.h>

#include <array>
#include <condition_variable>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

extern "C" char __executable_start, _end;  // of the linker: this program, with its constants

namespace emulator {

constexpr unsigned kWarp = 32, kMaxThreads = 1024, kMaxCluster = 16;

using Place = uint32_t;  // in the program's code: "@" and its digits in a report, which tests/emulated.py turns into lines
inline Place place_of(const void* address) { return static_cast<Place>(static_cast<const char*>(address) - &__executable_start); }
#define HERE place_of(__builtin_return_address(0))

// An access to a word, and when it was: before() tells whether it happened before another.
struct Touch {
  uint32_t block;
  uint16_t thread;
  uint8_t bytes;  // bits; 0: never touched
  bool atomic;
  uint32_t barriers, warp_barriers, arrivals;  // of the thread, until then
  uint32_t counter;                            // place of the counter of bytes that tells of it, plus 1; 0: none does
  Place place;
};

struct Word {
  uint32_t run;               // which the touches belong to
  Touch written[2], read[2];  // of two threads each: enough to see that a third is not alone
};

// Of device memory: bytes that kernels may use.
struct Range {
  const char *begin, *end;
  bool writable;
  std::vector<uint8_t> initialized;  // bits of each word's bytes; of writable ranges, as are
  std::vector<Word> words;
};

struct Copy {  // cp.async
  uint32_t to;
  const char* from;  // null: zeros
  Place place;
};

enum class State { ready, lanes, block_barrier, cluster_barrier, bytes, exited };

struct Block;

struct Thread {
  Block* block = nullptr;
  Index index = {};
  unsigned number = 0, lane = 0, warp = 0;
  State state = State::exited;
  Place place = 0;
  bool waited = false;  // for the previous grid
  uint32_t barriers = 0, warp_barriers = 0, arrivals = 0, waits = 0;
  std::vector<bool> relaxed;      // arrivals
  std::vector<uint32_t> counters;  // of bytes, plus 1, that it has waited for
  std::deque<std::vector<Copy>> copies;  // groups, the last one open
  // What it brings to its warp or barrier, and what it gets.
  Lanes operation = {};
  unsigned mask = 0;
  uint64_t value = 0, result = 0;
  int argument = 0, width = 0;
  void* registers = nullptr;

  char* stack = nullptr;
  bool started = false;
  ucontext_t first;
  jmp_buf context;
};

struct Block {
  unsigned rank = 0;
  uint32_t number = 0;
  Index index = {};
  unsigned alive = 0, at_barrier = 0;
  bool ended = true;
  int vote_any = 0, vote_all = 1, vote_count = 0;
  std::unique_ptr<Thread[]> threads{new Thread[kMaxThreads]};
  std::array<uint64_t, kMaxThreads / 64> ready = {};  // bits

  char* shared = nullptr;  // the OS thread's part of the program's thread-local memory
  size_t dynamic_begin = 0, dynamic_end = 0, dynamic_room = 0;  // places in it; past the end nothing may be touched
  std::vector<uint8_t> initialized;
  Word* words = nullptr;  // most are never touched, and take no memory
  std::map<uint32_t, int64_t> expected;  // bytes that are still to come, by the place of their counter

  jmp_buf scheduler;
  std::mutex mutex;
  std::condition_variable turn;
  bool runs = false;
  unsigned quantum = 0;
};

extern std::array<Block, kMaxCluster>& blocks;  // of the cluster that runs
extern const Launch* launched;
extern Thread* current;  // null: the host
extern unsigned in_cluster, cluster_alive, cluster_arrived, cluster_phase;
extern uint32_t launch_number, cluster_run;  // what touches of device and of shared memory belong to
extern uint64_t steps, max_steps;
extern Order order;

inline unsigned thread_count() { return launched->block.x * launched->block.y * launched->block.z; }

// ---- threads.cpp ---------------------------------------------------------------------------------------------------------

size_t thread_local_bytes();
bool on_a_stack(const void* address);

void say(const char* format, ...) __attribute__((format(printf, 1, 2)));  // a part of a report
void say_thread(const Thread& thread);
[[noreturn]] void stop();
[[noreturn]] void report(Place place, const char* format, ...) __attribute__((format(printf, 2, 3)));  // all of one
[[noreturn]] void hang(Place place);

inline void step(Place place) {
  if (++steps > max_steps) hang(place);
}
void wait_in(State state, Place place);
void set_ready(Thread& thread);
void may_switch(Place place);  // where the order of two threads is open

// ---- memory.cpp ----------------------------------------------------------------------------------------------------------

void check_access(const void* where, size_t bytes, bool writes, bool atomic, Place place, uint32_t counter = 0);

constexpr uint32_t kPlaceBits = 27, kPlaces = (uint32_t{1} << kPlaceBits) - 1;  // of an address: rank + 1 above, place below

// ---- together.cpp --------------------------------------------------------------------------------------------------------

void leave(Thread& thread);  // it has exited

}  // namespace emulator
