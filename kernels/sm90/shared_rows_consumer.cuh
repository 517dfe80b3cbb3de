// Two consumer warp groups that own the same 64 rows, because the registers of one do not hold O: each has half of the
// columns of V and O. They compute scores by turns, of one key tile each, and hand each other P, so that no product is
// computed twice:
//
//   of its own key tiles           S = Q K^T, P = 2^(S - row_shift), O += P V, and P goes to the other group
//   of those of the other group    O += P V, where P comes from shared memory
//
// The gradients are computed in the same way (shared_gradient_consumer.cuh). Their rows are queries, or keys; "key tiles"
// are then tiles of the other side, and P, O and V stand for what is multiplied:
//
//   O     rows       S          P                              V
//   dQ    queries    Q K^T      dS = P o (dO V^T - delta)      K
//   dK    keys       K Q^T      dS^T                           Q
//   dV    keys       K Q^T      P^T                            dO
//
// The forward's row shifts and row sums go from group to group together with P: the group that computes P has those of all
// key tiles before, and both groups have those of all rows at the end. A thread of one group and that of the same number
// in the other hold the same rows and keys of P, so a thread writes what exactly one other thread reads. One buffer serves
// both directions, because a thread reads what is there before it writes, and one mbarrier for each pair of warps.
//
// While a group computes exponentials, its own product P V of the key tile before and the products of the other group keep
// the tensor cores busy. The steps of a group, for its key tiles t:
//
//   issue   O += P(t - 2) V(t - 2), S = Q K(t)^T
//   read    P(t - 1); wait for O -> release V(t - 2)
//   issue   O += P(t - 1) V(t - 1)
//   wait    S -> release K(t); P(t) = 2^(S - row_shift)
//   wait    O -> release V(t - 1)
//
// If P is dS, K is V, whose stages are few (kDerives). The stage of t - 2 is then released before S(t), which may need it,
// is issued, and that of t - 1 before dP(t) is awaited:
//
//   issue   O += dS(t - 2) V(t - 2); wait for O -> release V(t - 2)
//   issue   S = Q V(t)^T
//   read    dS(t - 1)
//   issue   O += dS(t - 1) V(t - 1), dP(t)
//   wait    S; P(t) = 2^(S - lse)
//   wait    O -> release V(t - 1)
//   wait    dP -> release its operand; dS(t) = P o (dP - delta)
#pragma once
#include "common/math.cuh"
#include "sm90/multiply_panels.cuh"
#include "sm90/store_box.cuh"

namespace fa2::sm90 {

// What one group hands to the other: P, row sums of each thread, and row shifts.
template <int kBc>
struct ExchangedTile {
    static constexpr int kStepBytes = 16 * kGroupThreads;  // of P of one k-step
    static constexpr int kSums = kBc / 16 * kStepBytes, kShifts = kSums + 8 * kGroupThreads;
    static constexpr int kBytes = kShifts + 4 * kGroupRows;
};

// `Shape` has the constants kBc, kColumns (of O), kOwnPanels and kOwnDv (the panels and the columns of a group's part of
// O), kDerives, kHasSoftmax (the groups hand over row shifts and row sums) and kMovesExchange. `Own` is the class of the
// consumer, which has the members warp_, lane_ and scores_, a QuadFragment<kBc / 8>, and with kHasSoftmax softmax_, an
// OnlineSoftmax. Its functions get the position of a key tile among those of the rows, which counts from 0 in the order
// in which they are processed:
//
//   multiply_scores(t)                 issues S = Q K^T, without the end of a group of products; waits until K is there
//   value_operand(t)                   the MN-major descriptor of the group's columns of V; waits until they are there
//   release_key(t), release_value(t)   the group has finished reading K or its columns of V
//   take_probabilities(t, p, rescale)  computes `p` from scores_; false if O must be multiplied by `rescale`
//
// with kDerives, in the place of the last one
//
//   issue_derivatives(t)               issues dP, as two groups of products
//   exponentiate(t)                    replaces S by P
//   take_derivatives(t, p)             computes `p`, dS, from P and dP
//
// and with kMovesExchange
//
//   place_to_write(), place_to_read()  the addresses of the buffers of P of the present key tile and of the one before
//   release_exchange()                 this warp has read the latter
template <class Own, class Shape, class Element>
class SharedRowsConsumer {
  protected:
    using Output = QuadFragment<Shape::kOwnDv / 8>;
    using Probabilities = PackedFragment<Element, Shape::kBc / 8>;
    using Exchanged = ExchangedTile<Shape::kBc>;
    static constexpr bool kHasSoftmax = Shape::kHasSoftmax;
    // Named barriers: one for each group, of `Own`, and one for both.
    static constexpr int kOwnBarrier = 1, kStoreBarrier = kOwnBarrier + 2;

