#include "policies/policy.hpp"
