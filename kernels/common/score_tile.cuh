// Where a warp's fragment of scores lies. What features do to a score depends on its query, key and head: whether a
// mask hides it, which bias is added to it, whether dropout drops it.
#pragma once
#include "common/types.cuh"

namespace fa2::common {

// Within the scores of one head: all that a mask by position needs. `lane` is the one that asks for its elements.
struct TilePosition {
    int32 first_query, first_key, lane;
};

// Within all scores. A tile of S^T lies where that of S does: only its fragment is transposed.
struct ScoreTile {
    int32 batch, head;
    TilePosition position;

    // The tile so many queries and keys further.
    __device__ __forceinline__ ScoreTile shifted(int32 queries, int32 keys) const {
        return {batch, head, position.first_query + queries, position.first_key + keys, position.lane};
    }
};

}  // namespace fa2::common
