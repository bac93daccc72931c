// ranks: the processes of one `mpirun`, or the one process there is. Work is handed out unit by
// unit to whoever is free; rank 0 collects.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

namespace kvreplay::replay {

// Rank of this process and their number; 0 of 1 without mpirun or in a build without MPI.
struct rank_place {
  int rank = 0, size = 1;
  int on_this_machine = 1;  // ranks that share this machine's cores
};

// Starts MPI where mpirun started this process, and ends it. One object, in main.
class ranks_session {
 public:
  ranks_session();
  ~ranks_session();
  ranks_session(const ranks_session&) = delete;
  ranks_session& operator=(const ranks_session&) = delete;
  // Ends every rank of the job at once, this one included, with the exit code. Returns only where
  // there is no job.
  void abort(int code);
};

rank_place this_rank();

// Calls work(i) once for every i of [0, units) on one of the ranks, and finished(i, text) on rank 0
// with what it returned, in order of arrival, on the thread that called distribute. Every rank
// calls it with the same number. What work throws leaves distribute on the rank where it happened.
void distribute(std::int64_t units, const std::function<std::string(std::int64_t)>& work,
                const std::function<void(std::int64_t, std::string)>& finished);

// Rank 0's text, on every rank.
std::string broadcast(std::string text);

// Sends and receives go in pieces of at most this many bytes (MPI counts are ints). Tests lower it.
void limit_message_bytes(std::int64_t most);

}  // namespace kvreplay::replay
