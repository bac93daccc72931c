// Report files that are either the old one or the whole new one, and the journal of finished rows.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "reports/result.hpp"

namespace kvreplay::reports {

// Whether `target` could be written: creates and removes a temporary file beside it (an existing
// target that is no regular file, such as /dev/stdout, is opened instead). Before a long run.
// Throws report_error naming the file and the system's reason.
void probe_writable(const std::string& target);

// Writes a temporary file beside `target`, syncs it and renames it over `target`; on any failure
// the old file stays and the temporary one is removed. A symbolic link is followed, permissions of
// an existing file are kept. What is no regular file is written directly. Throws report_error.
void write_atomic(const std::string& target, std::string_view data);

// The whole file. Throws report_error if it cannot be read or is larger than `max_bytes`.
std::string read_file(const std::string& path, std::uint64_t max_bytes = std::uint64_t{1} << 32);

// TARGET.journal
std::string journal_path(const std::string& target);

// Appends one line (to_json_line) per finished row; each is with the system when append returns,
// so a killed run leaves every finished row. One writer at a time.
class journal_writer {
 public:
  enum class start { fresh, resume };
  // fresh: empties it. resume: keeps whole lines and cuts off a last one that has no end.
  journal_writer(const std::string& target, start how);
  ~journal_writer();
  journal_writer(const journal_writer&) = delete;
  journal_writer& operator=(const journal_writer&) = delete;
  void append(const result& row);
  // The target is whole: closes and deletes the journal. append is not called afterwards.
  void remove();

 private:
  std::string path_;
  int file_ = -1;
};

// Rows of TARGET.journal; none if there is no such file. A last line without an end is what a
// killed run leaves and is ignored; any other line that is not a row is a report_error naming it.
std::vector<result> read_journal(const std::string& target);

}  // namespace kvreplay::reports
