// What threads do together: barriers of a block and of a cluster, collectives of a warp, counted bytes.
#include "state.h"

#include <algorithm>
#include <cstring>

namespace emulator {
namespace {

// ---- barriers ------------------------------------------------------------------------------------------------------------

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

// ---- lanes of a warp -----------------------------------------------------------------------------------------------------

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
  const auto operands = [&](unsigned lane) -> MultiplyOperands& { return *static_cast<MultiplyOperands*>(lanes[lane]->registers); };
  for (unsigned lane = 0; lane < kWarp; ++lane) {
    for (unsigned half = 0; half < 2; ++half) {
      const unsigned group = lane / 4, at = lane % 4 * 2 + half;
      for (unsigned r = 0; r < 4; ++r) a[group + r % 2 * 8][at + r / 2 * 8] = bfloat16(operands(lane).a.r[r], half);
      for (unsigned r = 0; r < 2; ++r) b[at + r * 8][group] = bfloat16(operands(lane).b[r], half);
    }
  }
  for (unsigned lane = 0; lane < kWarp; ++lane) {
    Sums& sums = operands(lane).sums;
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
  for (unsigned lane = 0; lane < kWarp; ++lane) memcpy(element[lane / 8][lane % 8], lanes[lane]->registers, 16);
  for (unsigned lane = 0; lane < kWarp; ++lane) {
    Matrices result;
    for (unsigned m = 0; m < 4; ++m) {
      const unsigned i = lane / 4, j = lane % 4 * 2;
      const uint32_t low = transposed ? element[m][j][i] : element[m][i][j], high = transposed ? element[m][j + 1][i] : element[m][i][j + 1];
      result.r[m] = low | high << 16;
    }
    memcpy(lanes[lane]->registers, &result, 16);  // all rows have been read
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

uint64_t meet(Lanes operation, unsigned mask, uint64_t value, int argument, int width, void* registers, Place place) {
  Thread& self = *current;
  step(place);
  self.operation = operation, self.mask = mask, self.value = value, self.argument = argument, self.width = width, self.registers = registers, self.place = place;
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

void leave(Thread& self) {
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

// ---- what kernels ask ----------------------------------------------------------------------------------------------------

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

void expect_bytes(uint64_t* arrivals, uint32_t bytes) {
  Block& block = *current->block;
  const auto place = static_cast<uint32_t>(reinterpret_cast<char*>(arrivals) - block.shared);
  if (place >= thread_local_bytes() || place % 8 != 0) report(HERE, "the counter of bytes is not at an aligned place in shared memory");
  if (!block.expected.emplace(place, bytes).second) report(HERE, "bytes are expected twice");
}

void send_counted(uint32_t to, const void* from, uint32_t bytes, uint32_t arrivals) {
  const Place place = HERE;
  if (in_cluster < 2) report(place, "st.async in a cluster of one block");
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

}  // namespace emulator
