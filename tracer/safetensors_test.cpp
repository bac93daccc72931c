#include "tracer/safetensors.hpp"

#include <doctest/doctest.h>

#include <bit>
#include <cmath>

#include "tracer/test_support.hpp"

namespace kvreplay::tracer {
namespace {

std::string open_error(const std::string& bytes) {
  const scratch_folder folder;
  write_file(folder.file("model.safetensors"), bytes);
  const std::string message = message_of([&] { tensor_store store(folder.path()); });
  CHECK((message.empty() || mentions(message, "model.safetensors")));
  return message;
}

std::string header_error(const std::string& header, const std::string& data = "") {
  return open_error(safetensors_bytes(header, data));
}

TEST_CASE("hostile headers are refused with a line that names the file") {
  const std::string four(4, 'x'), eight(8, 'x');
  CHECK(mentions(open_error(""), "too short"));
  CHECK(mentions(open_error("1234567"), "too short"));
  CHECK(mentions(open_error(std::string(8, '\0')), "begin"));
  CHECK(mentions(open_error(std::string("\xff\xff\xff\xff\xff\xff\xff\xff{}", 10)), "header of"));
  CHECK(mentions(open_error(std::string("\x40\0\0\0\0\0\0\0{}", 10)), "header of 64 bytes"));
  CHECK(mentions(header_error("[]"), "begin"));
  CHECK(mentions(header_error("{"), "JSON"));
  CHECK(mentions(header_error("{} x"), "JSON"));
  CHECK(mentions(header_error("{'a':1}"), "JSON"));
  CHECK(mentions(header_error("{\"\xff\":1}"), "JSON"));
  CHECK(mentions(header_error(std::string("{}\0\0", 4)), "NUL"));
  CHECK(mentions(header_error(R"({"a":{"a":{"a":{"a":[1]}}}})"), "nested"));
  CHECK(mentions(header_error(R"({"a":1})"), "not an object"));
  CHECK(mentions(header_error(R"({"__metadata__":{"a":1}})"), "__metadata__"));
  CHECK(mentions(header_error(R"({"a":{"shape":[1],"data_offsets":[0,4]}})", four), "dtype"));
  CHECK(mentions(header_error(R"({"a":{"dtype":4,"shape":[1],"data_offsets":[0,4]}})", four),
                 "dtype"));
  CHECK(mentions(header_error(R"({"a":{"dtype":"F32","data_offsets":[0,4]}})", four), "shape"));
  CHECK(mentions(header_error(R"({"a":{"dtype":"F32","shape":[1]}})", four), "data_offsets"));
  const auto tensor = [](const std::string& shape, const std::string& offsets) {
    return R"({"a":{"dtype":"F32","shape":)" + shape + R"(,"data_offsets":)" + offsets + "}}";
  };
  CHECK(mentions(header_error(tensor("[-1]", "[0,4]"), four), "shape"));
  CHECK(mentions(header_error(tensor("[1.0]", "[0,4]"), four), "shape"));
  CHECK(mentions(header_error(tensor("[18446744073709551615]", "[0,4]"), four), "shape"));
  CHECK(mentions(header_error(tensor("[1]", "[0]"), four), "list of two"));
  CHECK(mentions(header_error(tensor("[1]", "[4,0]"), four), "outside"));
  CHECK(mentions(header_error(tensor("[1]", "[4,8]"), four), "outside the data section of 4"));
  CHECK(mentions(header_error(tensor("[2]", "[0,4]"), four), "needs 8 bytes"));
  CHECK(mentions(header_error(tensor("[1]", "[0,8]"), eight), "needs 4 bytes"));
  CHECK(mentions(header_error(tensor("[4294967296,4294967296]", "[0,4]"), four), "overflows"));
  CHECK(mentions(header_error(tensor("[4611686018427387904]", "[0,4]"), four), "overflows"));
  const std::string entry = R"({"dtype":"F32","shape":[1],"data_offsets":)";
  CHECK(mentions(header_error("{\"a\":" + entry + "[0,4]},\"a\":" + entry + "[0,4]}}", four),
                 "twice"));
  CHECK(mentions(header_error("{\"a\":" + entry + "[0,4]},\"b\":" + entry + "[0,4]}}", four),
                 "'a' and 'b' share bytes"));
  CHECK(mentions(header_error("{\"a\":" + entry + "[0,4]},\"b\":" + entry + "[2,6]}}", eight),
                 "share"));
  CHECK(mentions(header_error("{\"a\\nb\\u0001\":1}"), "'a\\x0ab\\x01'"));
}

TEST_CASE("odd headers that are legal") {
  CHECK(header_error("{}") == "");
  CHECK(header_error("{\"__metadata__\":{\"format\":\"pt\"}}   ") == "");
  CHECK(header_error(R"({"a":{"dtype":"F32","shape":[0,3],"data_offsets":[0,0]}})") == "");
  CHECK(header_error(R"({"a":{"dtype":"F32","shape":[],"data_offsets":[0,4]}})", "abcd") == "");
  // The data section need not be aligned, and unknown types are left alone.
  CHECK(header_error(R"({"a":{"dtype":"F4","shape":[5],"data_offsets":[0,3]}} )", "abc") == "");
}

TEST_CASE("values are widened exactly and other types skipped until asked for") {
  const scratch_folder folder;
  std::string data;
  const std::vector<std::uint16_t> halves = {0x3c00, 0x0001, 0x83ff, 0x7bff, 0x8000, 0xc500};
  data.append(reinterpret_cast<const char*>(halves.data()), 12);
  data.append(reinterpret_cast<const char*>(halves.data()), 12);
  const float exact = 0x1.234566p-3f;
  data.append(reinterpret_cast<const char*>(&exact), 4);
  data.append(8, '\1');
  write_file(folder.file("model.safetensors"),
             safetensors_bytes(R"({"half":{"dtype":"F16","shape":[6],"data_offsets":[0,12]},)"
                               R"("brain":{"dtype":"BF16","shape":[2,3],"data_offsets":[12,24]},)"
                               R"("single":{"dtype":"F32","shape":[],"data_offsets":[24,28]},)"
                               R"("long":{"dtype":"I64","shape":[1],"data_offsets":[28,36]}})",
                               data));
  const tensor_store store(folder.path());
  CHECK(store.read("half", {6}) ==
        std::vector<float>{1.0f, 0x1p-24f, -0x3ffp-24f, 65504.0f, -0.0f, -5.0f});
  const auto brain = store.read("brain", {2, 3});
  for (size_t i = 0; i < brain.size(); ++i) {
    CHECK(std::bit_cast<std::uint32_t>(brain[i]) == static_cast<std::uint32_t>(halves[i]) << 16);
  }
  CHECK(store.read("single", {}) == std::vector<float>{exact});
  CHECK(store.first_bytes("half", 2) == std::string("\x00\x3c", 2));
  CHECK(store.first_bytes("single", 64).size() == 4);
  CHECK(mentions(message_of([&] { store.read("long", {1}); }), "'I64', expected F32, F16 or BF16"));
  CHECK(mentions(message_of([&] { store.read("half", {2, 3}); }), "shape [6], expected [2, 3]"));
  CHECK(mentions(message_of([&] { store.read("none", {1}); }), "'none' is missing"));
  CHECK_FALSE(store.has("none"));
  const std::string file = folder.file("model.safetensors");
  std::filesystem::resize_file(file, std::filesystem::file_size(file) - 10);
  CHECK(mentions(message_of([&] { store.read("long", {1}); }), "'I64'"));
  CHECK(mentions(message_of([&] { store.read("single", {}); }), "ends at byte"));
}

std::string shard(const std::vector<std::string>& names) {
  float_tensors tensors;
  for (const auto& name : names) tensors[name] = {{1}, {static_cast<float>(name[0])}};
  return float_file(tensors);
}

struct sharded_folder {
  scratch_folder folder;
  std::vector<std::string> notes;

