// Splits the inputs of a call into parts (parts.cuh), and finds the heads whose values the parts do not represent well.
//
// A block splits one strip of a head, which it reads once. The lanes that share a row have a chunk of eight columns each,
// because a chunk is what a thread can store. A thread has several rows, all of which it loads before it waits for one:
// memory bounds the kernel.
//
// The block also marks its K/V head in `exceptions` if parts would lose accuracy there: the head is then left to kernels
// of IEEE arithmetic (common/exceptions.cuh). Parts have an absolute error of 2^-39 of the largest element of a strip: a
// row or a column loses bits if its own largest element is smaller than 2^-kSpread of that one. Magnitudes beyond
// 2^+-50 could take products of two units out of the range of float32. Infinities and NaN have no parts. A row or a
// column of zeros loses nothing.
//
// A head is also marked if its scores may have a term, the product of one column of Q and K, above kLargestTerm. The
// last bit of the parts is 2^-23 of a number. In a score of many terms such errors are lost among those of the sum;
// where a single term makes the score, nothing hides its error.
//
// The blocks of a K/V head leave what they find in its `extremes`. The last of them makes the mark of it, and zeros for
// the next launch. Only the first warp does that, so that the others need not wait for what it finds.
//
// In a backward the blocks of dO compute delta (common/delta.cuh) of their rows, too, and all blocks clear the workspace
// to which a later kernel adds.
#pragma once
#include "common/delta.cuh"
#include "common/ptx.cuh"
#include "common/statistics.cuh"
#include "float32_parts/parts.cuh"

namespace fa2::float32_parts {

// Params is a template parameter because only one of the two records has dO.
template <class Spec, bool kWithDout, class Params = fa2::Params>
struct SplitInputs {
    static constexpr int kThreads = 32 * Spec::kWarps;
    static constexpr int kSpread = 12;
    static constexpr float kLargestTerm = 32.0f;

    // kOfScores: the matrix is Q or K.
    template <bool kOfScores>
    using Layout = PartsLayout<kColumnsOf<Spec, kOfScores>, !kWithDout && kPartsMayShare<Spec>>;
    template <bool kOfScores>
    static constexpr int kColumns = common::round_up(kColumnsOf<Spec, kOfScores>, kPanelColumns);

    __device__ static constexpr int lanes_of(int columns) {
        int lanes = max_of(1, Spec::kWarps / 2);  // the block has a strip's rows at most
        while (8 * lanes < columns) lanes *= 2;
        return lanes;
    }
    template <bool kOfScores>
    static constexpr int kLanes = lanes_of(kColumnsOf<Spec, kOfScores>);  // that share a row
    template <bool kOfScores>
    static constexpr int kRowsAtOnce = kThreads / kLanes<kOfScores>;
    template <bool kOfScores>
    static constexpr int kRows = kUnitRows / kRowsAtOnce<kOfScores>;  // of a thread
    static_assert(kLanes<true> <= 32 && kLanes<false> <= 32);
    template <bool kOfScores>
    using Values = float[kRows<kOfScores>][8];

    // An input with its parts.
    struct Matrix {
        const float* x;
        Strides strides;
        float16* parts;
        float* units;
        int32 num_heads, num_strips;
        int32 heads_per_group;  // heads of the matrix for a K/V head
    };
    // What the warps have found: the largest magnitudes of all elements, and of the columns; the smallest of rows' largest
    // magnitudes.
    struct Shared {
        uint32 largest[Spec::kWarps], smallest_row[Spec::kWarps];
        alignas(16) uint32 of_columns[Spec::kWarps][8 * max_of(kLanes<true>, kLanes<false>)];
    };

    __device__ static void run(const Params& params) {
        __shared__ Shared shared;
        const int32 num_heads_kv = params.num_heads / params.heads_per_group;
        const Matrix q{params.q,         params.q_strides, params.q_parts,        params.q_units,
                       params.num_heads, params.q_strips,  params.heads_per_group};
        const Matrix k{params.k, params.k_strides, params.k_parts, params.k_units, num_heads_kv, params.k_strips, 1};
        const Matrix v{params.v, params.v_strides, params.v_parts, params.v_units, num_heads_kv, params.k_strips, 1};
        int32 block = blockIdx.x;
        const int32 of_q = params.batch * params.num_heads * params.q_strips;
        const int32 of_k = params.batch * num_heads_kv * params.k_strips;
        if (block < of_q)
            split<false, true>(params, q, block, shared);
        else if (block < of_q + of_k)
            split<true, true>(params, k, block - of_q, shared);
        else if (!kWithDout || block < of_q + 2 * of_k)
            split<true, false>(params, v, block - of_q - of_k, shared);
        else if constexpr (kWithDout)
            split<false, false>(params,
                                {params.dout, params.dout_strides, params.dout_parts, params.dout_units,
                                 params.num_heads, params.q_strips, params.heads_per_group},
                                block - of_q - 2 * of_k, shared);
        if constexpr (kWithDout) common::clear_workspace(params.dq_accum, params.dq_accum_bytes);
    }

