// Base of the consumer warp groups of the backward by key tiles: dQ of the keys of a block.
//
// Every group reads all of dS, which passes through shared memory as [query][key] with the 128-byte swizzle: stmatrix
// transposes dS^T when it is stored. dQ is added to a workspace (dq_workspace.cuh).
#pragma once
#include "sm90/key_group.cuh"
#include "sm90/wgmma_backward.cuh.j2"

namespace fa2::sm90 {

template <class Spec, class Shape>
class DqOfKeys : protected KeyGroup<Spec, Shape, BackwardMemory<Shape>> {
  protected:
    using Memory = BackwardMemory<Shape>;
    using Base = KeyGroup<Spec, Shape, Memory>;
    using Base::arrive, Base::lane_, Base::memory_, Base::own_, Base::params_, Base::warp_;
    using typename Base::Element;
    static constexpr int kBr = Shape::kBr, kBc = Shape::kBc, kD = Shape::kD;
    // Of a part of the tile's queries; most kernels have one.
    static constexpr int kPartQueries = Shape::kPartQueries;
    using Rounded = PackedFragment<Element, kPartQueries / 8>;
    using Workspace = DqWorkspace<kBr, kD>;

    __device__ DqOfKeys(const Params& params, const Params& maps, const Memory& memory)
        : Base(params, maps, memory), rank_(rank_in_pair<Spec>()) {
        if constexpr (Shape::kPair) read_.turn = rank_;
    }

    // In a pair, buffer 0 is of the steps whose dQ the first block computes, and 1 of those of the second. The block's own,
    // for the keys of both, lies before that which it sends.
    __device__ __forceinline__ uint32 place_of_ds(uint32 buffer) const { return buffer ^ (Shape::kPair ? rank_ : 0); }

    // Writes this warp's 16 keys of dS to the panel of its group's 64 keys, transposed.
    template <int kPart = 0>
    __device__ __forceinline__ void store_ds(const Rounded& ds, int32 panel_index) {
        const uint32 buffer = written_.slot();
        const uint32 panel = memory_.ds(place_of_ds(buffer)) + panel_index * Shape::kDsPanelBytes;
        if constexpr (kPart == 0) mbarrier_wait(memory_.empty_ds(buffer), written_.parity() ^ 1);
        const uint32 row = kPart * kPartQueries + lane_ % 8 + lane_ / 16 * 8,
                     chunk = (warp_ * 2 + lane_ / 8 % 2) ^ (lane_ % 8);
        const uint32 address = panel + row * kPanelRowBytes + chunk * 16;
#pragma unroll
        for (int s = 0; s < kPartQueries / 16; ++s)
            stmatrix_x4_transposed(address + s * 16 * kPanelRowBytes, ds.k16(s));
        if constexpr (kPart + 1 < Shape::kParts) return;
        __syncwarp();
        arrive(memory_.written_ds(buffer));
        written_.advance();
    }

    // K from a column on, as the operand of dQ: MN-major.
    __device__ __forceinline__ uint64 columns_of_k(int32 column) const {
        const uint32 panel = column / Shape::kPanelColumns * Shape::kKeyPanelBytes;
        return matrix_descriptor<Shape::kPanelRowBytes>(memory_.key() + panel + column % Shape::kPanelColumns * 2,
                                                        Shape::kKeyPanelBytes);
    }

    // Issues dQ of the oldest dS tile not yet read (the previous step's in the loop, the last one after it) once that
    // tile is complete. `keys`: MN-major descriptor of K. `ds`: descriptor of dS buffer 0.
    template <int kN8>
    __device__ __forceinline__ void issue_dq(QuadFragment<kN8>& dq, uint64 keys, uint64 ds) const {
        const uint32 buffer = read_.slot();
        mbarrier_wait(memory_.full_ds(buffer), read_.parity());
        ds += place_of_ds(buffer) * (Shape::kDsBytes / 16);
        wgmma_fence();
#pragma unroll
        for (int s = 0; s < Spec::kBc / 16; ++s) {
            const uint64 k =
                keys + s / (kBc / 16) * (Shape::kKeyBytes / 16) + along_rows<Shape::kPanelRowBytes>(s % (kBc / 16));
            const uint64 d = ds + along_columns<Shape::kDsPanelBytes>(s);
            const uint64 a = Shape::kDqTransposed ? k : d, b = Shape::kDqTransposed ? d : k;
            if (s == 0)
                wgmma_first_dq(dq, a, b);
            else
                wgmma_dq(dq, a, b);
        }
        wgmma_commit();
        pin(dq);
    }

