// The launch plan of the CUDA top-k, callable without a GPU: tests and tools reach it through the loaded library.
#include "../topk_plan.h"

extern "C" __attribute__((visibility("default"))) void dsv4_ops_topk_plan(
    int64_t shared_bytes, int64_t processors, int64_t clusters, int64_t rows, int64_t width, int64_t* plan) {
  const dsv4_ops::TopkPlan found = dsv4_ops::topk_plan({shared_bytes, processors, clusters != 0}, rows, width);
  plan[0] = found.threads, plan[1] = found.vectors, plan[2] = found.cluster, plan[3] = found.bin_bits, plan[4] = found.shared_bytes, plan[5] = found.listed;
}
