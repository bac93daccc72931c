#include "reports/result.hpp"
