// dQ = scale * workspace, rounded and rearranged from accumulator order into rows (last stage of `single_pass`).
//
// A block owns one query tile of a head. A thread converts 2 rows by 8 columns of dQ (by 16 columns if the workspace is
// transposed): the accumulators of 4 (8) lanes of one 16 x 8 workspace block, which it stores as whole 16-byte chunks. If
// the workspace has rows, it converts 16 columns of one.
#pragma once
#include "common/sequence.cuh"
#include "sm90/dq_workspace.cuh"

namespace fa2::sm90 {

template <class Spec>
struct ConvertDq {
    using Element = typename Spec::Element;
    static constexpr int kBr = Spec::kBr, kD = round_up(Spec::kHeadDim, 16);
    using Workspace = DqWorkspace<kBr, kD>;
    using Four = Vector<float, 4>;
    using Chunk = Vector<uint32, 4>;

    __device__ static void run(const Params& params, int32 block, int32 blocks) {
        // Blocks run from the last tile to the first, because those added last are still in the L2 cache.
        const int32 index = blocks - 1 - block;
        const int32 head = index / params.num_tiles;
        const float* workspace = params.dq_accum + static_cast<int64>(index) * Workspace::kTileElements;
        const auto rows = common::workspace_rows<Spec>(params, index % params.num_tiles);
        if (Spec::kVarlen && rows.length <= 0) return;
        Element* dq =
            params.dq + params.dq_strides.offset(head / params.num_heads, rows.first, head % params.num_heads);
        const ConvertDq tile{params, workspace, dq, rows.length};
        if constexpr (common::kHasBoxes<Spec>)
            tile.convert_rows();
        else if constexpr (Workspace::kTransposed)
            tile.convert_transposed();
        else
            tile.convert();
    }

    __device__ void convert() const {
        constexpr int kChunks = Spec::kHeadDim / 8;
        for (int32 index = threadIdx.x; index < kBr / 2 * kChunks; index += blockDim.x) {
            const int32 column8 = index % kChunks, g = index / kChunks % 8, row16 = index / (kChunks * 8);
            Four x[4];
#pragma unroll
            for (int t = 0; t < 4; ++t) x[t] = load(row16, column8, 4 * g + t);
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                Chunk chunk;
#pragma unroll
                for (int t = 0; t < 4; ++t) chunk.item[t] = packed(x[t].item[2 * i], x[t].item[2 * i + 1]);
                store(16 * row16 + g + 8 * i, column8 * 8, chunk);
            }
        }
    }

    __device__ void convert_transposed() const {
        for (int32 index = threadIdx.x; index < kBr / 2 * (kD / 16); index += blockDim.x) {
            const int32 t = index % 4, column16 = index / 4 % (kD / 16), row8 = index / 4 / (kD / 16);
            Four x[8];
#pragma unroll
            for (int g = 0; g < 8; ++g) x[g] = load(column16, row8, 4 * g + t);
#pragma unroll
            for (int j = 0; j < 2; ++j)
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    if (16 * column16 + 8 * i >= Spec::kHeadDim) continue;
                    Chunk chunk;
#pragma unroll
                    for (int g = 0; g < 4; ++g)
                        chunk.item[g] = packed(x[2 * g].item[2 * i + j], x[2 * g + 1].item[2 * i + j]);
                    store(8 * row8 + 2 * t + j, 16 * column16 + 8 * i, chunk);
                }
        }
    }

    __device__ void convert_rows() const {
        for (int32 index = threadIdx.x; index < kBr * (kD / 16); index += blockDim.x) {
            const int32 column16 = index % (kD / 16), row = index / (kD / 16);
            Four x[4];
#pragma unroll
            for (int t = 0; t < 4; ++t)
                x[t] = *reinterpret_cast<const Four*>(workspace + row * kD + Workspace::offset_in_row(2 * column16, t));
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                if (16 * column16 + 8 * j >= Spec::kHeadDim) continue;
                Chunk chunk;
#pragma unroll
                for (int t = 0; t < 4; ++t) chunk.item[t] = packed(x[t].item[2 * j], x[t].item[2 * j + 1]);
                store(row, 16 * column16 + 8 * j, chunk);
            }
        }
    }

    __device__ Four load(int32 row16, int32 column8, int32 lane) const {
        return *reinterpret_cast<const Four*>(workspace + Workspace::offset(row16, column8, lane));
    }
    __device__ uint32 packed(float lo, float hi) const {
        return common::pack<Element>(params.softmax_scale * lo, params.softmax_scale * hi);
    }
    __device__ void store(int32 row, int32 column, const Chunk& chunk) const {
        if (row >= length) return;
        *reinterpret_cast<Chunk*>(dq + row * params.dq_strides.row + column) = chunk;
    }

    const Params& params;
    const float* workspace;
    Element* dq;
    int32 length;
};

}  // namespace fa2::sm90
