#include "reports/atomic_file.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <system_error>
#include <utility>

#include "reports/json.hpp"
#include "reports/text.hpp"

namespace kvreplay::reports {
namespace {

namespace fs = std::filesystem;

[[noreturn]] void fail(const std::string& path, const std::string& what, int code) {
  const std::string reason = std::error_code(code, std::generic_category()).message();
  throw report_error(escape_bytes(path + ": " + what + ": " + reason, controls::none));
}

// An open file that closes itself; close() reports what the system held back until then.
class descriptor {
 public:
  descriptor(std::string path, int flags, mode_t mode = 0666) : path_(std::move(path)) {
    do {
      file_ = ::open(path_.c_str(), flags | O_CLOEXEC, mode);
    } while (file_ < 0 && errno == EINTR);
    if (file_ < 0) fail(path_, "cannot be opened", errno);
  }
  ~descriptor() {
    if (file_ >= 0) ::close(file_);
  }
  descriptor(const descriptor&) = delete;
  descriptor& operator=(const descriptor&) = delete;

  int get() const { return file_; }
  int release() { return std::exchange(file_, -1); }
  void sync() {
    if (::fsync(file_) != 0 && errno != EINVAL) fail(path_, "cannot be written", errno);
  }
  void close() {
    if (::close(release()) != 0 && errno != EINTR) fail(path_, "cannot be written", errno);
  }

 private:
  std::string path_;
  int file_ = -1;
};

void write_all(int file, std::string_view data, const std::string& path) {
  while (!data.empty()) {
    const ssize_t n = ::write(file, data.data(), data.size());
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) fail(path, "cannot be written", errno);
    data.remove_prefix(static_cast<std::size_t>(n));
  }
}

// Where a target really lies, and whether it is something to write into rather than replace.
struct place {
  std::string path;
  bool direct = false;
  mode_t mode = 0;  // of an existing regular file
};

place locate(const std::string& target) {
  place out{target};
  std::error_code error;
  const fs::path real = fs::canonical(target, error);
  if (!error) out.path = real.string();
  struct stat info = {};
  if (::stat(out.path.c_str(), &info) != 0) {
    if (errno != ENOENT) fail(target, "cannot be written", errno);
    return out;
  }
  if (S_ISDIR(info.st_mode)) fail(target, "cannot be written", EISDIR);
  out.direct = !S_ISREG(info.st_mode);
  if (!out.direct) out.mode = info.st_mode & 07777;
  return out;
}

// A new file beside `path`; its name holds the process id, so two programs do not meet.
std::string temporary_name(const std::string& path) {
  return fmt::format("{}.{}.tmp", path, ::getpid());
}

// Makes the rename last through a power cut. The new file is in place already, so a folder that
// cannot be opened for this is no error.
void sync_folder(const std::string& path) {
  const fs::path parent = fs::path(path).parent_path();
  const int folder = ::open(parent.empty() ? "." : parent.c_str(), O_RDONLY | O_DIRECTORY);
  if (folder < 0) return;
  ::fsync(folder);
  ::close(folder);
}

// What a killed program of the same id left is removed; a link is never followed.
descriptor create_temporary(const std::string& name) {
  ::unlink(name.c_str());
  return descriptor(name, O_WRONLY | O_CREAT | O_EXCL);
}

}  // namespace

void probe_writable(const std::string& target) {
  const place to = locate(target);
  if (to.direct) {
    descriptor(to.path, O_WRONLY).close();
    return;
  }
  const std::string name = temporary_name(to.path);
  create_temporary(name).close();
  if (::unlink(name.c_str()) != 0) fail(name, "cannot be removed", errno);
}

void write_atomic(const std::string& target, std::string_view data) {
  const place to = locate(target);
  if (to.direct) {
    descriptor file(to.path, O_WRONLY);
    write_all(file.get(), data, target);
    file.close();
    return;
  }
  const std::string name = temporary_name(to.path);
  try {
    descriptor file = create_temporary(name);
    write_all(file.get(), data, target);
    if (to.mode != 0 && ::fchmod(file.get(), to.mode) != 0) fail(target, "keeps no mode", errno);
    file.sync();
    file.close();
    if (::rename(name.c_str(), to.path.c_str()) != 0) fail(target, "cannot be replaced", errno);
  } catch (...) {
    ::unlink(name.c_str());
    throw;
  }
  sync_folder(to.path);
}

std::string read_file(const std::string& path, std::uint64_t max_bytes) {
  descriptor file(path, O_RDONLY);
  std::string out;
  char buffer[1 << 16];
  for (;;) {
    const ssize_t n = ::read(file.get(), buffer, sizeof buffer);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) fail(path, "cannot be read", errno);
    if (n == 0) return out;
    out.append(buffer, static_cast<std::size_t>(n));
    if (out.size() > max_bytes) fail(path, fmt::format("is over {} bytes", max_bytes), EFBIG);
  }
}

std::string journal_path(const std::string& target) { return target + ".journal"; }

journal_writer::journal_writer(const std::string& target, start how) : path_(journal_path(target)) {
  std::uint64_t whole = 0;
  std::error_code missing;
  if (how == start::resume && fs::exists(path_, missing)) {
    const std::string text = read_file(path_);
    const std::size_t end = text.rfind('\n');
    whole = end == std::string::npos ? 0 : end + 1;
  }
  descriptor file(path_, O_WRONLY | O_CREAT | O_APPEND);
  if (::ftruncate(file.get(), static_cast<off_t>(whole)) != 0) {
    fail(path_, "cannot be written", errno);
  }
  file_ = file.release();
}

journal_writer::~journal_writer() {
  if (file_ >= 0) ::close(file_);
}

void journal_writer::append(const result& row) {
  write_all(file_, to_json_line(row) + "\n", path_);
}

void journal_writer::remove() {
  if (file_ >= 0) ::close(std::exchange(file_, -1));
  if (::unlink(path_.c_str()) != 0 && errno != ENOENT) fail(path_, "cannot be removed", errno);
}

std::vector<result> read_journal(const std::string& target) {
  const std::string path = journal_path(target);
  std::error_code missing;
  if (!fs::exists(path, missing)) return {};
  const std::string text = read_file(path);
  std::vector<result> rows;
  std::size_t begin = 0;
  for (std::size_t end; (end = text.find('\n', begin)) != std::string::npos; begin = end + 1) {
    const std::string_view line(text.data() + begin, end - begin);
    rows.push_back(read_json_line(line, fmt::format("{}:{}", path, rows.size() + 1)));
  }
  return rows;
}

}  // namespace kvreplay::reports