  private:
    static constexpr int32 kExponentBias = 127, kNoNumber = 255;  // of a float's exponent
    // The largest shift whose unit is not subnormal after the smallest float16 numbers are multiplied by it.
    static constexpr int32 kLargestShift = 134;
    // Exponents of the largest element of a strip, so that the product of two units is a normal number.
    static constexpr int32 kSmallest = kExponentBias - 50, kLargest = kExponentBias + 50;

    // The chunk of this thread in a row, and its rows in a strip.
    template <bool kOfScores>
    __device__ static int32 own_chunk() {
        return threadIdx.x % kLanes<kOfScores>;
    }
    template <bool kOfScores>
    __device__ static int32 own_row(int r) {
        return r * kRowsAtOnce<kOfScores> + threadIdx.x / kLanes<kOfScores>;
    }

    template <bool kOfKeys, bool kOfScores>
    __device__ static void split(const Params& params, const Matrix& matrix, int32 index, Shared& shared) {
        const int32 strip = index % matrix.num_strips, head_index = index / matrix.num_strips;
        const int32 batch = head_index / matrix.num_heads, head = head_index % matrix.num_heads;
        const auto rows = common::workspace_rows<Spec, kOfKeys>(params, strip);

        Values<kOfScores> value;
        load<kOfScores>(value, matrix.x, matrix.strides, batch, head, rows);
        if constexpr (kWithDout && !kOfKeys) {
            const int64 first = common::first_statistic<Spec>(params, batch, head) + rows.first;
            Values<kOfScores> o;
            const bool with_delta = !kOfScores && params.o != nullptr;
            if constexpr (!kOfScores)
                if (with_delta) load<false>(o, params.o, params.o_strides, batch, head, rows);
            clear_unseen<kOfScores>(value, params.lse + first, rows.length);
            if constexpr (!kOfScores)
                if (with_delta) store_delta(o, value, params, first, rows.length);
        }
        find<kOfScores>(value, shared);
        __syncthreads();
        uint32 largest = 0;
#pragma unroll
        for (int w = 0; w < Spec::kWarps; ++w) largest = max_of(largest, shared.largest[w]);
        const int32 head_kv = head_index / matrix.heads_per_group;
        if (threadIdx.x < 32) note<kOfKeys, kOfScores>(params, head_kv, largest, shared);
        store<kOfScores>(value, matrix, index, largest);
        if (threadIdx.x < 32) mark(params, head_kv);
    }

    // Loads this thread's chunk of its rows; zeros beyond the columns and in rows that are not there.
    template <bool kOfScores>
    __device__ static void load(Values<kOfScores>& value, const float* x, const Strides& strides, int32 batch,
                                int32 head, const common::Rows& rows) {
        constexpr int kHeadDim = kColumnsOf<Spec, kOfScores>;
        const int32 column = 8 * own_chunk<kOfScores>();
        const float* from = x + strides.offset(batch, rows.first + own_row<kOfScores>(0), head) + column;
        const int64 step = strides.row * kRowsAtOnce<kOfScores>;
        // Rows of one sequence are aligned alike if the first is, and the step.
        const bool aligned =
            kHeadDim % 4 == 0 && reinterpret_cast<uint64>(from) % 16 == 0 && (kRows<kOfScores> == 1 || step % 4 == 0);
        const auto left = [&](int r) { return own_row<kOfScores>(r) < rows.length ? kHeadDim - column : 0; };
        if (aligned) {
#pragma unroll
            for (int r = 0; r < kRows<kOfScores>; ++r)
#pragma unroll
                for (int quad = 0; quad < 8; quad += 4) {
                    float4 y = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
                    if (quad < left(r)) y = *reinterpret_cast<const float4*>(from + r * step + quad);
                    value[r][quad] = y.x, value[r][quad + 1] = y.y, value[r][quad + 2] = y.z, value[r][quad + 3] = y.w;
                }
        } else {
#pragma unroll
            for (int r = 0; r < kRows<kOfScores>; ++r)
#pragma unroll
                for (int e = 0; e < 8; ++e) value[r][e] = e < left(r) ? from[r * step + e] : 0.0f;
        }
    }

