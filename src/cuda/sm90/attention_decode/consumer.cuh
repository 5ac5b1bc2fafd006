// A warp that attends: S = Q K^T, softmax, O += P V, over 16 keys of one kv head at a time. Warps share nothing until a
// piece ends; each has its own maxima and sums.
#pragma once

#include "cuda/sm90/attention_decode/merge.cuh"
#include "cuda/sm90/attention_decode/products.cuh"

namespace heddle::cuda::sm90::attention_decode {

template <class C>
class Consumer : Products<C> {
 public:
  __device__ Consumer(const Params& params, SharedMemory<C> memory, int number)
      : Base(params, memory, number / (params.plan.row_groups * params.plan.key_splits),
             number / params.plan.key_splits % params.plan.row_groups * (kRowTile * C::kRowTiles)),
        control(memory.control()),
        warp(number),
        split(number % params.plan.key_splits),
        active(head < params.plan.heads && first_row < params.plan.rows) {}

  __device__ void run() {
    Merger<C> merger(p, shared);
    const Piece* last = nullptr;  // whose unit is merged when all else is done: it began in an earlier CTA
    std::uint32_t phase = 0;
    for (RingPosition slot;; slot.next(kPieces), phase ^= 1) {
      ptx::barrier_wait(control.piece_ready[slot.index], slot.phase);
      const Piece& piece = control.pieces[slot.index];
      const bool more = piece.sequence >= 0;
      const Piece* merge = last;
      if (more) {
        clear();
        ptx::barrier_wait(control.q_ready, phase);
        load_factors();
        if constexpr (C::kQInRegisters) {
          this->load_q(0, 0);
          ptx::barrier_arrive(control.q_free);
        }
#pragma unroll 1
        for (int block = 0; block < piece.blocks; ++block) attend(piece, piece.first_slot + block * p.plan.block);
        finish(piece, merger);
        if (piece.merge == Piece::kCluster) merger.gather(piece);
        if constexpr (!C::kQInRegisters) ptx::barrier_arrive(control.q_free);
        merge = piece.merge == Piece::kNow ? &piece : nullptr;
        if (piece.merge == Piece::kLast) {
          if (warp == 0 && lane() == 0) control.last = piece;
          last = &control.last;
        }
      }
      consumers_meet();  // for control.last
      if (merge != nullptr) merger.merge(*merge);
      if (!more) return;
      release(control.piece_free[slot.index]);
    }
  }

 private:
  using Base = Products<C>;
  using Base::first_row, Base::head, Base::kColumns, Base::kTiles, Base::lane, Base::o, Base::p, Base::shared;
  using typename Base::T;

  __device__ void release(ptx::Barrier& barrier) {
    __syncwarp();
    if (lane() == 0) ptx::barrier_arrive(barrier);
  }

  // This warp's part of the merge buffer.
  __device__ float* merge_rows() const { return shared.merge() + warp * 8 * C::kMergePitch; }

  __device__ void clear() {
#pragma unroll
    for (int m = 0; m < kTiles; ++m) {
      state[m] = {};
      value_unit[m] = p.scales_by_key ? 0.0f : 1.0f;
#pragma unroll
      for (int n = 0; n < kColumns; ++n) {
#pragma unroll
        for (int c = 0; c < 4; ++c) o[m][n][c] = 0.0f;
      }
    }
  }

  __device__ void load_factors() {
    if constexpr (C::kE4m3) {
#pragma unroll
      for (int n = 0; n < 2 * kTiles; ++n) {
        const int row = min(first_row + 8 * n + lane() / 4, p.plan.rows - 1);
        factor[n] = control.row_factor[head % p.plan.heads * p.plan.rows + row];
      }
    }
  }

