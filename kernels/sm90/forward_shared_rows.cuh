// The forward beyond 256 columns, where two consumer warp groups have the same 64 rows. forward.cuh introduces the family,
// and shared_rows_consumer.cuh has the order of the products.
//
// A block has 64 rows. Two blocks may be a cluster, which has a query tile of 128: K and V are read once for both, as each
// block loads half of their panels to the shared memory of both. A stage is empty when the groups of both blocks have
// read it. The tiles of a cluster are known in advance (next_index), so that the blocks need not agree on them.
//
// No deadlock is possible. Both blocks have the same key tiles, and their producers load them in the same order. A producer
// waits for stages, which the consumers of both blocks release in that order, and for Q's buffer, which those of its own
// block release: by then it has loaded all K and V of the query tile before, for both blocks.
//
// Shared memory, in panels of 64 columns:
//
//   Q [64][the wider of D and Dv], through which O is stored | K [kStages][kBc][D] | V [1 or 2 stages][kBc][Dv] | P and row
//   statistics that a group hands to the other | next query tiles [4] | barriers
//
// Barriers: as in forward.cuh, but V has a pair for each group's columns.
#pragma once
#include "sm90/forward_kernel.cuh"
#include "sm90/forward_producer.cuh"
#include "sm90/forward_shared_rows_consumer.cuh"
#include "sm90/shared_rows_producer.cuh"

namespace fa2::sm90 {

template <class Spec, class Shape = SharedRowsShape<Spec>, class Memory = SharedRowsMemory<Shape>>
using Forward = ForwardKernel<Shape, Memory, ForwardProducer<Spec, Shape, Memory, SharedRowsLoads<Spec>>,
                              ForwardSharedRowsConsumer<Spec>>;

}  // namespace fa2::sm90
