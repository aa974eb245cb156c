// Runs blocks of CUDA threads on a CPU and watches what they do; README.md says how.
#include "runtime.h"

#include <link.h>
#include <setjmp.h>
#include <signal.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <condition_variable>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

extern "C" char __executable_start, _end;  // of the linker: this program, with its constants

namespace emulator {
namespace {

constexpr unsigned kWarp = 32, kMaxThreads = 1024, kMaxCluster = 16;
constexpr uint32_t kPlaceBits = 27, kPlaces = (uint32_t{1} << kPlaceBits) - 1;  // of addresses in shared memory
constexpr size_t kStack = 128 << 10;

using Place = uint32_t;  // in the code: the report resolves it

Place place_of(const void* address) { return static_cast<Place>(static_cast<const char*>(address) - &__executable_start); }
#define HERE place_of(__builtin_return_address(0))

// ---- who touched a word, and whether that happened before ----------------------------------------------------------------

struct Touch {
  uint32_t block;
  uint16_t thread;
  uint8_t bytes;  // bits; 0: never touched
  bool atomic;
  uint32_t barriers, arrivals;  // of the thread, until then
  uint32_t warp_barriers;
  uint32_t counter;  // of its block, plus 1, which tells that a write by st.async has come; 0: of no such
  Place place;
};

struct Word {
  uint32_t run;               // which the touches belong to
  Touch written[2], read[2];  // two of different threads suffice to see that a third has company
};

struct Range {
  const char *begin, *end;
  bool writable;
  std::vector<uint8_t> initialized;  // bits of each word's bytes, of writable ranges
  std::vector<Word> words;
};

// ---- threads, blocks, and the OS threads that blocks are ------------------------------------------------------------------

enum class State { ready, lanes, block_barrier, cluster_barrier, bytes, exited };
const char* const kStateNames[] = {"can go on", "wait for lanes of their warp", "wait at __syncthreads", "wait for the cluster", "wait for bytes", "have exited"};

struct Copy {
  uint32_t to, bytes;
  const char* from;
  Place place;
};

struct Block;

struct Thread {
  Block* block = nullptr;
  Index index = {};
  unsigned number = 0, lane = 0, warp = 0;
  State state = State::exited;
  Place place = 0;
  bool waited = false;  // for the previous grid
  uint32_t barriers = 0, warp_barriers = 0, arrivals = 0, waits = 0;
  std::vector<bool> relaxed;  // arrivals
  Lanes operation = {};
  unsigned mask = 0;
  uint64_t value = 0, result = 0;
  int argument = 0, width = 0;
  const void* matrices = nullptr;
  std::vector<uint32_t> counters;        // that it has waited for
  std::deque<std::vector<Copy>> copies;  // groups, the last one open

  char* stack = nullptr;
  bool started = false;
  ucontext_t first;
  jmp_buf context;
};

struct Block {
  unsigned rank = 0;
  uint32_t number = 0;
  Index index = {};
  char* shared = nullptr;  // of the OS thread: its part of the program's thread-local memory
  std::vector<uint8_t> initialized;
  std::vector<Word> words;
  size_t dynamic_begin = 0, dynamic_end = 0, dynamic_room = 0;  // offsets; past dynamic_end nothing may be touched
  std::unique_ptr<Thread[]> threads{new Thread[kMaxThreads]};
  std::array<uint64_t, kMaxThreads / 64> ready = {};
  unsigned alive = 0, at_barrier = 0;
  std::map<uint32_t, int64_t> expected;  // bytes that are still to come, by the counter's place
  int vote_any = 0, vote_all = 1, vote_count = 0;
  bool ended = true;

