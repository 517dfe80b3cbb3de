// Base of the warp groups that compute gradients of a key tile, or their tangents: the order of the steps, and the store.
#pragma once
#include "sm90/backward_shape.cuh"
#include "sm90/store_box.cuh"

namespace fa2::sm90 {

template <class Spec, class Shape, class Memory>
class KeyGroup {
  protected:
    using Element = typename Spec::Element;
    static constexpr int kStoreBarrier = 1;  // a named barrier for each group

    __device__ KeyGroup(const Params& params, const Params& maps, const Memory& memory)
        : params_(params),
          maps_(maps),
          memory_(memory),
          warp_(__shfl_sync(common::kFullWarp, threadIdx.x / 32 % 4, 0)),
          lane_(threadIdx.x % 32),
          own_(key_tile<Spec>(params)) {}

    // Runs all steps of the block. With a right limit only, the query tiles that need the mask come first and have a
    // separate loop. With a left limit they are at both ends, and every step tests at run time whether it needs the
    // mask: with one more copy of the step the compiler would serialise its wgmmas. All boxes of tokens need it.
    template <class Group>
    static __device__ __forceinline__ void take_steps(Group& group) {
        const KeyTile<Spec>& own = group.own_;
        const int32 end_head = own.end_head(group.params_);
#pragma unroll 1
        for (int32 head = own.first_step().head; head < end_head; ++head) {
            int32 tile = own.begin_of(head);
            const int32 end = own.end_of(head);
            const int32 masked_end = Spec::kSplit ? min_of(own.tiles.full_begin, end) : own.tiles.full_begin;
            constexpr bool kMasksAll = common::kLeftLimit<Spec> || common::kHasBoxes<Spec>;
#pragma unroll 1
            for (; tile < (kMasksAll ? end : masked_end); ++tile) group.template step<true>({head, tile});
            if constexpr (!kMasksAll) {
#pragma unroll 1
                for (; tile < end; ++tile) group.template step<false>({head, tile});
            }
        }
    }

    template <bool kMasked>
    __device__ __forceinline__ bool needs_mask(const QueryStep& step) const {
        return kMasked &&
               (!common::kLeftLimit<Spec> || step.tile < own_.tiles.full_begin || step.tile >= own_.tiles.full_end);
    }

    __device__ __forceinline__ common::ScoreTile score_tile(const QueryStep& step, int32 first_key) const {
        const QueryStep own = own_.at(step);
        return {own_.batch, own.head, {own.tile * Shape::kBr, first_key + 16 * warp_, lane_}};
    }

    // Lane 0 arrives for its warp; the warp must have converged.
    __device__ __forceinline__ void arrive(uint32 barrier) const {
        if (lane_ == 0) mbarrier_arrive(barrier);
    }

    // Stores this warp's 16 rows of a gradient by TMA; they pass through the rows of K or V in shared memory from `row`
    // on.
    template <int kN8>
    __device__ __forceinline__ void store_gradient(const QuadFragment<kN8>& x, float scale, const TensorMap& map,
                                                   uint32 smem, int32 row) const {
        constexpr uint32 kRowBytes = Shape::kPanelRowBytes;
        const uint32 box = smem + row * kRowBytes, lane_row = lane_ % 16;
        PackedFragment<Element, 2> packed;
#pragma unroll
        for (int n = 0; n < kN8; n += 2) {
#pragma unroll
            for (int j = 0; j < 2; ++j)
#pragma unroll
                for (int i = 0; i < 2; ++i)
                    packed.set(i, j, x.value[n + j][2 * i] * scale, x.value[n + j][2 * i + 1] * scale);
            const uint32 chunk = chunk_in_box<kRowBytes>(n, lane_);
            stmatrix_x4(box + n / 8 * Shape::kKeyPanelBytes + lane_row * kRowBytes + chunk * 16, packed.k16(0));
        }
        async_proxy_fence();
        __syncwarp();
        if (lane_ == 0) {
#pragma unroll
            for (int panel = 0; panel < ceil_div(kN8 * 8, kPanelColumns); ++panel)
                own_.keys.store(map, box + panel * Shape::kKeyPanelBytes, panel * kPanelColumns, own_.first_key + row,
                                own_.head, own_.batch);
            tma_store_commit();
        }
    }

    const Params &params_, &maps_;  // the sequence's record; the kernel's parameter, where TMA reads its maps
    const Memory memory_;
    const int32 warp_, lane_;
    const KeyTile<Spec> own_;
};

}  // namespace fa2::sm90