    // Adds the dQ of `issue_dq` to the workspace tile of its step. This warp's part of the tile starts at block `row16`
    // of 16 rows and block `column8` of 8 columns. `next`: the step whose dQ is added next. The workspace pointer
    // advances from step to step, which costs the loop less than a 64-bit multiplication. It advances before its use,
    // because advancing it afterwards would wait until all additions have been issued.
    template <int kN8>
    __device__ __forceinline__ void add_dq(const QuadFragment<kN8>& dq, int32 row16, int32 column8,
                                           const QueryStep& next) {
        arrive(memory_.empty_ds(read_.slot()));
        if constexpr (Shape::kPair) {  // the other block may send again, and write what it sends; its own step follows
            if (lane_ == 0) mbarrier_arrive_there(in_block(rank_ ^ 1, memory_.empty_ds(read_.slot())));
            read_.advance();
        }
        read_.advance();
        if constexpr (common::kHasBoxes<Spec>) {
            add_rows(dq, row16, column8, own_.step_before(next));
            return;
        }
        workspace_ += static_cast<int64>(tiles_to_walk_) * Workspace::kTileElements;
        // In dQ^T = K^T dS^T, rows are columns of K: those of a panel may exceed kD.
        constexpr bool kAllRows = !Workspace::kTransposed || kD == 2 * kPanelColumns;
        if (kAllRows || row16 < Workspace::kRows / 16) {
#pragma unroll
            for (int n = 0; n < kN8; ++n)
                if (column8 + n < Workspace::kColumns / 8)
                    add_global(workspace_ + Workspace::offset(0, n, 0), dq.value[n]);
        }
        tiles_to_walk_ = 0;
        if constexpr (!Shape::kPair) walk_to(next);
    }

    // Adds dQ of a box of tokens to the workspace of rows, two blocks of columns at a time. There are registers to find the
    // rows here, but not to keep them from step to step.
    template <int kN8>
    __device__ __forceinline__ void add_rows(const QuadFragment<kN8>& dq, int32 row16, int32 column8,
                                             const QueryStep& step) const {
        static_assert(kN8 % 2 == 0 && !Workspace::kTransposed);
        const int64 head = static_cast<int64>(own_.batch) * params_.num_heads + step.head;
        const auto place = own_.queries.place(step.tile);
        const int32 lane = as_if_new(lane_);
        float* workspace = params_.dq_accum + Workspace::offset_in_row(column8, lane);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int32 row = own_.queries.position(params_, place, 16 * row16 + QuadFragment<kN8>::row(i, lane));
            if (row >= params_.seqlen_q) continue;
            float* to = workspace + (head * ceil_div(params_.seqlen_q, kBr) * kBr + row) * kD;
#pragma unroll
            for (int n = 0; n < kN8; n += 2)
                if (column8 + n < kD / 8)
                    add_global(to + 8 * n, {dq.value[n][2 * i], dq.value[n][2 * i + 1], dq.value[n + 1][2 * i],
                                            dq.value[n + 1][2 * i + 1]});
        }
    }

    // Walks to the step whose dQ is added next; in a pair to every step, also to those of the other block.
    __device__ __forceinline__ void walk_to(const QueryStep& step) {
        if constexpr (common::kListsTiles<Spec>) {
            tiles_to_walk_ -= added_tile_;
            tiles_to_walk_ += added_tile_ = tile_of_group(step);
        } else {
            tiles_to_walk_ += tiles_ahead_of(step);
        }
    }
    // At a head change, skip the query tiles outside this key tile's range.
    __device__ __forceinline__ int32 tiles_ahead_of(const QueryStep& step) const {
        return step.tile == own_.tiles.begin ? query_tiles() - own_.tiles.end + own_.tiles.begin + 1 : 1;
    }

    // Waits until all warps have completed their last dQ; after it no warp reads K or V.
    __device__ __forceinline__ void wait_for_last_dq() const {
        if (Shape::kPair && read_.turn == rank_) return;  // all were the other block's
        const auto last = Shape::kPair ? read_.previous().previous() : read_.previous();
        mbarrier_wait(memory_.empty_ds(last.slot()), last.parity());
    }

    // Sets the workspace pointer to this lane's part of the first step's dQ. `params` is of a template type because the
    // record has a workspace only in kernels that compute dQ.
    template <class Record>
    __device__ __forceinline__ void start_adding(const Record& params, int32 row16, int32 column8) {
        if constexpr (common::kHasBoxes<Spec>) return;
        const QueryStep step = own_.at(own_.first_step());
        if constexpr (Shape::kPair && !common::kListsTiles<Spec>) tiles_to_walk_ = -tiles_ahead_of(own_.first_step());
        if constexpr (common::kListsTiles<Spec>) added_tile_ = tile_of_group(own_.first_step());
        const int64 first = Spec::kVarlen
                                ? common::first_workspace_tile<Spec>(params, own_.batch, step.head)
                                : (static_cast<int64>(own_.batch) * params.num_heads + step.head) * query_tiles();
        workspace_ =
            params.dq_accum + (first + step.tile) * Workspace::kTileElements + Workspace::offset(row16, column8, lane_);
    }

    // Query tiles of a head in the workspace, including those outside this key tile's range.
    __device__ __forceinline__ int32 query_tiles() const {
        if constexpr (Spec::kVarlen) return common::workspace_tiles<Spec>(params_);
        return common::kLeftLimit<Spec> || common::kListsTiles<Spec> ? ceil_div(params_.seqlen_q, kBr) : own_.tiles.end;
    }

    // The number of a step's query tile among those of the group in the workspace.
    __device__ __forceinline__ int32 tile_of_group(const QueryStep& step) const {
        const QueryStep own = own_.at(step);
        return (own.head - own_.first_query_head) * query_tiles() + own.tile;
    }

    const uint32 rank_;               // of the block in a pair
    RingPosition<2> written_, read_;  // in the ring of dS buffers
    float* workspace_ = nullptr;      // this lane's part of the tile of the last added dQ
    int32 tiles_to_walk_ = 0;
    int32 added_tile_ = 0;  // under a sparse map, the number of that tile in the group
};

}  // namespace fa2::sm90