  jmp_buf scheduler;
  std::thread worker;
  std::mutex mutex;
  std::condition_variable turn;
  bool runs = false, quit = false;
  unsigned quantum = 0;
};

struct DynamicArray {
  unsigned char* (*address)();
  size_t bytes;
};
std::vector<DynamicArray>& dynamic_arrays() {
  static std::vector<DynamicArray> arrays;
  return arrays;
}

std::array<Block, kMaxCluster>& blocks = *new std::array<Block, kMaxCluster>;  // OS threads wait in them to the end
std::map<const char*, Range> ranges;  // by their begin
std::vector<void*> allocations;
char* stacks = nullptr;
constexpr size_t kStacks = kStack * kMaxThreads * kMaxCluster;

Thread* current = nullptr;
const Launch* launched = nullptr;
unsigned in_cluster = 0, cluster_alive = 0, cluster_arrived = 0, cluster_phase = 0, cluster_number = 0;
uint32_t launch_number = 0, cluster_run = 0;  // what touches of device and of shared memory belong to
uint64_t steps = 0, max_steps = kMaxSteps;
Order order = Order::forward;
std::mt19937_64 dice;

unsigned thread_count() { return launched->block.x * launched->block.y * launched->block.z; }

unsigned draw(unsigned below) { return static_cast<unsigned>(dice() % below); }

// ---- reports ----------------------------------------------------------------------------------------------------------------

void say(const char* format, ...) __attribute__((format(printf, 1, 2)));
void say(const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  vfprintf(stderr, format, arguments);
  va_end(arguments);
}

void say_threads() {
  for (unsigned rank = 0; rank < in_cluster; ++rank) {
    const Block& block = blocks[rank];
    const unsigned count = thread_count();
    for (unsigned from = 0, to; from < count; from = to) {
      const Thread& one = block.threads[from];
      for (to = from + 1; to < count && block.threads[to].state == one.state && (one.state == State::exited || block.threads[to].place == one.place); ++to) {
      }
      say("  block %u threads %u-%u %s", block.number, from, to - 1, kStateNames[static_cast<int>(one.state)]);
      if (one.state != State::exited) say(" at @%x", one.place);
      say("\n");
    }
  }
}

void say_thread(const Thread& thread) { say(" by thread %u (warp %u lane %u) of block %u", thread.number, thread.warp, thread.lane, thread.block->number); }

[[noreturn]] void stop() {
  fflush(stdout);
  fflush(stderr);
  _exit(3);
}

[[noreturn]] void report(Place place, const char* format, ...) __attribute__((format(printf, 2, 3)));
void report(Place place, const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  say("emulator: ");
  vfprintf(stderr, format, arguments);
  va_end(arguments);
  if (current != nullptr) say_thread(*current);
  if (place != 0) say(" at @%x", place);
  say("\n");
  stop();
}

// ---- switching --------------------------------------------------------------------------------------------------------------

void set_ready(Thread& thread) {
  thread.state = State::ready;
  thread.block->ready[thread.number / 64] |= uint64_t{1} << (thread.number % 64);
}

bool any_ready(const Block& block) {
  return std::any_of(block.ready.begin(), block.ready.end(), [](uint64_t word) { return word != 0; });
}

int next_ready(const Block& block) {
  constexpr unsigned kWords = kMaxThreads / 64;
  if (order == Order::backward) {
    for (unsigned i = kWords; i-- > 0;) {
      if (block.ready[i] != 0) return static_cast<int>(i * 64 + 63 - __builtin_clzll(block.ready[i]));
    }
    return -1;
  }
  const unsigned start = order == Order::random ? draw(thread_count()) : 0;
  for (unsigned i = 0; i <= kWords; ++i) {  // the first word once more, for what lies before the start
    uint64_t word = block.ready[(start / 64 + i) % kWords];
    if (i == 0) word &= ~uint64_t{0} << (start % 64);
    if (word != 0) return static_cast<int>((start / 64 + i) % kWords * 64 + __builtin_ctzll(word));
  }
  return -1;
}

void step(Place place) {
  if (++steps > max_steps) {
    say("emulator: hang: more than %llu steps, the last one", static_cast<unsigned long long>(max_steps));
    say_thread(*current);
    say(" at @%x\n", place);
    say_threads();
    stop();
  }
}

void pause() {  // the thread that runs, in its own state
  Thread* const self = current;
  if (_setjmp(self->context) == 0) _longjmp(self->block->scheduler, 1);
}

void wait_in(State state, Place place) {
  Thread& self = *current;
  step(place);
  self.state = state, self.place = place;
  self.block->ready[self.number / 64] &= ~(uint64_t{1} << (self.number % 64));
  pause();
}

// Here another thread may go first: where the order of two is open.
void may_switch(Place place) {
  step(place);
  if (order == Order::random && draw(4) == 0) {
    current->place = place;
    pause();
  }
}

void finish_block_barrier(Block& block);
void finish_cluster_barrier();

void thread_exits() {
  Thread& self = *current;
  Block& block = *self.block;
  self.state = State::exited;
  block.ready[self.number / 64] &= ~(uint64_t{1} << (self.number % 64));
  --block.alive, --cluster_alive;
  if (self.arrivals > cluster_phase) --cluster_arrived;
  if (block.alive == 0) block.ended = true;
  if (block.ended && std::any_of(block.expected.begin(), block.expected.end(), [](const auto& one) { return one.second != 0; })) report(0, "the block ends before all bytes have come that it expects,");
  const unsigned first = self.warp * kWarp;
  for (unsigned i = first; i < first + kWarp; ++i) {
    const Thread& other = block.threads[i];
    if (other.state == State::lanes && (other.mask >> self.lane & 1u) != 0) report(other.place, "lane %u has exited, which lanes of its warp wait for", self.lane);
  }
  if (block.alive > 0 && block.at_barrier == block.alive) finish_block_barrier(block);
  if (cluster_alive > 0 && cluster_arrived == cluster_alive) finish_cluster_barrier();
}

void run_thread() {  // a fibre, once for each thread that has this number
  for (;;) {
    launched->thread(launched->parameters);
    thread_exits();
    pause();
  }
}

void resume(Thread& thread) {
  current = &thread;
  if (_setjmp(thread.block->scheduler) == 0) {
    if (thread.started) _longjmp(thread.context, 1);
    thread.started = true;
    setcontext(&thread.first);
  }
  current = nullptr;
}

// The OS thread of a block: runs its fibres until none can go on, or its turn is over.
void serve(Block& block) {
  std::unique_lock<std::mutex> lock(block.mutex);
  for (;;) {
    block.turn.wait(lock, [&] { return block.runs || block.quit; });
    if (block.quit) return;
    for (unsigned left = block.quantum; left > 0; --left) {
      const int next = next_ready(block);
      if (next < 0) break;
      resume(block.threads[next]);
    }
    block.runs = false;
    block.turn.notify_all();
  }
}

void run_block(Block& block, unsigned quantum) {
  std::unique_lock<std::mutex> lock(block.mutex);
  block.quantum = quantum, block.runs = true;
  block.turn.notify_all();
  block.turn.wait(lock, [&] { return !block.runs; });
}

// This program's part of the calling OS thread's thread-local memory: all __shared__ variables.
struct ThreadLocal {
  char* begin;
  size_t bytes;
};

size_t thread_local_bytes() {
  static const size_t bytes = [] {
    size_t found = 0;
    dl_iterate_phdr(
        [](dl_phdr_info* info, size_t, void* out) {
          for (int i = 0; i < info->dlpi_phnum; ++i) {
            if (info->dlpi_phdr[i].p_type == PT_TLS) *static_cast<size_t*>(out) = info->dlpi_phdr[i].p_memsz;
          }
          return 1;  // the program comes first
        },
        &found);
    return found;
  }();
  return bytes;
}

char* thread_local_begin() {
  char* found = nullptr;
  dl_iterate_phdr(
      [](dl_phdr_info* info, size_t, void* out) {
        *static_cast<char**>(out) = static_cast<char*>(info->dlpi_tls_data);
        return 1;
      },
      &found);
  return found;
}

void start_worker(Block& block, unsigned rank) {
  block.rank = rank;
  for (unsigned i = 0; i < kMaxThreads; ++i) {
    Thread& thread = block.threads[i];
    thread.block = &block, thread.number = i, thread.lane = i % kWarp, thread.warp = i / kWarp;
    thread.stack = stacks + kStack * (rank * kMaxThreads + i);
    getcontext(&thread.first);
    thread.first.uc_stack.ss_sp = thread.stack, thread.first.uc_stack.ss_size = kStack, thread.first.uc_link = nullptr;
    makecontext(&thread.first, run_thread, 0);
  }
  std::unique_lock<std::mutex> lock(block.mutex);
  block.runs = true;
  block.worker = std::thread([&block] {
    {
      const std::lock_guard<std::mutex> inner(block.mutex);
      block.shared = thread_local_begin();
      block.runs = false;
      for (const DynamicArray& array : dynamic_arrays()) {
        if (array.address != nullptr) block.dynamic_begin = static_cast<size_t>(reinterpret_cast<char*>(array.address()) - block.shared), block.dynamic_room = array.bytes;
      }
      block.turn.notify_all();
    }
    serve(block);
  });
  block.worker.detach();
  block.turn.wait(lock, [&] { return !block.runs; });
  block.initialized.resize(thread_local_bytes() / 4 + 1);
  block.words.resize(thread_local_bytes() / 4 + 1);
}

// ---- memory -----------------------------------------------------------------------------------------------------------------

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

void remember(Touch (&touches)[2], const Touch& touch) {
  for (Touch& known : touches) {
    if (known.bytes == 0 || (known.block == touch.block && known.thread == touch.thread && known.counter == 0)) {
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
  remember(writes ? word.written : word.read, Touch{self.block->number, static_cast<uint16_t>(self.number), static_cast<uint8_t>(bytes), atomic, self.barriers, self.arrivals, self.warp_barriers, counter, place});
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

void check_access(const void* where, size_t bytes, bool writes, bool atomic, Place place, uint32_t counter = 0) {
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

bool on_a_stack(const void* address) { return static_cast<const char*>(address) - stacks >= 0 && static_cast<const char*>(address) - stacks < static_cast<ptrdiff_t>(kStacks); }

// ---- barriers -----------------------------------------------------------------------------------------------------------------

void no_lane_has_exited(const Thread& self, const char* what, uint32_t arrivals, Place place) {  // with fewer arrivals
  for (unsigned i = self.warp * kWarp; i < std::min((self.warp + 1) * kWarp, thread_count()); ++i) {
    const Thread& other = self.block->threads[i];
    if (other.state == State::exited && other.arrivals < arrivals) report(place, "%s by a warp of which lane %u has exited", what, i % kWarp);
  }
}

void finish_block_barrier(Block& block) {
  for (unsigned i = 0; i < thread_count(); ++i) {
    Thread& thread = block.threads[i];
    if (thread.state == State::block_barrier) {
      no_lane_has_exited(thread, "__syncthreads", ~0u, thread.place);
      ++thread.barriers;
      set_ready(thread);
      const Vote vote = static_cast<Vote>(thread.argument);
      thread.result = static_cast<uint64_t>(vote == Vote::any ? block.vote_any : vote == Vote::all ? block.vote_all : block.vote_count);
    }
  }
  block.at_barrier = 0, block.vote_any = 0, block.vote_all = 1, block.vote_count = 0;
}

void finish_cluster_barrier() {
  cluster_arrived = 0, ++cluster_phase;
  for (unsigned rank = 0; rank < in_cluster; ++rank) {
    for (unsigned i = 0; i < thread_count(); ++i) {
      Thread& thread = blocks[rank].threads[i];
      if (thread.state == State::cluster_barrier && thread.arrivals <= cluster_phase) set_ready(thread);
    }
  }
}

// ---- lanes of a warp ------------------------------------------------------------------------------------------------------------

constexpr auto kLoadMatrices = static_cast<Lanes>(100), kLoadTransposed = static_cast<Lanes>(101), kMultiply = static_cast<Lanes>(102);

struct MultiplyOperands {
  Sums sums;
  Matrices a;
  uint32_t b[2];
};

float bfloat16(uint32_t pair, unsigned half) {
  const uint32_t bits = half != 0 ? pair & 0xffff0000u : pair << 16;
  float value;
  memcpy(&value, &bits, 4);
  return value;
}

void multiply(Thread* const* lanes) {
  float a[16][16], b[16][8];
  const auto operands = [&](unsigned lane) -> const MultiplyOperands& { return *static_cast<const MultiplyOperands*>(lanes[lane]->matrices); };
  for (unsigned lane = 0; lane < kWarp; ++lane) {
    for (unsigned half = 0; half < 2; ++half) {
      const unsigned group = lane / 4, at = lane % 4 * 2 + half;
      for (unsigned r = 0; r < 4; ++r) a[group + r % 2 * 8][at + r / 2 * 8] = bfloat16(operands(lane).a.r[r], half);
      for (unsigned r = 0; r < 2; ++r) b[at + r * 8][group] = bfloat16(operands(lane).b[r], half);
    }
  }
  for (unsigned lane = 0; lane < kWarp; ++lane) {
    Sums& sums = const_cast<MultiplyOperands&>(operands(lane)).sums;
    for (unsigned i = 0; i < 4; ++i) {
      const unsigned row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
      double sum = static_cast<double>(sums.f[i]);
      for (unsigned k = 0; k < 16; ++k) sum += static_cast<double>(a[row][k]) * static_cast<double>(b[k][column]);
      sums.f[i] = static_cast<float>(sum);
    }
  }
}

void transpose_out(Thread* const* lanes, bool transposed) {
  uint16_t element[4][8][8];
  for (unsigned lane = 0; lane < kWarp; ++lane) memcpy(element[lane / 8][lane % 8], lanes[lane]->matrices, 16);
  for (unsigned lane = 0; lane < kWarp; ++lane) {
    Matrices result;
    for (unsigned m = 0; m < 4; ++m) {
      const unsigned i = lane / 4, j = lane % 4 * 2;
      const uint32_t low = transposed ? element[m][j][i] : element[m][i][j], high = transposed ? element[m][j + 1][i] : element[m][i][j + 1];
      result.r[m] = low | high << 16;
    }
    memcpy(const_cast<void*>(lanes[lane]->matrices), &result, 16);  // all rows have been read
  }
}

uint64_t combined(Lanes operation, unsigned mask, Thread* const* lanes) {
  uint64_t all = operation == Lanes::all ? 1 : 0;
  bool first = true;
  for (unsigned lane = 0; lane < kWarp; ++lane) {
    if ((mask >> lane & 1u) == 0) continue;
    const uint64_t value = lanes[lane]->value;
    const auto word = static_cast<uint32_t>(value), so_far = static_cast<uint32_t>(all);
    const auto signed_word = static_cast<int32_t>(word), signed_so_far = static_cast<int32_t>(so_far);
    switch (operation) {
      case Lanes::ballot: all |= value << lane; break;
      case Lanes::any: all |= value; break;
      case Lanes::all: all &= value; break;
      case Lanes::add: all = static_cast<uint32_t>(so_far + word); break;
      case Lanes::min_unsigned: all = first ? word : std::min(so_far, word); break;
      case Lanes::max_unsigned: all = first ? word : std::max(so_far, word); break;
      case Lanes::min_signed: all = static_cast<uint32_t>(first ? signed_word : std::min(signed_so_far, signed_word)); break;
      case Lanes::max_signed: all = static_cast<uint32_t>(first ? signed_word : std::max(signed_so_far, signed_word)); break;
      case Lanes::bit_and: all = first ? word : so_far & word; break;
      case Lanes::bit_or: all = so_far | word; break;
      case Lanes::bit_xor: all = so_far ^ word; break;
      default: break;
    }
    first = false;
  }
  return all;
}

void finish_lanes(Thread* const* lanes, unsigned mask) {
  const Lanes operation = current->operation;
  if (operation == kMultiply) multiply(lanes);
  if (operation == kLoadMatrices || operation == kLoadTransposed) transpose_out(lanes, operation == kLoadTransposed);
  const uint64_t all = combined(operation, mask, lanes);
  for (unsigned lane = 0; lane < kWarp; ++lane) {
    if ((mask >> lane & 1u) == 0) continue;
    Thread& thread = *lanes[lane];
    const int width = thread.width, own = static_cast<int>(lane), first = own / width * width;
    int from = own;
    if (operation == Lanes::shuffle) from = first + (thread.argument & (width - 1));
    if (operation == Lanes::shuffle_up) from = own - thread.argument < first ? own : own - thread.argument;
    if (operation == Lanes::shuffle_down) from = own + thread.argument >= first + width ? own : own + thread.argument;
    if (operation == Lanes::shuffle_xor) from = (own ^ thread.argument) >= first + width ? own : own ^ thread.argument;
    if (operation >= Lanes::shuffle && operation <= Lanes::shuffle_xor) {
      if ((mask >> from & 1u) == 0) report(thread.place, "a shuffle reads lane %d, which is not in its mask %08x,", from, mask);
      thread.result = lanes[from]->value;
    } else {
      thread.result = all;
    }
    if (operation == Lanes::sync && mask == ~0u) ++thread.warp_barriers;
  }
  for (unsigned lane = 0; lane < kWarp; ++lane) {
    if ((mask >> lane & 1u) != 0 && lanes[lane] != current) set_ready(*lanes[lane]);
  }
}

uint64_t meet(Lanes operation, unsigned mask, uint64_t value, int argument, int width, const void* matrices, Place place) {
  Thread& self = *current;
  step(place);
  self.operation = operation, self.mask = mask, self.value = value, self.argument = argument, self.width = width, self.matrices = matrices, self.place = place;
  if ((mask >> self.lane & 1u) == 0) report(place, "a lane is not in the mask %08x that it gives", mask);
  const unsigned first = self.warp * kWarp;
  Thread* lanes[kWarp];
  bool complete = true;
  for (unsigned lane = 0; lane < kWarp; ++lane) {
    Thread& other = self.block->threads[first + lane];
    lanes[lane] = &other;
    if ((mask >> lane & 1u) == 0 || &other == &self) continue;
    if (first + lane >= thread_count() || other.state == State::exited) report(place, "lane %u is in the mask %08x, but has exited", lane, mask);
    if (other.state == State::lanes) {
      if (other.operation != operation || other.mask != mask) {
        say("emulator: lane %u waits in another operation of the warp (mask %08x) at @%x, this one has mask %08x\n", lane, other.mask, other.place, mask);
        report(place, "lanes of a warp are in different operations");
      }
    } else {
      complete = false;
    }
  }
  if (complete) {
    finish_lanes(lanes, mask);
    self.state = State::ready;
  } else {
    wait_in(State::lanes, place);
  }
  return self.result;
}

}  // namespace

// ---- what kernels ask -------------------------------------------------------------------------------------------------------------

Index thread_index() noexcept { return current->index; }
Index block_index() noexcept { return current->block->index; }
Index block_size() noexcept { return launched->block; }
Index grid_size() noexcept { return launched->grid; }

int block_barrier(Vote vote, int value) {
  Thread& self = *current;
  Block& block = *self.block;
  const Place place = HERE;
  no_lane_has_exited(self, "__syncthreads", ~0u, place);
  self.argument = static_cast<int>(vote);
  block.vote_any |= value != 0, block.vote_all &= value != 0, block.vote_count += value != 0;
  if (++block.at_barrier == block.alive) {
    self.state = State::block_barrier, self.place = place;
    finish_block_barrier(block);
    may_switch(place);
  } else {
    wait_in(State::block_barrier, place);
  }
  return static_cast<int>(self.result);
}

void cluster_arrive(bool release) {
  Thread& self = *current;
  const Place place = HERE;
  no_lane_has_exited(self, "barrier.cluster.arrive", self.arrivals + 1, place);
  if (self.arrivals != self.waits) report(place, "barrier.cluster.arrive twice without a wait");
  if (!release) self.relaxed.resize(self.arrivals + 1), self.relaxed[self.arrivals] = true;
  ++self.arrivals;
  if (++cluster_arrived == cluster_alive) finish_cluster_barrier();
  may_switch(place);
}

void cluster_wait() {
  Thread& self = *current;
  const Place place = HERE;
  if (self.arrivals != self.waits + 1) report(place, "barrier.cluster.wait without an arrival");
  if (cluster_phase < self.arrivals) wait_in(State::cluster_barrier, place);
  ++self.waits;
}

void previous_grid_wait() { current->waited = true; }

uint64_t together(Lanes operation, unsigned mask, uint64_t value, int argument, int width) { return meet(operation, mask, value, argument, width, nullptr, HERE); }

Matrices load_matrices(uint32_t row, bool transposed) {
  const Place place = HERE;
  const void* const from = shared_pointer(nullptr, row);
  check_access(from, 16, false, false, place);
  Matrices matrices;
  memcpy(&matrices, from, 16);
  meet(transposed ? kLoadTransposed : kLoadMatrices, ~0u, 0, 0, 32, &matrices, place);
  return matrices;
}

Sums multiply_bf16(Sums sums, Matrices a, uint32_t b0, uint32_t b1) {
  MultiplyOperands operands{sums, a, {b0, b1}};
  meet(kMultiply, ~0u, 0, 0, 32, &operands, HERE);
  return operands.sums;
}

uint32_t atomic(void* place, Atomic operation, uint32_t operand, uint32_t expected) {
  const Place here = HERE;
  if (!on_a_stack(place)) check_access(place, 4, true, true, here);
  may_switch(here);
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
  current->copies.back().push_back(Copy{to, there ? 16u : 0u, static_cast<const char*>(from), place});
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
      if (copy.bytes != 0) memcpy(target, copy.from, 16);
      if (copy.bytes == 0) memset(target, 0, 16);
    }
    groups.pop_front();
  }
}

void expect_bytes(uint64_t* arrivals, uint32_t bytes) {
  Block& block = *current->block;
  const auto place = static_cast<uint32_t>(reinterpret_cast<char*>(arrivals) - block.shared);
  if (place >= thread_local_bytes() || place % 8 != 0) report(HERE, "the counter of bytes is not at an aligned place in shared memory");
  if (!block.expected.emplace(place, bytes).second) report(HERE, "bytes are expected twice");
}

void send_counted(uint32_t to, const void* from, uint32_t bytes, uint32_t arrivals) {
  const Place place = HERE;
  if (to >> kPlaceBits != arrivals >> kPlaceBits) report(place, "st.async with its counter in another block");
  void* const target = shared_pointer(nullptr, to);
  Block& block = blocks[(arrivals >> kPlaceBits) - 1];
  const auto counter = block.expected.find(arrivals & kPlaces);
  check_access(target, bytes, true, false, place, (arrivals & kPlaces) + 1);
  if (counter == block.expected.end()) report(place, "st.async where no bytes are expected");
  memcpy(target, from, bytes);
  counter->second -= bytes;
  if (counter->second < 0) report(place, "more bytes come by st.async than are expected");
  for (unsigned i = 0; counter->second == 0 && i < thread_count(); ++i) {
    Thread& thread = block.threads[i];
    if (thread.state == State::bytes && thread.value == counter->first) set_ready(thread);
  }
  may_switch(place);
}

void wait_for_bytes(uint64_t* arrivals) {
  Thread& self = *current;
  const auto counter = self.block->expected.find(static_cast<uint32_t>(reinterpret_cast<char*>(arrivals) - self.block->shared));
  if (counter == self.block->expected.end()) report(HERE, "bytes are waited for that are not expected");
  self.value = counter->first;
  if (counter->second > 0) wait_in(State::bytes, HERE);
  self.counters.push_back(counter->first + 1);
}

// ---- host side ----------------------------------------------------------------------------------------------------------------------

void fail(const char* what, ...) {
  va_list arguments;
  va_start(arguments, what);
  say("emulator: ");
  vfprintf(stderr, what, arguments);
  va_end(arguments);
  if (current != nullptr) say_thread(*current);
  say("\n");
  stop();
}

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

void schedule(Order new_order, uint64_t seed, uint64_t most) {
  order = new_order, max_steps = most;
  dice.seed(seed);
}

DynamicShared::DynamicShared(unsigned char* (*address)(), size_t bytes) {
  if (!dynamic_arrays().empty()) fail("one dynamic array of shared memory in a program");
  dynamic_arrays().push_back({address, bytes});
}

namespace {

void start_block(Block& block, unsigned number) {
  const Launch& launch = *launched;
  block.number = number;
  block.index = Index{number % launch.grid.x, number / launch.grid.x % launch.grid.y, number / launch.grid.x / launch.grid.y};
  if (launch.shared_bytes > block.dynamic_room) fail("a launch with %zu bytes of shared memory, of at most %zu", launch.shared_bytes, block.dynamic_room);
  block.dynamic_end = block.dynamic_begin + launch.shared_bytes;
  memset(block.shared, 0xa5, thread_local_bytes());  // neither a number that works nor a pointer
  std::fill(block.initialized.begin(), block.initialized.end(), uint8_t{0});
  block.alive = thread_count(), block.at_barrier = 0, block.ended = false;
  block.vote_any = 0, block.vote_all = 1, block.vote_count = 0, block.expected.clear();
  for (unsigned i = 0; i < thread_count(); ++i) {
    Thread& thread = block.threads[i];
    thread.index = Index{i % launch.block.x, i / launch.block.x % launch.block.y, i / launch.block.x / launch.block.y};
    thread.place = 0, thread.waited = false;
    thread.barriers = thread.warp_barriers = thread.arrivals = thread.waits = 0;
    thread.relaxed.clear(), thread.copies.clear(), thread.counters.clear();
    memset(thread.stack, 0x5a, 64);
    set_ready(thread);
  }
}

void run_cluster(unsigned number) {
  cluster_number = number, cluster_alive = in_cluster * thread_count(), cluster_arrived = 0, cluster_phase = 0, steps = 0;
  ++cluster_run;
  for (unsigned rank = 0; rank < in_cluster; ++rank) start_block(blocks[rank], number * in_cluster + rank);
  for (;;) {
    std::vector<unsigned> able;
    for (unsigned rank = 0; rank < in_cluster; ++rank) {
      if (any_ready(blocks[rank])) able.push_back(rank);
    }
    if (able.empty()) break;
    const unsigned next = order == Order::random ? able[draw(static_cast<unsigned>(able.size()))] : order == Order::forward ? able.front() : able.back();
    run_block(blocks[next], order == Order::random && in_cluster > 1 ? 1 + draw(20000) : ~0u);
  }
  if (cluster_alive > 0) {
    say("emulator: deadlock: no thread can go on\n");
    say_threads();
    stop();
  }
  for (unsigned rank = 0; rank < in_cluster; ++rank) {
    for (unsigned i = 0; i < thread_count(); ++i) {
      for (unsigned j = 0; j < 64; ++j) {
        if (blocks[rank].threads[i].stack[j] != 0x5a) fail("the stack of a thread was too small");
      }
    }
  }
}

}  // namespace

void launch(const Launch& launch) {
  const uint64_t grid = uint64_t{launch.grid.x} * launch.grid.y * launch.grid.z, threads = uint64_t{launch.block.x} * launch.block.y * launch.block.z;
  if (threads == 0 || threads > kMaxThreads || launch.cluster == 0 || launch.cluster > kMaxCluster || grid % launch.cluster != 0) {
    fail("a launch of %llu blocks of %llu threads in clusters of %u", static_cast<unsigned long long>(grid), static_cast<unsigned long long>(threads), launch.cluster);
  }
  if (stacks == nullptr) {
    void* const mapped = mmap(nullptr, kStacks, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (mapped == MAP_FAILED) fail("no address space for stacks");
    stacks = static_cast<char*>(mapped);
  }
  ++launch_number;
  launched = &launch, in_cluster = launch.cluster;
  for (unsigned rank = 0; rank < in_cluster; ++rank) {
    if (blocks[rank].shared == nullptr) start_worker(blocks[rank], rank);
  }
  std::vector<unsigned> clusters(grid / launch.cluster);
  for (unsigned i = 0; i < clusters.size(); ++i) clusters[i] = i;
  if (order == Order::backward) std::reverse(clusters.begin(), clusters.end());
  if (order == Order::random) std::shuffle(clusters.begin(), clusters.end(), dice);
  for (const unsigned cluster : clusters) run_cluster(cluster);
  launched = nullptr;
}

}  // namespace emulator

// ---- what the compiler calls at each access of instrumented code: see README.md ----------------------------------------------------------

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