  explicit sharded_folder(const std::string& weight_map) {
    write_file(folder.file("one.safetensors"), shard({"a", "b"}));
    write_file(folder.file("two.safetensors"), shard({"c"}));
    if (!weight_map.empty()) {
      write_file(folder.file("model.safetensors.index.json"),
                 "{\"weight_map\":" + weight_map + "}");
    }
  }
  std::string error() {
    return message_of([&] { tensor_store store(folder.path(), &notes); });
  }
};

TEST_CASE("the index decides which file holds a tensor") {
  const std::string good = R"({"a":"one.safetensors","b":"one.safetensors","c":"two.safetensors"})";
  sharded_folder whole(good);
  CHECK(whole.error() == "");
  CHECK(whole.notes.empty());

  std::filesystem::remove(whole.folder.file("two.safetensors"));
  CHECK(mentions(whole.error(), "shard 'two.safetensors' is missing; tensor 'c'"));

  sharded_folder wrong(R"({"a":"one.safetensors","c":"one.safetensors","d":"two.safetensors"})");
  CHECK(mentions(wrong.error(), "tensor 'c' is mapped to 'one.safetensors'"));
  CHECK(mentions(wrong.error(), "it lies in 'two.safetensors'"));

  sharded_folder absent(R"({"a":"one.safetensors","d":"one.safetensors"})");
  CHECK(mentions(absent.error(),
                 "tensor 'd' is mapped to 'one.safetensors', which does not hold it"));

  sharded_folder stale(R"({"a":"one.safetensors"})");
  write_file(stale.folder.file("two.safetensors"), shard({"a"}));
  CHECK(stale.error() == "");
  REQUIRE(stale.notes.size() == 2);
  CHECK(mentions(stale.notes[0], "'b' ignored"));
  CHECK(mentions(stale.notes[1], "two.safetensors: file ignored"));
  CHECK(tensor_store(stale.folder.path()).entries().size() == 1);
}

TEST_CASE("without an index every file counts, and doubles are an error") {
  sharded_folder folder("");
  CHECK(tensor_store(folder.folder.path()).entries().size() == 3);
  write_file(folder.folder.file("old.safetensors"), shard({"a"}));
  CHECK(mentions(folder.error(), "tensor 'a' is also in"));
  const scratch_folder empty;
  CHECK(mentions(message_of([&] { tensor_store store(empty.path()); }), "no *.safetensors file"));
}

TEST_CASE("an index cannot point outside its folder, nor be anything but a map of names") {
  for (const std::string name : {"../one.safetensors", "/etc/passwd", "", "..", "a\\\\b"}) {
    CAPTURE(name);
    sharded_folder folder("{\"a\":\"" + name + "\"}");
    CHECK(mentions(folder.error(), "is not a file name in the same folder"));
  }
  CHECK(mentions(sharded_folder("[1]").error(), "no weight_map"));
  CHECK(mentions(sharded_folder(R"({"a":1})").error(), "not a string"));
  CHECK(mentions(sharded_folder(R"({"a":"one.safetensors","a":"two.safetensors"})").error(),
                 "twice"));
}

}  // namespace
}  // namespace kvreplay::tracer
