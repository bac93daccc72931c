// The device language that kernels are written in: one source for nvcc and for a host compiler.
//
// With nvcc every name is a thin alias over CUDA. With a host compiler every CUDA thread is a fiber
// (simt_runtime.cpp): barriers and warp collectives are rendezvous points that are checked for
// divergence, shared memory is a heap block of exact size filled with NaN, and the order in which
// threads run is drawn from a seed. What goes wrong is reported with its source line as a
// `failure`.
//
// Rules for kernels. All device code through these names; collectives always by all 32 lanes of a
// warp and in warp-uniform control flow; no return before a barrier; no warp-synchronous
// assumptions (shuffles order no memory, sync_warp does); blocks talk to each other only through
// the end of a kernel; block sizes are multiples of 32; a kernel takes one struct of arguments.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

#if defined(__CUDACC__)
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#define SIMT_KERNEL __global__ void
#define SIMT_DEVICE __device__ __forceinline__
#define SIMT_EITHER __host__ __device__ __forceinline__
#define SIMT_BOUNDS(threads, blocks) __launch_bounds__(threads, blocks)
#define SIMT_SHARED(type, name, count) __shared__ __align__(16) type name[count]
#define SIMT_UNROLL _Pragma("unroll")
#else
#include <atomic>
#include <bit>
#include <cmath>
#include <cstring>
#include <functional>
#include <source_location>
// A bare __shared__ would compile to a local variable of every thread, silently wrong.
#define __shared__ use_SIMT_SHARED_instead
#define SIMT_KERNEL inline void
#define SIMT_DEVICE inline
#define SIMT_EITHER inline
#define SIMT_BOUNDS(threads, blocks)
#define SIMT_SHARED(type, name, count)                                            \
  static const char name##_key = 0;                                               \
  type* const name = static_cast<type*>(::kvreplay::kernels::simt::shared_memory( \
      &name##_key, sizeof(type) * static_cast<std::size_t>(count)))
#define SIMT_UNROLL
#endif

namespace kvreplay::kernels::simt {

inline constexpr int warp_size = 32;

struct extent {
  unsigned x = 1, y = 1, z = 1;
};

// A kernel that broke a rule (host) or a launch that CUDA refused. what() is one line.
class failure : public std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct alignas(16) words4 {
  std::uint32_t word[4];
};
struct alignas(8) words2 {
  std::uint32_t word[2];
};

#if defined(__CUDACC__)

using stream_type = cudaStream_t;

SIMT_DEVICE unsigned thread_index() { return threadIdx.x; }
SIMT_DEVICE unsigned block_x() { return blockIdx.x; }
SIMT_DEVICE unsigned block_y() { return blockIdx.y; }
SIMT_DEVICE unsigned block_z() { return blockIdx.z; }
SIMT_DEVICE unsigned grid_x() { return gridDim.x; }
SIMT_DEVICE unsigned block_size() { return blockDim.x; }
SIMT_DEVICE void sync_threads() { __syncthreads(); }
SIMT_DEVICE void sync_warp() { __syncwarp(); }
template <class T>
SIMT_DEVICE T shuffle_xor(T value, int mask) {
  return __shfl_xor_sync(0xffffffffu, value, mask);
}
template <class T>
SIMT_DEVICE T shuffle(T value, int lane) {
  return __shfl_sync(0xffffffffu, value, lane);
}
SIMT_DEVICE unsigned ballot(bool predicate) { return __ballot_sync(0xffffffffu, predicate); }
SIMT_DEVICE int atomic_add(int* p, int value) { return atomicAdd(p, value); }
SIMT_DEVICE int atomic_max(int* p, int value) { return atomicMax(p, value); }
SIMT_DEVICE int atomic_or(int* p, int bits) { return atomicOr(p, bits); }
// 16 bytes from an address that is a multiple of 16, through the read-only path.
SIMT_DEVICE words4 load16(const void* p) {
  const uint4 v = __ldg(reinterpret_cast<const uint4*>(p));
  return {{v.x, v.y, v.z, v.w}};
}
SIMT_DEVICE words2 load8(const void* p) {
  const uint2 v = __ldg(reinterpret_cast<const uint2*>(p));
  return {{v.x, v.y}};
}
SIMT_DEVICE std::uint32_t load4(const void* p) {
  return __ldg(reinterpret_cast<const unsigned*>(p));
}
// The same from memory that the kernel also writes.
SIMT_DEVICE words4 read16(const void* p) {
  const uint4 v = *reinterpret_cast<const uint4*>(p);
  return {{v.x, v.y, v.z, v.w}};
}
SIMT_DEVICE void store16(void* p, const words4& v) {
  *reinterpret_cast<uint4*>(p) = make_uint4(v.word[0], v.word[1], v.word[2], v.word[3]);
}
SIMT_DEVICE float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
SIMT_DEVICE float log2_exact(float x) { return log2f(x); }
SIMT_DEVICE float log_exact(float x) { return logf(x); }
SIMT_DEVICE float sqrt_exact(float x) { return sqrtf(x); }
SIMT_DEVICE float abs_value(float x) { return fabsf(x); }
SIMT_DEVICE float greater_of(float a, float b) { return fmaxf(a, b); }
SIMT_DEVICE int lesser_of(int a, int b) { return min(a, b); }
// Products and quotients that are rounded once and never fused with a neighbour.
SIMT_DEVICE float multiply(float a, float b) { return __fmul_rn(a, b); }
SIMT_DEVICE float divide(float a, float b) { return __fdiv_rn(a, b); }
SIMT_DEVICE float add(float a, float b) { return __fadd_rn(a, b); }
SIMT_DEVICE double multiply(double a, double b) { return __dmul_rn(a, b); }
SIMT_DEVICE double add(double a, double b) { return __dadd_rn(a, b); }
SIMT_DEVICE int round_to_int(float x) { return __float2int_rn(x); }  // ties to even
SIMT_DEVICE std::uint32_t float_bits(float x) { return __float_as_uint(x); }
SIMT_DEVICE float bits_float(std::uint32_t x) { return __uint_as_float(x); }
SIMT_DEVICE float half_to_float(std::uint16_t h) { return __half2float(__ushort_as_half(h)); }
SIMT_DEVICE std::uint16_t float_to_half(float x) { return __half_as_ushort(__float2half_rn(x)); }
SIMT_DEVICE int population(unsigned x) { return __popc(x); }
// Bytes of (b:a) chosen by the low three bits of the selector's nibbles.
SIMT_DEVICE std::uint32_t permute_bytes(std::uint32_t a, std::uint32_t b, std::uint32_t selector) {
  return __byte_perm(a, b, selector);
}
SIMT_DEVICE std::uint32_t pack_halves(float low, float high) {
  const half2 h = __floats2half2_rn(low, high);
  return *reinterpret_cast<const std::uint32_t*>(&h);
}
SIMT_DEVICE float low_half(std::uint32_t w) { return __low2float(*reinterpret_cast<half2*>(&w)); }
SIMT_DEVICE float high_half(std::uint32_t w) { return __high2float(*reinterpret_cast<half2*>(&w)); }
SIMT_DEVICE std::uint32_t subtract_halves(std::uint32_t a, std::uint32_t b) {
  const half2 r = __hsub2(*reinterpret_cast<half2*>(&a), *reinterpret_cast<half2*>(&b));
  return *reinterpret_cast<const std::uint32_t*>(&r);
}
SIMT_DEVICE int dot4(std::uint32_t a, std::uint32_t b, int c) {
  return __dp4a(static_cast<int>(a), static_cast<int>(b), c);
}
// d += a b; a [16, 32] by rows, b [32, 8] by columns, fragments as in the PTX manual.
SIMT_DEVICE void mma_s8(int (&d)[4], const std::uint32_t (&a)[4], const std::uint32_t (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
// d += a b; a [16, 16], b [16, 8] of halves, d in FP32.
SIMT_DEVICE void mma_f16(float (&d)[4], const std::uint32_t (&a)[4], const std::uint32_t (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// Starts a kernel on a stream; throws `failure` where CUDA refuses the launch.
template <class Args>
void launch(void (*kernel)(Args), extent grid, unsigned block, const Args& args,
            stream_type stream) {
  kernel<<<dim3(grid.x, grid.y, grid.z), block, 0, stream>>>(args);
  const cudaError_t error = cudaGetLastError();
  if (error != cudaSuccess) {
    throw failure(std::string("kernel launch failed: ") + cudaGetErrorString(error));
  }
}

#else

using location = std::source_location;

struct stream_type {};

// How the host runs threads. seed 0: threads and blocks in order; else drawn from the seed.
struct schedule {
  std::uint64_t seed = 0;
};
// Applies to launches of the calling thread until it is destroyed.
class scheduled {
 public:
  explicit scheduled(schedule s);
  ~scheduled();
  scheduled(const scheduled&) = delete;
  scheduled& operator=(const scheduled&) = delete;

 private:
  schedule before_;
};

// Runtime entry points. Everything below them is what kernels call.
extent thread_extent();  // of the running thread: x = index in the block
extent block_extent();
extent grid_extent();
unsigned threads_per_block();
void barrier(const location& at);
// All lanes of the warp give a value and see all 32. `operation` tells collectives apart.
void exchange(int operation, std::uint64_t value, bool orders_memory, const location& at,
              std::uint64_t (&values)[warp_size]);
void* shared_memory(const void* key, std::size_t bytes);
[[noreturn]] void fail(const char* what, const location& at);
void run_grid(extent grid, unsigned block, const std::function<void()>& body);

inline unsigned thread_index() { return thread_extent().x; }
inline unsigned block_x() { return block_extent().x; }
inline unsigned block_y() { return block_extent().y; }
inline unsigned block_z() { return block_extent().z; }
inline unsigned grid_x() { return grid_extent().x; }
inline unsigned block_size() { return threads_per_block(); }
inline void sync_threads(const location& at = location::current()) { barrier(at); }
inline void sync_warp(const location& at = location::current()) {
  std::uint64_t ignored[warp_size];
  exchange(1, 0, true, at, ignored);
}
template <class T>
std::uint64_t to_bits(T value) {
  static_assert(sizeof(T) <= 8);
  std::uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof value);
  return bits;
}
template <class T>
T from_bits(std::uint64_t bits) {
  T value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}
template <class T>
T shuffle_xor(T value, int mask, const location& at = location::current()) {
  std::uint64_t all[warp_size];
  exchange(2, to_bits(value), false, at, all);
  return from_bits<T>(all[(thread_index() % warp_size) ^ static_cast<unsigned>(mask)]);
}
template <class T>
T shuffle(T value, int lane, const location& at = location::current()) {
  std::uint64_t all[warp_size];
  exchange(3, to_bits(value), false, at, all);
  return from_bits<T>(all[lane & (warp_size - 1)]);
}
inline unsigned ballot(bool predicate, const location& at = location::current()) {
  std::uint64_t all[warp_size];
  exchange(4, predicate ? 1 : 0, false, at, all);
  unsigned bits = 0;
  for (unsigned i = 0; i < warp_size; ++i) bits |= static_cast<unsigned>(all[i]) << i;
  return bits;
}
inline int atomic_add(int* p, int value) {
  return std::atomic_ref<int>(*p).fetch_add(value, std::memory_order_relaxed);
}
inline int atomic_max(int* p, int value) {
  std::atomic_ref<int> target(*p);
  int old = target.load(std::memory_order_relaxed);
  while (old < value && !target.compare_exchange_weak(old, value, std::memory_order_relaxed)) {
  }
  return old;
}
inline int atomic_or(int* p, int bits) {
  return std::atomic_ref<int>(*p).fetch_or(bits, std::memory_order_relaxed);
}
inline void check_aligned(const void* p, std::uintptr_t bytes, const location& at) {
  if (reinterpret_cast<std::uintptr_t>(p) % bytes != 0) fail("misaligned wide access", at);
}
inline words4 load16(const void* p, const location& at = location::current()) {
  check_aligned(p, 16, at);
  words4 v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
inline words4 read16(const void* p, const location& at = location::current()) {
  return load16(p, at);
}
inline words2 load8(const void* p, const location& at = location::current()) {
  check_aligned(p, 8, at);
  words2 v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
inline std::uint32_t load4(const void* p, const location& at = location::current()) {
  check_aligned(p, 4, at);
  std::uint32_t v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
inline void store16(void* p, const words4& v, const location& at = location::current()) {
  check_aligned(p, 16, at);
  std::memcpy(p, &v, sizeof v);
}
inline float exp2_fast(float x) { return std::exp2(x); }
inline float log2_exact(float x) { return std::log2(x); }
inline float log_exact(float x) { return std::log(x); }
inline float sqrt_exact(float x) { return std::sqrt(x); }
inline float abs_value(float x) { return std::fabs(x); }
inline float greater_of(float a, float b) { return std::fmax(a, b); }  // as the device: drops NaN
inline int lesser_of(int a, int b) { return a < b ? a : b; }
inline float multiply(float a, float b) { return a * b; }
inline double multiply(double a, double b) { return a * b; }
inline double add(double a, double b) { return a + b; }
inline float divide(float a, float b) { return a / b; }
inline float add(float a, float b) { return a + b; }
inline int round_to_int(float x) {  // saturating and 0 for NaN, as the device's conversion
  if (!(x == x)) return 0;
  if (x >= 0x1p31F) return INT32_MAX;
  return x < -0x1p31F ? INT32_MIN : static_cast<int>(std::nearbyint(x));
}
inline std::uint32_t float_bits(float x) { return std::bit_cast<std::uint32_t>(x); }
inline float bits_float(std::uint32_t x) { return std::bit_cast<float>(x); }
inline float half_to_float(std::uint16_t h) {
  return static_cast<float>(std::bit_cast<_Float16>(h));
}
inline std::uint16_t float_to_half(float x) {
  return std::bit_cast<std::uint16_t>(static_cast<_Float16>(x));
}
inline int population(unsigned x) { return std::popcount(x); }
std::uint32_t permute_bytes(std::uint32_t a, std::uint32_t b, std::uint32_t selector);
inline std::uint32_t pack_halves(float low, float high) {
  return float_to_half(low) | static_cast<std::uint32_t>(float_to_half(high)) << 16;
}
inline float low_half(std::uint32_t w) { return half_to_float(static_cast<std::uint16_t>(w)); }
inline float high_half(std::uint32_t w) {
  return half_to_float(static_cast<std::uint16_t>(w >> 16));
}
inline std::uint32_t subtract_halves(std::uint32_t a, std::uint32_t b) {
  return pack_halves(low_half(a) - low_half(b), high_half(a) - high_half(b));
}
int dot4(std::uint32_t a, std::uint32_t b, int c);
void mma_s8(int (&d)[4], const std::uint32_t (&a)[4], const std::uint32_t (&b)[2],
            const location& at = location::current());
void mma_f16(float (&d)[4], const std::uint32_t (&a)[4], const std::uint32_t (&b)[2],
             const location& at = location::current());

// Runs a kernel to its end; throws `failure` where a thread broke a rule.
template <class Args>
void launch(void (*kernel)(Args), extent grid, unsigned block, const Args& args, stream_type) {
  run_grid(grid, block, [&] { kernel(args); });
}

#endif

SIMT_DEVICE float warp_sum(float value) {
  SIMT_UNROLL
  for (int mask = 16; mask > 0; mask >>= 1) value += shuffle_xor(value, mask);
  return value;
}

SIMT_DEVICE float warp_max(float value) {
  SIMT_UNROLL
  for (int mask = 16; mask > 0; mask >>= 1) value = greater_of(value, shuffle_xor(value, mask));
  return value;
}

}  // namespace kvreplay::kernels::simt
