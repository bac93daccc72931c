#include "tracer/safetensors.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <limits>
#include <set>
#include <span>
#include <system_error>

#include "kernels/half.hpp"
#include "tracer/json_file.hpp"

namespace kvreplay::tracer {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using entry_map = std::map<std::string, tensor_entry>;

constexpr std::uint64_t longest_header = 100'000'000;  // the format's own bound

// A file opened for reading at offsets; moved nowhere, closed at the end of the scope.
class input_file {
 public:
  explicit input_file(const std::string& path) : path_(path), fd_(open(path.c_str(), O_RDONLY)) {
    struct stat status {};
    if (fd_ < 0 || fstat(fd_, &status) != 0) {
      const int error = errno;
      if (fd_ >= 0) close(fd_);
      throw model_error(fmt::format("{}: {}", path, std::generic_category().message(error)));
    }
    size_ = static_cast<std::uint64_t>(status.st_size);
  }
  ~input_file() { close(fd_); }
  input_file(const input_file&) = delete;
  input_file& operator=(const input_file&) = delete;

  std::uint64_t size() const { return size_; }

  void read(std::uint64_t offset, void* out, std::uint64_t bytes) const {
    auto* to = static_cast<char*>(out);
    while (bytes > 0) {
      const ssize_t got = pread(fd_, to, bytes, static_cast<off_t>(offset));
      if (got < 0 && errno == EINTR) continue;
      if (got < 0) {
        throw model_error(fmt::format("{}: {}", path_, std::generic_category().message(errno)));
      }
      if (got == 0) {
        throw model_error(
            fmt::format("{}: ends at byte {}, expected {} more", path_, offset, bytes));
      }
      to += got;
      offset += static_cast<std::uint64_t>(got);
      bytes -= static_cast<std::uint64_t>(got);
    }
  }

