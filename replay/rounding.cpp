#include "replay/rounding.hpp"

#include <tbb/parallel_for.h>

#include <algorithm>

#include "kernels/inner_loops.hpp"

namespace kvreplay::replay {

void round_to_half(tracer::attention_block& block) {
  const auto& loops = kernels::active_loops();
  for (const std::span<float> values : {block.q, block.k, block.v}) {
    constexpr size_t piece = 4096;
    tbb::parallel_for(size_t{0}, (values.size() + piece - 1) / piece, [&](size_t i) {
      const auto part = values.subspan(i * piece, std::min(piece, values.size() - i * piece));
      kernels::half_bits bits[piece];
      loops.to_halves(part.data(), std::ssize(part), bits);
      loops.from_halves(bits, std::ssize(part), part.data());
    });
  }
}

}  // namespace kvreplay::replay
