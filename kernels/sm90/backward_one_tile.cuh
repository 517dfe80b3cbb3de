// one_tile: short sequences are bound by latencies and memory, and not by products, so that mma.sync does for them.
#pragma once
#include "sm80/backward_one_tile.cuh"

namespace fa2::sm90 {

using sm80::BackwardOneTile;

}  // namespace fa2::sm90
