// ranks without MPI: this process does everything.
#include "replay/ranks.hpp"

namespace kvreplay::replay {

ranks_session::ranks_session() = default;
ranks_session::~ranks_session() = default;
void ranks_session::abort(int) {}

rank_place this_rank() { return {}; }

void distribute(std::int64_t units, const std::function<std::string(std::int64_t)>& work,
                const std::function<void(std::int64_t, std::string)>& finished) {
  for (std::int64_t i = 0; i < units; ++i) finished(i, work(i));
}

std::string broadcast(std::string text) { return text; }

void limit_message_bytes(std::int64_t) {}

}  // namespace kvreplay::replay
