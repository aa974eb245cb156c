// Fibres, the OS threads that blocks are, launches, and what a report says.
#include "state.h"

#include <link.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <thread>

namespace emulator {

std::array<Block, kMaxCluster>& blocks = *new std::array<Block, kMaxCluster>;  // for good: OS threads wait in them
const Launch* launched = nullptr;
Thread* current = nullptr;
unsigned in_cluster = 0, cluster_alive = 0, cluster_arrived = 0, cluster_phase = 0;
uint32_t launch_number = 0, cluster_run = 0;
uint64_t steps = 0, max_steps = kMaxSteps;
Order order = Order::forward;

namespace {

constexpr size_t kStack = 128 << 10, kStacks = kStack * kMaxThreads * kMaxCluster;
char* stacks = nullptr;
std::mt19937_64 dice;
unsigned char* (*dynamic_array)() = nullptr;
size_t dynamic_room = 0;

unsigned draw(unsigned below) { return static_cast<unsigned>(dice() % below); }

}  // namespace

// ---- reports -------------------------------------------------------------------------------------------------------------

namespace {

const char* const kStateNames[] = {"can go on", "wait for lanes of their warp", "wait at __syncthreads", "wait for the cluster", "wait for bytes", "have exited"};

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

}  // namespace

void say(const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  vfprintf(stderr, format, arguments);
  va_end(arguments);
}

void say_thread(const Thread& thread) { say(" by thread %u (warp %u lane %u) of block %u", thread.number, thread.warp, thread.lane, thread.block->number); }

void stop() {
  fflush(stdout);
  fflush(stderr);
  _exit(3);
}

[[noreturn]] void report_all(Place place, const char* format, va_list arguments) {
  say("emulator: ");
  vfprintf(stderr, format, arguments);
  if (current != nullptr) say_thread(*current);
  if (place != 0) say(" at @%x", place);
  say("\n");
  stop();
}

void report(Place place, const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  report_all(place, format, arguments);
}

void hang(Place place) {
  say("emulator: hang: more than %llu steps, the last one", static_cast<unsigned long long>(max_steps));
  say_thread(*current);
  say(" at @%x\n", place);
  say_threads();
  stop();
}

void fail(const char* what, ...) {
  va_list arguments;
  va_start(arguments, what);
  report_all(0, what, arguments);
}

// ---- switching -----------------------------------------------------------------------------------------------------------

bool on_a_stack(const void* address) {
  const ptrdiff_t offset = static_cast<const char*>(address) - stacks;
  return offset >= 0 && offset < static_cast<ptrdiff_t>(kStacks);
}

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

void set_ready(Thread& thread) {
  thread.state = State::ready;
  thread.block->ready[thread.number / 64] |= uint64_t{1} << (thread.number % 64);
}

namespace {

void pause() {  // the thread that runs, in its own state
  Thread* const self = current;
  if (_setjmp(self->context) == 0) _longjmp(self->block->scheduler, 1);
}

}  // namespace

void wait_in(State state, Place place) {
  Thread& self = *current;
  step(place);
  self.state = state, self.place = place;
  self.block->ready[self.number / 64] &= ~(uint64_t{1} << (self.number % 64));
  pause();
}

void may_switch(Place place) {
  step(place);
  if (order == Order::random && draw(4) == 0) {
    current->place = place;
    pause();
  }
}

namespace {

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

void run_thread() {  // a fibre, once for each thread that has this number
  for (;;) {
    launched->thread(launched->parameters);
    leave(*current);
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
    block.turn.wait(lock, [&] { return block.runs; });
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
  std::thread([&block] {
    {
      const std::lock_guard<std::mutex> inner(block.mutex);
      block.shared = thread_local_begin();
      if (dynamic_array != nullptr) block.dynamic_begin = static_cast<size_t>(reinterpret_cast<char*>(dynamic_array()) - block.shared), block.dynamic_room = dynamic_room;
      block.runs = false;
      block.turn.notify_all();
    }
    serve(block);
  }).detach();
  block.turn.wait(lock, [&] { return !block.runs; });
  block.initialized.resize(thread_local_bytes() / 4 + 1);
  block.words = static_cast<Word*>(calloc(thread_local_bytes() / 4 + 1, sizeof(Word)));
  if (block.words == nullptr) fail("no memory");
}

// ---- launches ------------------------------------------------------------------------------------------------------------

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
  cluster_alive = in_cluster * thread_count(), cluster_arrived = 0, cluster_phase = 0, steps = 0;
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

void schedule(Order new_order, uint64_t seed, uint64_t most) {
  order = new_order, max_steps = most;
  dice.seed(seed);
}

DynamicShared::DynamicShared(unsigned char* (*address)(), size_t bytes) {
  if (dynamic_array != nullptr) fail("a program can have one dynamic array of shared memory");
  dynamic_array = address, dynamic_room = bytes;
}

Index thread_index() noexcept { return current->index; }
Index block_index() noexcept { return current->block->index; }
Index block_size() noexcept { return launched->block; }
Index grid_size() noexcept { return launched->grid; }

}  // namespace emulator
