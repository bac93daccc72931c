// What several tests of this folder need: a folder that removes itself, small synthetic traces.
#pragma once

#include <unistd.h>

#include <atomic>
#include <filesystem>
#include <string>

#include "traces/synth.hpp"

namespace kvreplay::replay {

class temporary_folder {
 public:
  temporary_folder() {
    static std::atomic<int> counter{0};
    path_ = std::filesystem::temp_directory_path() /
            ("kvreplay_test_" + std::to_string(getpid()) + "_" + std::to_string(counter++));
    std::filesystem::create_directories(path_);
  }
  ~temporary_folder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  temporary_folder(const temporary_folder&) = delete;
  temporary_folder& operator=(const temporary_folder&) = delete;
  std::string operator/(const std::string& name) const { return (path_ / name).string(); }

 private:
  std::filesystem::path path_;
};

inline std::string testdata(const std::string& folder, const std::string& name) {
  return std::string(KVREPLAY_SOURCE_DIR) + "/" + folder + "/testdata/" + name;
}

// The shapes that a policy must cope with.
enum class trace_kind { grouped, windowed, sinks, one_layer, one_token_prompt };

inline traces::synth_options options_for(trace_kind kind, std::uint64_t seed) {
  traces::synth_options o;
  o.layers = 3;
  o.q_heads = 6;
  o.kv_heads = 2;
  o.head_dim = 8;
  o.prompt_length = 40;
  o.tokens = 96;
  o.seed = seed;
  switch (kind) {
    case trace_kind::grouped:
      break;
    case trace_kind::windowed:
      o.window = {0, 20, 0};
      break;
    case trace_kind::sinks:
      o.learned_sinks = true;
      break;
    case trace_kind::one_layer:
      o.layers = 1;
      break;
    case trace_kind::one_token_prompt:
      o.prompt_length = 1;
      o.tokens = 60;
      break;
  }
  return o;
}

}  // namespace kvreplay::replay
