// A warp that attends: S = Q K^T, softmax, O += P V, over 16 keys of one kv head at a time. Warps share nothing until a
// piece ends; each has its own maxima and sums.
#pragma once

#include "cuda/sm90/attention_decode/merge.cuh"
#include "cuda/sm90/attention_decode/scores.cuh"
#include "cuda/sm90/attention_decode/tile.cuh"

namespace heddle::cuda::sm90::attention_decode {

template <class C>
class Consumer {
 public:
  __device__ Consumer(const Params& params, SharedMemory<C> memory, int number)
      : p(params),
        shared(memory),
        control(memory.control()),
        warp(number),
        head(number / (params.plan.row_groups * params.plan.key_splits)),
        first_row(number / params.plan.key_splits % params.plan.row_groups * (kRowTile * C::kRowTiles)),
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
          load_q(0, 0);
          release(control.q_free);
        }
#pragma unroll 1
        for (int block = 0; block < piece.blocks; ++block) attend(piece, piece.first_slot + block * p.plan.block);
        finish(piece, merger);
        if constexpr (!C::kQInRegisters) release(control.q_free);
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
  using T = typename C::Element;
  static constexpr int kTiles = C::kRowTiles, kSteps = C::kSize / 16, kColumns = C::kSize / 8;

  static __device__ int lane() { return recomputed(static_cast<int>(threadIdx.x)) % 32; }

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