  // One block's keys and values, which lie from slot `from` on.
  __device__ void attend(const Piece& piece, int from) {
    const int k_stage = stage.index;
    const std::uint32_t k_phase = stage.phase;
    stage.next(p.plan.stages);
    const int v_stage = stage.index;
    const std::uint32_t v_phase = stage.phase;
    stage.next(p.plan.stages);
    const int groups = active ? p.plan.block / kKeyTile : 0;
    const KeyRows rows(p.plan, head);
    ptx::barrier_wait(control.full[k_stage], k_phase);
    if (split >= groups) {
      release(control.empty[k_stage]);
      ptx::barrier_wait(control.full[v_stage], v_phase);
      release(control.empty[v_stage]);
      return;
    }
#pragma unroll 1
    for (int group = split; group < groups; group += p.plan.key_splits) {
      const bool last = group + p.plan.key_splits >= groups;
      const int slot = from + group * kKeyTile, first_key = slot - piece.k_begin;
      ScoreTile s[kTiles];
      this->score(ptx::shared_address(shared.tile(k_stage)), rows, group * kKeyTile, s);
      if (last) release(control.empty[k_stage]);
      const bool whole = p.plain && first_key >= piece.whole_begin && first_key + kKeyTile <= piece.whole_end;
      std::uint32_t kept[2] = {0xFFFFFFFF, 0xFFFFFFFF};
      finish_scores(piece, first_key, whole, s, kept);
      std::uint32_t probabilities[kTiles][4];
#pragma unroll
      for (int m = 0; m < kTiles; ++m) {
        float correction[2];
        softmax(s[m], state[m], correction);
        if constexpr (C::kE4m3) {
          if (p.scales_by_key) scale_probabilities(piece, first_key, m, s[m], correction);
        }
        if (__any_sync(0xffffffff, correction[0] != 1.0f || correction[1] != 1.0f)) {
#pragma unroll
          for (int n = 0; n < kColumns; ++n) {
#pragma unroll
            for (int c = 0; c < 4; ++c) o[m][n][c] *= correction[c / 2];
          }
        }
        probabilities[m][0] = ptx::pack2<T>(s[m][0][0], s[m][0][1]);
        probabilities[m][1] = ptx::pack2<T>(s[m][0][2], s[m][0][3]);
        probabilities[m][2] = ptx::pack2<T>(s[m][1][0], s[m][1][1]);
        probabilities[m][3] = ptx::pack2<T>(s[m][1][2], s[m][1][3]);
      }
      ptx::barrier_wait(control.full[v_stage], v_phase);
      if (whole) {
        this->template add_values<false>(ptx::shared_address(shared.tile(v_stage)), rows, group * kKeyTile,
                                         probabilities, kept);
      } else {
        this->template add_values<true>(ptx::shared_address(shared.tile(v_stage)), rows, group * kKeyTile,
                                        probabilities, kept);
      }
    }
    release(control.empty[v_stage]);
  }

  // Scales, options and masks. kept: which of this thread's values (those of two neighbouring keys in the halves of a
  // word, keys 8 further in the second) some row of the warp attends.
  __device__ void finish_scores(const Piece& piece, int first_key, bool whole, ScoreTile (&s)[kTiles],
                                std::uint32_t (&kept)[2]) {
    const int kv_head = piece.head + head;
#pragma unroll
    for (int m = 0; m < kTiles; ++m) {
      if constexpr (C::kE4m3) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
#pragma unroll
          for (int n = 0; n < 4; ++n) s[m][n / 2][2 * r + n % 2] *= factor[2 * m + r];
        }
        if (p.scales_by_key) {
#pragma unroll
          for (int n = 0; n < 4; ++n) {
            const float scale = key_scale(p.problem.k_scale, piece, first_key, n);
            s[m][n / 2][n % 2] *= scale;
            s[m][n / 2][2 + n % 2] *= scale;
          }
        }
      } else {
#pragma unroll
        for (int n = 0; n < 8; ++n) s[m][n / 4][n % 4] *= p.scale_log2;
      }
    }
    if (whole) return;
    unsigned attended = 0;  // bits: key of this thread
#pragma unroll
    for (int m = 0; m < kTiles; ++m) {
      const TileRows rows(p, piece, kv_head, first_row + kRowTile * m);
      if (!p.plain) apply_options(p, piece, rows, first_key, merge_rows(), s[m]);
      mask_band(rows, first_key, s[m]);
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        if (s[m][n / 2][n % 2] != -INFINITY || s[m][n / 2][2 + n % 2] != -INFINITY) attended |= 1u << n;
      }
    }