    // `part`: the group's columns of O. `exchange`: Exchanged::kBytes of shared memory, unless kMovesExchange; `barriers`:
    // mbarriers of one arrival for each of the 4 pairs of warps.
    __device__ SharedRowsConsumer(int32 part, uint32 exchange, uint32 barriers)
        : part_(part),
          exchange_(of_thread(exchange)),
          shifts_(exchange + Exchanged::kShifts + 4 * (threadIdx.x % kGroupThreads / 32 * 16 + threadIdx.x % 32 / 4)),
          barrier_(barriers + 8 * (threadIdx.x % kGroupThreads / 32)) {}

    // Computes O, row shifts and row sums of `tiles` key tiles. Both groups have the same number of them, one at least.
    __device__ __forceinline__ void take_tiles(int32 tiles) {
        if constexpr (kHasSoftmax) own().softmax_.reset();
        output_.fill(0.0f);
        int32 t = (turn_ + part_) % 2;
        if (t < tiles) {
            if (t == 0)
                step<false, false>(t);
            else
                step<false, true>(t);
#pragma unroll 1
            for (t += 2; t < tiles; t += 2) step<true, true>(t);
            issue_output(p_, t - 2);
            if (t == tiles) take_other<0>(t - 1, true);
            finish_output<0>(tiles - 1);
        } else {
            take_other<0>(0, false);
            finish_output<0>(0);
        }
        turn_ += tiles;
    }

    __device__ __forceinline__ void multiply_output(const float (&factor)[2]) {
#pragma unroll
        for (int n = 0; n < Shape::kOwnDv / 8; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) output_.value[n][e] *= factor[e / 2];
    }

    // Stores the group's columns of O by TMA, through the memory of the block's rows at `smem`. These begin at `row`.
    template <class TmaRows>
    __device__ __forceinline__ void store_output(uint32 smem, const TensorMap& map, const TmaRows& rows, int32 row,
                                                 int32 head, int32 batch) {
        constexpr uint32 kPanelBytes = kGroupRows * kPanelRowBytes;
        const int first = part_ * Shape::kOwnPanels;
        const uint32 box = smem + first * kPanelBytes + own().warp_ * 16 * kPanelRowBytes;
        barrier_sync(kStoreBarrier, 2 * kGroupThreads);  // both groups have finished reading these rows
        write_box<Element>(box, kPanelBytes, output_, own().lane_);
        async_proxy_fence();
        __syncwarp();
        if (own().lane_ > 0) return;
#pragma unroll
        for (int panel = 0; panel < Shape::kOwnPanels; ++panel)
            if ((first + panel) * kPanelColumns < Shape::kColumns)
                rows.store(map, box + panel * kPanelBytes, (first + panel) * kPanelColumns, row + 16 * own().warp_,
                           head, batch);
        tma_store_commit();
        tma_store_wait_read();
    }

    const int32 part_;
    uint32 turn_ = 0;  // key tiles so far; the groups take turns also across the ends of rows
    Output output_;

  private:
    // From key tile t - 2 of this group, whose P is there, to P of key tile t. kHasOwn, kHasOther: there are key tiles t - 2
    // and t - 1. No product is in flight at the beginning and at the end, where the compiler would not know it in a loop.
    template <bool kHasOwn, bool kHasOther>
    __device__ __forceinline__ void step(int32 t) {
        if constexpr (kHasOwn) issue_output(p_, t - 2);
        if constexpr (kHasOwn && Shape::kDerives) {
            finish_output<0>(t - 2);
            pin(p_);
        }
        issue_scores(t);
        if constexpr (kHasOther) take_other<1>(t - 1, kHasOwn && !Shape::kDerives);
        if constexpr (Shape::kDerives) {
            own().issue_derivatives(t);
            wgmma_wait<kHasOther ? 3 : 2>();
            pin(own().scores_);
            own().exponentiate(t);
            if constexpr (kHasOther) {
                finish_output<2>(t - 1);
                pin(other_p_);
            }
            own().take_derivatives(t, p_);
            hand_over();
        } else {
            wgmma_wait<kHasOther ? 1 : 0>();
            pin(own().scores_);
            own().release_key(t);
            float rescale[2];
            const bool kept = own().take_probabilities(t, p_, rescale);
            hand_over();
            if constexpr (kHasOther) {
                finish_output<0>(t - 1);
                pin(other_p_);
                if (__builtin_expect(!kept, 0)) multiply_output(rescale);
            }
        }
    }

