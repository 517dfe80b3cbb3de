// The producer warp group of the tangents of dK and dV. Jobs of its warps:
//
//   0       one thread loads K, V and their tangents, by TMA
//   1, 2    load Q (warp 1) and dO (warp 2) of one query tile after the other, with their tangents, by TMA, and write the
//           statistics: lse in base 2 and lse' (warp 1), delta and delta' (warp 2)
//
// An lse of +infinity makes P zero in rows beyond the sequence and in rows without a visible key. What Q, dO and their
// tangents hold in the latter may be NaN, which P = 0 would not keep out of the sums over queries: these rows are cleared.
#pragma once
#include "common/statistics.cuh"
#include "sm90/dkdv_jvp_shape.cuh"

namespace fa2::sm90 {

template <class Spec>
class DkdvJvpProducer {
    using Shape = DkdvJvpShape<Spec>;
    using Memory = DkdvJvpMemory<Shape>;
    static constexpr int kBr = Shape::kBr;

  public:
    __device__ DkdvJvpProducer(const Params& params, const Params& maps, const Memory& memory)
        : params_(params), maps_(maps), memory_(memory), own_(key_tile<Spec>(params)) {}

    __device__ void run() {
        if (common::may_hide_rows<Spec>(params_))
            run_with<true>();
        else
            run_with<false>();
    }

  private:
    // kHides: there may be rows that see no key.
    template <bool kHides>
    __device__ void run_with() {
        const int32 warp = threadIdx.x / 32;
        if (warp == 0 && threadIdx.x == 0) load_keys();
        if (warp == 1) load_queries<true, kHides>();
        if (warp == 2) load_queries<false, kHides>();
    }

    __device__ void load_keys() const {
        const uint32 key = memory_.full_key(), value = memory_.full_value();
        mbarrier_arrive_expect(key, (1 + Spec::kKeyTangent) * Shape::kKeyBytes);
        load_keys<Shape::kPanels>(maps_.k, memory_.key(), key);
        if constexpr (Spec::kKeyTangent) load_keys<Shape::kPanels>(maps_.kt, memory_.key_tangent(), key);
        mbarrier_arrive_expect(value, (1 + Spec::kValueTangent) * Shape::kValueBytes);
        load_keys<Shape::kPanelsV>(maps_.v, memory_.value(), value);
        if constexpr (Spec::kValueTangent) load_keys<Shape::kPanelsV>(maps_.vt, memory_.value_tangent(), value);
    }
    template <int kPanels>
    __device__ void load_keys(const TensorMap& map, uint32 smem, uint32 full) const {
#pragma unroll
        for (int panel = 0; panel < kPanels; ++panel)
            own_.keys.load(smem + panel * Shape::kKeyPanelBytes, map, full, panel * kPanelColumns, own_.first_key,
                           own_.head, own_.batch);
    }

    template <bool kQ>
    static constexpr bool kMoves = kQ ? Spec::kQueryTangent : Spec::kDoutTangent;
    template <bool kQ>
    static constexpr int kPanelsOf = kQ ? Shape::kPanels : Shape::kPanelsV;
    template <bool kQ>
    static constexpr int kPanelBytes = kQ ? Shape::kQueryPanelBytes : Shape::kDoutPanelBytes;
    template <bool kQ>
    __device__ uint32 rows_of(uint32 stage) const {
        return kQ ? memory_.query(stage) : memory_.dout(stage);
    }

