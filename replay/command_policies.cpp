#include <fmt/format.h>

#include "policies/catalogue.hpp"
#include "replay/commands.hpp"

namespace kvreplay::replay {

int run_policies(const policies_command& command) {
  fmt::print("{}", command.name.empty() ? policies::catalogue_table()
                                        : policies::manual_page(command.name));
  return exit_ok;
}

}  // namespace kvreplay::replay
