#include "traces/retention_gate.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <filesystem>

#include "traces/hdf5.hpp"

namespace kvreplay::traces {
namespace {

constexpr std::int64_t most_values = std::int64_t{1} << 30;  // of one array of a gate

using extents = std::vector<hsize_t>;

hid_t checked(hid_t id, const std::string& where, const char* what) {
  if (id < 0) h5::fail(where, what);
  return id;
}

void write_floats(hid_t parent, const std::string& name, const std::string& where,
                  const extents& shape, const std::vector<float>& values) {
  const auto at = fmt::format("{}: {}", where, name);
  if (H5Lexists(parent, name.c_str(), H5P_DEFAULT) > 0 &&
      H5Ldelete(parent, name.c_str(), H5P_DEFAULT) < 0) {
    h5::fail(at, "cannot be replaced");
  }
  const h5::handle space(
      checked(H5Screate_simple(static_cast<int>(shape.size()), shape.data(), nullptr), at,
              "has no room"),
      H5Sclose);
  const h5::handle data(checked(H5Dcreate2(parent, name.c_str(), H5T_IEEE_F32LE, space.get(),
                                           H5P_DEFAULT, H5P_DEFAULT, H5P_DEFAULT),
                                at, "cannot be created"),
                        H5Dclose);
  if (H5Dwrite(data.get(), H5T_NATIVE_FLOAT, H5S_ALL, H5S_ALL, H5P_DEFAULT, values.data()) < 0) {
    h5::fail(at, "cannot be written");
  }
}

// Every array of the gate with its name and shape: one list for reading and writing.
template <class Gate, class Visit>
void for_each_array(Gate& g, Visit visit) {
  const auto n = [](int x) { return static_cast<hsize_t>(x); };
  const hsize_t inputs = n(g.head_dim) + n(g.value_dim);
  visit("input_mean", extents{n(g.layers), n(g.kv_heads), inputs}, g.input_mean);
  visit("input_scale", extents{n(g.layers), n(g.kv_heads), inputs}, g.input_scale);
  visit("hidden_weight", extents{n(g.layers), n(g.kv_heads), n(g.hidden), inputs}, g.hidden_weight);
  visit("hidden_bias", extents{n(g.layers), n(g.kv_heads), n(g.hidden)}, g.hidden_bias);
  visit("output_weight", extents{n(g.outputs), n(g.hidden)}, g.output_weight);
  visit("output_bias", extents{n(g.outputs)}, g.output_bias);
}

void write_into(const std::string& path, const std::vector<std::vector<std::vector<float>>>& rows,
                const retention_gate& gate, const std::vector<int>& layers) {
  const h5::session session;
  const h5::handle file(
      checked(H5Fopen(path.c_str(), H5F_ACC_RDWR, H5P_DEFAULT), path, "cannot be opened"),
      H5Fclose);
  for (std::size_t s = 0; s < rows.size(); ++s) {
    for (std::size_t l = 0; l < layers.size(); ++l) {
      const auto name = fmt::format("/sequences/{}/layers/{}", s, layers[l]);
      const h5::handle group(
          checked(H5Gopen2(file.get(), name.c_str(), H5P_DEFAULT), path, "lacks a layer"),
          H5Gclose);
      const auto heads = static_cast<hsize_t>(gate.kv_heads);
      write_floats(group.get(), "retention", fmt::format("{}: {}", path, name),
                   {rows[s][l].size() / heads, heads}, rows[s][l]);
    }
  }
  if (H5Lexists(file.get(), "retention_gate", H5P_DEFAULT) > 0) {
    H5Ldelete(file.get(), "retention_gate", H5P_DEFAULT);
  }
  const h5::handle group(
      checked(H5Gcreate2(file.get(), "retention_gate", H5P_DEFAULT, H5P_DEFAULT, H5P_DEFAULT), path,
              "cannot hold a gate"),
      H5Gclose);
  for_each_array(gate, [&](const char* name, const extents& shape, const std::vector<float>& x) {
    write_floats(group.get(), name, fmt::format("{}: retention_gate", path), shape, x);
  });
  if (H5Fflush(file.get(), H5F_SCOPE_GLOBAL) < 0) h5::fail(path, "cannot be flushed");
}

}  // namespace

float log_retention(const retention_gate& gate, int layer, int kv_head, const float* k,
                    const float* v) {
  const int inputs = gate.head_dim + gate.value_dim;
  const std::int64_t head = std::int64_t{layer} * gate.kv_heads + kv_head;
  const float* mean = gate.input_mean.data() + head * inputs;
  const float* scale = gate.input_scale.data() + head * inputs;
  const int out = gate.output_of(layer, kv_head);
  double z = static_cast<double>(gate.output_bias[static_cast<std::size_t>(out)]);
  for (std::int64_t j = 0; j < gate.hidden; ++j) {
    const float* w = gate.hidden_weight.data() + (head * gate.hidden + j) * inputs;
    double sum =
        static_cast<double>(gate.hidden_bias[static_cast<std::size_t>(head * gate.hidden + j)]);
    for (int c = 0; c < inputs; ++c) {
      const float x = c < gate.head_dim ? k[c] : v[c - gate.head_dim];
      sum += static_cast<double>(w[c]) * static_cast<double>((x - mean[c]) * scale[c]);
    }
    z += static_cast<double>(gate.output_weight[static_cast<std::size_t>(out * gate.hidden + j)]) *
         std::tanh(sum);
  }
  // ln sigmoid(z) without overflow at either end.
  return static_cast<float>(z < 0 ? z - std::log1p(std::exp(z)) : -std::log1p(std::exp(-z)));
}

void copy_with_retention(const std::string& from, const std::string& to,
                         const std::vector<std::vector<std::vector<float>>>& rows,
                         const retention_gate& gate) {
  std::vector<int> layers;
  {
    const h5::session session;
    const auto file = h5::open_read_only(from);
    for (const auto& name :
         h5::root(file.get(), from).open("sequences").open("0").open("layers").children()) {
      layers.push_back(std::stoi(name));
    }
  }
  std::sort(layers.begin(), layers.end());
  const std::string part = to + ".part";
  std::error_code problem;
  std::filesystem::copy_file(from, part, std::filesystem::copy_options::overwrite_existing,
                             problem);
  if (problem) throw trace_error(fmt::format("{}: {}", part, problem.message()));
  std::filesystem::permissions(part, std::filesystem::perms::owner_write,
                               std::filesystem::perm_options::add, problem);
  try {
    write_into(part, rows, gate, layers);
    std::filesystem::rename(part, to);
  } catch (const std::filesystem::filesystem_error& e) {
    std::filesystem::remove(part, problem);
    throw trace_error(fmt::format("{}: {}", to, e.code().message()));
  } catch (...) {
    std::filesystem::remove(part, problem);
    throw;
  }
}

std::optional<retention_gate> read_retention_gate(const std::string& path,
                                                  const model_info& model) {
  const h5::session session;
  const auto file = h5::open_read_only(path);
  const auto root = h5::root(file.get(), path);
  if (!root.has("retention_gate")) return std::nullopt;
  const auto group = root.open("retention_gate");
  for (const char* name : {"hidden_bias", "output_weight", "output_bias"}) {
    if (!group.has(name)) return std::nullopt;  // somebody else's gate
  }
  retention_gate gate;
  gate.layers = static_cast<int>(model.layers.size());
  gate.kv_heads = model.n_kv_heads;
  gate.head_dim = model.head_dim;
  gate.value_dim = model.value_dim;
  const auto bias = group.open_dataset("hidden_bias").extents();
  const auto outputs = group.open_dataset("output_bias").extents();
  const std::int64_t most = std::int64_t{1} << 16;
  if (bias.size() != 3 || bias[2] < 1 || bias[2] > most || outputs.size() != 1) {
    throw trace_error(
        fmt::format("{}: hidden_bias or output_bias has a shape no gate has", group.where()));
  }
  gate.hidden = static_cast<int>(bias[2]);
  const bool fits = outputs[0] == 1 || outputs[0] == gate.layers ||
                    outputs[0] == std::int64_t{gate.layers} * gate.kv_heads;
  if (!fits) {
    throw trace_error(
        fmt::format("{}: {} output projections, expected 1, one a layer or one a head",
                    group.where(), outputs[0]));
  }
  gate.outputs = static_cast<int>(outputs[0]);
  for_each_array(gate, [&](const char* name, const extents& shape, std::vector<float>& x) {
    if (!group.has(name)) throw trace_error(fmt::format("{}: {} is missing", group.where(), name));
    const auto data = group.open_dataset(name);
    const std::vector<std::int64_t> expected(shape.begin(), shape.end());
    if (data.extents() != expected) {
      throw trace_error(fmt::format("{}: shape [{}], expected [{}]", data.where(),
                                    fmt::join(data.extents(), ", "), fmt::join(expected, ", ")));
    }
    if (data.kind() != h5::element::float32) {
      throw trace_error(fmt::format("{}: {}, expected float32", data.where(), data.type_name()));
    }
    std::int64_t count = 1;
    for (const auto n : expected) count = std::min(count * n, most_values + 1);
    if (count > most_values) {
      throw trace_error(fmt::format("{}: more than {} weights", data.where(), most_values));
    }
    x.resize(static_cast<std::size_t>(count));
    data.read(H5T_NATIVE_FLOAT, 0, expected[0], x.data());
    for (const float value : x) {
      if (!std::isfinite(value)) {
        throw trace_error(
            fmt::format("{}: holds {}, expected finite weights", data.where(), value));
      }
    }
  });
  return gate;
}

}  // namespace kvreplay::traces
