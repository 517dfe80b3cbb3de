// Splits the inputs of a call into parts (parts.cuh), and finds the heads whose values the parts do not represent well.
//
// A block splits one strip of a head. It reads the strip once; a thread holds a quarter of a row, in chunks of eight
// columns, because a chunk is what it can store.
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
// the next launch.
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
    static constexpr int kThreadsPerRow = kThreads / kUnitRows;
    static constexpr int kSpread = 12;
    static constexpr float kLargestTerm = 32.0f;
    static_assert(kThreads % kUnitRows == 0 && kPanelColumns % (8 * kThreadsPerRow) == 0 && 32 % kThreadsPerRow == 0);

    // kOfScores: the matrix is Q or K.
    template <bool kOfScores>
    using Layout = PartsLayout<kColumnsOf<Spec, kOfScores>>;
    template <bool kOfScores>
    static constexpr int kColumns = Layout<kOfScores>::kPanels * kPanelColumns;
    template <bool kOfScores>
    static constexpr int kChunks = kColumns<kOfScores> / (8 * kThreadsPerRow);  // of a thread

    // An input with its parts.
    struct Matrix {
        const float* x;
        Strides strides;
        float16* parts;
        float* units;
        int32 num_heads, num_strips;
        int32 heads_per_group;  // heads of the matrix for a K/V head
    };

    __device__ static void run(const Params& params) {
        const int32 num_heads_kv = params.num_heads / params.heads_per_group;
        const Matrix q{params.q,         params.q_strides, params.q_parts,        params.q_units,
                       params.num_heads, params.q_strips,  params.heads_per_group};
        const Matrix k{params.k, params.k_strides, params.k_parts, params.k_units, num_heads_kv, params.k_strips, 1};
        const Matrix v{params.v, params.v_strides, params.v_parts, params.v_units, num_heads_kv, params.k_strips, 1};
        int32 block = blockIdx.x;
        const int32 of_q = params.batch * params.num_heads * params.q_strips;
        const int32 of_k = params.batch * num_heads_kv * params.k_strips;
        if (block < of_q)
            split<false, true>(params, q, block);
        else if (block < of_q + of_k)
            split<true, true>(params, k, block - of_q);
        else if (!kWithDout || block < of_q + 2 * of_k)
            split<true, false>(params, v, block - of_q - of_k);
        else if constexpr (kWithDout)
            split<false, false>(params,
                                {params.dout, params.dout_strides, params.dout_parts, params.dout_units,
                                 params.num_heads, params.q_strips, params.heads_per_group},
                                block - of_q - 2 * of_k);
        if constexpr (kWithDout) common::clear_workspace(params.dq_accum, params.dq_accum_bytes);
    }

  private:
    static constexpr int32 kExponentBias = 127, kNoNumber = 255;  // of a float's exponent
    // The largest shift whose unit is not subnormal after the smallest float16 numbers are multiplied by it.
    static constexpr int32 kLargestShift = 134;
    // Exponents of the largest element of a strip, so that the product of two units is a normal number.
    static constexpr int32 kSmallest = kExponentBias - 50, kLargest = kExponentBias + 50;

    template <bool kOfKeys, bool kOfScores>
    __device__ static void split(const Params& params, const Matrix& matrix, int32 index) {
        const int32 strip = index % matrix.num_strips, head_index = index / matrix.num_strips;
        const int32 batch = head_index / matrix.num_heads, head = head_index % matrix.num_heads;
        const auto rows = common::workspace_rows<Spec, kOfKeys>(params, strip);
        const int32 row = threadIdx.x / kThreadsPerRow, lane = threadIdx.x % kThreadsPerRow;

        using Parts = Layout<kOfScores>;
        float value[kChunks<kOfScores>][8];
        bool valid = row < rows.length;
        if constexpr (kWithDout && !kOfKeys) {
            // A row that sees no key is zero in the parts: it may hold NaN, which P = 0 would not keep out of sums.
            const float* lse = params.lse + common::first_statistic<Spec>(params, batch, head);
            valid = valid && lse[rows.first + row] != -common::infinity<float>();
        }
        load<kOfScores>(value, matrix.x + matrix.strides.offset(batch, valid ? rows.first + row : 0, head), valid,
                        lane);
        if constexpr (kWithDout && !kOfKeys && !kOfScores)
            if (params.o != nullptr)
                compute_delta(value, params, batch, head, rows.first + row, row < rows.length, lane);
        const int32 head_kv = head_index / matrix.heads_per_group;
        const uint32 largest = largest_of_strip<kOfScores>(value, params, head_kv, kOfKeys);
        mark(params, head_kv);

        const int32 exponent = static_cast<int32>(largest >> 23);
        const bool has_scale = largest != 0 && exponent != kNoNumber;
        const int32 shift = has_scale ? min_of(kExponentBias + 13 - exponent, kLargestShift) : 0;
        // 1 / unit may lie outside the range of float32. Its two factors do not.
        const float scale[2] = {power_of_two(shift / 2), power_of_two(shift - shift / 2)};
        if (threadIdx.x == 0) matrix.units[index] = power_of_two(-(shift / 2)) * power_of_two(shift / 2 - shift);
        const int32 first_row = Parts::row_of(head_index, matrix.num_strips, strip * kUnitRows + row);
#pragma unroll
        for (int c = 0; c < kChunks<kOfScores>; ++c) {
            const int32 column = (c * kThreadsPerRow + lane) * 8;
#pragma unroll
            for (int e = 0; e < 8; ++e) value[c][e] = value[c][e] * scale[0] * scale[1];
#pragma unroll
            for (int part = 0; part < kParts; ++part) {
                uint32 word[4];
#pragma unroll
                for (int w = 0; w < 4; ++w) word[w] = take_part(value[c][2 * w], value[c][2 * w + 1]);
                const int32 panel = part * Parts::kPanels + column / kPanelColumns;
                const int32 panel_row = first_row + panel * Parts::panel_rows(matrix.num_strips);
                common::store_global(Parts::address(matrix.parts, panel_row) + Parts::chunk(column, row), word);
            }
        }
    }

    // Stores delta of a row of dO, of which a row that sees no key has zeros.
    __device__ static void compute_delta(const float (&dout)[kChunks<false>][8], const Params& params, int32 batch,
                                         int32 head, int32 row, bool exists, int32 lane) {
        float o[kChunks<false>][8];
        load<false>(o, params.o + params.o_strides.offset(batch, exists ? row : 0, head), exists, lane);
        float sum = 0.0f;
#pragma unroll
        for (int c = 0; c < kChunks<false>; ++c)
#pragma unroll
            for (int e = 0; e < 8; ++e) sum += o[c][e] * dout[c][e];
        sum = common::row_sum<kThreadsPerRow>(sum);
        if (lane != 0 || !exists) return;
        const int64 index = common::first_statistic<Spec>(params, batch, head) + row;
        params.delta[index] = sum - common::dlse_of<Spec>(params, index);
    }

    // Loads this thread's chunks of a row; zeros beyond the row and in rows that are not there.
    template <bool kOfScores>
    __device__ static void load(float (&value)[kChunks<kOfScores>][8], const float* row, bool valid, int32 lane) {
        constexpr int kHeadDim = kColumnsOf<Spec, kOfScores>;
        const bool aligned = kHeadDim % 4 == 0 && reinterpret_cast<uint64>(row) % 16 == 0;
#pragma unroll
        for (int c = 0; c < kChunks<kOfScores>; ++c) {
            const int32 column = (c * kThreadsPerRow + lane) * 8;
#pragma unroll
            for (int quad = 0; quad < 8; quad += 4) {
                float4 x = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
                const int32 left = valid ? kHeadDim - column - quad : 0;
                const float* from = row + column + quad;
                if (aligned && left > 0) {
                    x = *reinterpret_cast<const float4*>(from);
                } else {
                    if (left > 0) x.x = from[0];
                    if (left > 1) x.y = from[1];
                    if (left > 2) x.z = from[2];
                    if (left > 3) x.w = from[3];
                }
                value[c][quad] = x.x, value[c][quad + 1] = x.y, value[c][quad + 2] = x.z, value[c][quad + 3] = x.w;
            }
        }
    }

    // The bits of the largest magnitude, which have the order of magnitudes; NaN is the largest. Notes if the values make
    // the K/V head an exception. kOfScores: the largest of the head's columns are updated.
    template <bool kOfScores>
    __device__ static uint32 largest_of_strip(const float (&value)[kChunks<kOfScores>][8], const Params& params,
                                              int32 head_kv, bool of_keys) {
        __shared__ uint32 of_columns[Spec::kWarps][kColumns<kOfScores>];
        __shared__ uint32 of_warps[Spec::kWarps];
        const int32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        uint32 of_row = 0;
#pragma unroll
        for (int c = 0; c < kChunks<kOfScores>; ++c)
#pragma unroll
            for (int e = 0; e < 8; ++e) of_row = max_of(of_row, magnitude_bits(value[c][e]));
        of_row = largest_over<1, kThreadsPerRow>(of_row);
        const uint32 of_warp = largest_over<kThreadsPerRow, 32>(of_row);
        if (lane == 0) of_warps[warp] = of_warp;
#pragma unroll
        for (int c = 0; c < kChunks<kOfScores>; ++c)
#pragma unroll
            for (int e = 0; e < 8; ++e) {
                const uint32 x = largest_over<kThreadsPerRow, 32>(magnitude_bits(value[c][e]));
                if (lane < kThreadsPerRow) of_columns[warp][(c * kThreadsPerRow + lane) * 8 + e] = x;
            }
        __syncthreads();
        uint32 largest = 0;
#pragma unroll
        for (int w = 0; w < Spec::kWarps; ++w) largest = max_of(largest, of_warps[w]);
        bool exception = loses_bits(of_row, largest);
        for (int32 column = threadIdx.x; column < kColumns<kOfScores>; column += kThreads) {
            uint32 of_column = 0;
#pragma unroll
            for (int w = 0; w < Spec::kWarps; ++w) of_column = max_of(of_column, of_columns[w][column]);
            exception |= loses_bits(of_column, largest);
            if (kOfScores && of_column != 0)
                atomicMax(extremes(params, head_kv) + (of_keys ? kColumns<true> : 0) + column, of_column);
        }
        const int32 exponent = static_cast<int32>(largest >> 23);
        exception |= largest != 0 && (exponent < kSmallest || exponent > kLargest);
        if (exception) atomicOr(extremes(params, head_kv) + kIsException, 1u);
        return largest;
    }

    // What the blocks of a K/V head have found: the largest magnitudes of the columns of Q and of K, whether values make it
    // an exception, and the number of blocks.
    static constexpr int kIsException = 2 * kColumns<true>, kNumBlocks = kIsException + 1, kExtremes = kNumBlocks + 1;
    __device__ static uint32* extremes(const Params& params, int32 head_kv) {
        return reinterpret_cast<uint32*>(params.extremes) + head_kv * kExtremes;
    }
    // The last block of the head marks it if it is an exception, or if a column may make too large a term of scores.
    __device__ static void mark(const Params& params, int32 head_kv) {
        __shared__ bool is_last;
        uint32* found = extremes(params, head_kv);
        __threadfence();
        __syncthreads();
        if (threadIdx.x == 0) {
            const uint32 of_queries = params.heads_per_group * params.q_strips * (kWithDout ? 2 : 1);
            is_last = atomicAdd(found + kNumBlocks, 1u) == of_queries + 2 * params.k_strips - 1;
        }
        __syncthreads();
        if (!is_last) return;
        __threadfence();
        for (int32 column = threadIdx.x; column < kColumns<true>; column += kThreads) {
            const float of_query = __uint_as_float(atomicExch(found + column, 0u));
            const float of_key = __uint_as_float(atomicExch(found + kColumns<true> + column, 0u));
            if (fabsf(params.softmax_scale) * of_query * of_key > kLargestTerm) atomicOr(found + kIsException, 1u);
        }
        __syncthreads();
        if (threadIdx.x != 0) return;
        params.exceptions[head_kv] = atomicExch(found + kIsException, 0u);
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
