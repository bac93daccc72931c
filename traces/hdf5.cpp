#include "traces/hdf5.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "traces/layout.hpp"

namespace kvreplay::traces::h5 {

namespace {

// A compressed chunk is inflated whole, so its size is a bound on memory.
constexpr std::int64_t max_filtered_chunk = std::int64_t{256} << 20;
constexpr std::int64_t max_cache = std::int64_t{256} << 20;

std::recursive_mutex& library_mutex() {
  static std::recursive_mutex mutex;
  return mutex;
}

// Walks HDF5's stack from the API call down; the last one seen is the cause.
herr_t keep_message(unsigned, const H5E_error2_t* error, void* text) noexcept {
  if (error->desc != nullptr && *error->desc != '\0') {
    *static_cast<const char**>(text) = error->desc;
  }
  return 0;
}

herr_t add_name(hid_t, const char* name, const H5L_info_t*, void* names) noexcept {
  static_cast<std::vector<std::string>*>(names)->emplace_back(name);
  return 0;
}

bool same_type(hid_t type, hid_t other) { return H5Tequal(type, other) > 0; }

std::string describe_float(hid_t type) {
  size_t sign = 0, exponent = 0, exponent_bits = 0, mantissa = 0, mantissa_bits = 0;
  H5Tget_fields(type, &sign, &exponent, &exponent_bits, &mantissa, &mantissa_bits);
  const size_t bits = 8 * H5Tget_size(type);
  if (bits == 16 && exponent_bits == 8) return "bfloat16";
  const char* order = H5Tget_order(type) == H5T_ORDER_BE ? " big-endian" : "";
  if (bits == 16 && (exponent_bits != 5 || mantissa_bits != 10)) {
    return fmt::format("16-bit float with {} exponent bits", exponent_bits);
  }
  return fmt::format("float{}{}", bits, order);
}

std::string clean(std::string text) {
  text.erase(std::min(text.find('\0'), text.size()));
  while (!text.empty() && text.back() == ' ') text.pop_back();
  return text;
}

}  // namespace

session::session() : lock_(library_mutex()) {
  // Once a write has failed, HDF5's own clean-up at exit follows dangling files and crashes. Every
  // handle here is closed by its owner, so that clean-up has nothing to do.
  [[maybe_unused]] static const herr_t no_exit_handler = H5dont_atexit();
  H5Eget_auto2(H5E_DEFAULT, &print_, &print_data_);
  H5Eset_auto2(H5E_DEFAULT, nullptr, nullptr);
}

session::~session() { H5Eset_auto2(H5E_DEFAULT, print_, print_data_); }

void fail(std::string_view where, std::string_view what) {
  const char* cause = nullptr;
  H5Ewalk2(H5E_DEFAULT, H5E_WALK_DOWNWARD, keep_message, &cause);
  std::string text = cause == nullptr ? fmt::format("{}: {}", where, what)
                                      : fmt::format("{}: {} (HDF5: {})", where, what, cause);
  H5Eclear2(H5E_DEFAULT);
  std::replace(text.begin(), text.end(), '\n', ' ');
  throw trace_error(text);
}

handle::handle(handle&& other) noexcept : id_(other.id_), close_(other.close_) { other.id_ = -1; }

handle& handle::operator=(handle&& other) noexcept {
  if (this != &other) {
    reset();
    id_ = std::exchange(other.id_, -1);
    close_ = other.close_;
  }
  return *this;
}

bool handle::reset() noexcept {
  if (id_ < 0) return true;
  const session guard;
  return close_(std::exchange(id_, -1)) >= 0;
}

handle float16_type() {
  handle type(H5Tcopy(H5T_IEEE_F32LE), H5Tclose);
  if (!type || H5Tset_fields(type.get(), 15, 10, 5, 0, 10) < 0 ||
      H5Tset_precision(type.get(), 16) < 0 || H5Tset_size(type.get(), 2) < 0 ||
      H5Tset_ebias(type.get(), 15) < 0) {
    fail("HDF5", "cannot build the 16-bit float type");
  }
  return type;
}

handle open_read_only(const std::string& path) {
  handle access(H5Pcreate(H5P_FILE_ACCESS), H5Pclose);
  // Without a lock: readers never need one, and some network file systems have none to give.
  if (!access || H5Pset_file_locking(access.get(), false, true) < 0) {
    fail(path, "cannot set the access properties");
  }
  handle file(H5Fopen(path.c_str(), H5F_ACC_RDONLY, access.get()), H5Fclose);
  if (!file) fail(path, "not a readable HDF5 file: foreign, truncated or damaged");
  return file;
}

group root(hid_t file, const std::string& path) {
  handle id(H5Gopen2(file, "/", H5P_DEFAULT), H5Gclose);
  if (!id) fail(path, "cannot open the root group");
  return group(std::move(id), path, true);
}

// ---- group -----------------------------------------------------------------------------------

std::string group::at(const std::string& name) const {
  return where_ + (is_root_ ? ": " : "/") + name;
}

bool group::has(const std::string& name) const {
  const htri_t exists = H5Lexists(id(), name.c_str(), H5P_DEFAULT);
  if (exists < 0) fail(at(name), "cannot look up the name");
  if (exists == 0) return false;
  H5L_info_t info;
  if (H5Lget_info(id(), name.c_str(), &info, H5P_DEFAULT) < 0) {
    fail(at(name), "cannot read the link");
  }
  if (info.type == H5L_TYPE_EXTERNAL) {
    throw trace_error(at(name) + ": links into another file, expected data in this file");
  }
  return true;
}

std::vector<std::string> group::children() const {
  std::vector<std::string> names;
  if (H5Literate(id(), H5_INDEX_NAME, H5_ITER_NATIVE, nullptr, add_name, &names) < 0) {
    fail(where_, "cannot list the group");
  }
  return names;
}

group group::open(const std::string& name) const {
  const std::string path = at(name);
  if (!has(name)) throw trace_error(path + ": missing, expected a group");
  handle child(H5Gopen2(id(), name.c_str(), H5P_DEFAULT), H5Gclose);
  if (!child) fail(path, "expected a group that can be opened");
  return group(std::move(child), path);
}

dataset group::open_dataset(const std::string& name) const {
  if (!has(name)) throw trace_error(at(name) + ": missing, expected a dataset");
  return dataset(id(), name, at(name));
}

bool group::has_attribute(const std::string& name) const {
  const htri_t exists = H5Aexists(id(), name.c_str());
  if (exists < 0) fail(where_, fmt::format("cannot look up attribute {}", name));
  return exists > 0;
}

handle group::open_attribute(const std::string& name) const {
  if (!has_attribute(name)) {
    throw trace_error(fmt::format("{}: attribute {} is missing", where_, name));
  }
  handle attribute(H5Aopen(id(), name.c_str(), H5P_DEFAULT), H5Aclose);
  if (!attribute) fail(where_, fmt::format("cannot open attribute {}", name));
  const handle space(H5Aget_space(attribute.get()), H5Sclose);
  if (H5Sget_simple_extent_npoints(space.get()) != 1) {
    throw trace_error(
        fmt::format("{}: attribute {} is an array, expected one value", where_, name));
  }
  return attribute;
}

std::int64_t group::integer(const std::string& name, std::int64_t low, std::int64_t high) const {
  const handle attribute = open_attribute(name);
  const handle type(H5Aget_type(attribute.get()), H5Tclose);
  const H5T_class_t type_class = H5Tget_class(type.get());
  std::int64_t value = 0;
  if (type_class == H5T_ENUM && H5Tget_size(type.get()) == 1) {  // h5py's bool
    std::int8_t flag = 0;
    if (H5Aread(attribute.get(), type.get(), &flag) < 0) fail(where_, "cannot read " + name);
    value = flag;
  } else if (type_class != H5T_INTEGER || H5Tget_size(type.get()) > 8) {
    throw trace_error(fmt::format("{}: attribute {} is not an integer", where_, name));
  } else if (H5Tget_sign(type.get()) == H5T_SGN_NONE) {
    std::uint64_t wide = 0;
    if (H5Aread(attribute.get(), H5T_NATIVE_UINT64, &wide) < 0) fail(where_, "cannot read " + name);
    if (wide > static_cast<std::uint64_t>(high)) {
      throw trace_error(
          fmt::format("{}: attribute {} is {}, expected {} to {}", where_, name, wide, low, high));
    }
    value = static_cast<std::int64_t>(wide);
  } else if (H5Aread(attribute.get(), H5T_NATIVE_INT64, &value) < 0) {
    fail(where_, "cannot read " + name);
  }
  if (value < low || value > high) {
    throw trace_error(
        fmt::format("{}: attribute {} is {}, expected {} to {}", where_, name, value, low, high));
  }
  return value;
}

double group::real(const std::string& name) const {
  const handle attribute = open_attribute(name);
  const handle type(H5Aget_type(attribute.get()), H5Tclose);
  const H5T_class_t type_class = H5Tget_class(type.get());
  if (type_class != H5T_FLOAT && type_class != H5T_INTEGER) {
    throw trace_error(fmt::format("{}: attribute {} is not a number", where_, name));
  }
  double value = 0;
  if (H5Aread(attribute.get(), H5T_NATIVE_DOUBLE, &value) < 0) fail(where_, "cannot read " + name);
  if (!std::isfinite(value)) {
    throw trace_error(
        fmt::format("{}: attribute {} is {}, expected a finite number", where_, name, value));
  }
  return value;
}

std::string group::text(const std::string& name) const {
  const handle attribute = open_attribute(name);
  const handle type(H5Aget_type(attribute.get()), H5Tclose);
  if (H5Tget_class(type.get()) != H5T_STRING) {
    throw trace_error(fmt::format("{}: attribute {} is not a string", where_, name));
  }
  if (H5Tis_variable_str(type.get()) > 0) {
    char* text = nullptr;
    if (H5Aread(attribute.get(), type.get(), &text) < 0) fail(where_, "cannot read " + name);
    const std::string value = text == nullptr ? std::string() : std::string(text);
    H5free_memory(text);
    return value;
  }
  std::string value(H5Tget_size(type.get()), '\0');
  if (H5Aread(attribute.get(), type.get(), value.data()) < 0) fail(where_, "cannot read " + name);
  return clean(std::move(value));
}

// ---- dataset ---------------------------------------------------------------------------------

dataset::dataset(hid_t parent, const std::string& name, std::string where)
    : where_(std::move(where)) {
  id_ = handle(H5Dopen2(parent, name.c_str(), H5P_DEFAULT), H5Dclose);
  if (!id_) fail(where_, "expected a dataset that can be opened");
  const handle space(H5Dget_space(id_.get()), H5Sclose);
  const int rank = space ? H5Sget_simple_extent_ndims(space.get()) : -1;
  if (rank < 0) fail(where_, "cannot read the extents");
  std::vector<hsize_t> sizes(static_cast<size_t>(rank));
  if (rank > 0 && H5Sget_simple_extent_dims(space.get(), sizes.data(), nullptr) < 0) {
    fail(where_, "cannot read the extents");
  }
  for (const hsize_t size : sizes) {
    // Beyond int64 stands for "too large"; the shape check names it.
    extents_.push_back(size > INT64_MAX ? INT64_MAX : static_cast<std::int64_t>(size));
  }
  classify();
  check_storage();
  if (!chunk_.empty()) reopen_with_cache(parent, name);
}

void dataset::classify() {
  type_ = handle(H5Dget_type(id_.get()), H5Tclose);
  if (!type_) fail(where_, "cannot read the element type");
  const hid_t type = type_.get();
  switch (H5Tget_class(type)) {
    case H5T_INTEGER:
      kind_ = H5Tget_size(type) <= 8 ? element::integer : element::other;
      type_name_ = fmt::format("{}int{}", H5Tget_sign(type) == H5T_SGN_NONE ? "u" : "",
                               8 * H5Tget_size(type));
      return;
    case H5T_FLOAT:
      type_name_ = describe_float(type);
      if (same_type(type, float16_type().get())) {
        kind_ = element::float16;
      } else if (same_type(type, H5T_IEEE_F32LE) || same_type(type, H5T_IEEE_F32BE)) {
        kind_ = element::float32;
      } else if (same_type(type, H5T_IEEE_F64LE) || same_type(type, H5T_IEEE_F64BE)) {
        kind_ = element::float64;
      }
      return;
    default:
      type_name_ = "neither integers nor floats";
  }
}

void dataset::check_storage() {
  const handle properties(H5Dget_create_plist(id_.get()), H5Pclose);
  if (!properties) fail(where_, "cannot read the creation properties");
  const H5D_layout_t layout = H5Pget_layout(properties.get());
  if (layout == H5D_VIRTUAL || H5Pget_external_count(properties.get()) > 0) {
    throw trace_error(where_ + ": data lies in another file, expected it in this file");
  }
  if (layout != H5D_CHUNKED) return;
  std::vector<hsize_t> sizes(extents_.size());
  if (H5Pget_chunk(properties.get(), static_cast<int>(sizes.size()), sizes.data()) < 0) {
    fail(where_, "cannot read the chunk shape");
  }
  chunk_.assign(sizes.begin(), sizes.end());
  const std::int64_t bytes =
      element_count(chunk_).value_or(0) * static_cast<std::int64_t>(H5Tget_size(type_.get()));
  check_filters(properties.get(), bytes);
  // One row of chunks: a scan along t then reads each chunk once.
  std::int64_t across = bytes;
  for (size_t axis = 1; axis < chunk_.size(); ++axis) {
    const std::int64_t chunks = std::max<std::int64_t>(extents_[axis] - 1, 0) / chunk_[axis] + 1;
    if (__builtin_mul_overflow(across, chunks, &across)) across = max_cache;
  }
  cache_bytes_ = std::min(std::max(across, std::int64_t{1} << 20), max_cache);
}

void dataset::check_filters(hid_t properties, std::int64_t chunk_bytes) const {
  const int count = H5Pget_nfilters(properties);
  for (int i = 0; i < count; ++i) {
    unsigned flags = 0, config = 0;
    size_t values = 0;
    char name[64] = "";
    const H5Z_filter_t filter = H5Pget_filter2(properties, static_cast<unsigned>(i), &flags,
                                               &values, nullptr, sizeof name, name, &config);
    if (filter > H5Z_FILTER_RESERVED || H5Zfilter_avail(filter) <= 0) {
      throw trace_error(
          fmt::format("{}: needs filter {} '{}', expected only filters built into HDF5", where_,
                      static_cast<int>(filter), name));
    }
  }
  if (count > 0 && chunk_bytes > max_filtered_chunk) {
    throw trace_error(fmt::format("{}: filtered chunks of {} bytes, expected at most {}", where_,
                                  chunk_bytes, max_filtered_chunk));
  }
}

void dataset::reopen_with_cache(hid_t parent, const std::string& name) {
  const handle access(H5Pcreate(H5P_DATASET_ACCESS), H5Pclose);
  constexpr size_t slots = 521;
  if (!access ||
      H5Pset_chunk_cache(access.get(), slots, static_cast<size_t>(cache_bytes_), 1.0) < 0) {
    fail(where_, "cannot set the chunk cache");
  }
  id_.reset();
  id_ = handle(H5Dopen2(parent, name.c_str(), access.get()), H5Dclose);
  if (!id_) fail(where_, "cannot open the dataset");
}

std::int64_t dataset::row_values() const {
  std::int64_t count = 1;
  for (size_t axis = 1; axis < extents_.size(); ++axis) count *= extents_[axis];
  return count;
}

std::optional<std::int64_t> dataset::first_unwritten(std::int64_t rows) const {
  H5D_space_status_t status = H5D_SPACE_STATUS_ALLOCATED;
  if (H5Dget_space_status(id_.get(), &status) < 0) fail(where_, "cannot read the storage status");
  if (rows <= 0 || row_values() == 0 || status == H5D_SPACE_STATUS_ALLOCATED) return std::nullopt;
  if (chunk_.empty()) return 0;
  std::int64_t expected = (rows - 1) / chunk_[0] + 1;
  for (size_t axis = 1; axis < chunk_.size(); ++axis) {
    if (__builtin_mul_overflow(expected, (extents_[axis] - 1) / chunk_[axis] + 1, &expected))
      return 0;
  }
  hsize_t stored = 0;
  const handle space(H5Dget_space(id_.get()), H5Sclose);
  if (!space || H5Dget_num_chunks(id_.get(), space.get(), &stored) < 0) {
    fail(where_, "cannot count the chunks");
  }
  if (static_cast<std::int64_t>(stored) >= expected) return std::nullopt;
  return first_hole(rows);
}

// The row at which the first missing chunk starts. There are fewer chunks than the extents ask for,
// so the walk ends after at most as many steps as there are chunks.
std::int64_t dataset::first_hole(std::int64_t rows) const {
  std::vector<hsize_t> at(extents_.size(), 0);
  while (static_cast<std::int64_t>(at[0]) < rows) {
    unsigned mask = 0;
    haddr_t address = HADDR_UNDEF;
    hsize_t size = 0;
    if (H5Dget_chunk_info_by_coord(id_.get(), at.data(), &mask, &address, &size) < 0) {
      fail(where_, "cannot read the chunk index");
    }
    if (address == HADDR_UNDEF) break;
    size_t axis = at.size() - 1;
    at[axis] += static_cast<hsize_t>(chunk_[axis]);
    while (axis > 0 && static_cast<std::int64_t>(at[axis]) >= extents_[axis]) {
      at[axis--] = 0;
      at[axis] += static_cast<hsize_t>(chunk_[axis]);
    }
  }
  return static_cast<std::int64_t>(at[0]);
}

void dataset::read(hid_t memory_type, std::int64_t begin, std::int64_t count, void* out,
                   std::int64_t last) const {
  std::vector<hsize_t> start(extents_.size(), 0), size(extents_.begin(), extents_.end());
  start[0] = static_cast<hsize_t>(begin);
  size[0] = static_cast<hsize_t>(count);
  if (last >= 0) size.back() = static_cast<hsize_t>(last);
  if (std::find(size.begin(), size.end(), hsize_t{0}) != size.end()) return;
  const handle space(H5Dget_space(id_.get()), H5Sclose);
  const handle memory(H5Screate_simple(static_cast<int>(size.size()), size.data(), nullptr),
                      H5Sclose);
  if (!space || !memory ||
      H5Sselect_hyperslab(space.get(), H5S_SELECT_SET, start.data(), nullptr, size.data(),
                          nullptr) < 0 ||
      H5Dread(id_.get(), memory_type, memory.get(), space.get(), H5P_DEFAULT, out) < 0) {
    fail(where_, fmt::format("cannot read rows {} to {}", begin, begin + count));
  }
}

void dataset::read_raw(std::int64_t begin, std::int64_t count, void* out, std::int64_t last) const {
  read(type_.get(), begin, count, out, last);
}

std::vector<std::int64_t> dataset::read_integers(std::int64_t begin, std::int64_t count) const {
  std::vector<std::int64_t> values(static_cast<size_t>(count * row_values()));
  read(H5T_NATIVE_INT64, begin, count, values.data());
  return values;
}

}  // namespace kvreplay::traces::h5
