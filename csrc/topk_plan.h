// How a row-wise top-k is launched on a GPU: from sizes alone, and for every size. Plain C++, so that tests need no GPU.
//
// Nothing that lies on the device (lengths, scores) has a say, so a captured graph holds for any later content.
#pragma once

#include <algorithm>
#include <cstdint>

namespace dsv4_ops {

struct TopkDevice {
  int64_t shared_bytes;  // most that a block may ask for
  int64_t processors;
  int64_t largest_cluster;  // of blocks: 1 before capability 9.0, 16 on 9.x and 10.x, 8 on later ones
};

enum class TopkKernel : int {
  direct,    // csrc/cuda/topk_direct.cuh: a block holds a row in registers
  resident,  // csrc/cuda/topk_listed.cuh: so does a block or cluster, which then lists the candidates
  streamed,  // csrc/cuda/topk_listed.cuh: a block or cluster lists candidates while it reads the row
  passes,    // csrc/cuda/topk_listed.cuh: histograms of the whole row, read again for each
};

struct TopkPlan {
  TopkKernel kernel;
  int threads;       // of a block
  int vectors;       // of four columns, in the registers of a thread
  int cluster;       // blocks that share a row
  int listed;        // candidates that the shared memory of a block holds
  int bitmap_words;  // of the row, in shared memory
  int shared_bytes;  // dynamic, of a block
};

constexpr int kTopkColumns = 4;  // of a vector
constexpr int kTopkBinBits = 11;
constexpr int kTopkBins = 1 << kTopkBinBits;
constexpr int kTopkFixedBytes = 3 * kTopkBins * 4 + 3072;
constexpr int kTopkFewestListed = 1024;

// The choice of kernel by sizes; what memory it takes follows in topk_plan.
inline TopkPlan topk_choice(const TopkDevice& device, int64_t rows, int64_t width, int64_t k) {
  const auto plan = [](TopkKernel kernel, int threads, int vectors, int cluster) { return TopkPlan{kernel, threads, vectors, cluster, 0, 0, 0}; };
  // Fastest of the built kernels in a sweep over rows {1, 4, 8, 16, 32, 48, 64, 128, 133, 256} on an H200 (k = 512, cold
  // L2; what they take: benchmarks/results/h200/topk.json).
  const bool wave = rows <= device.processors;
  if (width <= 2048) return plan(TopkKernel::direct, 512, 1, 1);
  if (width <= 4096) return plan(TopkKernel::direct, 512, 2, 1);
  if (width <= 8192) return plan(TopkKernel::direct, 512, 4, 1);
  if (width <= 16384) return rows <= 16 ? plan(TopkKernel::direct, 1024, 4, 1) : plan(TopkKernel::direct, 512, 8, 1);
  if (width <= 32768 && rows <= 16 && k <= 512 && device.largest_cluster > 1) {  // larger k: a block alone is faster
    return rows <= 8 ? plan(TopkKernel::resident, 512, 2, 8) : plan(TopkKernel::resident, 512, 4, 4);
  }
  if (width <= 32768 && wave) return plan(TopkKernel::direct, 1024, 8, 1);
  if (device.largest_cluster > 1 && width > 32768) {
    const bool wide_clusters = device.largest_cluster >= 16;
    if (width <= 65536 && rows <= 8) return plan(TopkKernel::resident, 512, 4, 8);
    if (width <= 65536 && rows <= 16) return plan(TopkKernel::resident, 512, 8, 4);
    if (width <= 65536 && rows <= 64) return plan(TopkKernel::streamed, 1024, 2, 2);
    if (width <= 131072 && rows <= 4 && wide_clusters) return plan(TopkKernel::resident, 1024, 2, 16);
    if (width <= 131072 && rows <= 8) return plan(TopkKernel::resident, 1024, 4, 8);
    if (width <= 262144 && rows <= 4 && wide_clusters) return plan(TopkKernel::resident, 1024, 4, 16);
    if (width <= 262144 && rows <= 8) return plan(TopkKernel::resident, 1024, 8, 8);
    if (rows <= 8) return plan(TopkKernel::streamed, 1024, 2, 8);
    if (rows <= 16) return plan(TopkKernel::streamed, 1024, 2, 4);
    if (rows <= 64) return plan(TopkKernel::streamed, 1024, 2, 2);
  }
  return wave ? plan(TopkKernel::streamed, 1024, 2, 1) : plan(TopkKernel::streamed, 512, 4, 1);
}

inline TopkPlan topk_plan(const TopkDevice& device, int64_t rows, int64_t width, int64_t k) {
  TopkPlan plan = topk_choice(device, rows, width, k);
  if (plan.kernel == TopkKernel::direct) return plan;
  const int64_t bitmap = (width + 127) / 128 * 16, room = device.shared_bytes - kTopkFixedBytes - bitmap;  // bytes
  // Columns above the bound: about k, and what a sample's bound lets through beside them, which grows with the width.
  const int64_t listed = std::max<int64_t>(k <= 1024 ? 4096 : 8192, plan.kernel == TopkKernel::streamed ? 2 * k + width / 96 : 0);
  plan.listed = static_cast<int>(std::min(room / 8, listed) / 32 * 32);
  if (plan.listed < kTopkFewestListed) return TopkPlan{TopkKernel::passes, 1024, 0, 1, 0, 0, 0};
  plan.bitmap_words = static_cast<int>(bitmap / 4);
  plan.shared_bytes = static_cast<int>(kTopkFixedBytes + bitmap + int64_t{8} * plan.listed);
  return plan;
}

}  // namespace dsv4_ops
