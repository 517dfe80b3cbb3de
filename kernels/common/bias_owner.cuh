// Blocks that own tiles of a broadcast bias: the scores that share a block's tile, and the result.
//
// A tile of the bias has kBr queries and kBc keys, one of each axis along which the bias is broadcast. A block visits the
// tiles of scores that share its own one after the other, always in the same order: of all sequences, heads, query tiles
// and key tiles along which the bias is broadcast. It sums the gradients of the scores in registers, so that each element
// of dbias is written once and has the same bits in each run. Sums over queries or keys are taken of the tile at the end.
//
// Which sequences share a tile depends on the leading axes that the bias has. `owned_strides` of the record lead from the
// number of a bias tile's sequence to the first sequence that shares it, and `shared_strides` from there to the others
// (fa2cupy/problem/strides.py). Along the other axes, the strides of dbias say what the bias is broadcast along.
//
// If tiles are few, several blocks divide the sequences that share one (kSplit). Each leaves its sums in an array of its
// own, of dbias's shape in C order, to which dbias_strides then belong; sum_dbias.cuh adds up the arrays.
#pragma once
#include "common/dbias.cuh"
#include "common/score_tile.cuh"
#include "common/sequence.cuh"
#include "common/shares.cuh"
#include "common/tile_lists.cuh"

namespace fa2::common {

// A range of an axis along which scores share a bias, or a single index of it.
struct Shared {
    int32 begin, end;

    // Takes the index from the number of a block, of which it leaves the numbers along other axes.
    __device__ __forceinline__ static Shared take(int32& block, int64 stride, int32 length) {
        if (stride == 0) return {0, length};
        const int32 index = block % length;
        block /= length;
        return {index, index + 1};
    }
};

// A tile of scores that a block visits.
struct BiasStep {
    int32 batch, head, query_tile, key_tile;
    bool masked;  // it has pairs that are not visible
};

// The threads of a block all of whose warps have sums.
template <class Spec>
struct AllThreads {
    static constexpr int kWarps = Spec::kWarps;
    __device__ __forceinline__ static int32 index() { return threadIdx.x; }
    __device__ __forceinline__ static int32 number() { return blockDim.x; }
    __device__ __forceinline__ static void sync() { __syncthreads(); }
};

// The tile of the bias that a block owns.
template <class Spec, class Record>
class OwnedTile {
  protected:
    static constexpr int kBr = Spec::kBr, kBc = Spec::kBc;

  public:
    __device__ __forceinline__ explicit OwnedTile(const Record& params) : params_(params) {
        int32 block = blockIdx.x;
        const ScoreStrides& strides = params.dbias_strides.inside();
        if constexpr (Spec::kSplit) share_ = Shared::take(block, 1, params.num_splits).begin;
        keys_ = Shared::take(block, strides.column, ceil_div(params.bias_columns, kBc));
        queries_ = Shared::take(block, strides.row, ceil_div(params.bias_rows, kBr));
        heads_ = Shared::take(block, strides.head, params.num_heads);
        first_ = static_cast<int32>(params.owned_strides.offset(block, 0, 0, 0));
    }

    // Copies the bias of a warp's rows, from `warp_row` on, to `smem` (bias_tile.cuh). The array has the rows and keys of
    // the bias, which may be more than those of a sequence.
    template <class Tile>
    __device__ __forceinline__ void load_bias(uint32 smem, int32 warp_row, int32 lane) const {
        struct {
            decltype(Record::bias) bias;
            const decltype(Record::bias_strides)& bias_strides;
            int32 seqlen_q, seqlen_k;
        } const array{params_.bias, params_.bias_strides, params_.bias_rows, params_.bias_columns};
        const ScoreTile own{first_, heads_.begin, {queries_.begin * kBr + warp_row, keys_.begin * kBc, lane}};
        if (Tile::takes(params_))
            Tile::load(smem, array, own);
        else
            Tile::load_elements(smem, array, own);
        Tile::wait(smem, lane);
    }