    // Zeros in rows that see no key: they may hold NaN, which P = 0 would not keep out of sums. `lse`: of the strip.
    template <bool kOfScores>
    __device__ static void clear_unseen(Values<kOfScores>& value, const float* lse, int32 num_rows) {
#pragma unroll
        for (int r = 0; r < kRows<kOfScores>; ++r) {
            const int32 row = own_row<kOfScores>(r);
            const bool is_unseen = row < num_rows && lse[row] == -common::infinity<float>();
#pragma unroll
            for (int e = 0; e < 8; ++e) value[r][e] = is_unseen ? 0.0f : value[r][e];
        }
    }

    // Stores delta of rows of dO, of which one that sees no key has zeros. `first`: the strip's first statistic.
    __device__ static void store_delta(const Values<false>& o, const Values<false>& dout, const Params& params,
                                       int64 first, int32 num_rows) {
#pragma unroll
        for (int r = 0; r < kRows<false>; ++r) {
            float sum = 0.0f;
#pragma unroll
            for (int e = 0; e < 8; ++e) sum += o[r][e] * dout[r][e];
            sum = common::row_sum<kLanes<false>>(sum);
            const int32 row = own_row<false>(r);
            if (own_chunk<false>() != 0 || row >= num_rows) continue;
            params.delta[first + row] = sum - common::dlse_of<Spec>(params, first + row);
        }
    }

    // What this warp finds. The bits of magnitudes have the order of magnitudes; NaN is the largest.
    template <bool kOfScores>
    __device__ static void find(const Values<kOfScores>& value, Shared& shared) {
        const int32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        uint32 largest = 0, smallest_row = ~0u, of_column[8] = {};
#pragma unroll
        for (int r = 0; r < kRows<kOfScores>; ++r) {
            uint32 of_row = 0;
#pragma unroll
            for (int e = 0; e < 8; ++e) {
                const uint32 x = magnitude_bits(value[r][e]);
                of_row = max_of(of_row, x);
                of_column[e] = max_of(of_column[e], x);
            }
            of_row = largest_over<1, kLanes<kOfScores>>(of_row);
            largest = max_of(largest, of_row);
            if (of_row != 0) smallest_row = min_of(smallest_row, of_row);
        }
        largest = largest_over<kLanes<kOfScores>, 32>(largest);
        smallest_row = ~largest_over<kLanes<kOfScores>, 32>(~smallest_row);
        if (lane == 0) shared.largest[warp] = largest, shared.smallest_row[warp] = smallest_row;
#pragma unroll
        for (int e = 0; e < 8; ++e) of_column[e] = largest_over<kLanes<kOfScores>, 32>(of_column[e]);
        if (lane >= kLanes<kOfScores>) return;
        uint4* to = reinterpret_cast<uint4*>(shared.of_columns[warp] + 8 * lane);
        to[0] = make_uint4(of_column[0], of_column[1], of_column[2], of_column[3]);
        to[1] = make_uint4(of_column[4], of_column[5], of_column[6], of_column[7]);
    }

    // The first warp updates the largest of the head's columns, and notes if the values make the head an exception.
    template <bool kOfKeys, bool kOfScores>
    __device__ static void note(const Params& params, int32 head_kv, uint32 largest, const Shared& shared) {
        uint32* found = extremes(params, head_kv);
        const int32 exponent = static_cast<int32>(largest >> 23);
        bool exception = largest != 0 && (exponent < kSmallest || exponent > kLargest);
#pragma unroll
        for (int w = 0; w < Spec::kWarps; ++w) exception |= loses_bits(shared.smallest_row[w], largest);
        for (int32 column = threadIdx.x; column < kColumnsOf<Spec, kOfScores>; column += 32) {
            uint32 of_column = 0;
#pragma unroll
            for (int w = 0; w < Spec::kWarps; ++w) of_column = max_of(of_column, shared.of_columns[w][column]);
            exception |= loses_bits(of_column, largest);
            if (kOfScores && of_column != 0) atomicMax(found + (kOfKeys ? kColumns<true> : 0) + column, of_column);
        }
        if (exception) atomicOr(found + kIsException, 1u);
    }