    // Waits for the product P V of key tile t, after which kPending others have been issued.
    template <int kPending>
    __device__ __forceinline__ void finish_output(int32 t) {
        wgmma_wait<kPending>();
        pin(output_);
        own().release_value(t);
    }

    // Issues the product of the other group's P of key tile t. kPending: products issued after that of the key tile before,
    // which is in flight if `waits`.
    template <int kPending>
    __device__ __forceinline__ void take_other(int32 t, bool waits) {
        float before[2];
        if constexpr (kHasSoftmax)
#pragma unroll
            for (int i = 0; i < 2; ++i) before[i] = own().softmax_.row_shift[i];
        read(t);
        if (waits) {
            finish_output<kPending>(t - 1);
            pin(p_);
        }
        if constexpr (kHasSoftmax) {
            float rescale[2];
            bool kept = true;
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const float shift = own().softmax_.row_shift[i];
                kept &= before[i] == shift;
                rescale[i] = before[i] == shift ? 1.0f : common::exp2_approx(before[i] - shift);
            }
            if (!__all_sync(common::kFullWarp, kept)) multiply_output(rescale);
        }
        issue_output(other_p_, t);
    }

    __device__ __forceinline__ void issue_scores(int32 t) {
        own().multiply_scores(t);
        wgmma_commit();
        pin(own().scores_);
    }

    __device__ __forceinline__ void issue_output(const Probabilities& p, int32 t) {
        const uint64 v = own().value_operand(t);
        pin(output_);
        wgmma_fence();
#pragma unroll
        for (int s = 0; s < Shape::kBc / 16; ++s) wgmma_output(output_, p.k16(s), v + along_rows(s));
        wgmma_commit();
        pin(output_);
    }

    __device__ __forceinline__ void hand_over() {
        const int32 lane = threadIdx.x % 32;
        uint32 exchange = exchange_;
        if constexpr (Shape::kMovesExchange) exchange = of_thread(own().place_to_write());
#pragma unroll
        for (int s = 0; s < Shape::kBc / 16; ++s) store_shared(exchange + s * Exchanged::kStepBytes, p_.k16(s));
        if constexpr (kHasSoftmax)
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                store_shared(sum_address(i), own().softmax_.sum[i]);
                if (lane % 4 == 0) store_shared(shifts_ + 32 * i, own().softmax_.row_shift[i]);
            }
        if constexpr (Shape::kMovesExchange) async_proxy_fence();  // TMA writes there next
        __syncwarp();
        if (lane == 0) mbarrier_arrive(barrier_);
    }
    __device__ __forceinline__ void read(int32 t) {
        mbarrier_wait(barrier_, (turn_ + t) % 2);
        uint32 exchange = exchange_;
        if constexpr (Shape::kMovesExchange) exchange = of_thread(own().place_to_read());
#pragma unroll
        for (int s = 0; s < Shape::kBc / 16; ++s) {
            const OperandA step = load_shared_operand(exchange + s * Exchanged::kStepBytes);
#pragma unroll
            for (int r = 0; r < 4; ++r) other_p_.word[2 * s + r / 2][r % 2] = step.reg[r];
        }
        if constexpr (kHasSoftmax)
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                own().softmax_.sum[i] = load_shared<float>(sum_address(i));
                own().softmax_.row_shift[i] = load_shared<float>(shifts_ + 32 * i);
            }
        if constexpr (Shape::kMovesExchange) own().release_exchange();
    }
    __device__ __forceinline__ static uint32 of_thread(uint32 exchange) {
        return exchange + 16 * (threadIdx.x % kGroupThreads);
    }
    __device__ __forceinline__ uint32 sum_address(int i) const {
        return exchange_ - 12 * (threadIdx.x % kGroupThreads) + Exchanged::kSums + i * 4 * kGroupThreads;
    }

    __device__ __forceinline__ Own& own() { return static_cast<Own&>(*this); }

    const uint32 exchange_, shifts_, barrier_;  // of this thread, and of this warp
    Probabilities p_, other_p_;
};

}  // namespace fa2::sm90
