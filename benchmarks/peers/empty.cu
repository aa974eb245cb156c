// An empty kernel: what a launch inside a CUDA graph takes by itself.
#include <cuda_runtime.h>

__global__ void empty_kernel() {}

extern "C" int launch_empty(void* stream, int grid, int block) {
  empty_kernel<<<grid, block, 0, static_cast<cudaStream_t>(stream)>>>();
  return static_cast<int>(cudaGetLastError());
}
