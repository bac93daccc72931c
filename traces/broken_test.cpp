// Files that break a rule of the structure: each is refused at open in one line that names it.
#include <fmt/format.h>

#include <cmath>
#include <limits>

#include "traces/test_support.hpp"

namespace kvreplay::traces {

using namespace testing;

namespace {

const std::string layer1 = "/sequences/0/layers/1/";

// A fresh small trace, changed, and what the reader says about it.
std::string after(const std::function<void(hid_t)>& change, std::string* path = nullptr) {
  const temp_folder folder;
  const std::string file = folder / "broken.h5";
  write_small(file, small_model(), small_plan());
  edit(file, change);
  if (path != nullptr) *path = file;
  return open_error(file);
}

void expect_error(const std::function<void(hid_t)>& change, const std::vector<std::string>& parts) {
  std::string path;
  const std::string message = after(change, &path);
  check_message(message, path, parts);
}

std::vector<std::uint16_t> ones(size_t n) { return std::vector<std::uint16_t>(n, 0x3c00); }

void half_dataset(hid_t file, const std::string& name, const std::vector<hsize_t>& extents) {
  const h5::handle type = h5::float16_type();
  size_t n = 1;
  for (const hsize_t e : extents) n *= e;
  make_dataset(file, name, extents, type.get(), ones(n).data());
}

void rename_link(hid_t file, const std::string& from, const std::string& to) {
  REQUIRE(H5Lmove(file, from.c_str(), file, to.c_str(), H5P_DEFAULT, H5P_DEFAULT) >= 0);
}

void remove_link(hid_t file, const std::string& name) {
  REQUIRE(H5Ldelete(file, name.c_str(), H5P_DEFAULT) >= 0);
}

}  // namespace

TEST_CASE("truncated, empty and foreign files give one line") {
  const temp_folder folder;
  const std::string good = test_data("plain.h5");
  const auto size = std::filesystem::file_size(good);
  for (const std::uintmax_t cut : {std::uintmax_t{0}, std::uintmax_t{1}, std::uintmax_t{48},
                                   std::uintmax_t{96}, std::uintmax_t{60000}, size - 1}) {
    const std::string path = folder / fmt::format("cut-{}.h5", cut);
    std::filesystem::copy_file(good, path);
    std::filesystem::resize_file(path, cut);
    CAPTURE(cut);
    check_message(open_error(path), path, {cut == 0 ? "empty file" : "not a readable HDF5 file"});
    check_message(open_error(path, true), path, {cut == 0 ? "empty" : "truncated"});
  }
  const std::string foreign = folder / "foreign.h5";
  std::ofstream(foreign) << std::string(5000, 'x');
  check_message(open_error(foreign), foreign, {"not a readable HDF5 file"});
  const std::string other = folder / "other.h5";
  {
    const h5::handle made(H5Fcreate(other.c_str(), H5F_ACC_TRUNC, H5P_DEFAULT, H5P_DEFAULT),
                          H5Fclose);
  }
  check_message(open_error(other), other, {"attribute format is missing"});
}

TEST_CASE("missing files, folders and pipes give one line and do not hang") {
  const temp_folder folder;
  check_message(open_error(folder / "none.h5"), folder / "none.h5", {"No such file"});
  check_message(open_error(folder.path()), folder.path(), {"is a folder"});
  REQUIRE(::system(("mkfifo " + (folder / "pipe")).c_str()) == 0);
  check_message(open_error(folder / "pipe"), folder / "pipe", {"not a regular file"});
  if (::geteuid() == 0) {
    MESSAGE("skipped: no permission can be denied to root");
    return;
  }
  std::ofstream(folder / "closed.h5") << "x";
  std::filesystem::permissions(folder / "closed.h5", std::filesystem::perms::none);
  check_message(open_error(folder / "closed.h5"), folder / "closed.h5", {"Permission denied"});
}

TEST_CASE("header attributes are checked") {
  const auto set_int = [](const char* object, const char* name, std::int64_t value) {
    return [=](hid_t f) { set_attribute(f, object, name, H5T_NATIVE_INT64, value); };
  };
  expect_error(set_int("/", "version", 2), {"version 2", "at most 1", "hint"});
  expect_error(set_int("/", "version", 0), {"version", "is 0"});
  expect_error(set_int("/", "complete", 0), {"complete is 0", "--recover"});
  expect_error(set_int("/model", "n_q_heads", 7), {"model", "n_q_heads 7", "n_kv_heads 3"});
  expect_error(set_int("/model", "head_dim", 0), {"model", "head_dim is 0"});
  expect_error(set_int("/model", "logit_size", 12), {"model", "logit_size is 12", "expected 13"});
  expect_error(set_int("/sequences/0", "n_prompt", 0), {"sequences/0", "n_prompt is 0"});
  expect_error(set_int("/sequences/0", "n_prompt", 8), {"sequences/0", "n_prompt is 8", "1 to 7"});
  expect_error(set_int("/sequences/0", "committed", 6), {"committed is 6", "n_tokens=7"});
  expect_error(set_int("/sequences/0", "n_tokens", std::int64_t{1} << 62),
               {"n_tokens is 4611686018427387904", "2147483647"});
  expect_error(set_int("/sequences/0/layers/1", "first_row", 4), {"layers/1", "first_row is 4"});
  const auto set_real = [](const char* name, double value) {
    return [=](hid_t f) { set_attribute(f, "/model", name, H5T_NATIVE_DOUBLE, value); };
  };
  expect_error(set_real("score_softcap", 50), {"model", "score_softcap is 50"});
  expect_error(set_real("softmax_scale", 0), {"softmax_scale is 0"});
  expect_error(set_real("softmax_scale", NAN), {"softmax_scale is nan"});
  expect_error(set_real("rope", 1), {"attribute rope is not a string"});
  expect_error([](hid_t f) { set_attribute(f, "/model", "n_layers", H5T_NATIVE_DOUBLE, 2.0); },
               {"n_layers is not an integer"});
  expect_error([](hid_t f) { H5Adelete_by_name(f, "/model", "vocab_size", H5P_DEFAULT); },
               {"model", "attribute vocab_size is missing"});
  CHECK(after(set_real("score_softcap", 0)) == "no error");
}

TEST_CASE("integers of any width and strings of either kind are accepted, unknown names ignored") {
  const temp_folder folder;
  const std::string path = folder / "other.h5";
  write_small(path, small_model(), small_plan());
  edit(path, [](hid_t f) {
    set_attribute<std::int8_t>(f, "/model", "head_dim", H5T_NATIVE_INT8, 5);
    set_attribute<std::uint16_t>(f, "/model", "value_dim", H5T_STD_U16LE, 2);
    set_attribute<std::int64_t>(f, "/model", "n_layers", H5T_NATIVE_INT64, 2);
    set_attribute<std::uint32_t>(f, "/model", "n_q_heads", H5T_STD_U32BE, __builtin_bswap32(6));
    const hid_t variable = H5Tcopy(H5T_C_S1);
    H5Tset_size(variable, H5T_VARIABLE);
    set_attribute<const char*>(f, "/model", "name", variable, "by variable length");
    H5Tclose(variable);
    const hid_t flag = H5Tenum_create(H5T_NATIVE_INT8);
    const std::int8_t no = 0, yes = 1;
    H5Tenum_insert(flag, "FALSE", &no);
    H5Tenum_insert(flag, "TRUE", &yes);
    set_attribute<std::int8_t>(f, "/", "complete", flag, 1);
    H5Tclose(flag);
    set_attribute<double>(f, "/model", "rope_theta", H5T_NATIVE_DOUBLE, 1e4);
    const std::int64_t tokens[7] = {0, 1, 2, 3, 4, 5, 6};
    make_dataset(f, "/sequences/0/tokens", {7}, H5T_NATIVE_INT64, tokens);
    make_dataset(f, "/sequences/0/layers/1/unknown", {7}, H5T_NATIVE_INT64, tokens);
    make_dataset(f, "/prompt", {7}, H5T_NATIVE_INT64, tokens);
    H5Gclose(H5Gcreate2(f, "/sequences/notes", H5P_DEFAULT, H5P_DEFAULT, H5P_DEFAULT));
    const hid_t old = H5Dopen2(f, "/sequences/0/tokens", H5P_DEFAULT);
    H5Dclose(old);
  });
  const reader file(path);
  CHECK(file.model().name == "by variable length");
  CHECK(file.model().n_q_heads == 6);
  CHECK(file.tokens(0) == std::vector<std::int32_t>{0, 1, 2, 3, 4, 5, 6});
}

TEST_CASE("rank, every extent and the order of axes are checked") {
  const std::string k = layer1 + "k";
  for (const std::vector<hsize_t>& wrong : {std::vector<hsize_t>{7, 3},
                                            {7, 3, 5, 1},
                                            {1, 7, 3, 5},
                                            {105},
                                            {6, 3, 5},
                                            {8, 3, 5},
                                            {3, 7, 5},
                                            {7, 5, 3},
                                            {5, 3, 7},
                                            {7, 15, 1},
                                            {7, 3, 0},
                                            {0, 3, 5},
                                            {7, 4, 5},
                                            {7, 3, 8}}) {
    expect_error([&](hid_t f) { half_dataset(f, k, wrong); },
                 {"sequences/0/layers/1/k", "shape [" + fmt::format("{}", wrong[0]),
                  "expected [T=7, n_kv_heads=3, head_dim=5]"});
  }
  expect_error([](hid_t f) { half_dataset(f, layer1 + "q", {7, 5, 6}); }, {"q", "shape [7, 5, 6]"});
  expect_error([](hid_t f) { half_dataset(f, layer1 + "v", {7, 2, 3}); }, {"v", "shape [7, 2, 3]"});
  expect_error([](hid_t f) { half_dataset(f, layer1 + "o", {7, 6, 3}); }, {"o", "shape [7, 6, 3]"});
  const std::vector<float> values(64, 1.f);
  expect_error(
      [&](hid_t f) {
        make_dataset(f, layer1 + "lse", {6, 7}, H5T_NATIVE_FLOAT, values.data());
      },
      {"lse", "shape [6, 7]", "[T=7, n_q_heads=6]"});
  expect_error(
      [&](hid_t f) {
        make_dataset(f, "/sequences/0/confidence", {4}, H5T_NATIVE_FLOAT, values.data());
      },
      {"confidence", "shape [4]", "[R=4, 4]"});
  const std::int32_t one = 0;
  expect_error(
      [&](hid_t f) {
        make_dataset(f, "/model/window", {1, 2}, H5T_NATIVE_INT, values.data());
      },
      {"model/window", "shape [1, 2]", "[n_layers=2]"});
  expect_error([&](hid_t f) { make_dataset(f, "/sequences/0/tokens", {}, H5T_NATIVE_INT, &one); },
               {"tokens", "shape []", "[T=7]"});
}

TEST_CASE("singleton axes are read as they are") {
  const temp_folder folder;
  model_info m = small_model(1);
  m.n_q_heads = m.n_kv_heads = m.head_dim = m.value_dim = 1;
  for (const std::int64_t tokens : {1, 3}) {
    const std::string path = folder / fmt::format("{}.h5", tokens);
    write_small(path, m, small_plan(1, tokens));
    const layer_slice s = reader(path).read_layer(0, 0, 0, tokens);
    CHECK(s.k == half_rows(0, tokens, 1));
    CHECK(s.lse == float_rows(0, tokens, 1));
  }
}

TEST_CASE("no rows at all is legal where it may be") {
  const temp_folder folder;
  sequence_plan p = small_plan();
  p.logit_pos.clear();
  p.confidence = true;
  p.spans = {{"none", {}}};
  write_small(folder / "empty.h5", small_model(), p);
  const reader file(folder / "empty.h5");
  CHECK(file.sequence(0).logit_pos.empty());
  CHECK(file.confidence(0).empty());
  CHECK(file.sequence(0).spans.at("none").empty());
}

TEST_CASE("element types are checked, bfloat16 by name") {
  const std::vector<float> values(256, 1.f);
  const std::string k = layer1 + "k";
  expect_error(
      [&](hid_t f) {
        make_dataset(f, k, {7, 3, 5}, H5T_NATIVE_FLOAT, values.data());
      },
      {"layers/1/k", "float32", "expected float16"});
  expect_error(
      [&](hid_t f) {
        make_dataset(f, k, {7, 3, 5}, H5T_NATIVE_SHORT, values.data());
      },
      {"layers/1/k", "int16", "expected float16"});
  expect_error(
      [&](hid_t f) {
        const hid_t type = H5Tcopy(H5T_IEEE_F32LE);
        H5Tset_fields(type, 15, 7, 8, 0, 7);
        H5Tset_precision(type, 16);
        H5Tset_size(type, 2);
        H5Tset_ebias(type, 127);
        make_dataset(f, k, {7, 3, 5}, type, values.data());
        H5Tclose(type);
      },
      {"layers/1/k", "bfloat16", "record a bfloat16 model as float16"});
  expect_error(
      [&](hid_t f) {
        const h5::handle type = h5::float16_type();
        H5Tset_order(type.get(), H5T_ORDER_BE);
        make_dataset(f, k, {7, 3, 5}, type.get(), values.data());
      },
      {"layers/1/k", "big-endian"});
  expect_error(
      [&](hid_t f) {
        make_dataset(f, "/sequences/0/tokens", {7}, H5T_NATIVE_FLOAT, values.data());
      },
      {"tokens", "float32", "expected integers"});
  expect_error(
      [&](hid_t f) {
        make_dataset(f, layer1 + "lse", {7, 6}, H5T_NATIVE_DOUBLE, values.data());
      },
      {"lse", "float64", "expected float32"});
}

TEST_CASE("what is missing is named") {
  for (const char* name : {"q", "k", "v"}) {
    expect_error([&](hid_t f) { remove_link(f, layer1 + name); },
                 {std::string("layers/1/") + name, "missing"});
  }
  expect_error([](hid_t f) { remove_link(f, "/sequences/0/tokens"); }, {"tokens", "missing"});
  expect_error([](hid_t f) { remove_link(f, "/sequences/0/layers/1"); },
               {"layers", "layer 1 is missing"});
  expect_error([](hid_t f) { remove_link(f, "/sequences/0/logit_pos"); }, {"logit_pos", "missing"});
  expect_error([](hid_t f) { remove_link(f, "/model"); }, {"model", "missing"});
  expect_error([](hid_t f) { remove_link(f, "/sequences/0"); }, {"sequences", "empty"});
  CHECK(after([](hid_t f) { remove_link(f, layer1 + "o"); }) == "no error");
  CHECK(after([](hid_t f) { remove_link(f, layer1 + "lse"); }) == "no error");
}

TEST_CASE("names order numerically; gaps and two spellings are errors") {
  const temp_folder folder;
  const std::string path = folder / "twelve.h5";
  write_small(path, small_model(12), small_plan(), 12);
  edit(path, [](hid_t f) {  // distinct values, so that an order by name would show
    for (int i = 0; i < 12; ++i) {
      poke<std::int32_t>(f, fmt::format("/sequences/{}/tokens", i), 0, i);
      poke<std::uint16_t>(f, fmt::format("/sequences/3/layers/{}/k", i), 0,
                          static_cast<std::uint16_t>(0x3c00 + i));
    }
    rename_link(f, "/sequences/7", "/sequences/007");
    rename_link(f, "/sequences/3/layers/2", "/sequences/3/layers/02");
  });
  {
    const reader file(path);
    REQUIRE(file.sequences().size() == 12);
    for (int i = 0; i < 12; ++i) {
      CHECK(file.sequences()[static_cast<size_t>(i)].id == i);
      CHECK(file.tokens(i)[0] == i);
      CHECK(file.read_layer(3, i, 0, 1).k[0] == 0x3c00 + i);
    }
  }
  edit(path, [](hid_t f) { rename_link(f, "/sequences/007", "/sequences/14"); });
  check_message(open_error(path), path, {"sequences", "7 is missing"});
  edit(path, [](hid_t f) { rename_link(f, "/sequences/14", "/sequences/03"); });
  check_message(open_error(path), path, {"'03'", "'3'", "two spellings"});
  edit(path, [](hid_t f) {
    rename_link(f, "/sequences/03", "/sequences/7");
    rename_link(f, "/sequences/4/layers/9", "/sequences/4/layers/12");
  });
  check_message(open_error(path), path, {"sequences/4/layers", "layer 9 is missing"});
  edit(path, [](hid_t f) {
    H5Lcreate_hard(f, "/sequences/4/layers/12", f, "/sequences/4/layers/9", H5P_DEFAULT,
                   H5P_DEFAULT);
  });
  check_message(open_error(path), path, {"sequences/4/layers", "layer 12 is not among"});
  edit(path, [](hid_t f) { rename_link(f, "/sequences/4/layers/12", "/sequences/4/layers/09"); });
  check_message(open_error(path), path, {"'09'", "'9'", "two spellings"});
}

TEST_CASE("positions must ascend within the sequence") {
  const auto positions = [](std::vector<std::int32_t> values) {
    return [values](hid_t f) {
      make_dataset(f, "/sequences/0/logit_pos", {values.size()}, H5T_NATIVE_INT, values.data());
    };
  };
  expect_error(positions({3, 4, 4, 6}), {"logit_pos", "4 follows 4 at index 2"});
  expect_error(positions({3, 4, 5, 7}), {"logit_pos", "value 7 at index 3", "0 to 6"});
  expect_error(positions({-1, 4, 5, 6}), {"logit_pos", "value -1 at index 0"});
  const std::int32_t ranges[4] = {0, 2, 2, 4};
  expect_error(
      [&](hid_t f) {
        make_dataset(f, "/sequences/0/chunks", {2, 2}, H5T_NATIVE_INT, ranges);
      },
      {"chunks", "2 chunks", "at most 1"});
  const std::int32_t backwards[2] = {5, 3};
  expect_error(
      [&](hid_t f) {
        make_dataset(f, "/sequences/0/chunks", {1, 2}, H5T_NATIVE_INT, backwards);
      },
      {"chunks", "[5, 3)"});
  const std::int64_t wide[2] = {0, std::int64_t{1} << 40};
  expect_error([&](hid_t f) { make_dataset(f, "/model/window", {2}, H5T_NATIVE_INT64, wide); },
               {"model/window", "1099511627776 at index 1"});
}

TEST_CASE("claims that the file cannot hold are refused before anything is allocated") {
  const hsize_t huge = hsize_t{1} << 62;
  expect_error(
      [&](hid_t f) {
        const h5::handle type = h5::float16_type();
        make_dataset(f, layer1 + "k", {huge, 3, 5}, type.get(), nullptr, {64, 3, 5});
      },
      {"layers/1/k", "shape [4611686018427387904, 3, 5]"});
  expect_error(
      [&](hid_t f) {
        make_dataset(f, "/sequences/0/tokens", {huge}, H5T_NATIVE_INT, nullptr, {64});
      },
      {"tokens", "shape [4611686018427387904]"});
  expect_error(
      [&](hid_t f) {
        make_dataset(f, "/sequences/0/logit_pos", {huge}, H5T_NATIVE_INT, nullptr, {64});
      },
      {"logit_pos", "shape [4611686018427387904]"});
  // The header agrees with the extents: two billion tokens in a file of a few KiB.
  expect_error(
      [&](hid_t f) {
        for (const char* name : {"n_tokens", "committed"}) {
          set_attribute<std::int64_t>(f, "/sequences/0", name, H5T_NATIVE_INT64, 2147483647);
        }
        make_dataset(f, "/sequences/0/tokens", {2147483647}, H5T_NATIVE_INT, nullptr, {1024});
      },
      {"tokens", "cannot be held by a file of"});
}

TEST_CASE("data in other files is refused") {
  expect_error(
      [](hid_t f) {
        remove_link(f, layer1 + "k");
        H5Lcreate_external("elsewhere.h5", "/k", f, (layer1 + "k").c_str(), H5P_DEFAULT,
                           H5P_DEFAULT);
      },
      {"layers/1/k", "another file"});
  expect_error(
      [](hid_t f) {
        remove_link(f, layer1 + "lse");
        const hsize_t extents[2] = {7, 6};
        const hid_t space = H5Screate_simple(2, extents, nullptr);
        const hid_t create = H5Pcreate(H5P_DATASET_CREATE);
        H5Pset_external(create, "/etc/passwd", 0, 168);
        H5Dclose(H5Dcreate2(f, (layer1 + "lse").c_str(), H5T_NATIVE_FLOAT, space, H5P_DEFAULT,
                            create, H5P_DEFAULT));
        H5Pclose(create);
        H5Sclose(space);
      },
      {"layers/1/lse", "another file"});
}

TEST_CASE("storage that was never written is named by its step") {
  const h5::handle type = h5::float16_type();
  expect_error(
      [&](hid_t f) {
        make_dataset(f, layer1 + "k", {7, 3, 5}, type.get(), nullptr);
      },
      {"layers/1/k", "from step 0 on were never written"});
  expect_error(
      [&](hid_t f) {
        make_dataset(f, layer1 + "v", {7, 3, 2}, type.get(), nullptr, {2, 3, 2});
        const hid_t data = H5Dopen2(f, (layer1 + "v").c_str(), H5P_DEFAULT);
        const hid_t space = H5Dget_space(data);
        const hsize_t start[3] = {0, 0, 0}, size[3] = {6, 3, 2};
        H5Sselect_hyperslab(space, H5S_SELECT_SET, start, nullptr, size, nullptr);
        const hid_t memory = H5Screate_simple(3, size, nullptr);
        REQUIRE(H5Dwrite(data, type.get(), memory, space, H5P_DEFAULT, ones(36).data()) >= 0);
        H5Sclose(memory);
        H5Sclose(space);
        H5Dclose(data);
      },
      {"layers/1/v", "from step 6 on were never written"});
}

}  // namespace kvreplay::traces