    // Stores this thread's chunk of its rows in parts, and the strip's unit.
    template <bool kOfScores>
    __device__ static void store(Values<kOfScores>& value, const Matrix& matrix, int32 index, uint32 largest) {
        using Parts = Layout<kOfScores>;
        const int32 exponent = static_cast<int32>(largest >> 23);
        const bool has_scale = largest != 0 && exponent != kNoNumber;
        const int32 shift = has_scale ? min_of(kExponentBias + 13 - exponent, kLargestShift) : 0;
        // 1 / unit may lie outside the range of float32. Its two factors do not.
        const float scale[2] = {power_of_two(shift / 2), power_of_two(shift - shift / 2)};
        if (threadIdx.x == 0) matrix.units[index] = power_of_two(-(shift / 2)) * power_of_two(shift / 2 - shift);
        const int32 strip = index % matrix.num_strips, head_index = index / matrix.num_strips;
        const int32 panel_rows = Parts::panel_rows(matrix.num_strips);
#pragma unroll
        for (int r = 0; r < kRows<kOfScores>; ++r) {
            const int32 row = own_row<kOfScores>(r);
            const int32 first_row = Parts::row_of(head_index, matrix.num_strips, strip * kUnitRows + row);
            const auto store_chunk = [&](int32 column, const uint32(&word)[4]) {
                const int32 panel_row = first_row + column / kPanelColumns * panel_rows;
                common::store_global(Parts::address(matrix.parts, panel_row) + Parts::chunk(column, row), word);
            };
#pragma unroll
            for (int e = 0; e < 8; ++e) value[r][e] = value[r][e] * scale[0] * scale[1];
#pragma unroll
            for (int part = 0; part < kParts; ++part) {
                uint32 word[4];
#pragma unroll
                for (int w = 0; w < 4; ++w) word[w] = take_part(value[r][2 * w], value[r][2 * w + 1]);
                // Beyond the chunks of all lanes there are zeros.
#pragma unroll
                for (int32 first = 0; first < Parts::kColumns; first += 8 * kLanes<kOfScores>) {
                    const int32 column = first + 8 * own_chunk<kOfScores>();
                    if (column >= Parts::kColumns) break;
                    store_chunk(part * Parts::kColumns + column, word);
#pragma unroll
                    for (int w = 0; w < 4; ++w) word[w] = 0;
                }
            }
        }
    }

    // What the blocks of a K/V head have found: the largest magnitudes of the columns of Q and of K, whether values make it
    // an exception, and the number of blocks.
    static constexpr int kIsException = 2 * kColumns<true>, kNumBlocks = kIsException + 1, kExtremes = kNumBlocks + 1;
    __device__ static uint32* extremes(const Params& params, int32 head_kv) {
        return reinterpret_cast<uint32*>(params.extremes) + head_kv * kExtremes;
    }
    // The last block of the head marks it if it is an exception, or if a column may make too large a term of scores.
    __device__ static void mark(const Params& params, int32 head_kv) {
        uint32* found = extremes(params, head_kv);
        __threadfence();
        __syncwarp();
        uint32 others = 0;
        if (threadIdx.x == 0) others = atomicAdd(found + kNumBlocks, 1u);
        const uint32 of_queries = params.heads_per_group * params.q_strips * (kWithDout ? 2 : 1);
        if (__shfl_sync(common::kFullWarp, others, 0) != of_queries + 2 * params.k_strips - 1) return;
        __threadfence();
        bool exception = false;
        for (int32 column = threadIdx.x; column < kColumnsOf<Spec, true>; column += 32) {
            const float of_query = __uint_as_float(atomicExch(found + column, 0u));
            const float of_key = __uint_as_float(atomicExch(found + kColumns<true> + column, 0u));
            exception |= fabsf(params.softmax_scale) * of_query * of_key > kLargestTerm;
        }
        exception = __any_sync(common::kFullWarp, exception);
        if (threadIdx.x != 0) return;
        params.exceptions[head_kv] = atomicExch(found + kIsException, 0u) | (exception ? 1u : 0u);
        atomicExch(found + kNumBlocks, 0u);
    }

    __device__ static uint32 magnitude_bits(float x) { return __float_as_uint(x) & 0x7fffffff; }
    __device__ static float power_of_two(int32 exponent) {
        return __uint_as_float(static_cast<uint32>(kExponentBias + exponent) << 23);
    }
    // True if the largest element of a row or a column is not zero, but small beside that of the strip.
    __device__ static bool loses_bits(uint32 own, uint32 of_strip) {
        return own != 0 && static_cast<int32>(own >> 23) + kSpread < static_cast<int32>(of_strip >> 23);
    }
    // The largest over the lanes whose numbers differ in the bits from kFirst up to, but without, kEnd.
    template <int kFirst, int kEnd>
    __device__ static uint32 largest_over(uint32 x) {
#pragma unroll
        for (int mask = kFirst; mask < kEnd; mask *= 2) x = max_of(x, __shfl_xor_sync(common::kFullWarp, x, mask));
        return x;
    }
};

}  // namespace fa2::float32_parts
