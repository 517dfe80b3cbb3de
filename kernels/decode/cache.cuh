// Rows of the cache. Without a block table a sequence has a page of its own, of params.page_size rows.
//
// Lengths and block tables are in device memory, so that the host cannot check them: pages are clamped to those that
// exist, as lengths are to the table's (work.cuh). Rows behind a length are never read, nor is the table behind it.
#pragma once
#include "decode/work.cuh"

namespace fa2::decode {

// A row of a page. The page is clamped where its rows are copied: who reads its number ahead does not wait for it.
struct Place {
    int32 page, row;

    __device__ __forceinline__ int64 offset(const Params& params, const Strides& strides, int32 head) const {
        return strides.offset(min_of(max_of(page, 0), params.num_pages - 1), row, head);
    }
};

// Keys lie together in groups of so many, which begin at multiples of this number.
inline constexpr int kRowsTogether = 16;

// Where a key of a sequence lies, which must be below the length.
__device__ __forceinline__ Place place_of(const Params& params, int32 batch, int32 key) {
    if (params.block_table == nullptr) return {batch, key};
    const int32 index = key / params.page_size;
    const int32 page = params.block_table[static_cast<int64>(batch) * params.pages_per_sequence + index];
    return {page, key - index * params.page_size};
}

// Writes the new rows of a K/V head to their places in the cache; all threads of a block take part. Nobody reads them
// there in this launch: those who need them read k and v.
template <class Spec>
__device__ __forceinline__ void append_rows(const Params& params, const Job& job) {
    using Element = typename Spec::Element;
    constexpr int kWidth = sizeof(Element) == 2 ? 8 : 1, kWidest = common::max_of(Spec::kHeadDim, Spec::kHeadDimV);
    constexpr int kVectors = kWidest / kWidth;
    using Copied = Vector<Element, kWidth>;
    static_assert(Spec::kHeadDim % kWidth == 0 && Spec::kHeadDimV % kWidth == 0);
    for (int32 index = threadIdx.x; index < params.seqlen_new * kVectors; index += blockDim.x) {
        const int32 row = index / kVectors, column = index % kVectors * kWidth;
        const Place place = place_of(params, job.batch, job.cached + row);
        const auto copy = [&](Element* to, const Strides& to_strides, const Element* from,
                              const Strides& from_strides) {
            *reinterpret_cast<Copied*>(to + place.offset(params, to_strides, job.head_kv) + column) =
                *reinterpret_cast<const Copied*>(from + from_strides.offset(job.batch, row, job.head_kv) + column);
        };
        if (Spec::kHeadDim == kWidest || column < Spec::kHeadDim)
            copy(params.k_cache, params.k_cache_strides, params.k, params.k_strides);
        if (Spec::kHeadDimV == kWidest || column < Spec::kHeadDimV)
            copy(params.v_cache, params.v_cache_strides, params.v, params.v_strides);
    }
}

}  // namespace fa2::decode
