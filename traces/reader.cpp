#include "traces/reader.hpp"
