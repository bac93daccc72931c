// visionzip: of an image, the tokens that its encoder attended to most stay.
// Paper: VisionZip, arXiv 2412.04467. Idea: a few dominant tokens carry most of an image.
// Deviations: the published method merges the others into contextual tokens; merged tokens have no
// keys in a trace and cannot be replayed.
#include "policies/catalogue.hpp"
#include "policies/parts.hpp"

namespace kvreplay::policies {
namespace {

void apply(param_reader& params, policy& out) {
  out.image.dominant =
      params.integer("dominant", 54, 0, no_upper_limit, "image tokens that stay, by image_score");
  out.score.kind = score_kind::image;
}

}  // namespace

entry visionzip_entry() {
  return {.name = "visionzip",
          .kind = "policy",
          .idea =
              "Keeps the image tokens with the largest saliency in the vision encoder, in every "
              "layer. Selects once, after the prompt; other tokens stay.",
          .source = "VisionZip, arXiv 2412.04467",
          .needs = "an image span and image_score",
          .deviations =
              "Contextual tokens, merged from the others, are left out: a trace has no keys for "
              "them. Tokens leave after the prompt pass.",
          .example = "visionzip:dominant=54",
          .composes = false,
          .apply = apply};
}

}  // namespace kvreplay::policies
