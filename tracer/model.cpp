#include "tracer/model.hpp"
