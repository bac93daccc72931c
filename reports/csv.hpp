// CSV by RFC 4180: a field with a comma, quote or line break is quoted, a quote doubled; lines end
// in a line feed; one header line. Numbers in base units, in the shortest form that gives the same
// double back; what was not measured is empty. Texts are escaped by escape_bytes(controls::lines).
#pragma once

#include <cstdint>
#include <iosfwd>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "reports/result.hpp"

namespace kvreplay::reports {

// One field, escaped and quoted where needed.
std::string csv_field(std::string_view text);

// The fields of results.json flattened with dots. Every row has every column; params.*,
// quality.* beyond the fixed ones and quality_ci.*.low/high are the union over the rows, in name
// order.
std::string to_csv(std::span<const result> runs);

// What a row of the detailed files belongs to.
struct row_key {
  std::string trace, policy, mode;
  int sequence = 0;
};

// --steps: one row per decode step.
struct step_row {
  row_key key;
  std::int64_t step = 0;
  maybe bytes, entries, confidence, budget, attention_recall, output_rel_l2;
};

// --heads: one row per layer and KV head.
struct head_row {
  row_key key;
  int layer = 0, kv_head = 0;
  maybe mean_entries, attention_recall, output_rel_l2, head_l1;
};

// --kept: what a KV head holds after the selection and ageing of a step.
struct kept_row {
  row_key key;
  std::int64_t step = 0;
  int layer = 0, kv_head = 0;
  std::vector<std::int32_t> positions;
};

// Headers and single rows, so that long files can be written as they grow.
// A number that is not finite is left empty.
inline constexpr std::string_view steps_header =
    "trace,policy,mode,sequence,step,bytes,entries,confidence,budget,attention_recall,"
    "output_rel_l2\n";
inline constexpr std::string_view heads_header =
    "trace,policy,mode,sequence,layer,kv_head,mean_entries,attention_recall,output_rel_l2,head_"
    "l1\n";
inline constexpr std::string_view kept_header =
    "trace,policy,mode,sequence,step,layer,kv_head,positions\n";
void write_row(std::ostream& out, const step_row& row);
void write_row(std::ostream& out, const head_row& row);
void write_row(std::ostream& out, const kept_row& row);

// Header and rows.
std::string to_csv(std::span<const step_row> rows);
std::string to_csv(std::span<const head_row> rows);
std::string to_csv(std::span<const kept_row> rows);

}  // namespace kvreplay::reports
