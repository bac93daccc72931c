// Kernels with one bug each, run by name. The tests of the host SIMT runtime run this program as
// built plainly, with AddressSanitizer and with ThreadSanitizer, and look for the report.
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "kernels/simt/simt.hpp"

namespace {

using namespace kvreplay::kernels::simt;

constexpr unsigned threads = 64;

struct arguments {
  const float* in = nullptr;  // [count]
  float* out = nullptr;       // [threads]
  int count = 0;
};

// What the bugs are variations of: every thread reads a neighbour's value through shared memory.
SIMT_KERNEL sound(arguments a) {
  SIMT_SHARED(float, rows, threads);
  const unsigned t = thread_index();
  rows[t] = a.in[lesser_of(static_cast<int>(t), a.count - 1)];
  sync_threads();
  a.out[t] = warp_sum(rows[(t + 1) % threads]);
}

SIMT_KERNEL array_one_short(arguments a) {
  SIMT_SHARED(float, rows, threads - 1);
  const unsigned t = thread_index();
  rows[t] = a.in[lesser_of(static_cast<int>(t), a.count - 1)];
  sync_threads();
  a.out[t] = rows[0];
}

SIMT_KERNEL unclamped_load(arguments a) {
  const unsigned t = thread_index();
  a.out[t] = a.in[t];
}

SIMT_KERNEL missing_barrier(arguments a) {
  SIMT_SHARED(float, rows, threads);
  const unsigned t = thread_index();
  rows[t] = a.in[lesser_of(static_cast<int>(t), a.count - 1)];
  a.out[t] = rows[(t + 1) % threads];
}

SIMT_KERNEL blocks_share_an_output(arguments a) { a.out[thread_index()] = a.in[0]; }

SIMT_KERNEL shuffle_under_divergence(arguments a) {
  const unsigned t = thread_index();
  float value = a.in[0];
  if (t % 2 == 0) value = shuffle_xor(value, 2);
  a.out[t] = value;
}

SIMT_KERNEL barriers_in_two_branches(arguments a) {
  if (thread_index() < 32) {
    sync_threads();
  } else {
    sync_threads();
  }
  a.out[thread_index()] = 0;
}

SIMT_KERNEL return_before_barrier(arguments a) {
  if (thread_index() == 5) return;
  sync_threads();
  a.out[thread_index()] = 0;
}

SIMT_KERNEL misaligned_load(arguments a) {
  a.out[thread_index()] = static_cast<float>(load16(a.in + 1).word[0]);
}

struct planted {
  const char* name;
  void (*kernel)(arguments);
  unsigned blocks;
};

constexpr planted all[] = {{"sound", sound, 2},
                           {"array_one_short", array_one_short, 1},
                           {"unclamped_load", unclamped_load, 1},
                           {"missing_barrier", missing_barrier, 1},
                           {"blocks_share_an_output", blocks_share_an_output, 2},
                           {"shuffle_under_divergence", shuffle_under_divergence, 1},
                           {"barriers_in_two_branches", barriers_in_two_branches, 1},
                           {"return_before_barrier", return_before_barrier, 1},
                           {"misaligned_load", misaligned_load, 1}};

// Blocks write apart from each other only in the sound kernel's launches, one per block.
int run(const planted& p) {
  const std::vector<float> in(threads - 8, 1.0F);
  std::vector<float> out(threads);
  const arguments a{in.data(), out.data(), static_cast<int>(in.size())};
  const unsigned launches = std::strcmp(p.name, "sound") == 0 ? p.blocks : 1;
  for (unsigned i = 0; i < launches; ++i) launch(p.kernel, {p.blocks / launches}, threads, a, {});
  for (const float x : out) {
    if (x == x) continue;
    std::puts("the output holds nan");
    return 3;
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  for (const planted& p : all) {
    if (argc != 2 || std::string(argv[1]) != p.name) continue;
    try {
      const int code = run(p);
      std::puts(code == 0 ? "finished" : "failed");
      return code;
    } catch (const failure& e) {
      std::puts(e.what());
      return 4;
    }
  }
  std::puts("usage: planted_bugs NAME");
  return 2;
}