 private:
  std::string path_;
  int fd_;
  std::uint64_t size_ = 0;
};

// Bytes of one element; 0 for types we do not know, whose extent cannot be checked.
std::uint64_t element_bytes(const std::string& dtype) {
  static const std::map<std::string, std::uint64_t> known = {
      {"BOOL", 1}, {"U8", 1},  {"I8", 1},  {"F8_E4M3", 1}, {"F8_E5M2", 1}, {"F8_E8M0", 1},
      {"I16", 2},  {"U16", 2}, {"F16", 2}, {"BF16", 2},    {"I32", 4},     {"U32", 4},
      {"F32", 4},  {"I64", 8}, {"U64", 8}, {"F64", 8},     {"C64", 8}};
  const auto found = known.find(dtype);
  return found == known.end() ? 0 : found->second;
}

std::string tensor_place(const std::string& file, const std::string& name) {
  return fmt::format("{}: tensor {}", file, in_quotes(name));
}

std::string shown(const std::vector<std::int64_t>& shape) {
  return fmt::format("[{}]", fmt::join(shape, ", "));
}

std::uint64_t as_count(const json& value, const std::string& place, const char* what) {
  if (!value.is_number_unsigned() ||
      value.get<std::uint64_t>() > std::numeric_limits<std::int64_t>::max()) {
    throw model_error(fmt::format("{}: {} holds {}, expected integers from 0 to 2^63 - 1", place,
                                  what, in_quotes(value.dump())));
  }
  return value.get<std::uint64_t>();
}

const json& member(const json& value, const char* key, const std::string& place) {
  const auto found = value.find(key);
  if (found == value.end()) throw model_error(fmt::format("{}: no {}", place, key));
  return *found;
}

std::uint64_t element_count(const std::vector<std::int64_t>& shape, const std::string& place) {
  std::uint64_t count = 1;
  for (const std::int64_t extent : shape) {
    if (__builtin_mul_overflow(count, static_cast<std::uint64_t>(extent), &count)) {
      throw model_error(fmt::format("{}: shape {} overflows 64 bits", place, shown(shape)));
    }
  }
  return count;
}

// The entry's byte range must lie in the data section and hold exactly its shape.
tensor_entry parse_entry(const std::string& file, const std::string& name, const json& value,
                         std::uint64_t data_begin, std::uint64_t data_size) {
  const std::string place = tensor_place(file, name);
  if (!value.is_object()) throw model_error(place + ": not an object");
  tensor_entry entry;
  entry.file = file;
  const json& dtype = member(value, "dtype", place);
  if (!dtype.is_string()) throw model_error(place + ": dtype is not a string");
  entry.dtype = dtype.get<std::string>();
  const json& shape = member(value, "shape", place);
  const json& offsets = member(value, "data_offsets", place);
  if (!shape.is_array()) throw model_error(place + ": shape is not a list");
  if (!offsets.is_array() || offsets.size() != 2) {
    throw model_error(place + ": data_offsets is not a list of two");
  }
  for (const json& extent : shape) {
    entry.shape.push_back(static_cast<std::int64_t>(as_count(extent, place, "shape")));
  }
  const std::uint64_t begin = as_count(offsets[0], place, "data_offsets");
  const std::uint64_t end = as_count(offsets[1], place, "data_offsets");
  if (begin > end || end > data_size) {
    throw model_error(
        fmt::format("{}: data_offsets [{}, {}] lie outside the data section of {} bytes", place,
                    begin, end, data_size));
  }
  const std::uint64_t count = element_count(entry.shape, place);
  const std::uint64_t unit = element_bytes(entry.dtype);
  std::uint64_t bytes = 0;
  if (__builtin_mul_overflow(count, unit, &bytes)) {
    throw model_error(fmt::format("{}: shape {} overflows 64 bits", place, shown(entry.shape)));
  }
  if (unit != 0 && bytes != end - begin) {
    throw model_error(fmt::format("{}: shape {} of {} needs {} bytes, data_offsets span {}", place,
                                  shown(entry.shape), entry.dtype, bytes, end - begin));
  }
  entry.begin = data_begin + begin;
  entry.end = data_begin + end;
  return entry;
}

void refuse_overlap(const std::string& file, const entry_map& entries) {
  std::vector<std::pair<std::uint64_t, const std::string*>> order;
  for (const auto& [name, entry] : entries) {
    if (entry.begin != entry.end) order.emplace_back(entry.begin, &name);
  }
  std::stable_sort(order.begin(), order.end(),
                   [](const auto& a, const auto& b) { return a.first < b.first; });
  for (size_t i = 1; i < order.size(); ++i) {
    if (order[i].first < entries.at(*order[i - 1].second).end) {
      throw model_error(fmt::format("{}: tensors {} and {} share bytes", file,
                                    in_quotes(*order[i - 1].second), in_quotes(*order[i].second)));
    }
  }
}

void check_metadata(const std::string& file, const json& metadata) {
  const bool strings =
      metadata.is_object() && std::all_of(metadata.begin(), metadata.end(),
                                          [](const json& value) { return value.is_string(); });
  if (!strings) throw model_error(file + ": __metadata__ is not a map of strings");
}

// The header as text. Spaces may follow the JSON; NUL padding, which some writers leave, is refused
// because the format's own reader refuses it.
std::string read_header(const std::string& file, const input_file& in) {
  if (in.size() < 8) {
    throw model_error(
        fmt::format("{}: {} bytes, too short for a safetensors file", file, in.size()));
  }
  unsigned char raw[8];
  in.read(0, raw, 8);
  std::uint64_t length = 0;
  for (int i = 7; i >= 0; --i) length = length << 8 | raw[i];
  if (length > longest_header || length > in.size() - 8) {
    throw model_error(
        fmt::format("{}: header of {} bytes, expected at most {}; not a safetensors file, "
                    "or cut short",
                    file, length, std::min(longest_header, in.size() - 8)));
  }
  std::string text(length, '\0');
  in.read(8, text.data(), length);
  if (text.find('\0') != std::string::npos) {
    throw model_error(file +
                      ": header holds NUL bytes; the format pads with spaces (save it again)");
  }
  if (text.empty() || text.front() != '{') {
    throw model_error(file + ": header does not begin with '{'");
  }
  return text;
}

entry_map read_entries(const std::string& file) {
  const input_file in(file);
  const std::string text = read_header(file, in);
  const json header = parse_json(text, file + ": header", 4);
  const std::uint64_t data_begin = 8 + text.size();
  entry_map entries;
  for (const auto& item : header.items()) {
    if (item.key() == "__metadata__") {
      check_metadata(file, item.value());
    } else {
      entries[item.key()] =
          parse_entry(file, item.key(), item.value(), data_begin, in.size() - data_begin);
    }
  }
  refuse_overlap(file, entries);
  return entries;
}

void note(std::vector<std::string>* notes, std::string text) {
  if (notes != nullptr) notes->push_back(std::move(text));
}

// weight_map of the index: tensor -> file name in the same directory.
std::map<std::string, std::string> read_index(const std::string& path) {
  const json index = read_json(path, longest_header, 8);
  if (!index.is_object() || !index.contains("weight_map") || !index["weight_map"].is_object()) {
    throw model_error(path + ": no weight_map in the index");
  }
  std::map<std::string, std::string> out;
  for (const auto& item : index["weight_map"].items()) {
    const std::string place = tensor_place(path, item.key());
    if (!item.value().is_string()) throw model_error(place + ": file name is not a string");
    const auto name = item.value().get<std::string>();
    const bool plain = !name.empty() && name != "." && name != ".." &&
                       name.find_first_of(std::string_view("/\\\0", 3)) == std::string::npos;
    if (!plain) {
      throw model_error(
          fmt::format("{}: {} is not a file name in the same folder", place, in_quotes(name)));
    }
    out[item.key()] = name;
  }
  return out;
}

std::vector<std::string> safetensors_files(const std::string& directory) {
  std::error_code error;
  std::vector<std::string> names;
  for (const auto& item : fs::directory_iterator(directory, error)) {
    if (item.path().extension() == ".safetensors") names.push_back(item.path().filename().string());
  }
  if (error) throw model_error(fmt::format("{}: {}", directory, error.message()));
  std::sort(names.begin(), names.end());
  return names;
}

[[noreturn]] void complain_absent(const std::string& index, const std::string& name,
                                  const std::string& file,
                                  const std::map<std::string, entry_map>& shards) {
  std::string hint;
  for (const auto& [other, entries] : shards) {
    if (entries.count(name) != 0) hint = fmt::format("; it lies in {}", in_quotes(other));
  }
  throw model_error(fmt::format("{}: tensor {} is mapped to {}, which does not hold it{}", index,
                                in_quotes(name), in_quotes(file), hint));
}

entry_map read_indexed(const std::string& directory, const std::string& index,
                       std::vector<std::string>* notes) {
  const auto mapping = read_index(index);
  std::map<std::string, entry_map> shards;
  for (const auto& [name, file] : mapping) {
    const fs::path path = fs::path(directory) / file;
    if (!fs::exists(path)) {
      throw model_error(fmt::format("{}: shard {} is missing; tensor {} is mapped to it", index,
                                    in_quotes(file), in_quotes(name)));
    }
    if (shards.count(file) == 0) shards[file] = read_entries(path.string());
  }
  entry_map out;
  for (const auto& [name, file] : mapping) {
    const auto found = shards.at(file).find(name);
    if (found == shards.at(file).end()) complain_absent(index, name, file, shards);
    out[name] = found->second;
  }
  for (const auto& [file, entries] : shards) {
    for (const auto& [name, entry] : entries) {
      const auto mapped = mapping.find(name);
      if (mapped == mapping.end() || mapped->second != file) {
        note(notes, fmt::format("{}: tensor {} ignored: the index does not map it to this file",
                                entry.file, in_quotes(name)));
      }
    }
  }
  for (const std::string& file : safetensors_files(directory)) {
    if (shards.count(file) == 0) {
      note(notes, fmt::format("{}: file ignored: the index does not name it",
                              (fs::path(directory) / file).string()));
    }
  }
  return out;
}

entry_map read_unindexed(const std::string& directory) {
  entry_map out;
  const auto files = safetensors_files(directory);
  if (files.empty()) throw model_error(directory + ": no *.safetensors file in the folder");
  for (const std::string& file : files) {
    for (auto& [name, entry] : read_entries((fs::path(directory) / file).string())) {
      const auto [place, fresh] = out.emplace(name, entry);
      if (!fresh) {
        throw model_error(fmt::format("{}: tensor {} is also in {}, and no index says which counts",
                                      entry.file, in_quotes(name), place->second.file));
      }
    }
  }
  return out;
}

// Widens 16-bit values in pieces, so that a tensor is never held twice.
void read_widened(const input_file& in, const tensor_entry& entry, std::span<float> out) {
  constexpr size_t piece = size_t{1} << 19;
  const bool brain = entry.dtype == "BF16";
  std::vector<std::uint16_t> raw(std::min(piece, out.size()));
  for (size_t begin = 0; begin < out.size(); begin += piece) {
    const size_t n = std::min(piece, out.size() - begin);
    in.read(entry.begin + begin * 2, raw.data(), n * 2);
    for (size_t i = 0; i < n; ++i) {
      out[begin + i] = brain ? std::bit_cast<float>(static_cast<std::uint32_t>(raw[i]) << 16)
                             : kernels::half_to_float(raw[i]);
    }
  }
}

}  // namespace

