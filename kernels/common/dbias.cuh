// The gradient of the bias: the gradient of each score belongs to the element of the bias that was added to the score.
// If the bias has an element for each score (kFullDbias), its gradient is rounded to the bias's type and stored; the
// block that owns a query tile also stores zeros for the key tiles that it skips. Along axes on which the bias is
// broadcast, many scores share one element; a warp then sums its own scores first and adds the sum with one atomic.
//
// dbias needs the gradient of the scores, dQ that of the products Q K^T. With a cap or the caller's score function the
// two differ by the derivatives of these. The weights (weights.cuh) leave these factors out if there is a dbias;
// `take_derivative` multiplies by them once dbias has been added. Between the two factors it has the gradient of what
// the function returns. The gradients of the function's arrays (kDscoreArgs) follow from that, and are summed in
// registers first, too.
#pragma once
#include "common/ptx.cuh"
#include "common/score_mod.cuh"
#include "common/tile_range.cuh"

namespace fa2::common {

// A copy of the products Q K^T, made before `take_weights` overwrites them. Empty unless derivatives are still to be
// taken: 1 if that of the cap is, 2 if that of the caller's function is, too.
template <class Spec, class Fragment,
          int kSaved = !kDerivesLater<Spec> ? 0
                       : Spec::kScoreMod    ? 2
                       : Spec::kSoftcap     ? 1
                                            : 0>
class SavedScores {
  public:
    __device__ __forceinline__ void save(const Fragment&) {}
    template <class Record>
    __device__ __forceinline__ void take_derivative(Fragment&, const Record&, const ScoreTile&) {}
};
template <class Spec, class Fragment>
class SavedScores<Spec, Fragment, 1> {
  public:
    __device__ __forceinline__ void save(const Fragment& products) { scores_ = products; }
    // Multiplies `ds` by the cap's derivative. The saved products are capped in place.
    template <class Record>
    __device__ __forceinline__ void take_derivative(Fragment& ds, const Record& params, const ScoreTile&) {
        const Softcap<Spec, Record> mod(params);
        mod.cap(scores_);
#pragma unroll
        for (int i = 0; i < Fragment::kRows; ++i)
#pragma unroll
            for (int j = 0; j < Fragment::kCols; ++j) ds(i, j) *= mod.derivative(scores_(i, j));
    }

  private:
    Fragment scores_;
};

template <class Spec, class Fragment>
class SavedScores<Spec, Fragment, 2> {
    using Real = typename ElementTraits<typename Spec::Element>::Accum;

  public:
    __device__ __forceinline__ void save(const Fragment& products) { products_ = products; }
    // Where P is 0, and with it dS, the function may have no finite derivative.
    template <class Record>
    __device__ __forceinline__ void take_derivative(Fragment& ds, const Record& params, const ScoreTile& tile) {
        const auto [first_query, first_key, lane] = tile.position;
        const auto mod = score_mod<Spec>(params, tile);
        GradientSums<Real> sums;
        if constexpr (Spec::kDscoreArgs) {
            constexpr int kWarpRows = Fragment::kRows * (32 / Fragment::kLanesPerRow);
            constexpr int kWarpCols = Fragment::kCols * Fragment::kLanesPerRow;
            begin_sums<Real>(score_args_of(params), tile.batch, tile.head, first_query - first_key - (kWarpCols - 1),
                             kWarpRows + kWarpCols - 1, lane, sums);
        }
#pragma unroll
        for (int i = 0; i < Fragment::kRows; ++i)
#pragma unroll
            for (int j = 0; j < Fragment::kCols; ++j) {
                if (ds(i, j) == 0) continue;
                const auto at = mod.position(first_query + Fragment::row(i, lane), first_key + Fragment::col(j, lane));
                Real slope;
                const Real called = mod.called(products_(i, j), at, 0, 0, mod.distance_terms_at(at, 0, 0), slope);
                const Real gradient = ds(i, j) * mod.derivative(mod.capped(called));
                if constexpr (Spec::kDscoreArgs)
                    add_argument_gradients<Real>(score_args_of(params), products_(i, j) * natural_scale<Spec>(params),
                                                 tile.batch, tile.head, at.query, at.key, gradient, sums);
                ds(i, j) = gradient * slope;
            }
        if constexpr (Spec::kDscoreArgs) end_sums<Real>(score_args_of(params), tile.batch, tile.head, lane, sums);
    }

