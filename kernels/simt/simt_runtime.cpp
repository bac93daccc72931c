// The host runtime of the device language (simt.hpp): one fiber per CUDA thread, blocks one after
// another. This file is never instrumented by a sanitizer; it tells the sanitizers about its fibers
// instead. Under ThreadSanitizer only barriers, sync_warp and the ends of kernels order memory, so
// what it reports are races of the kernel between threads of a block or between blocks.
#include <pthread.h>
#include <sys/mman.h>

#include <cstdio>
#include <cstdlib>
#include <memory>
#include <new>
#include <numeric>
#include <vector>

#include "kernels/simt/simt.hpp"

#if !defined(__x86_64__)
#error "the fiber switch of the host SIMT runtime is written for x86-64"
#endif

#if defined(SIMT_ASAN)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#elif defined(SIMT_TSAN)
#include <sanitizer/tsan_interface.h>
extern "C" {
void AnnotateIgnoreReadsBegin(const char*, int);
void AnnotateIgnoreReadsEnd(const char*, int);
void AnnotateIgnoreWritesBegin(const char*, int);
void AnnotateIgnoreWritesEnd(const char*, int);
}
#endif

namespace kvreplay::kernels::simt {
namespace {

constexpr std::size_t stack_bytes = 256 * 1024;
constexpr std::size_t guard_bytes = 4096;
constexpr std::size_t red_zone = 64;  // bytes behind a shared array in builds without ASan
constexpr int red_zone_value = 0xA5;

// Calls of libc by the runtime are not accesses of the kernel.
struct unobserved {
#if defined(SIMT_TSAN)
  unobserved() {
    AnnotateIgnoreReadsBegin("", 0);
    AnnotateIgnoreWritesBegin("", 0);
  }
  ~unobserved() {
    AnnotateIgnoreWritesEnd("", 0);
    AnnotateIgnoreReadsEnd("", 0);
  }
#else
  unobserved() {}
  ~unobserved() {}
#endif
};

enum class state : std::uint8_t { ready, at_barrier, at_collective, exited };

struct fiber {
  void* stack_pointer = nullptr;
  char* stack = nullptr;  // lowest usable byte; a guard page lies below
  std::size_t size = 0;
  void* fake_stack = nullptr;  // ASan
  void* tsan = nullptr;
  unsigned index = 0;
  state now = state::ready;
  location where;
};

// A warp's rendezvous. Two buffers, so that a lane may come to the next collective while another
// has not yet read the values of this one.
struct warp_point {
  unsigned arrived = 0, generation = 0;
  int operation = 0;
  location where;
  std::uint64_t values[2][warp_size];
};

struct shared_array {
  const void* key = nullptr;
  std::size_t bytes = 0;
  unsigned char* data = nullptr;
};

struct machine {
  std::vector<fiber> threads;
  fiber host;
  fiber* running = nullptr;
  std::vector<unsigned> ready;
  std::size_t next_ready = 0;
  std::uint64_t random = 0;
  unsigned size = 0, waiting = 0, exited = 0;
  location barrier_at;
  std::vector<warp_point> warps;
  std::vector<shared_array> shared;
  extent block, grid;
  const std::function<void()>* body = nullptr;
  char message[512] = {};

