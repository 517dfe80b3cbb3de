// The arithmetic of a warp in decode/decode.cuh on mma.sync: S = Q K^T and O = P V of 16 or 32 keys, for up to 32 rows of
// the query heads that share them. Few of the rows may exist: the tensor cores have time, as memory bounds the kernel.
#pragma once
#include "common/online_softmax.cuh"
#include "decode/decode.cuh"
#include "sm80/multiply.cuh"

namespace fa2::sm80 {

template <class Spec>
class DecodeWarp {
  public:
    static constexpr int kD = padded_head_dim(Spec::kHeadDim), kDv = padded_head_dim(Spec::kHeadDimV);
    // Warps that compute the same S, and have a part of the columns of O each.
    static constexpr int kSharers = sharers_of_gradient(kDv);
    static constexpr int kKeys = Spec::kBc / (Spec::kWarps / kSharers);  // of a step
    // V is the first columns of K, and not copied.
    static constexpr bool kValuesInKeys = Spec::kHeadDim > 512, kRefills = false, kCopiesMeanwhile = false,
                          kSendsRows = false;
    static constexpr int kProducers = 0;

  private:
    using Element = typename Spec::Element;
    static constexpr int kBr = Spec::kBr, kM16 = kBr / 16, kThreads = 32 * kSharers, kPartCols = kDv / kSharers;
    using QTile = SmemTile<kBr, kD>;
    using KTile = SmemTile<kKeys, kD>;
    using VTile = SmemTile<kKeys, kValuesInKeys ? kD : kDv>;
    using Scores = QuadFragment<kKeys / 8>;
    using Output = QuadFragment<kPartCols / 8>;
    using Softmax = common::OnlineSoftmax<float, 2, 4, common::exp2_approx>;
    using Job = decode::Job;
    static_assert(kBr % 16 == 0);

  public:
    static constexpr int kColumns = kDv;
    static constexpr int kKeyBytes = KTile::kBytes, kQueryBytes = QTile::kBytes, kScratchBytes = 0;
    // A slot has room for K and V, and for 16 rows of O.
    static constexpr int kSlotBytes = common::max_of(kKeyBytes + (kValuesInKeys ? 0 : VTile::kBytes), 16 * kDv * 4);

    // Starts the copy of a job's rows of Q by all threads of the block.
    template <int kThreads>
    __device__ __forceinline__ static void copy_queries(char* to, const Params& params, const Job& job, int32 rows) {
        const decode::QueryRows<Spec, Params> source_of{params, job, rows};
        load_rows_async<QTile, kThreads, Spec::kHeadDim>(shared_address(to), source_of, threadIdx.x);
    }
    // Waits for the warps that share keys.
    __device__ __forceinline__ static void sync() {
        if constexpr (kSharers > 1)
            barrier_sync(1 + threadIdx.x / kThreads, kThreads);
        else
            __syncwarp();
    }
    // Starts the copy of the warps' rows of K, or of V.
    template <class SourceOf>
    __device__ __forceinline__ static void copy_keys(char* to, const SourceOf& source_of) {
        load_rows_async<KTile, kThreads, Spec::kHeadDim>(shared_address(to), source_of, threadIdx.x % kThreads);
    }
    template <class SourceOf>
    __device__ __forceinline__ static void copy_values(char* to, const SourceOf& source_of) {
        load_rows_async<VTile, kThreads, Spec::kHeadDimV>(shared_address(to), source_of, threadIdx.x % kThreads);
    }
    __device__ __forceinline__ static void commit() { cp_async_commit(); }
    template <int kPending>
    __device__ __forceinline__ static void wait() {
        cp_async_wait<kPending>();
    }

    // Begins a job whose first row is `first_row`.
    __device__ __forceinline__ void begin(const Params& params, const Job& job, int32 first_row) {
        slopes_.load(params, job, [=](int i) { return first_row + i / 2 * 16 + Output::row(i % 2, threadIdx.x % 32); });
        has_shifts_ = false;
#pragma unroll
        for (int m = 0; m < kM16; ++m) {
            softmax_[m].reset();
            output_[m].fill(0.0f);
        }
    }

