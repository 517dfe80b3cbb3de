// Which operands of a kernel have tangents.
#pragma once
#include "common/spec.cuh.j2"

namespace fa2::sm90 {

// Panels of a tangent lie behind those of its operand, and both are loaded at the same time.
struct Unmoved {
    static constexpr bool kMoves = false, kQuery = false, kKey = false, kValue = false, kDout = false;
};
template <class Spec>
struct MovedBy {
    static constexpr bool kMoves = true;
    static constexpr bool kQuery = Spec::kQueryTangent, kKey = Spec::kKeyTangent, kValue = Spec::kValueTangent,
                          kDout = Spec::kDoutTangent;
};

}  // namespace fa2::sm90
