// Stand-in for the headers of PyTorch's stable ABI, as far as the host side of csrc/cuda needs them: tensors in the
// emulator's device memory, checks that throw. The build sends every `#include <torch/...>` here.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <vector>

namespace emulator {

// What cudaDeviceGetAttribute says, by device index.
struct DeviceSizes {
  int shared_bytes, processors, major;
};
inline std::vector<DeviceSizes> devices;

template <class... Parts>
[[noreturn]] void throw_error(const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  throw std::runtime_error(text.str());
}

}  // namespace emulator

#define STD_TORCH_CHECK(condition, ...) \
  do {                                  \
    if (!(condition)) ::emulator::throw_error(__VA_ARGS__); \
  } while (false)
#define STD_CUDA_CHECK(call) STD_TORCH_CHECK((call) == cudaSuccess, #call)
#define STD_CUDA_KERNEL_LAUNCH_CHECK() static_cast<void>(0)
#define TORCH_ERROR_CODE_CHECK(call) STD_TORCH_CHECK((call) == 0, #call)

inline int aoti_torch_get_current_cuda_stream(int, void** stream) {
  *stream = nullptr;
  return 0;
}

namespace torch::headeronly {

enum class ScalarType : int8_t { Byte, Char, Short, Int, Long, Half, Float, Double, Bool = 11, BFloat16 = 15, Float8_e4m3fn = 24 };

inline int64_t element_bytes(ScalarType type) {
  switch (type) {
    case ScalarType::Short: case ScalarType::Half: case ScalarType::BFloat16: return 2;
    case ScalarType::Int: case ScalarType::Float: return 4;
    case ScalarType::Long: case ScalarType::Double: return 8;
    default: return 1;
  }
}

}  // namespace torch::headeronly

namespace torch::stable {

using headeronly::ScalarType;

class Tensor {
 public:
  Tensor() = default;
  Tensor(void* data, ScalarType type, std::vector<int64_t> sizes, std::vector<int64_t> strides, int device)
      : data_(data), type_(type), sizes_(std::move(sizes)), strides_(std::move(strides)), device_(device) {}

  int64_t dim() const { return static_cast<int64_t>(sizes_.size()); }
  int64_t size(int64_t i) const { return sizes_.at(static_cast<size_t>(i < 0 ? i + dim() : i)); }
  int64_t stride(int64_t i) const { return strides_.at(static_cast<size_t>(i < 0 ? i + dim() : i)); }
  const std::vector<int64_t>& sizes() const { return sizes_; }
  const std::vector<int64_t>& strides() const { return strides_; }
  int64_t numel() const {
    int64_t product = 1;
    for (const int64_t size : sizes_) product *= size;
    return product;
  }
  bool is_contiguous() const {
    int64_t expected = 1;
    for (int64_t i = dim(); i-- > 0; expected *= size(i)) {
      if (size(i) != 1 && stride(i) != expected) return false;
    }
    return true;
  }
  ScalarType scalar_type() const { return type_; }
  bool is_cuda() const { return true; }
  bool is_cpu() const { return false; }
  bool defined() const { return data_ != nullptr; }
  int get_device_index() const { return device_; }
  void* mutable_data_ptr() const { return data_; }
  const void* const_data_ptr() const { return data_; }
  template <class T>
  T* mutable_data_ptr() const { return static_cast<T*>(data_); }
  template <class T>
  const T* const_data_ptr() const { return static_cast<const T*>(data_); }

 private:
  void* data_ = nullptr;
  ScalarType type_ = ScalarType::Float;
  std::vector<int64_t> sizes_, strides_;
  int device_ = 0;
};

// Of device memory that kernels may write, and read once they have.
inline Tensor new_empty(const Tensor& like, std::vector<int64_t> sizes, std::optional<ScalarType> type = std::nullopt) {
  const ScalarType chosen = type.value_or(like.scalar_type());
  std::vector<int64_t> strides(sizes.size());
  int64_t bytes = headeronly::element_bytes(chosen), elements = 1;
  for (size_t i = sizes.size(); i-- > 0; elements *= sizes[i]) strides[i] = elements;
  bytes *= elements;
  void* const data = emulator::allocate(static_cast<size_t>(bytes));
  emulator::expose(data, static_cast<size_t>(bytes), emulator::Access::write, false);
  return Tensor(data, chosen, std::move(sizes), std::move(strides), like.get_device_index());
}

namespace accelerator {
struct DeviceGuard {
  explicit DeviceGuard(int device) { emulated_device = device; }
};
}  // namespace accelerator

}  // namespace torch::stable

// ---- the CUDA runtime's questions about devices and kernels ------------------------------------------------------------------

enum cudaDeviceAttr { cudaDevAttrMaxSharedMemoryPerBlockOptin, cudaDevAttrMultiProcessorCount, cudaDevAttrComputeCapabilityMajor };
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  const emulator::DeviceSizes& sizes = emulator::devices.at(static_cast<size_t>(device));
  *value = attribute == cudaDevAttrMaxSharedMemoryPerBlockOptin ? sizes.shared_bytes : attribute == cudaDevAttrMultiProcessorCount ? sizes.processors : sizes.major;
  return cudaSuccess;
}

// Of kernels that have a processor to themselves.
template <class Kernel>
cudaError_t cudaOccupancyMaxActiveClusters(int* clusters, Kernel*, const cudaLaunchConfig_t* config) {
  *clusters = emulator::devices.at(static_cast<size_t>(emulated_device)).processors;
  for (unsigned i = 0; i < config->numAttrs; ++i) {
    if (config->attrs[i].id == cudaLaunchAttributeClusterDimension) *clusters /= static_cast<int>(config->attrs[i].val.clusterDim.x);
  }
  return cudaSuccess;
}

struct cudaFuncAttributes {
  size_t sharedSizeBytes;
};
template <class Kernel>
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, Kernel*) {
  attributes->sharedSizeBytes = 0;
  return cudaSuccess;
}