    // Stores the sums of the block. A warp has kM fragments, one below the other from row `warp_row` of the tile on.
    // `scratch` is shared memory of kBc elements for each warp, which no warp reads any more behind a barrier. `Threads`
    // are those that have sums.
    template <class Threads = AllThreads<Spec>, class Fragment, class Real, int kM>
    __device__ __forceinline__ void store(const Fragment (&sums)[kM], Real* scratch, int32 warp_row, int32 warp,
                                          int32 lane) const {
        constexpr int kLanes = Fragment::kLanesPerRow, kStep = Fragment::kLaneStep;
        constexpr int kFragmentRows = Fragment::kRows * (32 / kLanes);
        const ScoreStrides& strides = params_.dbias_strides.inside();
        const bool sums_queries = strides.row == 0, sums_keys = strides.column == 0;
        const int32 first_row = sums_queries ? 0 : queries_.begin * kBr, first_key = sums_keys ? 0 : keys_.begin * kBc;
        auto* first = result() + params_.dbias_strides.offset(first_, heads_.begin, first_row, first_key);
        const int32 rows = params_.bias_rows - first_row, keys = params_.bias_columns - first_key;
        if (!sums_queries) {
#pragma unroll
            for (int m = 0; m < kM; ++m) {
                const int32 own_row = warp_row + m * kFragmentRows;
                auto* own = first + own_row * strides.row;
                if (!sums_keys) {
                    store_elements(sums[m], own, strides, rows - own_row, keys, lane);
                    continue;
                }
#pragma unroll
                for (int i = 0; i < Fragment::kRows; ++i) {
                    Real of_row = 0;
#pragma unroll
                    for (int j = 0; j < Fragment::kCols; ++j) of_row += sums[m](i, j);
                    of_row = row_sum<kLanes, kStep>(of_row);
                    const int32 row = Fragment::row(i, lane);
                    if (lane / kStep % kLanes == 0 && row < rows - own_row)
                        store_rounded(own + row * strides.row, of_row);
                }
            }
            return;
        }
        Threads::sync();  // no warp reads operands any more
#pragma unroll
        for (int j = 0; j < Fragment::kCols; ++j) {
            Real of_column = 0;
#pragma unroll
            for (int m = 0; m < kM; ++m)
#pragma unroll
                for (int i = 0; i < Fragment::kRows; ++i) of_column += sums[m](i, j);
            of_column = column_sum<kLanes, kStep>(of_column);
            if (lane % kStep == 0 && lane < kStep * kLanes) scratch[warp * kBc + Fragment::col(j, lane)] = of_column;
        }
        Threads::sync();  // the sums of all warps are there
        for (int32 key = Threads::index(); key < kBc; key += Threads::number()) {
            Real sum = 0;
#pragma unroll
            for (int w = 0; w < Threads::kWarps; ++w) sum += scratch[w * kBc + key];
            if (!sums_keys && key < keys) store_rounded(first + key * strides.column, sum);
            scratch[key] = sum;
        }
        Threads::sync();  // those of all keys are there
        if (!sums_keys || warp != 0) return;
        Real all = 0;
        for (int32 key = lane; key < kBc; key += 32) all += scratch[key];
        all = row_sum<32>(all);
        if (lane == 0) store_rounded(first, all);
    }

  private:
    // The first element of dbias, or of the block's share.
    __device__ __forceinline__ auto* result() const {
        if constexpr (Spec::kSplit)
            return params_.shares + blockIdx.x % params_.num_splits * params_.share_elements;
        else
            return params_.dbias;
    }

