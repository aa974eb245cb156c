// What drivers share: a request is a line of words and some tensors on standard input, the answer tensors on standard output.
//
//   request    "OP order seed device [integers...] [steps=MOST] tensors=N\n", then N tensors
//   tensor     int64: dtype (ScalarType), dimensions, sizes..., strides..., alignment of the first element in 256 bytes,
//              elements from the first to the last; then the elements
//   answer     int64 count, then tensors, contiguous; int64 -1 and a length and a text where the call threw
//
// A driver: `#include "driver.h"`, the kernel's source file, EMULATED_DYNAMIC_SHARED for its `extern __shared__` array, and
//   int main() { return emulator::serve_requests([](const emulator::Request& request) { ...; return std::vector<Tensor>{...}; }); }
#pragma once

#include "torch.h"

#include <cstdio>
#include <iostream>
#include <string>

namespace emulator {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

struct Request {
  std::string op;
  std::vector<int64_t> integers;
  std::vector<Tensor> tensors;
};

template <class T>
T read_one() {
  T value;
  if (!std::cin.read(reinterpret_cast<char*>(&value), sizeof value)) fail("a request ends early");
  return value;
}

// Each element of a view may be read, and nothing between them.
inline void expose_view(const Tensor& view, int64_t dim, char* from) {
  const int64_t bytes = torch::headeronly::element_bytes(view.scalar_type());
  if (dim == view.dim()) return expose(from, static_cast<size_t>(bytes), Access::read, true);
  if (dim == view.dim() - 1 && view.stride(dim) == 1) return expose(from, static_cast<size_t>(bytes * view.size(dim)), Access::read, true);
  for (int64_t i = 0; i < view.size(dim); ++i) expose_view(view, dim + 1, from + i * view.stride(dim) * bytes);
}

inline Tensor read_tensor(int device) {
  const auto type = static_cast<ScalarType>(read_one<int64_t>());
  std::vector<int64_t> sizes(static_cast<size_t>(read_one<int64_t>())), strides(sizes.size());
  for (int64_t& size : sizes) size = read_one<int64_t>();
  for (int64_t& stride : strides) stride = read_one<int64_t>();
  const auto alignment = static_cast<size_t>(read_one<int64_t>());
  const auto bytes = static_cast<size_t>(read_one<int64_t>() * torch::headeronly::element_bytes(type));
  char* const data = static_cast<char*>(allocate(bytes, alignment));
  if (bytes > 0 && !std::cin.read(data, static_cast<std::streamsize>(bytes))) fail("a tensor ends early");
  Tensor tensor(data, type, std::move(sizes), std::move(strides), device);
  if (tensor.numel() > 0) expose_view(tensor, 0, data);
  return tensor;
}

inline void write_bytes(const void* data, size_t bytes) {
  if (fwrite(data, 1, bytes, stdout) != bytes) fail("the answer cannot be written");
}

inline void write_integer(int64_t value) { write_bytes(&value, sizeof value); }

template <class Answer>
int serve_requests(const Answer& answer) {
  for (std::string line; std::getline(std::cin, line);) {
    std::istringstream words(line);
    Request request;
    std::string order;
    uint64_t seed = 0;
    int device = 0;
    words >> request.op >> order >> seed >> device;
    int64_t tensors = 0;
    uint64_t steps = kMaxSteps;
    for (std::string word; words >> word;) {
      if (word.rfind("tensors=", 0) == 0) {
        tensors = std::stoll(word.substr(8));
      } else if (word.rfind("steps=", 0) == 0) {
        steps = std::stoull(word.substr(6));
      } else {
        request.integers.push_back(std::stoll(word));
      }
    }
    schedule(order == "forward" ? Order::forward : order == "backward" ? Order::backward : Order::random, seed, steps);
    for (int64_t i = 0; i < tensors; ++i) request.tensors.push_back(read_tensor(device));
    try {
      const std::vector<Tensor> results = answer(request);
      write_integer(static_cast<int64_t>(results.size()));
      for (const Tensor& result : results) {
        const int64_t numbers[] = {static_cast<int64_t>(result.scalar_type()), result.dim()};
        write_bytes(numbers, sizeof numbers);
        for (int64_t i = 0; i < result.dim(); ++i) write_integer(result.size(i));
        write_bytes(result.const_data_ptr(), static_cast<size_t>(result.numel() * torch::headeronly::element_bytes(result.scalar_type())));
      }
    } catch (const std::exception& error) {
      const std::string text = error.what();
      write_integer(-1), write_integer(static_cast<int64_t>(text.size())), write_bytes(text.data(), text.size());
    }
    fflush(stdout);
    free_all();
  }
  return 0;
}

}  // namespace emulator
