// The arithmetic of a warp in decode/decode.cuh without tensor cores: S = Q K^T and O = P V of 16 keys for up to 16 rows,
// in IEEE arithmetic in float or double. A lane holds a part of S and O, as microtile.cuh says.
#pragma once
#include "common/online_softmax.cuh"
#include "decode/decode.cuh"
#include "simt/microtile.cuh"

namespace fa2::simt {

template <class Spec>
class DecodeWarp {
  public:
    static constexpr int kKeys = 16;  // of a step
    static constexpr int kSharers = 1;
    static constexpr bool kValuesInKeys = false, kRefills = false, kCopiesMeanwhile = false, kSendsRows = false;
    static constexpr int kProducers = 0;

  private:
    using Real = typename Spec::Element;
    static constexpr int kBr = Spec::kBr;
    using Micro = Microtile<Real, kBr, kKeys, Spec::kHeadDim>;
    using MicroV = Microtile<Real, kBr, kKeys, Spec::kHeadDimV>;
    using Rows = typename Micro::Rows;
    using RowsV = typename MicroV::Rows;
    using Scores = typename Micro::Scores;
    using Sums = typename MicroV::Sums;
    using Job = decode::Job;
    static constexpr int kRows = Scores::kRows;
    static_assert(kBr <= 16);

  public:
    static constexpr int kColumns = RowsV::kColumns;
    static constexpr int kKeyBytes = kKeys * Rows::kRowLength * sizeof(Real);
    static constexpr int kSlotBytes = kKeyBytes + kKeys * RowsV::kRowLength * sizeof(Real);
    static constexpr int kQueryBytes = kBr * Rows::kRowLength * sizeof(Real);
    static constexpr int kScratchBytes = Micro::kPostedElements * sizeof(Real);

    template <int kThreads>
    __device__ __forceinline__ static void copy_queries(char* to, const Params& params, const Job& job, int32 rows) {
        copy_rows<Rows, kThreads, kBr>(to, threadIdx.x, decode::QueryRows<Spec, Params>{params, job, rows});
    }
    __device__ __forceinline__ static void sync() { __syncwarp(); }
    template <class SourceOf>
    __device__ __forceinline__ static void copy_keys(char* to, const SourceOf& source_of) {
        copy_rows<Rows, 32, kKeys>(to, threadIdx.x % 32, source_of);
    }
    template <class SourceOf>
    __device__ __forceinline__ static void copy_values(char* to, const SourceOf& source_of) {
        copy_rows<RowsV, 32, kKeys>(to, threadIdx.x % 32, source_of);
    }
    // GPUs without asynchronous copies have copied when they get here.
    __device__ __forceinline__ static void commit() {
        if constexpr (kAsynchronous) common::cp_async_commit();
    }
    template <int kPending>
    __device__ __forceinline__ static void wait() {
        if constexpr (kAsynchronous) common::cp_async_wait<kPending>();
    }

    __device__ __forceinline__ void begin(const Params& params, const Job& job, int32 first_row) {
        slopes_.load(params, job, [=](int i) { return first_row + Scores::row(i, threadIdx.x % 32); });
        softmax_.reset();
        output_.clear();
    }

    template <class Mask>
    __device__ __forceinline__ void step(const Params& params, const char* q, const char* slot, char* scratch,
                                         const Mask& mask, int32 first_row, int32 first_key, bool masked) {
        const int32 lane = threadIdx.x % 32;
        const Real* k = reinterpret_cast<const Real*>(slot);
        Real* posted = reinterpret_cast<Real*>(scratch);
        Scores scores;
        Micro::dot(scores, reinterpret_cast<const Real*>(q), k, lane);
        decode::modify<Spec>(scores, params, slopes_, 0, first_key, lane);
        if (masked)
            common::mask_scores(scores, mask, common::TilePosition{first_row, first_key, lane},
                                -common::infinity<Real>());
        Real rescale[kRows];
        softmax_.update(scores, rescale);
        __syncwarp();  // nobody reads the P of the step before any more
        Micro::post(scores, posted, lane);
        __syncwarp();
        MicroV::accumulate(output_, rescale, posted, k + kKeys * Rows::kRowLength, lane);
    }

    __device__ __forceinline__ void finish(common::RowStatistic<Real>* rows, char*) {
        const int32 lane = threadIdx.x % 32;
        Real total[kRows];
        softmax_.totals(total);
#pragma unroll
        for (int i = 0; i < kRows; ++i)
            if (lane_column(lane) == 0) rows[Scores::row(i, lane)] = {softmax_.row_shift[i], total[i]};
    }

    template <class Exchange>
    __device__ __forceinline__ void put(char* to, int32) const {
        const int32 lane = threadIdx.x % 32;
        Real* rows = reinterpret_cast<Real*>(to);
#pragma unroll
        for (int i = 0; i < kRows; ++i)
#pragma unroll
            for (int c = 0; c < Sums::kChunks; ++c)
                *reinterpret_cast<typename RowsV::Vec*>(
                    rows + Exchange::offset(Scores::row(i, lane), Sums::col(c, lane))) = output_.scaled(i, c, Real(1));
    }

  private:
    // Starts the copy of rows from anywhere: 16 bytes at a time where a row begins on them, else one element.
    template <class RowsOf, int kThreads, int kCount, class SourceOf>
    __device__ __forceinline__ static void copy_rows(char* to, int32 thread, const SourceOf& source_of) {
        constexpr int kVector = RowsOf::kVector, kVectors = RowsOf::kColumns / kVector;
        Real* rows = reinterpret_cast<Real*>(to);
        for (int32 index = thread; index < kCount * kVectors; index += kThreads) {
            const int32 row = index / kVectors, column = index % kVectors * kVector;
            const Real* source = source_of(row);
            Real* target = rows + row * RowsOf::kRowLength + column;
            if (RowsOf::in_vectors(source, 0)) {
                RowsOf::template copy_vector<kVector>(target, source + column, source && column < RowsOf::kHeadDim);
            } else {
#pragma unroll
                for (int v = 0; v < kVector; ++v)
                    RowsOf::template copy_vector<1>(target + v, source + column + v,
                                                    source && column + v < RowsOf::kHeadDim);
            }
        }
    }

    decode::RowSlopes<Spec, kRows> slopes_;
    common::OnlineSoftmax<Real, kRows, Scores::kLanesPerRow, common::exp_accurate, true, Scores::kLaneStep> softmax_;
    Sums output_;
};

}  // namespace fa2::simt
