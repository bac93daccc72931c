// Run under mpirun by CTest: work is handed out once, arrives whole in pieces, and is the same
// wherever it was done.
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "replay/ranks.hpp"

using namespace kvreplay::replay;

namespace {

std::string text_of(std::int64_t unit) {
  std::string text;
  for (std::int64_t i = 0; i < (unit % 5) * 700'001; ++i)
    text += static_cast<char>('a' + (i * 7 + unit) % 26);
  return text;
}

}  // namespace

int main() {
  ranks_session session;
  limit_message_bytes(std::int64_t{1} << 20);  // so that pieces are many
  const auto place = this_rank();
  for (const std::int64_t units : {0, 1, 5, 23}) {
    std::vector<int> seen(static_cast<size_t>(units));
    bool whole = true;
    distribute(units, text_of, [&](std::int64_t unit, const std::string& text) {
      ++seen[static_cast<size_t>(unit)];
      whole = whole && text == text_of(unit);
    });
    bool once = true;
    for (const int count : seen) once = once && count == (place.rank == 0 ? 1 : 0);
    if (!once || !whole) {
      std::fprintf(stderr, "rank %d of %d: %ld units: %s\n", place.rank, place.size,
                   static_cast<long>(units),
                   once ? "a text is not whole" : "a unit is not done once");
      session.abort(1);
      return 1;
    }
  }
  const auto told = broadcast(place.rank == 0 ? text_of(4) : "");
  if (told != text_of(4)) {
    std::fprintf(stderr, "rank %d: the broadcast text differs\n", place.rank);
    session.abort(1);
    return 1;
  }
  if (place.rank == 0) std::printf("%d ranks agree\n", place.size);
  return 0;
}
