// A policy is data: a score rule, a budget rule, protection, a trigger, a precision. Nothing here
// executes attention; kernels/ and replay/ carry out what these structs say.
#pragma once

#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "policies/kept_sets.hpp"

namespace kvreplay::policies {

// A SPEC that cannot be read: unknown name or key (with the nearest one), value out of range ...
// The command line answers it with exit code 2.
class spec_error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// What an entry is worth. position: newer is better (window, streaming, and `full`, which never
// ranks). hash: random. sum: H2O. last: TOVA. ema: CONF-KV. history: Scissorhands. observed:
// SnapKV. retention: TrimKV. future: the oracle. redundancy: R-KV. given: sets from a file (kept).
// image: worth of image positions alone (FastV, VisionZip); all others stay.
enum class score_kind : std::uint8_t {
  position,
  hash,
  sum,
  last,
  ema,
  history,
  observed,
  retention,
  key_norm,
  key_difference,
  redundancy,
  future,
  given,
  image
};
enum class group_reduce : std::uint8_t { mean, max, sum };
enum class score_scope : std::uint8_t { head, layer };
enum class mass_scale : std::uint8_t { log, max };
// What fills the scores after the prompt: nothing, the sum over all prompt rows, the mean over the
// last `obs` rows, the last `history` rows one by one, the last row.
enum class prompt_seed : std::uint8_t { none, column_sums, mean_of_last, last_history, last_row };

enum class pool_kind : std::uint8_t { max, avg };

struct score_rule {
  score_kind kind = score_kind::position;
  group_reduce gqa = group_reduce::mean;
  score_scope scope = score_scope::head;
  prompt_seed prompt = prompt_seed::none;
  int obs = 32;         // rows of prompt_seed::mean_of_last
  double decay = 0.97;  // ema
  double recency = 0.05;
  mass_scale mass = mass_scale::log;
  std::uint64_t seed = 0;
  int history = 400;                // history: steps that count
  pool_kind pool = pool_kind::max;  // observed, redundancy: over entries in position order
  int kernel = 7;                   // width of the pool, odd
  double lambda = 0.1;              // redundancy: weight of importance
  double age_offset = 0;            // retention
  bool exponential = false;         // retention: exp of the score
};

// True where scores are >= 0 and grow with worth, so that shares of them mean something.
bool has_shares(const score_rule& rule);

enum class amount_unit : std::uint8_t { everything, entries, percent, bytes };
struct amount {
  amount_unit unit = amount_unit::everything;
  double value = 0;
  bool operator==(const amount&) const = default;
};

enum class gate_signal : std::uint8_t { signal, shuffled, random, constant, inverted };
struct gate_rule {
  double tau = 0.6;
  // tau=q0.7: nearest-rank quantile of c(P-1 .. T-1), reads the future
  bool tau_is_quantile = false;
  double w_entropy = 0.4, w_margin = 0.3, w_top = 0.3;
  double temperature = 1;
  double smooth = 0;
  int hold = 0;
  int shrink = -1;  // entries that may leave per step; -1 = all
  gate_signal gate = gate_signal::signal;
  double p = 0.5;  // gate=random: tight with this probability
  std::uint64_t seed = 0;
  amount high, low;
};

struct pyramid_rule {
  bool on = false;
  double beta = 2, total = 1;
  bool exact = true;
  int window = 0;  // pyramidkv: entries set aside before the shares and added back to each
};

// How a budget is divided over the heads. adaptive: AdaKV, by scores over the heads of a layer.
// table: HeadKV, by a table over all heads. global: by scores over all layers and heads.
enum class division_kind : std::uint8_t { uniform, adaptive, table, global };
struct division_rule {
  division_kind kind = division_kind::uniform;
  bool blend = false;          // adaptive: the published rounding
  double floor = 0.2;          // adaptive: share of the budget that each head has first
  double beta = 1.5;           // table: floor(F / beta) of every head goes into the pool
  std::string file;            // table
  std::vector<double> shares;  // table: [n_layers * n_kv_heads], sum 1; filled from `file`
  int least = 0;               // global: entries that each head has first
  std::int64_t total = 0;      // global: entries in all; 0: layers * KV heads * budget
};

// CriticalKV: the best `first` of a head's budget by score, the rest by score times value norm.
struct critical_rule {
  bool on = false;
  double first = 0.5, epsilon = 1e-4;
};

struct budget_rule {
  amount single;  // ungated policies; everything = never evict
  bool gated = false;
  gate_rule gate;  // high and low replace `single`
  pyramid_rule pyramid;
  division_rule division;
  double drop = 0;  // scissorhands: a full head drops floor(drop * B) entries at once
};

struct protection_rule {
  int sinks = 0;
  int recent = 0;
  double heavy = -1;         // h2o: recent = B - floor(heavy * B); < 0: `recent` counts
  bool hard_recent = false;  // confkv: a budget below `recent` is refused, not flagged
};

struct trigger_rule {
  int every = 1;
  bool prefill_only = false;
};

enum class body_kind : std::uint8_t { none, int8, int4 };
enum class scale_kind : std::uint8_t { hybrid, token, channel, group };
struct precision_rule {
  body_kind body = body_kind::none;
  int window = 128;
  int sinks = 0;
  scale_kind scales = scale_kind::hybrid;
  bool channel_static = false;  // update=static; default grow
  double margin = 1.25;
  int page = 0;  // entries per page of the paged layout; 0: contiguous
};

// What a policy reads beyond q, k, v. A trace offers or refuses by name.
struct policy_needs {
  bool confidence = false;       // `confidence` or `logits` at P-1 .. T-1
  bool full_logits = false;      // temperature != 1
  bool mass = false;             // attention its own cache produces
  std::int64_t prompt_rows = 0;  // attention of the last n prompt rows; -1: all of them
  bool future = false;           // tau=qX, gate=shuffled, the oracle
  bool keys = false;             // keys (and queries) themselves, not their attention alone
  bool value_norm = false;       // `value_norm`, or `wo`
  bool retention = false;
  bool image_score = false;
  bool image_span = false;
  bool rope = false;        // rope_inv_freq
  bool all_layers = false;  // a budget over all layers
  bool bytes_budget = false;
};

// What a policy of images drops after the prompt: all but the best image positions, in the layers
// from `layer` on.
struct image_rule {
  int layer = 0;
  double ratio = 0;   // fastv: share that leaves
  int dominant = -1;  // visionzip: positions that stay; < 0: by ratio
};

struct policy {
  std::string name;            // "confkv-l"
  std::string spec;            // as given
  std::string resolved;        // score, budget, selection, trigger, precision, every parameter
  std::string precision_name;  // "fp16", "int8" ...
  // In catalogue order, as text: the policy's own keys ("budget"), then those of its modifiers with
  // their name before it ("pyramid.beta").
  std::vector<std::pair<std::string, std::string>> params;
  score_rule score;
  critical_rule critical;
  budget_rule budget;
  image_rule image;
  std::string kept_file;  // kept: the sets that are replayed, filled from the file:
  std::shared_ptr<const kept_sets> kept;
  bool rerotate = false;  // in-cache positions in place of true ones
  protection_rule protect;
  trigger_rule trigger;
  precision_rule precision;
  policy_needs needs;
};

// Reads `name:key=value,key=value+modifier:key=value`; modifiers in any order, each at most once.
// Throws spec_error, one line that names the part, key and value and what was expected.
// parse_policy(p.resolved) gives p again (but for `spec`).
policy parse_policy(std::string_view spec);

// The same policy without `+modifier` (with it not there: itself).
policy without_modifier(const policy& p, std::string_view modifier);

}  // namespace kvreplay::policies
