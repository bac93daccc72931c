// cache_on_device: a step and a selection, from the views of the heads to what comes back.
#pragma once

#include <algorithm>

#include "kernels/cache_on_device.cuh"
#include "kernels/device_cache_entries.cuh"

namespace kvreplay::kernels::device {

inline void cache_on_device::check_items(std::span<const device_step> items) const {
  for (const device_step& item : items) {
    index(item.layer, 0);
    if (item.q == nullptr || item.k == nullptr || item.v == nullptr || item.o == nullptr ||
        item.lse == nullptr) {
      throw std::invalid_argument("device_cache: an item has no q, k, v, o or lse");
    }
    const auto layer = static_cast<std::size_t>(item.layer);
    if (arenas_[layer] == nullptr) throw std::invalid_argument("device_cache: nothing is loaded");
    if (item.position != items[0].position) {
      throw std::invalid_argument("device_cache: the items of a call are of one position");
    }
    if (item.position < 0 || item.position <= newest_[layer]) {
      throw std::invalid_argument(place_of("append", item.layer, 0, item.position)
                                      .append(": not newer than position ")
                                      .append(std::to_string(newest_[layer])));
    }
  }
}

inline void cache_on_device::add_window(const device_step& item, step_views& views) {
  const int window = shape_.window_of(item.layer);
  if (window <= 0 || item.position < window) return;
  for (int h = 0; h < shape_.kv_heads; ++h) {
    views.windows.push_back({on_device(item.layer, h), nullptr, window});
  }
}

// Everything but the addresses of uploaded arrays and work space.
inline cache_on_device::step_views cache_on_device::views_of(std::span<const device_step> items) {
  step_views views;
  const int group = shape_.group();
  for (const device_step& item : items) {
    add_window(item, views);
    views.layers.push_back({on_device(item.layer, 0), nullptr});
    for (int h = 0; h < shape_.kv_heads; ++h) {
      const head_room bound = bound_of(item, h);
      views.longest = std::max({views.longest, bound.body, bound.tail});
      views.most = std::max(views.most, held_[index(item.layer, h)] + 1);
      views.appends.push_back({on_device(item.layer, h), nullptr, nullptr, item.position});
      attend_head head;
      head.storage = on_device(item.layer, h);
      if (!shape_.sink_logits.empty()) {
        head.sink = sink_logits_.get() + std::int64_t{item.layer} * shape_.q_heads + h * group;
      }
      views.attends.push_back(head);
      views.gathered.push_back(head.storage);
    }
  }
  views.most = (views.most + 63) / 64 * 64;
  return views;
}

// The newcomers and queries cross to the device; outputs lie as o of all items, then lse:
// [items, q_heads, value_dim], [items, q_heads].
inline void cache_on_device::stage_rows(std::span<const device_step> items, step_views& views) {
  const std::int64_t k_dim = shape_.head_dim, v_dim = shape_.value_dim, group = shape_.group();
  const auto values = [](std::int64_t heads, std::int64_t dim) {
    return static_cast<std::size_t>(heads * dim);
  };
  const std::size_t q_size = values(shape_.q_heads, k_dim), k_size = values(shape_.kv_heads, k_dim),
                    v_size = values(shape_.kv_heads, v_dim);
  const auto room = [](std::size_t n) { return upload_stage::room_for(n * sizeof(float)); };
  constexpr std::size_t views_of_head = sizeof(append_head) + sizeof(attend_head) +
                                        sizeof(window_head) + sizeof(compact_head) +
                                        sizeof(layer_mean_item) + sizeof(head_storage*);
  step_stage_.begin(items.size() * (room(q_size) + room(k_size) + room(v_size)) +
                    views.appends.size() * views_of_head + 6 * upload_stage::room_for(1));
  const auto heads = static_cast<std::int64_t>(views.appends.size());
  float* o = results_.room(heads * group * (v_dim + 1), "the outputs of a step", stream_.get());
  float* lse = o + heads * group * v_dim;
  const bool layer_mean = rules_.mass == mass_layout::layer_mean;
  float* mass =
      layer_mean ? mass_.room(heads * group * views.most, "mass", stream_.get()) : nullptr;
  for (std::size_t i = 0, head = 0; i < items.size(); ++i) {
    const float* q = step_stage_.put(items[i].q, q_size);
    const float* k = step_stage_.put(items[i].k, k_size);
    const float* v = step_stage_.put(items[i].v, v_size);
    const auto first_row = static_cast<std::int64_t>(head) * group;
    if (layer_mean) views.layers[i].mass = mass + first_row * views.most;
    for (int h = 0; h < shape_.kv_heads; ++h, ++head) {
      const std::int64_t row = first_row + h * group;  // query head of the call
      views.appends[head].k = k + h * k_dim;
      views.appends[head].v = v + h * v_dim;
      views.attends[head].q = q + h * group * k_dim;
      views.attends[head].o = o + row * v_dim;
      views.attends[head].lse = lse + row;
      if (layer_mean) views.attends[head].mass = mass + row * views.most;
    }
  }
}

// Keep lists and work space of compaction for `heads` heads.
inline std::uint8_t* cache_on_device::keep_room(std::size_t heads, int most, int*& work) {
  const std::int64_t n = static_cast<std::int64_t>(heads) * most;
  work = work_.room(2 * n, "keep lists", stream_.get());
  return keep_.room(n, "keep lists", stream_.get());
}

inline void cache_on_device::launch_step(std::span<const device_step> items, step_views& views) {
  stage_rows(items, views);
  std::vector<compact_head> compacts;
  int* work = nullptr;
  std::uint8_t* keep = keep_room(views.windows.size(), views.most, work);
  for (std::int64_t i = 0; i < std::ssize(views.windows); ++i) {
    window_head& w = views.windows[static_cast<std::size_t>(i)];
    w.keep = keep + i * views.most;
    compacts.push_back({w.storage, w.keep, work + 2 * i * views.most});
  }
  const auto windowed = static_cast<int>(compacts.size());
  const window_batch window{step_stage_.put(views.windows), windowed, items[0].position};
  const compact_batch compact{step_stage_.put(compacts), windowed, shape_.head_dim,
                              shape_.value_dim, views.most};
  // Positions up to t - 1 - W have come of age: those that ageing after step t - 1 moves.
  const append_batch append{step_stage_.put(views.appends),
                            static_cast<int>(views.appends.size()),
                            shape_.head_dim,
                            shape_.value_dim,
                            format_.tail_window + 1,
                            format_.tail_sinks,
                            format_.body != body_format::none,
                            format_.scales == scale_format::hybrid};
  const attend_head* attends = step_stage_.put(views.attends);
  const layer_mean_item* layers = step_stage_.put(views.layers);
  views.gathered_there = step_stage_.put(views.gathered);
  step_stage_.send(stream_.get());
  if (windowed > 0) {
    stream_.run("window", [&](auto s) {
      launch_window(window, s);
      launch_compact(compact, s);
    });
  }
  stream_.run("append", [&](auto s) { launch_append(append, s); });
  launch_attention(views, attends, layers);
}

inline void cache_on_device::launch_attention(const step_views& views, const attend_head* heads,
                                              const layer_mean_item* layers) {
  attend_batch a;
  a.heads = heads;
  a.head_count = static_cast<int>(views.attends.size());
  a.group = shape_.group();
  a.head_dim = shape_.head_dim;
  a.value_dim = shape_.value_dim;
  a.softmax_scale = static_cast<float>(shape_.softmax_scale);
  a.split_entries = entries_per_split;
  a.splits = std::max(1, (views.longest + entries_per_split - 1) / entries_per_split);
  a.most_entries = views.most;
  a.mass_stride = views.most;
  const std::int64_t rows = std::int64_t{a.head_count} * a.group;
  const bool layer_mean = rules_.mass == mass_layout::layer_mean;
  a.reduce = layer_mean ? mass_layout::per_query_head : rules_.mass;
  if (!layer_mean) a.rule = rules_.update;
  a.decay = rules_.decay;
  a.scores = scores_.room(rows * a.most_entries, "attention scores", stream_.get());
  a.partial_o = partial_.room(rows * a.splits * (a.value_dim + 2), "outputs", stream_.get());
  a.partial_state = a.partial_o + rows * a.splits * a.value_dim;
  stream_.run("attend", [&](auto s) { launch_attend(a, attend_tier::automatic, s); });
  if (!layer_mean) return;
  layer_mean_batch mean;
  mean.items = layers;
  mean.item_count = static_cast<int>(views.layers.size());
  mean.kv_heads = shape_.kv_heads;
  mean.group = a.group;
  mean.most_entries = a.most_entries;
  mean.mass_stride = a.mass_stride;
  mean.rule = rules_.update;
  mean.decay = rules_.decay;
  stream_.run("layer_mean", [&](auto s) { launch_layer_mean(mean, s); });
}

inline void cache_on_device::attend(std::span<const device_step> items, bool want_positions) {
  if (items.empty()) return;
  check_items(items);
  for (const device_step& item : items) make_room(item);
  step_views views = views_of(items);
  launch_step(items, views);
  fetch_results(items, views, want_positions);
}

// Starts the copy of every head's positions into host memory, [heads, most].
inline const std::int32_t* cache_on_device::gather_positions(const head_storage* const* heads,
                                                             std::size_t count, int most) {
  const std::int64_t n = static_cast<std::int64_t>(count) * most;
  positions_batch batch{heads, static_cast<int>(count), most,
                        gathered_.room(n, "positions", stream_.get())};
  stream_.run("positions", [&](auto s) { launch_positions(batch, s); });
  const std::size_t bytes = static_cast<std::size_t>(n) * sizeof(std::int32_t);
  std::byte* here = positions_host_.room(bytes);
  copy_async(here, batch.out, bytes, stream_.get());
  return reinterpret_cast<const std::int32_t*>(here);
}

inline void cache_on_device::fetch_results(std::span<const device_step> items,
                                           const step_views& views, bool want_positions) {
  const std::int32_t* positions = nullptr;
  if (want_positions) {
    positions = gather_positions(views.gathered_there, views.gathered.size(), views.most);
  }
  const std::size_t rows = views.attends.size() * static_cast<std::size_t>(shape_.group());
  const std::size_t width = static_cast<std::size_t>(shape_.value_dim);
  const std::size_t bytes = rows * (width + 1) * sizeof(float);
  std::byte* results = results_host_.room(bytes);
  copy_async(results, views.attends[0].o, bytes, stream_.get());
  const std::size_t storage_bytes = mirror_.size() * sizeof(head_storage);
  std::byte* storage = storage_host_.room(storage_bytes);
  copy_async(storage, storage_.get(), storage_bytes, stream_.get());
  stream_.wait();
  selecting_ = false;
  const auto* o = reinterpret_cast<const float*>(results);
  const float* lse = o + rows * width;
  const auto heads = static_cast<std::size_t>(shape_.kv_heads);
  const auto q_heads = static_cast<std::size_t>(shape_.q_heads);
  for (std::size_t i = 0; i < items.size(); ++i) {
    const device_step& item = items[i];
    const std::size_t first = index(item.layer, 0);
    std::memcpy(&mirror_[first], storage + first * sizeof(head_storage),
                heads * sizeof(head_storage));
    check_faults(item.layer, &item);
    std::memcpy(item.o, o + i * q_heads * width, q_heads * width * sizeof(float));
    std::memcpy(item.lse, lse + i * q_heads, q_heads * sizeof(float));
    newest_[static_cast<std::size_t>(item.layer)] = item.position;
    aged_[static_cast<std::size_t>(item.layer)] = 1;
    for (std::size_t h = 0; h < heads; ++h) {
      held_[first + h] = mirror_[first + h].body + mirror_[first + h].tail;
      if (positions == nullptr) continue;
      const std::int32_t* row = positions + static_cast<std::int64_t>(i * heads + h) * views.most;
      positions_[first + h].assign(row, row + held_[first + h]);
    }
  }
}

inline std::int64_t cache_on_device::select(std::span<const device_selection> items) {
  std::vector<select_head> heads;
  std::vector<compact_head> compacts;
  std::int64_t leaving = 0;
  int most = 0;
  for (const device_selection& item : items) {
    const std::size_t first = index(item.layer, 0);
    if (newest_[static_cast<std::size_t>(item.layer)] !=
        newest_[static_cast<std::size_t>(items[0].layer)]) {
      throw std::invalid_argument("device_cache: the items of a call are of one position");
    }
    for (int h = 0; h < shape_.kv_heads; ++h) {
      int& held = held_[first + static_cast<std::size_t>(h)];
      if (item.budget[h] < 1) throw std::invalid_argument("device_cache: a budget is below 1");
      if (held <= item.budget[h]) continue;
      heads.push_back({on_device(item.layer, h), nullptr, item.budget[h], item.model_layer,
                       rules_.one_set ? 0 : h, item.sinks, item.recent});
      most = std::max(most, held);
      leaving += held - item.budget[h];
      held = item.budget[h];
    }
  }
  if (heads.empty()) return 0;
  if (selecting_) stream_.wait();
  int* work = nullptr;
  std::uint8_t* keep = keep_room(heads.size(), most, work);
  for (std::size_t i = 0; i < heads.size(); ++i) {
    heads[i].keep = keep + static_cast<std::int64_t>(i) * most;
    compacts.push_back(
        {heads[i].storage, heads[i].keep, work + 2 * static_cast<std::int64_t>(i) * most});
  }
  select_stage_.begin(heads.size() * (sizeof(select_head) + sizeof(compact_head)) +
                      2 * upload_stage::room_for(1));
  const auto count = static_cast<int>(heads.size());
  const select_batch select{select_stage_.put(heads),
                            count,
                            newest_[static_cast<std::size_t>(items[0].layer)],
                            rules_.rank,
                            rules_.recency,
                            rules_.seed};
  const compact_batch compact{select_stage_.put(compacts), count, shape_.head_dim, shape_.value_dim,
                              most};
  select_stage_.send(stream_.get());
  selecting_ = true;
  stream_.run("select", [&](auto s) { launch_select(select, s); });
  stream_.run("compact", [&](auto s) { launch_compact(compact, s); });
  return leaving;
}

inline std::vector<std::vector<std::int32_t>> cache_on_device::held_positions(int layer) {
  std::vector<const head_storage*> heads;
  int most = 1;
  for (int h = 0; h < shape_.kv_heads; ++h) {
    heads.push_back(on_device(layer, h));
    most = std::max(most, held_[index(layer, h)]);
  }
  if (selecting_) stream_.wait();
  selecting_ = false;
  select_stage_.begin(heads.size() * sizeof(heads[0]) + upload_stage::room_for(1));
  const head_storage* const* there = select_stage_.put(heads);
  select_stage_.send(stream_.get());
  const std::int32_t* rows = gather_positions(there, heads.size(), most);
  stream_.wait();
  std::vector<std::vector<std::int32_t>> all;
  for (int h = 0; h < shape_.kv_heads; ++h) {
    const std::int32_t* row = rows + std::int64_t{h} * most;
    all.emplace_back(row, row + held_[index(layer, h)]);
  }
  return all;
}

inline std::int64_t cache_on_device::quantised(int layer) const {
  std::int64_t total = 0;
  for (int h = 0; h < shape_.kv_heads; ++h) total += mirror_[index(layer, h)].quantised;
  return total;
}

inline std::int64_t cache_on_device::reserved_bytes() const {
  std::int64_t total = keep_.bytes() + work_.bytes() + scores_.bytes() + partial_.bytes() +
                       mass_.bytes() + results_.bytes() + gathered_.bytes();
  for (const auto& arena : arenas_) total += arena == nullptr ? 0 : arena->bytes();
  return total;
}

class device_of_kernels : public compute_device {
 public:
  explicit device_of_kernels(std::string name) : name_(std::move(name)) {}
  std::string name() const override { return name_; }
  void flush_caches() override {
    if (other_ == nullptr) {
      other_ = std::make_unique<device_buffer<std::byte>>(cache_bytes, "room beside the caches");
    }
    fill_async(other_->get(), cache_bytes, {});
    wait_for({});
  }
  double copy_bandwidth(std::int64_t bytes) override {
    const auto size = static_cast<std::size_t>(std::max<std::int64_t>(bytes, 4096));
    const device_buffer<std::byte> from(size, "a copy"), to(size, "a copy");
    time_mark begin, end;
    double best = 0;
    for (int lap = 0; lap < 10; ++lap) {
      flush_caches();
      begin.set({});
      copy_async(to.get(), from.get(), size, {});
      end.set({});
      wait_for({});
      best = std::max(best, 2e6 * static_cast<double>(size) / end.since(begin));
    }
    return best;
  }
  std::unique_ptr<device_cache> make_cache(const cache_shape& shape, const storage_format& format,
                                           const device_rules& rules) override {
    const std::string lacks = device_lacks(shape, format);
    if (!lacks.empty()) {
      throw std::invalid_argument(std::string("the device kernels have no ").append(lacks));
    }
    return std::make_unique<cache_on_device>(shape, format, rules);
  }

 private:
  static constexpr std::size_t cache_bytes = std::size_t{256} << 20;  // more than any second level
  std::string name_;
  std::unique_ptr<device_buffer<std::byte>> other_;
};

}  // namespace kvreplay::kernels::device