  private:
    Fragment products_;
};

// Stores an element, rounded to the type of the array.
__device__ __forceinline__ void store_rounded(float* address, float x) { *address = x; }
__device__ __forceinline__ void store_rounded(double* address, double x) { *address = x; }
template <class T>
__device__ __forceinline__ void store_rounded(T* address, float x) {
    *address = T{static_cast<uint16>(pack<T>(x, 0.0f))};
}

// Exchanges words among the four lanes of a quad: word w of lane t becomes word t of lane w.
__device__ __forceinline__ void transpose_quad(uint32 (&x)[4], int32 lane) {
#pragma unroll
    for (int step = 1; step <= 2; ++step) {
        const bool is_upper = lane & step;
#pragma unroll
        for (int w = 0; w < 4; ++w) {
            if (w & step) continue;
            uint32 &lower = x[w], &upper = x[w + step];
            const uint32 received = __shfl_xor_sync(kFullWarp, is_upper ? lower : upper, step);
            (is_upper ? lower : upper) = received;
        }
    }
}

// Stores each element of a full dbias. `first`: the element of the fragment's first row and column; `queries` and
// `keys`: the rows and columns from there on that exist.
template <class T, class Fragment>
__device__ __forceinline__ void store_elements(const Fragment& ds, T* first, const ScoreStrides& strides, int32 queries,
                                               int32 keys, int32 lane) {
#pragma unroll
    for (int i = 0; i < Fragment::kRows; ++i)
#pragma unroll
        for (int j = 0; j < Fragment::kCols; ++j)
            if (Fragment::row(i, lane) < queries && Fragment::col(j, lane) < keys)
                store_rounded(first + strides.offset(0, 0, Fragment::row(i, lane), Fragment::col(j, lane)), ds(i, j));
}
// The quad layout in float32: in pairs where rows are contiguous and start at 8-byte boundaries. The pairs of a quad are
// a whole sector of 32 bytes.
template <int kN8>
__device__ __forceinline__ void store_elements(const QuadFragment<kN8>& ds, float* first, const ScoreStrides& strides,
                                               int32 queries, int32 keys, int32 lane) {
    using Fragment = QuadFragment<kN8>;
#pragma unroll
    for (int i = 0; i < Fragment::kRows; ++i) {
        float* row = first + strides.offset(0, 0, Fragment::row(i, lane), Fragment::col(0, lane));
        const int32 left = (Fragment::row(i, lane) < queries ? keys : 0) - Fragment::col(0, lane);
        const bool in_pairs = strides.column == 1 && reinterpret_cast<uint64>(row) % 8 == 0;
#pragma unroll
        for (int n = 0; n < kN8; ++n) {
            const float even = ds.value[n][2 * i], odd = ds.value[n][2 * i + 1];
            if (in_pairs && 8 * n + 1 < left) {
                store_global(row + 8 * n, even, odd);
            } else {
                if (8 * n < left) row[8 * n * strides.column] = even;
                if (8 * n + 1 < left) row[(8 * n + 1) * strides.column] = odd;
            }
        }
    }
}
// The quad layout in 16 bits. A lane's pairs are 4 bytes at 16-byte distances; exchanged within the quad, they become 16
// contiguous bytes per lane and 64 per row, which takes a quarter of the stores and fills sectors.
template <int kN8, class T>
__device__ __forceinline__ void store_elements(const QuadFragment<kN8>& ds, T* first, const ScoreStrides& strides,
                                               int32 queries, int32 keys, int32 lane) {
    using Fragment = QuadFragment<kN8>;
    static_assert(sizeof(T) == 2);
#pragma unroll
    for (int i = 0; i < Fragment::kRows; ++i) {
        T* row = first + strides.offset(0, 0, Fragment::row(i, lane), 0);
        const int32 existing = Fragment::row(i, lane) < queries ? keys : 0;
        const bool is_wide = strides.column == 1 && reinterpret_cast<uint64>(row) % 16 == 0;
#pragma unroll
        for (int n = 0; n < kN8; n += 4) {
            uint32 words[4];
#pragma unroll
            for (int w = 0; w < 4; ++w)
                words[w] = n + w < kN8 ? pack<T>(ds.value[n + w][2 * i], ds.value[n + w][2 * i + 1]) : 0;
            transpose_quad(words, lane);
            const int32 key = 8 * (n + lane % 4), end = min_of(existing, 8 * kN8);  // kN8 may be no multiple of 4
            if (is_wide && key + 8 <= end) {
                store_global(row + key, words);
            } else {
#pragma unroll
                for (int e = 0; e < 8; ++e)
                    if (key + e < end)
                        row[(key + e) * strides.column] = T{static_cast<uint16>(words[e / 2] >> e % 2 * 16)};
            }
        }
    }
}

// Stores zeros to the keys [begin, end) of a row, all lanes together. A key tile begins with key `begin`.
template <class T>
__device__ __forceinline__ void clear_keys(T* row, int64 stride, int32 begin, int32 end, int32 lane) {
    constexpr int32 kWide = 16 / sizeof(T);
    if (stride == 1 && reinterpret_cast<uint64>(row) % 16 == 0) {
        const int32 whole = end / kWide * kWide;
        for (int32 key = begin + lane * kWide; key < whole; key += 32 * kWide)
            *reinterpret_cast<Vector<T, kWide>*>(row + key) = {};
        begin = max_of(begin, whole);
    }
    for (int32 key = begin + lane; key < end; key += 32) row[key * stride] = {};
}

// Stores zeros to a full dbias where a warp's rows skip key tiles: before key `begin` and from key `end` on. Nobody else
// writes them, except for packed sequences, whose dbias also has elements outside all blocks, and under a sparse map: it
// is then cleared beforehand.
template <class Spec>
inline constexpr bool kClearsSkippedDbias =
    Spec::kFullDbias && kRightLimit<Spec> && !Spec::kVarlen && !Spec::kBlockMask;
template <class Spec, class Record>
__device__ __forceinline__ void clear_skipped_dbias(const Record& params, const ScoreTile& first, int32 rows,
                                                    int32 begin, int32 end) {
    if constexpr (kClearsSkippedDbias<Spec>) {
        const ScoreStrides& strides = params.dbias_strides.inside();
        auto* row = params.dbias + params.dbias_strides.offset(first.batch, first.head, first.position.first_query, 0);
        rows = min_of(rows, params.seqlen_q - first.position.first_query);
        for (int32 i = 0; i < rows; ++i, row += strides.row) {
            if constexpr (kLeftLimit<Spec>) clear_keys(row, strides.column, 0, begin, first.position.lane);
            clear_keys(row, strides.column, end, params.seqlen_k, first.position.lane);
        }
    }
}

// Adds each element with its own atomic.
template <class Spec, class Fragment, class Real>
__device__ __forceinline__ void add_elements(const Fragment& ds, Real* sums, const ScoreStrides& strides, int32 queries,
                                             int32 keys, int32 lane) {
#pragma unroll
    for (int i = 0; i < Fragment::kRows; ++i)
#pragma unroll
        for (int j = 0; j < Fragment::kCols; ++j)
            if (Fragment::row(i, lane) < queries && Fragment::col(j, lane) < keys)
                atomicAdd(sums + strides.offset(0, 0, Fragment::row(i, lane), Fragment::col(j, lane)), ds(i, j));
}
// Adds a whole fragment, each row of which begins at a 16-byte boundary. Each two lanes exchange a pair, so that both add
// four neighbouring elements by one instruction: the even lane those of accumulator n, the odd one those of n + 1.
template <int kN8>
__device__ __forceinline__ void add_fours(const QuadFragment<kN8>& ds, float* sums, int64 stride, int32 lane) {
    static_assert(kN8 % 2 == 0);
    const bool odd = lane % 2;
    float* row = sums + lane / 4 * stride + lane % 4 / 2 * 4 + 8 * odd;
#pragma unroll
    for (int i = 0; i < 2; ++i, row += 8 * stride)
#pragma unroll
        for (int n = 0; n < kN8; n += 2) {
            float x[2][2];  // the two pairs of the four
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                const float first = ds.value[n][2 * i + e], second = ds.value[n + 1][2 * i + e];
                const float received = __shfl_xor_sync(kFullWarp, odd ? first : second, 1);
                x[0][e] = odd ? received : first;
                x[1][e] = odd ? second : received;
            }
            add_global(row + 8 * n, {x[0][0], x[0][1], x[1][0], x[1][1]});
        }
}
// Adds neighbouring elements in fours or pairs if the rows of `sums` are contiguous and start at boundaries of as many.
template <class Spec, int kN8>
__device__ __forceinline__ void add_elements(const QuadFragment<kN8>& ds, float* sums, const ScoreStrides& strides,
                                             int32 queries, int32 keys, int32 lane) {
    using Fragment = QuadFragment<kN8>;
    const uint64 first = strides.row | reinterpret_cast<uint64>(sums) / sizeof(float);
    const bool in_pairs = strides.column == 1 && first % 2 == 0;
#if __CUDA_ARCH__ >= 900
    if (strides.column == 1 && first % 4 == 0 && queries >= 16 && keys >= 8 * kN8) {
        add_fours(ds, sums, strides.row, lane);
        return;
    }
#endif
#pragma unroll
    for (int i = 0; i < Fragment::kRows; ++i) {
        float* row = sums + strides.offset(0, 0, Fragment::row(i, lane), Fragment::col(0, lane));
        if (Fragment::row(i, lane) >= queries) continue;
        const int32 left = keys - Fragment::col(0, lane);
#pragma unroll
        for (int n = 0; n < kN8; ++n) {
            if (in_pairs && 8 * n + 1 < left) {
                add_global(row + 8 * n, ds.value[n][2 * i], ds.value[n][2 * i + 1]);
            } else {
#pragma unroll
                for (int e = 0; e < 2; ++e)
                    if (8 * n + e < left) atomicAdd(row + (8 * n + e) * strides.column, ds.value[n][2 * i + e]);
            }
        }
    }
}

