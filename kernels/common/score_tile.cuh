// The position of a warp's fragment of scores. Features need it: masks, biases and dropout treat each score according
// to its query, key, head and batch.
#pragma once
#include "common/types.cuh"

namespace fa2::common {

// The position within the scores of one head, which is all that a mask by position needs, and the calling lane.
struct TilePosition {
    int32 first_query, first_key, lane;
};

// The position within all scores. A tile of S^T has the same position as the tile of S: only its fragment is
// transposed.
struct ScoreTile {
    int32 batch, head;
    TilePosition position;

    // The tile `queries` rows and `keys` columns further on.
    __device__ __forceinline__ ScoreTile shifted(int32 queries, int32 keys) const {
        return {batch, head, position.first_query + queries, position.first_key + keys, position.lane};
    }
};

}  // namespace fa2::common
