// paged: entries in pages that the heads of a layer share, instead of one run of rows per head.
// Paper: PagedAttention, arXiv 2309.06180. Contiguous rows are what CONF-KV argues for; budgets
// that differ between heads (DBTrimKV) need pages. Deviations: pages are taken per layer, KV head
// and precision tier; a page table per head and tier.
#include "policies/catalogue.hpp"

namespace kvreplay::policies {
namespace {

constexpr int most_in_page = 1 << 16;

void apply(param_reader& params, policy& out) {
  const int page = params.integer("page", 16, 1, most_in_page, "entries per page, a power of two");
  if ((page & (page - 1)) != 0) params.refuse("page", "expected a power of two");
  out.precision.page = page;
}

}  // namespace

entry paged_entry() {
  return {.name = "paged",
          .kind = "precision",
          .slot = "layout",
          .idea =
              "Stores entries in pages that the KV heads of a layer share; empty pages go back to "
              "them. Changes where bytes lie (reserved_bytes, with the slack of pages that are not "
              "full) and how long kernels take, and no other number.",
          .source = "PagedAttention, arXiv 2309.06180",
          .needs = "nothing; runs on the CPU only",
          .deviations = "Pages are per layer, KV head and tier of precision.",
          .example = "h2o:budget=512+int8+paged:page=16",
          .apply = apply};
}

}  // namespace kvreplay::policies
