// Where the rows of a tier lie: one after another, or in pages that a table lists. Plain types
// only: the loops of one instruction set include this (inner_loops.hpp says what that forbids).
#pragma once

#include <cstdint>

namespace kvreplay::kernels {

// Row i lies at i where `table` is null, else in page table[i / 2^shift], at i % 2^shift.
struct row_pages {
  const std::int32_t* table = nullptr;
  int shift = 0;
};

static inline std::int64_t row_of(const row_pages& pages, std::int64_t i) {
  if (pages.table == nullptr) return i;
  const std::int64_t page = pages.table[i >> pages.shift];
  return (page << pages.shift) + (i & ((std::int64_t{1} << pages.shift) - 1));
}

// Of the `left` rows from row i on, those that lie one after another.
static inline std::int64_t rows_together(const row_pages& pages, std::int64_t i,
                                         std::int64_t left) {
  if (pages.table == nullptr) return left;
  const std::int64_t page = std::int64_t{1} << pages.shift;
  const std::int64_t rest = page - (i & (page - 1));
  return rest < left ? rest : left;
}

}  // namespace kvreplay::kernels
