// What host code asks of a GPU or tells it once, and keeps for good.
#pragma once

#include "../checks.h"

#include <array>
#include <mutex>

namespace dsv4_ops {

constexpr int kDevices = 64;

inline int checked_device(const char* op, const torch::stable::Tensor& tensor) {
  const int index = tensor.get_device_index();
  DSV4_CHECK(index >= 0 && index < kDevices, op, ": device index ", index, " is beyond ", kDevices);
  return index;
}

// A value for each device, made at its first use; a maker that throws is asked again.
template <class T>
class PerDevice {
 public:
  template <class Make>
  const T& get(int device, const Make& make) {
    std::call_once(asked_[device], [&] { known_[device] = make(); });
    return known_[device];
  }

 private:
  std::array<std::once_flag, kDevices> asked_;
  std::array<T, kDevices> known_ = {};  // so that a static one needs no guard
};

}  // namespace dsv4_ops