  machine() = default;
  machine(const machine&) = delete;
  machine& operator=(const machine&) = delete;
  ~machine() {
    for (fiber& f : threads) {
      if (f.stack != nullptr) munmap(f.stack - guard_bytes, stack_bytes + guard_bytes);
    }
  }
};

thread_local machine* current = nullptr;
thread_local schedule chosen;

extern "C" void kvreplay_simt_switch(void** save, void* load);
asm(R"(.text
.globl kvreplay_simt_switch
.type kvreplay_simt_switch,@function
kvreplay_simt_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp,(%rdi)
  movq %rsi,%rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size kvreplay_simt_switch,.-kvreplay_simt_switch
)");

// `leaves`: the fiber will not be resumed.
void switch_to(fiber& from, fiber& to, [[maybe_unused]] bool leaves) {
  current->running = &to;
#if defined(SIMT_ASAN)
  __sanitizer_start_switch_fiber(leaves ? nullptr : &from.fake_stack, to.stack, to.size);
#elif defined(SIMT_TSAN)
  __tsan_switch_to_fiber(to.tsan, __tsan_switch_to_fiber_no_sync);
#endif
  kvreplay_simt_switch(&from.stack_pointer, to.stack_pointer);
#if defined(SIMT_ASAN)
  __sanitizer_finish_switch_fiber(from.fake_stack, nullptr, nullptr);
#endif
}

std::uint64_t draw() {  // xorshift64
  std::uint64_t& x = current->random;
  x ^= x << 13;
  x ^= x >> 7;
  x ^= x << 17;
  return x;
}

void make_ready(unsigned index) {
  current->threads[index].now = state::ready;
  current->ready.push_back(index);
}

fiber* next_fiber() {
  machine& m = *current;
  if (m.next_ready == m.ready.size()) {
    m.ready.clear();
    m.next_ready = 0;
    return nullptr;
  }
  if (chosen.seed != 0) {
    const std::size_t other = m.next_ready + draw() % (m.ready.size() - m.next_ready);
    std::swap(m.ready[other], m.ready[m.next_ready]);
  }
  return &m.threads[m.ready[m.next_ready++]];
}

// Writes the report of the first rule broken and leaves the block for good. Nothing is unwound:
// kernels hold no resources.
[[noreturn]] void leave_with(const char* what, const location& at) {
  machine& m = *current;
  unsigned count[4] = {};
  for (unsigned i = 0; i < m.size; ++i) ++count[static_cast<int>(m.threads[i].now)];
  {
    const unobserved quiet;
    std::snprintf(m.message, sizeof m.message,
                  "simt: %s at %s:%u (block %u,%u,%u thread %u; threads runnable %u, at a barrier "
                  "%u, at a warp collective %u, exited %u)",
                  what, at.file_name(), static_cast<unsigned>(at.line()), m.block.x, m.block.y,
                  m.block.z, m.running->index, count[0], count[1], count[2], count[3]);
  }
#if defined(SIMT_TSAN)
  __tsan_release(&m);
#endif
  switch_to(*m.running, m.host, true);
  std::abort();  // not reached: the host never resumes a fiber that left
}

void wait_in(state s, const location& at) {
  fiber& self = *current->running;
  self.now = s;
  self.where = at;
#if defined(SIMT_TSAN)
  __tsan_release(current);  // seen by the host alone, when the launch ends
#endif
  fiber* next = next_fiber();
  if (next == nullptr) {
    leave_with(s == state::at_barrier ? "deadlock: a barrier that never completes"
                                      : "deadlock: a warp collective that never completes",
               at);
  }
  if (next != &self) switch_to(self, *next, false);
}

void run_thread() {
#if defined(SIMT_ASAN)
  __sanitizer_finish_switch_fiber(nullptr, nullptr, nullptr);
#endif
  (*current->body)();
  machine& m = *current;
  fiber& self = *m.running;
  self.now = state::exited;
  ++m.exited;
  if (m.waiting > 0) leave_with("a thread returned while others wait at a barrier", m.barrier_at);
#if defined(SIMT_TSAN)
  __tsan_release(&m);
#endif
  fiber* next = next_fiber();
  if (next == nullptr && m.exited != m.size) {
    for (unsigned i = 0; i < m.size; ++i) {
      if (m.threads[i].now == state::exited) continue;
      leave_with("deadlock: threads wait for others that returned", m.threads[i].where);
    }
  }
  switch_to(self, next == nullptr ? m.host : *next, true);
  std::abort();  // not reached
}

void map_stack(fiber& f) {
  constexpr std::size_t all = stack_bytes + guard_bytes;
  constexpr int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  if (f.stack == nullptr) {
    void* memory = mmap(nullptr, all, PROT_READ | PROT_WRITE, flags, -1, 0);
    if (memory == MAP_FAILED) throw std::bad_alloc();
    mprotect(memory, guard_bytes, PROT_NONE);
    f.stack = static_cast<char*>(memory) + guard_bytes;
    f.size = stack_bytes;
    return;
  }
#if defined(SIMT_TSAN)
  // A fresh mapping makes TSan forget the accesses of the stack's last owner.
  if (mmap(f.stack, stack_bytes, PROT_READ | PROT_WRITE, flags | MAP_FIXED, -1, 0) == MAP_FAILED) {
    throw std::bad_alloc();
  }
#elif defined(SIMT_ASAN)
  __asan_unpoison_memory_region(f.stack, stack_bytes);  // frames that were left, not returned from
#endif
}

void prepare(fiber& f, unsigned index) {
  map_stack(f);
  f.index = index;
  f.fake_stack = nullptr;
  void** top = reinterpret_cast<void**>(f.stack + stack_bytes - 64);
  *--top = nullptr;                               // the return address of run_thread
  *--top = reinterpret_cast<void*>(&run_thread);  // where the first switch returns to
  for (int saved = 0; saved < 6; ++saved) *--top = nullptr;
  f.stack_pointer = top;
#if defined(SIMT_TSAN)
  f.tsan = __tsan_create_fiber(0);
#endif
}

void describe_host_stack([[maybe_unused]] fiber& host) {
#if defined(SIMT_ASAN)
  pthread_attr_t attributes;
  void* low = nullptr;
  pthread_getattr_np(pthread_self(), &attributes);
  pthread_attr_getstack(&attributes, &low, &host.size);
  pthread_attr_destroy(&attributes);
  host.stack = static_cast<char*>(low);
#elif defined(SIMT_TSAN)
  host.tsan = __tsan_get_current_fiber();
#endif
}

void release_shared(machine& m) {
  const unobserved quiet;
  for (const shared_array& s : m.shared) {
#if !defined(SIMT_ASAN)
    for (std::size_t i = 0; i < red_zone && m.message[0] == 0; ++i) {
      if (s.data[s.bytes + i] == red_zone_value) continue;
      std::snprintf(m.message, sizeof m.message,
                    "simt: write behind a shared array of %zu bytes (block %u,%u,%u)", s.bytes,
                    m.block.x, m.block.y, m.block.z);
    }
#endif
    std::free(s.data);
  }
  m.shared.clear();
}

void run_block(machine& m, std::uint64_t number) {
  m.ready.clear();
  m.next_ready = 0;
  m.waiting = m.exited = 0;
  m.random = (chosen.seed + number + 1) * 0x9E3779B97F4A7C15u | 1;
  for (warp_point& w : m.warps) w.arrived = 0;
  for (unsigned i = 0; i < m.size; ++i) {
    prepare(m.threads[i], i);
    make_ready(i);
  }
  switch_to(m.host, *next_fiber(), false);
#if defined(SIMT_TSAN)
  for (unsigned i = 0; i < m.size; ++i) __tsan_destroy_fiber(m.threads[i].tsan);
#endif
  release_shared(m);
}

// Blocks may run in any order on a device: with a seed they do so here.
std::vector<std::uint64_t> block_order(std::uint64_t count) {
  std::vector<std::uint64_t> order(count);
  std::iota(order.begin(), order.end(), std::uint64_t{0});
  if (chosen.seed == 0) return order;
  std::uint64_t x = chosen.seed * 0x9E3779B97F4A7C15u | 1;
  for (std::size_t i = order.size(); i > 1; --i) {
    x = x * 6364136223846793005u + 1442695040888963407u;
    std::swap(order[i - 1], order[(x >> 33) % i]);
  }
  return order;
}

// The current machine of the thread, kept for its stacks between launches.
machine& own_machine() {
  static thread_local std::unique_ptr<machine> kept;
  if (kept == nullptr) kept = std::make_unique<machine>();
  return *kept;
}

void check_extents(extent grid, unsigned block) {
  const bool grid_fits = grid.x >= 1 && grid.x <= 0x7fffffffu && grid.y >= 1 && grid.y <= 65535 &&
                         grid.z >= 1 && grid.z <= 65535;
  if (grid_fits && block >= warp_size && block <= 1024 && block % warp_size == 0) return;
  char text[160];
  std::snprintf(text, sizeof text, "simt: grid %u,%u,%u with %u threads cannot be launched", grid.x,
                grid.y, grid.z, block);
  throw failure(text);
}

}  // namespace

scheduled::scheduled(schedule s) : before_(chosen) { chosen = s; }
scheduled::~scheduled() { chosen = before_; }

extent thread_extent() { return {current->running->index, 0, 0}; }
extent block_extent() { return current->block; }
extent grid_extent() { return current->grid; }
unsigned threads_per_block() { return current->size; }
void fail(const char* what, const location& at) { leave_with(what, at); }

void barrier(const location& at) {
  machine& m = *current;
  if (m.waiting == 0) {
    m.barrier_at = at;
  } else if (m.barrier_at.line() != at.line()) {
    leave_with("divergent barrier: threads wait at different lines,", at);
  }
  if (m.exited > 0) leave_with("a barrier after another thread returned", at);
#if defined(SIMT_TSAN)
  __tsan_release(&m.waiting);
#endif
  if (++m.waiting == m.size) {
    m.waiting = 0;
    const unsigned self = m.running->index;
    const unobserved quiet;
    for (unsigned i = 0; i < m.size; ++i) {
      if (i != self) make_ready(i);
    }
  } else {
    wait_in(state::at_barrier, at);
  }
#if defined(SIMT_TSAN)
  __tsan_acquire(&m.waiting);
#endif
}

void exchange(int operation, std::uint64_t value, [[maybe_unused]] bool orders_memory,
              const location& at, std::uint64_t (&values)[warp_size]) {
  machine& m = *current;
  const unsigned self = m.running->index, lane = self % warp_size;
  warp_point& warp = m.warps[self / warp_size];
  if (warp.arrived == 0) {
    warp.operation = operation;
    warp.where = at;
  } else if (warp.operation != operation || warp.where.line() != at.line()) {
    leave_with("divergent warp collective: lanes at different operations,", at);
  }
  const unsigned buffer = warp.generation & 1;
  warp.values[buffer][lane] = value;
  warp.arrived |= 1u << lane;
#if defined(SIMT_TSAN)
  if (orders_memory) __tsan_release(&warp);
#endif
  if (warp.arrived == 0xffffffffu) {
    warp.arrived = 0;
    ++warp.generation;
    const unobserved quiet;
    for (unsigned i = 0; i < warp_size; ++i) {
      if (i != lane) make_ready(self - lane + i);
    }
  } else {
    wait_in(state::at_collective, at);
  }
#if defined(SIMT_TSAN)
  if (orders_memory) __tsan_acquire(&warp);
#endif
  for (unsigned i = 0; i < warp_size; ++i) values[i] = warp.values[buffer][i];
}

void* shared_memory(const void* key, std::size_t bytes) {
  const unobserved quiet;
  machine& m = *current;
  for (const shared_array& s : m.shared) {
    if (s.key == key) return s.data;
  }
#if defined(SIMT_ASAN)
  auto* data = static_cast<unsigned char*>(std::malloc(bytes));
  if (data == nullptr) std::abort();
#else
  auto* data = static_cast<unsigned char*>(std::malloc(bytes + red_zone));
  if (data == nullptr) std::abort();
  std::memset(data + bytes, red_zone_value, red_zone);
#endif
  std::memset(data, 0xFF, bytes);  // NaN as FP32 and FP16, -1 as integers
  m.shared.push_back({key, bytes, data});
  return data;
}

void run_grid(extent grid, unsigned block, const std::function<void()>& body) {
  check_extents(grid, block);
  if (current != nullptr) throw failure("simt: a kernel cannot launch a kernel");
  machine& m = own_machine();
  m.size = block;
  m.grid = grid;
  m.body = &body;
  m.message[0] = 0;
  if (m.threads.size() < block) m.threads.resize(block);
  if (m.warps.size() < block / warp_size) m.warps.resize(block / warp_size);
  describe_host_stack(m.host);
  current = &m;
  for (const std::uint64_t b : block_order(std::uint64_t{grid.x} * grid.y * grid.z)) {
    m.block = {static_cast<unsigned>(b % grid.x), static_cast<unsigned>(b / grid.x % grid.y),
               static_cast<unsigned>(b / grid.x / grid.y)};
    run_block(m, b);
    if (m.message[0] != 0) break;
  }
#if defined(SIMT_TSAN)
  __tsan_acquire(&m);
#endif
  current = nullptr;
  if (m.message[0] != 0) throw failure(m.message);
}

}  // namespace kvreplay::kernels::simt
