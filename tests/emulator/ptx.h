// csrc/cuda/ptx.cuh for the emulator: the same functions, without a machine of that kind.
#ifndef DSV4_OPS_PTX
#define DSV4_OPS_PTX

namespace dsv4_ops::ptx {

inline void wait_for_previous_grid() { emulator::previous_grid_wait(); }
inline void allow_next_grid() {}
inline void cluster_arrive_release() { emulator::cluster_arrive(true); }
inline void cluster_arrive_relaxed() { emulator::cluster_arrive(false); }
inline void cluster_wait_acquire() { emulator::cluster_wait(); }

inline uint32_t address(const void* shared) { return emulator::shared_address(shared, emulator::kOwnBlock); }
inline uint32_t address_in(const void* shared, uint32_t rank) { return emulator::shared_address(shared, rank); }
template <class T>
inline T* pointer_in(T* shared, uint32_t rank) { return static_cast<T*>(emulator::shared_pointer(shared, rank)); }

inline void send(uint32_t to, uint2 pair) { emulator::store_shared(to, emulated_bits<uint64_t>(pair)); }
inline void send(uint32_t to, float a, float b) { send(to, uint2{__float_as_uint(a), __float_as_uint(b)}); }

__forceinline__ void append_if(uint32_t condition, int32_t* target, int& at, int value) {
  if (condition != 0) target[at++] = value;
}
inline void append_if(uint32_t condition, uint32_t& at, uint2 pair) {
  if (condition != 0) send(at, pair), at += 8;
}

inline void expect_bytes(uint64_t* arrivals, uint32_t bytes) { emulator::expect_bytes(arrivals, bytes); }
inline void send_counted(uint32_t to, uint4 words, uint32_t arrivals) { emulator::send_counted(to, &words, 16, arrivals); }
inline void send_counted(uint32_t to, uint32_t word, uint32_t arrivals) { emulator::send_counted(to, &word, 4, arrivals); }
inline void wait_for_bytes(uint64_t* arrivals) { emulator::wait_for_bytes(arrivals); }

template <class T>
inline T load_global(const T* from) {
  return *from;
}

inline uint4 load16_if(bool there, const void* from) {
  uint4 words = {};
  if (there) words = *static_cast<const uint4*>(from);
  return words;
}
inline uint32_t load_byte_if(bool there, const void* from) { return there ? *static_cast<const uint8_t*>(from) : 0; }

inline void copy16_async(uint32_t to, const void* from, bool there) { emulator::copy16(to, from, there); }
inline void commit_copies() { emulator::commit_copies(); }
template <int pending>
inline void wait_copies() { emulator::wait_copies(pending); }
inline void wait_copies() { emulator::wait_copies(-1); }
inline void prefetch(const void*) {}  // of any address: no fault, no effect

inline void load_matrices(uint32_t (&r)[4], uint32_t row) {
  const emulator::Matrices found = emulator::load_matrices(row, false);
  for (int i = 0; i < 4; ++i) r[i] = found.r[i];
}
inline void load_matrices_transposed(uint32_t (&r)[4], uint32_t row) {
  const emulator::Matrices found = emulator::load_matrices(row, true);
  for (int i = 0; i < 4; ++i) r[i] = found.r[i];
}
inline void multiply_bf16(float (&sums)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  const emulator::Sums result = emulator::multiply_bf16({{sums[0], sums[1], sums[2], sums[3]}}, {{a[0], a[1], a[2], a[3]}}, b0, b1);
  for (int i = 0; i < 4; ++i) sums[i] = result.f[i];
}

inline uint32_t decode_e4m3_to_half(uint32_t code) {  // sign, 4 bits of exponent (bias 7), 3 of mantissa; 0x7f and 0xff are NaN
  const uint32_t sign = (code & 0x80u) << 8, exponent = (code >> 3) & 15u;
  uint32_t mantissa = code & 7u;
  if ((code & 0x7fu) == 0x7fu) return 0x7fffu;
  if (exponent != 0) return sign | (exponent + 8) << 10 | mantissa << 7;
  if (mantissa == 0) return sign;
  uint32_t shifted = 8;  // subnormal: mantissa * 2^-9, a normal float16
  for (; mantissa < 8; mantissa <<= 1) --shifted;
  return sign | (shifted + 1) << 10 | (mantissa & 7u) << 7;
}
inline uint2 decode_e4m3x4(uint32_t codes) {
  uint32_t half[4];
  for (int i = 0; i < 4; ++i) half[i] = decode_e4m3_to_half(codes >> (8 * i) & 255u);
  return {half[0] | half[1] << 16, half[2] | half[3] << 16};
}

// To the nearest number of so many bits behind the point of the leading one and no exponent below `lowest`, ties to even.
inline double rounded(double value, int bits, int lowest) {
  int exponent = 0;
  frexp(value, &exponent);  // 0.5 <= |value| / 2^exponent < 1
  const double step = ldexp(1.0, (exponent - 1 > lowest ? exponent - 1 : lowest) - bits);
  return nearbyint(value / step) * step;
}
inline uint32_t to_half(float value) {
  if (value != value) return 0x7fffu;
  const uint32_t sign = __float_as_uint(value) >> 16 & 0x8000u;
  const double size = isinf(value) ? 65536.0 : rounded(fabs(static_cast<double>(value)), 10, -14);
  if (size >= 65536.0) return sign | 0x7c00u;
  if (size < 0x1p-14) return sign | static_cast<uint32_t>(size * 0x1p24);
  const uint32_t bits = __float_as_uint(static_cast<float>(size));  // exact
  return sign | ((bits >> 23) - 112) << 10 | (bits >> 13 & 0x3ffu);
}
inline uint32_t pack_f16(float low, float high) { return to_half(low) | to_half(high) << 16; }

inline uint32_t multiply_bf16(uint32_t a, uint32_t b) {
  const double product = static_cast<double>(__uint_as_float(a << 16)) * static_cast<double>(__uint_as_float(b << 16));  // exact
  if (product != product) return 0x7fffu;
  if (isinf(product) || product == 0) return __float_as_uint(static_cast<float>(product)) >> 16;
  return __float_as_uint(static_cast<float>(rounded(product, 7, -126))) >> 16;
}
inline uint32_t multiply_bf16x2(uint32_t a, uint32_t b) { return multiply_bf16(a & 0xffffu, b & 0xffffu) | multiply_bf16(a >> 16, b >> 16) << 16; }

}  // namespace dsv4_ops::ptx

#endif