    // Loads Q or dO of all steps. The loads of statistics are in flight while the warp waits for a stage.
    template <bool kQ, bool kHides>
    __device__ void load_queries() const {
        constexpr int kRows = ceil_div(kBr, 32);  // of a lane
        const int32 lane = threadIdx.x % 32;
        const uint32 landed = kQ ? memory_.landed_query() : memory_.landed_dout();
        RingPosition<Shape::kStages> ring;
        uint32 landed_parity = 0;
        QueryStep step = own_.first_step();
#pragma unroll 1
        while (own_.has(step, params_)) {
            const QueryStep own = own_.at(step);
            const uint32 stage = ring.slot();
            const uint32 full = kQ ? memory_.full_query(stage) : memory_.full_dout(stage);
            float statistic[kRows], tangent[kRows];
            uint32 hidden[kRows], hides = 0;
#pragma unroll
            for (int i = 0; i < kRows; ++i) {
                const bool is_hidden = load_row<kQ, kHides>(own, lane + 32 * i, statistic[i], tangent[i]);
                if constexpr (kHides) hides |= hidden[i] = __ballot_sync(common::kFullWarp, is_hidden);
            }
            const bool clears = kHides && hides != 0;
            mbarrier_wait(kQ ? memory_.empty_query(stage) : memory_.empty_dout(stage), ring.parity() ^ 1);
            if (lane == 0) {
                load_boxes<kQ>(stage, own, clears ? landed : full);
                if (clears) mbarrier_arrive(full);
            }
#pragma unroll
            for (int i = 0; i < kRows; ++i) {
                const int32 query = lane + 32 * i;
                const uint32 address = (kQ ? memory_.lse(stage) : memory_.delta(stage)) + 8 * query;
                if (query < kBr) store_shared(address, statistic[i]);
                if (query < kBr) store_shared(address + 4, tangent[i]);
            }
            if (clears) {
                mbarrier_wait(landed, landed_parity);
                landed_parity ^= 1;
#pragma unroll
                for (int i = 0; i < kRows; ++i) clear_rows<kQ>(rows_of<kQ>(stage), 32 * i, hidden[i], lane);
                async_proxy_fence();
            }
            mbarrier_arrive(full);
            ring.advance();
            if (++step.tile == own_.tiles.end) {
                step.tile = own_.tiles.begin;
                ++step.head;
            }
        }
    }

    // Loads the statistics of a query of a tile. The result is true if the query exists and sees no key.
    template <bool kQ, bool kHides>
    __device__ bool load_row(const QueryStep& own, int32 query, float& statistic, float& tangent) const {
        const int32 row = own.tile * kBr + query;
        statistic = kQ ? common::infinity<float>() : 0.0f;
        tangent = 0.0f;
        if (query >= kBr || row >= params_.seqlen_q) return false;
        const int64 index = common::first_statistic<Spec>(params_, own_.batch, own.head) + row;
        const float lse = kQ || kHides ? params_.lse[index] : 0.0f;
        if (lse == -common::infinity<float>()) return true;
        statistic = kQ ? common::in_base2(lse) : params_.delta[index];
        tangent = (kQ ? params_.lset : params_.deltat)[index];
        return false;
    }

    // Loads a tile of Q or dO and of its tangent.
    template <bool kQ>
    __device__ void load_boxes(uint32 stage, const QueryStep& own, uint32 barrier) const {
        mbarrier_arrive_expect(barrier, kPanelsOf<kQ> * kPanelBytes<kQ>);
        load_box<kQ>(rows_of<kQ>(stage), kQ ? maps_.q : maps_.dout, own, barrier);
        if constexpr (kMoves<kQ>)
            load_box<kQ>(rows_of<kQ>(stage) + Shape::kTileRowsBytes, kQ ? maps_.qt : maps_.dot, own, barrier);
    }
    template <bool kQ>
    __device__ void load_box(uint32 smem, const TensorMap& map, const QueryStep& own, uint32 barrier) const {
#pragma unroll
        for (int panel = 0; panel < kPanelsOf<kQ>; ++panel)
            own_.queries.load(smem + panel * kPanelBytes<kQ>, map, barrier, panel * kPanelColumns, own.tile * kBr,
                              own.head, own_.batch);
    }

    // Stores zeros to rows of a tile and of its tangent: those of the bits of `rows`, which begin at row `first`. Each
    // lane has a chunk of a row, of one or two panels.
    template <bool kQ>
    __device__ static void clear_rows(uint32 smem, int32 first, uint32 rows, int32 lane) {
        constexpr int32 kChunks = 8 * kPanelsOf<kQ>;
        const uint32 panel = lane % kChunks < 8 ? 0 : kPanelBytes<kQ>,
                     tangent = lane < kChunks ? 0 : Shape::kTileRowsBytes;
        const uint32 chunk = smem + panel + tangent + first * kPanelRowBytes + lane % 8 * 16;
#pragma unroll 1
        for (; rows != 0; rows &= rows - 1)
            if (lane < kChunks * (1 + kMoves<kQ>)) store_shared(chunk + (__ffs(rows) - 1) * kPanelRowBytes, 0, 0, 0, 0);
    }

    const Params &params_, &maps_;  // the sequence's record; the kernel's parameter, where TMA reads its maps
    const Memory memory_;
    const KeyTile<Spec> own_;
};

}  // namespace fa2::sm90
