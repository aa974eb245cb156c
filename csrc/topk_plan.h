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
  bool clusters;  // hardware clusters (capability 9.0 and later)
};

struct TopkPlan {
  int threads;       // of a block
  int vectors;       // of four columns, kept in the registers of a thread; 0: the row is read again in each pass
  int cluster;       // blocks that share a row
  int bin_bits;      // histogram bins of a pass, as a power of two
  int listed;        // candidates that the shared memory of a block holds
  int shared_bytes;  // of a block
};

constexpr int kTopkColumns = 4;          // of a vector
constexpr int kTopkHistogramWords = 6144;  // three passes of 2048 bins, or four of up to 1024
constexpr int kTopkFixedBytes = kTopkHistogramWords * 4 + 2048;
constexpr int kTopkMostListed = 8192;  // of 8 bytes: two blocks fit a processor of an H200, one any other chip's

inline int64_t topk_columns(const TopkPlan& plan) { return int64_t{plan.threads} * plan.vectors * plan.cluster * kTopkColumns; }

// Blocks of a cluster read each other's histograms: the more blocks, the fewer bins.
constexpr int topk_bin_bits(int cluster) { return cluster <= 2 ? 11 : cluster == 4 ? 10 : cluster == 8 ? 9 : 8; }

inline TopkPlan topk_plan(const TopkDevice& device, int64_t rows, int64_t width) {
  const int listed = static_cast<int>(std::min<int64_t>((device.shared_bytes - kTopkFixedBytes) / 8, kTopkMostListed));
  const auto plan = [&](int threads, int vectors, int cluster) {
    return TopkPlan{threads, vectors, cluster, topk_bin_bits(cluster), listed, kTopkFixedBytes + 8 * listed};
  };
  // Fastest of the built kernels in a sweep over rows {1, 4, 8, 16, 32, 48, 64, 128, 133, 256} on an H200 (k = 512, cold
  // L2; what they take: benchmarks/results/h200/topk.json). Few rows take many small blocks, which work at once; many rows
  // take few large ones, since each block costs the same barriers. Long rows, many of them: reading twice, the second time
  // from L2, beats blocks that hold a row and so leave the memory idle while they search.
  const bool wave = rows <= device.processors;
  if (width <= 2048) return plan(512, 1, 1);
  if (width <= 4096) return plan(1024, 1, 1);
  if (width <= 8192) return wave ? plan(1024, 2, 1) : plan(512, 4, 1);
  if (!device.clusters) return width <= 16384 ? plan(1024, 4, 1) : plan(1024, 0, 1);
  if (width <= 16384) return rows <= 16 ? plan(512, 2, 4) : rows <= 64 ? plan(1024, 2, 2) : plan(1024, 4, 1);
  if (width <= 32768) return rows <= 16 ? plan(512, 4, 4) : plan(1024, 4, 2);
  if (width <= 65536) return rows <= 8 ? plan(512, 4, 8) : rows <= 16 ? plan(1024, 4, 4) : rows <= 64 ? plan(1024, 0, 2) : plan(1024, 0, 1);
  if (width <= 131072) return rows <= 8 ? plan(512, 8, 8) : rows <= 16 ? plan(1024, 0, 4) : plan(1024, 0, 2);
  if (rows <= 4 && width <= 262144) return plan(512, 8, 16);
  return rows <= 8 ? plan(1024, 0, 8) : rows <= 16 ? plan(1024, 0, 4) : wave && rows <= 64 ? plan(1024, 0, 2) : plan(1024, 0, 4);
}

}  // namespace dsv4_ops