  protected:
    const Record& params_;
    Shared keys_, queries_, heads_;
    int32 first_, share_ = 0;
};

// The heads that share a tile of a bias with all queries and keys. Several blocks divide their sequences, and leave sums
// of their own in arrays of dbias's shape, to which dbias_strides belong.
template <class Spec, class Record>
class HeadOwner {
  public:
    __device__ __forceinline__ explicit HeadOwner(const Record& params) : params_(params) {
        int32 block = blockIdx.x;
        const int32 share = Shared::take(block, 1, params.num_splits).begin;
        heads_ = Shared::take(block, params.dbias_strides.inside().head, params.num_heads);
        first_ = static_cast<int32>(params.owned_strides.offset(block, 0, 0, 0));
        own_ = steps_of_share(params.shared_sequences, params.num_splits, share);
        sums_ = params.shares + share * params.share_elements + params.dbias_strides.offset(first_, heads_.begin, 0, 0);
    }
    // Calls visit(batch, head) for each head, always in the same order.
    template <class Visit>
    __device__ __forceinline__ void visit(const Visit& visit) const {
        for (int32 sharer = own_.begin; sharer < own_.end; ++sharer) {
            const int32 batch = first_ + static_cast<int32>(params_.shared_strides.offset(sharer, 0, 0, 0));
            for (int32 head = heads_.begin; head < heads_.end; ++head) visit(batch, head);
        }
    }
    // Stores the sum of an element, if it exists.
    __device__ __forceinline__ void store(int32 query, int32 key, float sum) const {
        const ScoreStrides& strides = params_.dbias_strides.inside();
        if (query < params_.seqlen_q && key < params_.seqlen_k) sums_[query * strides.row + key * strides.column] = sum;
    }

  private:
    const Record& params_;
    Shared heads_;
    StepRange own_;
    int32 first_;
    float* sums_;
};

// The tiles of scores that share it, in the order in which the block visits them.
template <class Spec, class Record>
class BiasOwner : public OwnedTile<Spec, Record> {
    using Base = OwnedTile<Spec, Record>;
    using Base::first_, Base::heads_, Base::kBc, Base::kBr, Base::keys_, Base::params_, Base::queries_, Base::share_;

  public:
    __device__ __forceinline__ explicit BiasOwner(const Record& params) : Base(params), end_(params.shared_sequences) {
        if constexpr (Spec::kSplit) {
            const StepRange own = steps_of_share(end_, params.num_splits, share_);
            sharer_ = own.begin;
            end_ = own.end;
        }
        head_ = heads_.begin;
        query_tile_ = queries_.begin;
        enter();
        skip_empty();
    }

    __device__ __forceinline__ bool has_step() const { return sharer_ < end_; }
    __device__ __forceinline__ BiasStep step() const {
        const bool masked = position_ >= tiles_.full_end || (tiles_.kLeftLimit && position_ < tiles_.full_begin);
        return {batch_, head_, query_tile_, tiles_.at(position_), masked};
    }
    __device__ __forceinline__ void advance() {
        ++position_;
        skip_empty();
    }

  private:
    // Goes on to the next query tile, head or sequence until there is a key tile, or no sequence is left.
    __device__ __forceinline__ void skip_empty() {
        while (has_step() && position_ >= tiles_.end) {
            if (++query_tile_ == queries_.end) {
                query_tile_ = queries_.begin;
                if (++head_ == heads_.end) {
                    head_ = heads_.begin;
                    ++sharer_;
                }
            }
            enter();
        }
    }
    // Finds the key tiles of the block that the query tile sees, if it exists.
    __device__ __forceinline__ void enter() {
        position_ = tiles_.end = 0;
        if (!has_step()) return;
        batch_ = first_ + static_cast<int32>(params_.shared_strides.offset(sharer_, 0, 0, 0));
        const auto& own = record_of_sequence<Spec>(params_, batch_);
        if (query_tile_ * kBr >= own.seqlen_q) return;
        tiles_ = key_tiles<Spec>(own, {query_tile_, head_, batch_});
        position_ = tiles_.begin;
        if constexpr (!KeyTiles<Spec>::kListed) {
            position_ = max_of(position_, keys_.begin);
            tiles_.end = min_of(tiles_.end, keys_.end);
        } else if (keys_.end == keys_.begin + 1) {
            const int32 lane = threadIdx.x % 32, end = tiles_.end;
            uint32 found = 0;
            for (tiles_.end = 0; position_ < end; position_ += 32) {
                const bool exists = position_ + lane < end;
                found = __ballot_sync(kFullWarp, exists && tiles_.at(position_ + lane) == keys_.begin);
                if (found == 0) continue;
                position_ += __ffs(found) - 1;
                tiles_.end = position_ + 1;
                return;
            }
        }
    }

    int32 sharer_ = 0, end_, batch_, head_, query_tile_, position_;
    KeyTiles<Spec> tiles_;
};

}  // namespace fa2::common