// True if the call asks for the gradient of the bias.
template <class Spec>
inline constexpr bool kWritesDbias = Spec::kDbias;

// Adds the gradient of the scores to that of a broadcast bias. `sums`: its element of the fragment's first score. Sums
// over a broadcast axis use the fragment layout: the first of the lanes that share a row or a column adds the sum.
template <class Spec, class Fragment, class Real>
__device__ __forceinline__ void add_dbias(const Fragment& ds, Real* sums, const ScoreStrides& strides, int32 queries,
                                          int32 keys, int32 lane) {
    if (strides.row != 0 && strides.column != 0) {
        add_elements<Spec>(ds, sums, strides, queries, keys, lane);
        return;
    }
    constexpr int kLanes = Fragment::kLanesPerRow, kStep = Fragment::kLaneStep;
    const auto element = [&](int i, int j) {
        return Fragment::row(i, lane) < queries && Fragment::col(j, lane) < keys ? ds(i, j) : Real(0);
    };
    if (strides.column == 0) {
        Real all = 0;
#pragma unroll
        for (int i = 0; i < Fragment::kRows; ++i) {
            Real sum = 0;
#pragma unroll
            for (int j = 0; j < Fragment::kCols; ++j) sum += element(i, j);
            sum = row_sum<kLanes, kStep>(sum);
            all += sum;
            if (strides.row != 0 && lane / kStep % kLanes == 0 && Fragment::row(i, lane) < queries)
                atomicAdd(sums + Fragment::row(i, lane) * strides.row, sum);
        }
        all = column_sum<kLanes, kStep>(all);
        if (strides.row == 0 && lane == 0) atomicAdd(sums, all);
        return;
    }
#pragma unroll
    for (int j = 0; j < Fragment::kCols; ++j) {
        Real sum = 0;
#pragma unroll
        for (int i = 0; i < Fragment::kRows; ++i) sum += element(i, j);
        sum = column_sum<kLanes, kStep>(sum);
        if (lane % kStep == 0 && lane < kStep * kLanes && Fragment::col(j, lane) < keys)
            atomicAdd(sums + Fragment::col(j, lane) * strides.column, sum);
    }
}
// Stores or adds the gradient of the scores. Does nothing unless the call asks for the gradient of the bias.
template <class Spec, class Fragment, class Record>
__device__ __forceinline__ void write_dbias(const Fragment& ds, const Record& params, const ScoreTile& tile) {
    if constexpr (kWritesDbias<Spec>) {
        const auto [first_query, first_key, lane] = tile.position;
        const ScoreStrides& strides = params.dbias_strides.inside();
        auto* first = params.dbias + params.dbias_strides.offset(tile.batch, tile.head, first_query, first_key);
        const int32 queries = params.seqlen_q - first_query, keys = params.seqlen_k - first_key;
        if constexpr (Spec::kFullDbias)
            store_elements(ds, first, strides, queries, keys, lane);
        else
            add_dbias<Spec>(ds, first, strides, queries, keys, lane);
    }
}

}  // namespace fa2::common