  // Fragments of row tile m for all steps (in registers) or for one.
  __device__ void load_q(int m, int step) {
    const int row = head % p.plan.heads * p.plan.rows + min(first_row + kRowTile * m + lane() % 16, p.plan.rows - 1);
    const std::uint32_t address = ptx::shared_address(shared.q()) + row * C::kQPitch + lane() / 16 * 16;
    if constexpr (C::kQInRegisters) {
#pragma unroll
      for (int n = 0; n < kSteps; ++n) ptx::load_matrix_x4(q[n], address + 32 * n);
    } else {
      ptx::load_matrix_x4(q[0], address + 32 * step);
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
      score(ptx::shared_address(shared.tile(k_stage)), rows, group * kKeyTile, s);
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
        add_values<false>(ptx::shared_address(shared.tile(v_stage)), rows, group * kKeyTile, probabilities, kept);
      } else {
        add_values<true>(ptx::shared_address(shared.tile(v_stage)), rows, group * kKeyTile, probabilities, kept);
      }
    }
    release(control.empty[v_stage]);
  }

  __device__ void score(std::uint32_t tile, const KeyRows& rows, int key, ScoreTile (&s)[kTiles]) {
#pragma unroll
    for (int m = 0; m < kTiles; ++m) {
#pragma unroll
      for (int n = 0; n < 8; ++n) s[m][n / 4][n % 4] = 0.0f;
    }
    if constexpr (C::kE4m3) {
      // A lane reads 16 columns of keys lane / 4 and lane / 4 + 8 at once: four steps' worth.
      const int lane = Consumer::lane(), row0 = rows.row(key + lane / 4), row1 = rows.row(key + lane / 4 + 8);
#pragma unroll C::kQInRegisters ? kSteps / 4 : 1
      for (int chunk = 0; chunk < kSteps / 4; ++chunk) {
        const std::uint32_t panel = tile + chunk / 2 * p.plan.panel_bytes;
        const int c = chunk % 2 * 4 + lane % 4;
        const uint4 k0 = ptx::load_shared_16(chunk_address(panel, row0, c));
        const uint4 k1 = ptx::load_shared_16(chunk_address(panel, row1, c));
        const std::uint32_t words0[4] = {k0.x, k0.y, k0.z, k0.w}, words1[4] = {k1.x, k1.y, k1.z, k1.w};
#pragma unroll
        for (int n = 0; n < 4; ++n) {
          const std::uint32_t b[4] = {ptx::e4m3x2_to_f16x2(words0[n]), ptx::e4m3x2_to_f16x2(words0[n] >> 16),
                                      ptx::e4m3x2_to_f16x2(words1[n]), ptx::e4m3x2_to_f16x2(words1[n] >> 16)};
          multiply(4 * chunk + n, b, s);
        }
      }
    } else {
      // Lanes 0-7 and 8-15 name keys 0-7, columns 0-7 and 8-15 of a step; 16-31 keys 8-15.
      const int lane = Consumer::lane(), row = rows.row(key + lane / 16 * 8 + lane % 8);
#pragma unroll C::kQInRegisters ? kSteps : 4
      for (int step = 0; step < kSteps; ++step) {
        std::uint32_t b[4];
        ptx::load_matrix_x4(b, chunk_address(tile + step / 4 * p.plan.panel_bytes, row, step % 4 * 2 + lane / 8 % 2));
        multiply(step, b, s);
      }
    }
  }

  __device__ void multiply(int step, const std::uint32_t (&b)[4], ScoreTile (&s)[kTiles]) {
#pragma unroll
    for (int m = 0; m < kTiles; ++m) {
      if constexpr (!C::kQInRegisters) load_q(m, step);
      const auto& a = q[C::kQInRegisters ? step : 0];
      ptx::mma_16816<T>(s[m][0], a, b[0], b[1]);
      ptx::mma_16816<T>(s[m][1], a, b[2], b[3]);
    }
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

  // O += P V for 16 values from `key` on. kMasked: values that nobody attends count as zeros, whatever they are: P is
  // zero there, but zero times NaN is not.
  template <bool kMasked>
  __device__ void add_values(std::uint32_t tile, const KeyRows& rows, int key,
                             const std::uint32_t (&probabilities)[kTiles][4], const std::uint32_t (&kept)[2]) {
    // Lanes 0-7 and 8-15 name keys 0-7 and 8-15 of one 16-byte chunk; 16-31 of the next.
    const int lane = Consumer::lane(), row = rows.row(key + lane % 16);
    constexpr int kChunks = C::kSize * C::kKeyBytes / 16;
#pragma unroll
    for (int chunk = 0; chunk < kChunks; chunk += 2) {
      std::uint32_t v[4];
      ptx::load_matrix_x4_transposed(v,
                                     chunk_address(tile + chunk / 8 * p.plan.panel_bytes, row, chunk % 8 + lane / 16));
      if constexpr (C::kE4m3) {
        // A word holds two columns of each of two keys: the even one's pair of keys, and the odd one's.
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          const std::uint32_t low = __byte_perm(v[2 * c], 0, 0x3120), high = __byte_perm(v[2 * c + 1], 0, 0x3120);
          add<kMasked>(2 * (chunk + c), ptx::e4m3x2_to_f16x2(low), ptx::e4m3x2_to_f16x2(high), probabilities, kept);
          add<kMasked>(2 * (chunk + c) + 1, ptx::e4m3x2_to_f16x2(low >> 16), ptx::e4m3x2_to_f16x2(high >> 16),
                       probabilities, kept);
        }
      } else {
        add<kMasked>(chunk, v[0], v[1], probabilities, kept);
        add<kMasked>(chunk + 1, v[2], v[3], probabilities, kept);
      }
    }
  }

  template <bool kMasked>
  __device__ void add(int column, std::uint32_t b0, std::uint32_t b1, const std::uint32_t (&probabilities)[kTiles][4],
                      const std::uint32_t (&kept)[2]) {
    if constexpr (kMasked) {
      b0 &= kept[0];
      b1 &= kept[1];
    }
#pragma unroll
    for (int m = 0; m < kTiles; ++m) ptx::mma_16816<T>(o[m][column], probabilities[m], b0, b1);
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

  const Params& p;
  const SharedMemory<C> shared;
  Control& control;
  const int warp;
  const int head, first_row, split;  // what is this warp's of a unit
  const bool active;
  RingPosition stage;
  RowState state[kTiles];
  float factor[2 * kTiles];  // of the scores of this thread's rows; e4m3 only
  float value_unit[kTiles];  // O counts in these; 1 unless scales differ from key to key
  float o[kTiles][kColumns][4];
  std::uint32_t q[C::kQInRegisters ? kSteps : 1][4];
};

}  // namespace heddle::cuda::sm90::attention_decode