    template <class Mask>
    __device__ __forceinline__ void step(const Params& params, const char* q, const char* slot, char*, const Mask& mask,
                                         int32 first_row, int32 first_key, bool masked) {
        const int32 lane = threadIdx.x % 32;
        const LaneAddress<QTile, MatrixOrder::kRowsFirst> q_address(shared_address(q), 0, lane);
        const LaneAddress<KTile, MatrixOrder::kChunksFirst> k_address(shared_address(slot), 0, lane);
        const LaneAddress<VTile, MatrixOrder::kRowsFirst> v_address(
            shared_address(slot) + (kValuesInKeys ? 0 : kKeyBytes), 0, lane);
        Scores scores[kM16];
#pragma unroll
        for (int m = 0; m < kM16; ++m) scores[m].fill(0.0f);
        multiply<Element, kD / 16>(
            scores, [&](int m, int kk) { return ldmatrix_x4<false>(q_address.at(m, kk)); },
            [&](int n, int kk) { return ldmatrix_x4<false>(k_address.at(n, kk)); });

        const float scale = decode::kScalesFirst<Spec> ? 1.0f : common::capped_scale<Spec>(params);
        PackedFragment<Element, kKeys / 8> p[kM16];
#pragma unroll
        for (int m = 0; m < kM16; ++m) {
            decode::modify<Spec>(scores[m], params, slopes_, 2 * m, first_key, lane);
            if (!masked && has_shifts_ && softmax_[m].try_row_shift(scores[m], scale, p[m])) continue;
            if constexpr (!decode::kScalesFirst<Spec>)
#pragma unroll
                for (int n = 0; n < kKeys / 8; ++n)
#pragma unroll
                    for (int e = 0; e < 4; ++e) scores[m].value[n][e] *= scale;
            if (masked)
                common::mask_scores(scores[m], mask, common::TilePosition{first_row + 16 * m, first_key, lane},
                                    -common::infinity<float>());
            float rescale[2];
            softmax_[m].update(scores[m], rescale);
#pragma unroll
            for (int n = 0; n < kPartCols / 8; ++n)
#pragma unroll
                for (int e = 0; e < 4; ++e) output_[m].value[n][e] *= rescale[e / 2];
            p[m].set(scores[m]);
        }
        multiply<Element, kKeys / 16>(
            output_, [&](int m, int kk) { return p[m].k16(kk); },
            [&](int n, int kk) { return ldmatrix_x4<true>(v_address.at(kk, part() * (kPartCols / 16) + n)); });
        has_shifts_ = true;
    }

    // Writes the statistics of the rows.
    __device__ __forceinline__ void finish(common::RowStatistic<float>* rows, char*) {
        if (part() != 0) return;
        const int32 lane = threadIdx.x % 32;
#pragma unroll
        for (int m = 0; m < kM16; ++m) {
            float total[2];
            softmax_[m].totals(total);
#pragma unroll
            for (int i = 0; i < 2; ++i)
                if (lane % 4 == 0) rows[16 * m + Output::row(i, lane)] = {softmax_[m].row_shift[i], total[i]};
        }
    }

    // Writes 16 rows of O, from the tile's row `begin` on.
    template <class Exchange>
    __device__ __forceinline__ void put(char* to, int32 begin) const {
        const int32 lane = threadIdx.x % 32;
        float* rows = reinterpret_cast<float*>(to);
#pragma unroll
        for (int m = 0; m < kM16; ++m) {
            if (16 * m != begin) continue;
#pragma unroll
            for (int n = 0; n < kPartCols / 8; ++n)
#pragma unroll
                for (int i = 0; i < 2; ++i)
                    *reinterpret_cast<float2*>(
                        rows + Exchange::offset(Output::row(i, lane), part() * kPartCols + Output::col(2 * n, lane))) =
                        make_float2(output_[m].value[n][2 * i], output_[m].value[n][2 * i + 1]);
        }
    }

  private:
    __device__ __forceinline__ static int32 part() { return kSharers > 1 ? threadIdx.x / 32 % kSharers : 0; }

    decode::RowSlopes<Spec, 2 * kM16> slopes_;
    Softmax softmax_[kM16];
    bool has_shifts_;  // without, trying them is in vain
    Output output_[kM16];
};

}  // namespace fa2::sm80