#pragma unroll
    for (int step = 4; step < 32; step *= 2) attended |= __shfl_xor_sync(0xffffffff, attended, step);
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      kept[n] = (attended >> (2 * n) & 1 ? 0x0000FFFFu : 0u) | (attended >> (2 * n + 1) & 1 ? 0xFFFF0000u : 0u);
    }
  }

  // Of key n of this thread's four.
  __device__ float key_scale(const Scales& scales, const Piece& piece, int first_key, int n) const {
    const int key = first_key + lane() % 4 * 2 + n / 2 * 8 + n % 2;
    Sequence s;
    s.k_begin = piece.k_begin;
    const AttentionProblem::Slot at =
        p.problem.key_slot(piece.sequence, s, min(max(key, piece.begin), max(piece.end - 1, piece.begin)));
    return scales.at(p.problem.page_table != nullptr ? at.batch : piece.cache_row, at.row, piece.head + head);
  }

  // P times the values' scales. O counts in units of the largest scale so far, so that float16 holds what P becomes.
  __device__ void scale_probabilities(const Piece& piece, int first_key, int m, ScoreTile& s, float (&correction)[2]) {
    float scale[4], largest = 0.0f;
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      scale[n] = key_scale(p.problem.v_scale, piece, first_key, n);
      largest = fmaxf(largest, fabsf(scale[n]));
    }
    largest = fmaxf(largest, __shfl_xor_sync(0xffffffff, largest, 1));
    largest = fmaxf(largest, __shfl_xor_sync(0xffffffff, largest, 2));
    const float before = value_unit[m];
    value_unit[m] = fmaxf(before, largest);
    const float inverse = value_unit[m] > 0.0f ? __fdividef(1.0f, value_unit[m]) : 0.0f;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if (before != value_unit[m]) correction[r] *= before * inverse;
#pragma unroll
      for (int n = 0; n < 4; ++n) s[n / 2][2 * r + n % 2] *= scale[n] * inverse;
    }
  }

  // Hands O, maxima and sums to the merge of the warps that shared the keys.
  __device__ void finish(const Piece& piece, Merger<C>& merger) {
#pragma unroll
    for (int m = 0; m < kTiles; ++m) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float sum = state[m].sum[r];
        sum += __shfl_xor_sync(0xffffffff, sum, 1);
        sum += __shfl_xor_sync(0xffffffff, sum, 2);
        if (lane() % 4 == 0) {
          control.max[warp][kRowTile * m + 8 * r + lane() / 4] = state[m].max[r];
          control.sum[warp][kRowTile * m + 8 * r + lane() / 4] = sum;
        }
      }
    }
    // Eight rows and kPassColumns columns at a time; selected, not indexed, since registers have no index.
    constexpr int kPasses = C::kSize / C::kPassColumns, kColumnsOfPass = C::kPassColumns / 8;
#pragma unroll 1
    for (int part = 0; part < 2 * kTiles * kPasses; ++part) {
      const int row = part / kPasses * 8, pass = part % kPasses;
      if (row >= p.plan.rows) break;  // no warp has rows here
      const int lane = Consumer::lane();
      float* to = merge_rows() + lane / 4 * C::kMergePitch;
#pragma unroll
      for (int n = 0; n < kColumnsOfPass; n += 2) {
        float2 even = make_float2(0.0f, 0.0f), odd = even;
#pragma unroll
        for (int other = 0; other < 2 * kTiles * kPasses; ++other) {
          const int m = other / kPasses / 2, r = other / kPasses % 2, column = other % kPasses * kColumnsOfPass + n;
          if (other == part) {
            even = make_float2(o[m][column][2 * r], o[m][column][2 * r + 1]);
            odd = make_float2(o[m][column + 1][2 * r], o[m][column + 1][2 * r + 1]);
          }
        }
        if constexpr (C::kE4m3) {
          const float unit = kTiles == 2 && row >= kRowTile ? value_unit[kTiles - 1] : value_unit[0];
          *reinterpret_cast<float4*>(to + 8 * n + 4 * (lane % 4)) =
              make_float4(even.x * unit, odd.x * unit, even.y * unit, odd.y * unit);
        } else {
          *reinterpret_cast<float2*>(to + 8 * n + 2 * (lane % 4)) = even;
          *reinterpret_cast<float2*>(to + 8 * n + 8 + 2 * (lane % 4)) = odd;
        }
      }
      consumers_meet();
      merger.join_warps(piece, row, pass * C::kPassColumns);
      consumers_meet();
    }
  }

  Control& control;
  const int warp, split;
  const bool active;
  RingPosition stage;
  RowState state[kTiles];
  float factor[2 * kTiles];  // of the scores of this thread's rows; e4m3 only
  float value_unit[kTiles];  // O counts in these; 1 unless scales differ from key to key
};

}  // namespace heddle::cuda::sm90::attention_decode