tensor_store::tensor_store(const std::string& directory, std::vector<std::string>* notes) {
  static_assert(std::endian::native == std::endian::little, "safetensors data is little-endian");
  const std::string index = (fs::path(directory) / "model.safetensors.index.json").string();
  entries_ = fs::exists(index) ? read_indexed(directory, index, notes) : read_unindexed(directory);
}

bool tensor_store::has(const std::string& name) const { return entries_.count(name) != 0; }

const tensor_entry& tensor_store::entry(const std::string& name) const {
  const auto found = entries_.find(name);
  if (found == entries_.end()) {
    const std::string file = entries_.empty() ? "model" : entries_.begin()->second.file;
    throw model_error(fmt::format("{}: tensor {} is missing", fs::path(file).parent_path().string(),
                                  in_quotes(name)));
  }
  return found->second;
}

void tensor_store::read_into(const std::string& name, const std::vector<std::int64_t>& expected,
                             std::span<float> out) const {
  const tensor_entry& found = entry(name);
  const std::string place = tensor_place(found.file, name);
  if (found.shape != expected) {
    throw model_error(
        fmt::format("{}: shape {}, expected {}", place, shown(found.shape), shown(expected)));
  }
  if (found.dtype != "F32" && found.dtype != "F16" && found.dtype != "BF16") {
    throw model_error(
        fmt::format("{}: dtype {}, expected F32, F16 or BF16", place, in_quotes(found.dtype)));
  }
  if (out.size() != element_count(expected, place)) {
    throw model_error(fmt::format("{}: room for {} values, expected {}", place, out.size(),
                                  element_count(expected, place)));
  }
  const input_file in(found.file);
  if (found.dtype == "F32") {
    in.read(found.begin, out.data(), out.size_bytes());
  } else {
    read_widened(in, found, out);
  }
}

std::vector<float> tensor_store::read(const std::string& name,
                                      const std::vector<std::int64_t>& expected) const {
  // The shape is checked against the file first: `expected` alone must not decide an allocation.
  const bool same = entry(name).shape == expected;
  std::vector<float> out(same ? element_count(expected, name) : 0,
                         std::numeric_limits<float>::quiet_NaN());
  read_into(name, expected, out);
  return out;
}

std::string tensor_store::first_bytes(const std::string& name, std::size_t n) const {
  const tensor_entry& found = entry(name);
  std::string out(std::min<std::uint64_t>(n, found.end - found.begin), '\0');
  input_file(found.file).read(found.begin, out.data(), out.size());
  return out;
}

}  // namespace kvreplay::tracer
