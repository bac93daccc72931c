// ranks over MPI. Rank 0 serves the others on its calling thread, which alone speaks MPI, and works
// on a second one. A rank that asks gets the next unit; counts and sizes are 64 bits, messages go
// in pieces.
#define OMPI_SKIP_MPICXX 1  // the C++ bindings, which MPI has dropped
#define MPICH_SKIP_MPICXX 1
#include <mpi.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <exception>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>

#include "replay/ranks.hpp"

namespace kvreplay::replay {
namespace {

enum tag : int { ask = 1, give, header, piece };
constexpr std::int64_t no_more = -1;
std::int64_t message_bytes = std::int64_t{1} << 30;

bool started_by_mpirun() {
  for (const char* name : {"OMPI_COMM_WORLD_SIZE", "PMIX_RANK", "PMI_RANK", "PMI_SIZE"}) {
    if (std::getenv(name) != nullptr) return true;
  }
  return false;
}

bool running() {
  int yes = 0, over = 0;
  MPI_Initialized(&yes);
  MPI_Finalized(&over);
  return yes != 0 && over == 0;
}

void send_text(std::int64_t unit, const std::string& text) {
  const std::int64_t head[2] = {unit, static_cast<std::int64_t>(text.size())};
  MPI_Send(head, 2, MPI_INT64_T, 0, header, MPI_COMM_WORLD);
  for (std::int64_t at = 0; at < head[1]; at += message_bytes) {
    const auto count = static_cast<int>(std::min(message_bytes, head[1] - at));
    MPI_Send(text.data() + at, count, MPI_CHAR, 0, piece, MPI_COMM_WORLD);
  }
}

std::pair<std::int64_t, std::string> receive_text(int from) {
  std::int64_t head[2];
  MPI_Recv(head, 2, MPI_INT64_T, from, header, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
  std::string text(static_cast<size_t>(head[1]), '\0');
  for (std::int64_t at = 0; at < head[1]; at += message_bytes) {
    const auto count = static_cast<int>(std::min(message_bytes, head[1] - at));
    MPI_Recv(text.data() + at, count, MPI_CHAR, from, piece, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
  }
  return {head[0], std::move(text)};
}

// The next unit of rank 0's own worker, or of a rank that asks.
class unit_counter {
 public:
  explicit unit_counter(std::int64_t units) : units_(units) {}
  std::int64_t next() {
    const std::scoped_lock lock(mutex_);
    return next_ < units_ ? next_++ : no_more;
  }
  void stop() {
    const std::scoped_lock lock(mutex_);
    next_ = units_;
  }

 private:
  std::mutex mutex_;
  std::int64_t next_ = 0, units_;
};

// Rank 0's share of the work, on a thread of its own that never speaks MPI.
class local_worker {
 public:
  local_worker(unit_counter& counter, const std::function<std::string(std::int64_t)>& work)
      : thread_([this, &counter, &work] { run(counter, work); }) {}
  ~local_worker() { thread_.join(); }

  // A finished unit, if one waits. Rethrows what the work threw.
  std::optional<std::pair<std::int64_t, std::string>> take() {
    const std::scoped_lock lock(mutex_);
    if (failed_) std::rethrow_exception(failed_);
    return std::exchange(done_, std::nullopt);
  }

 private:
  void run(unit_counter& counter, const std::function<std::string(std::int64_t)>& work) {
    try {
      for (std::int64_t i; (i = counter.next()) != no_more;) {
        auto text = work(i);
        while (true) {  // until the one before has been taken
          {
            const std::scoped_lock lock(mutex_);
            if (!done_) {
              done_.emplace(i, std::move(text));
              break;
            }
          }
          std::this_thread::sleep_for(std::chrono::milliseconds(1));
        }
      }
    } catch (...) {
      const std::scoped_lock lock(mutex_);
      failed_ = std::current_exception();
    }
  }

  std::mutex mutex_;
  std::optional<std::pair<std::int64_t, std::string>> done_;
  std::exception_ptr failed_;
  std::thread thread_;
};

// Answers one message, if one waits. Returns false where none did.
bool serve_one(unit_counter& counter, int& asking_no_more, std::int64_t& received,
               const std::function<void(std::int64_t, std::string)>& finished) {
  int waits = 0;
  MPI_Status status;
  MPI_Iprobe(MPI_ANY_SOURCE, ask, MPI_COMM_WORLD, &waits, &status);
  if (waits != 0) {
    MPI_Recv(nullptr, 0, MPI_CHAR, status.MPI_SOURCE, ask, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
    const std::int64_t unit = counter.next();
    MPI_Send(&unit, 1, MPI_INT64_T, status.MPI_SOURCE, give, MPI_COMM_WORLD);
    if (unit == no_more) ++asking_no_more;
    return true;
  }
  MPI_Iprobe(MPI_ANY_SOURCE, header, MPI_COMM_WORLD, &waits, &status);
  if (waits == 0) return false;
  auto [unit, text] = receive_text(status.MPI_SOURCE);
  ++received;
  finished(unit, std::move(text));
  return true;
}

void serve(std::int64_t units, int others, const std::function<std::string(std::int64_t)>& work,
           const std::function<void(std::int64_t, std::string)>& finished) {
  unit_counter counter(units);
  try {
    local_worker worker(counter, work);
    std::int64_t received = 0;
    int asking_no_more = 0;
    while (received < units || asking_no_more < others) {
      bool busy = serve_one(counter, asking_no_more, received, finished);
      if (auto own = worker.take()) {
        ++received;
        finished(own->first, std::move(own->second));
        busy = true;
      }
      if (!busy) std::this_thread::sleep_for(std::chrono::microseconds(200));
    }
  } catch (...) {
    counter.stop();
    throw;
  }
}

void ask_and_work(const std::function<std::string(std::int64_t)>& work) {
  while (true) {
    MPI_Send(nullptr, 0, MPI_CHAR, 0, ask, MPI_COMM_WORLD);
    std::int64_t unit = no_more;
    MPI_Recv(&unit, 1, MPI_INT64_T, 0, give, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
    if (unit == no_more) return;
    send_text(unit, work(unit));
  }
}

}  // namespace

ranks_session::ranks_session() {
  if (!started_by_mpirun()) return;
  int provided = 0;
  MPI_Init_thread(nullptr, nullptr, MPI_THREAD_FUNNELED, &provided);
}

ranks_session::~ranks_session() {
  if (running()) MPI_Finalize();
}

void ranks_session::abort(int code) {
  if (running() && this_rank().size > 1) MPI_Abort(MPI_COMM_WORLD, code);
}

rank_place this_rank() {
  rank_place place;
  if (!running()) return place;
  MPI_Comm_rank(MPI_COMM_WORLD, &place.rank);
  MPI_Comm_size(MPI_COMM_WORLD, &place.size);
  static const int local = [] {
    MPI_Comm here;
    int count = 1;
    MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, 0, MPI_INFO_NULL, &here);
    MPI_Comm_size(here, &count);
    MPI_Comm_free(&here);
    return count;
  }();
  place.on_this_machine = local;
  return place;
}

void distribute(std::int64_t units, const std::function<std::string(std::int64_t)>& work,
                const std::function<void(std::int64_t, std::string)>& finished) {
  const auto place = this_rank();
  if (place.size == 1) {
    for (std::int64_t i = 0; i < units; ++i) finished(i, work(i));
    return;
  }
  if (place.rank == 0) {
    serve(units, place.size - 1, work, finished);
  } else {
    ask_and_work(work);
  }
  // Without it a rank that is done could ask in its next call while rank 0 still answers this one.
  MPI_Barrier(MPI_COMM_WORLD);
}

std::string broadcast(std::string text) {
  if (this_rank().size == 1) return text;
  auto size = static_cast<std::int64_t>(text.size());
  MPI_Bcast(&size, 1, MPI_INT64_T, 0, MPI_COMM_WORLD);
  text.resize(static_cast<size_t>(size));
  for (std::int64_t at = 0; at < size; at += message_bytes) {
    const auto count = static_cast<int>(std::min(message_bytes, size - at));
    MPI_Bcast(text.data() + at, count, MPI_CHAR, 0, MPI_COMM_WORLD);
  }
  return text;
}

void limit_message_bytes(std::int64_t most) { message_bytes = std::max<std::int64_t>(1, most); }

}  // namespace kvreplay::replay
