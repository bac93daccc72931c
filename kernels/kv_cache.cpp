#include "kernels/kv_cache.hpp"
