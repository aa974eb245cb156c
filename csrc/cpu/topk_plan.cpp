// The launch plan of the CUDA top-k, callable without a GPU: tests and tools reach it through the loaded library.
#include "../topk_plan.h"

extern "C" __attribute__((visibility("default"))) void dsv4_ops_topk_plan(
    int64_t shared_bytes, int64_t processors, int64_t largest_cluster, int64_t rows, int64_t width, int64_t k, int64_t* plan) {
  const dsv4_ops::TopkPlan found = dsv4_ops::topk_plan({shared_bytes, processors, largest_cluster}, rows, width, k);
  plan[0] = static_cast<int64_t>(found.kernel), plan[1] = found.threads, plan[2] = found.vectors, plan[3] = found.cluster;
  plan[4] = found.listed, plan[5] = found.bitmap_words, plan[6] = found.shared_bytes;
}
