// A warp's blocks: S = Q K^T, softmax, O += P V, over 16 keys of one kv head at a time.
#pragma once

#include "cuda/common/attention/rows.cuh"
#include "cuda/common/ptx/arithmetic.cuh"
#include "cuda/common/ptx/barrier.cuh"
#include "cuda/common/ptx/memory.cuh"
#include "cuda/common/ring.cuh"
#include "cuda/sm90/attention_decode/products.cuh"

namespace heddle::cuda::sm90::attention_decode {

template <class C>
class WarpBlocks : protected Products<C> {
 protected:
  using Base = Products<C>;
  using Base::Base;
  using Base::control, Base::factor, Base::first_row, Base::head, Base::kColumns, Base::kTiles, Base::lane, Base::o,
      Base::p, Base::shared, Base::split, Base::state, Base::value_unit;
  using typename Base::ScoreTile;
  using typename Base::T;

  __device__ void attend(const Piece& piece) {
    if (C::kKeyScales && head < p.plan.heads && piece.blocks > 0) {
      find_scales(piece);
      scales = scale_at(scale_place(piece, piece.first_slot + split * kKeyTile));
    }
#pragma unroll 1
    for (int block = 0; block < piece.blocks; ++block) attend(piece, piece.first_slot + block * p.plan.block);
  }

 private:
  // One block's keys and values, which lie from slot `from` on.
  __device__ void attend(const Piece& piece, int from) {
    const int k_stage = stage.index;
    const std::uint32_t k_phase = stage.phase;
    stage.next(p.plan.stages);
    const int v_stage = stage.index;
    const std::uint32_t v_phase = stage.phase;
    stage.next(p.plan.stages);
    const bool active = head < p.plan.heads && first_row < p.plan.rows;
    const int groups = active ? p.plan.block / kKeyTile : 0;
    const KeyRows rows(p.plan, head);
    await_filled(control.full[k_stage], k_phase);
    if (split >= groups) {
      release_after_reads(control.empty[k_stage]);
      await_filled(control.full[v_stage], v_phase);
      release_after_reads(control.empty[v_stage]);
      return;
    }
#pragma unroll 1
    for (int group = split; group < groups; group += p.plan.key_splits) {
      const bool last = group + p.plan.key_splits >= groups;
      const int slot = from + group * kKeyTile, first_key = slot - piece.k_begin;
      // Scales of keys that this launch itself appends can be read only when those keys have come.
      if (C::kKeyScales && slot + kKeyTile > piece.new_slot) scales = scale_at(scale_place(piece, slot));
      ScoreTile s[kTiles];
      const bool released = last && planted_release(Plant::late_key_reads, control.empty[k_stage]);
      this->score(ptx::shared_address(shared.tile(k_stage)), rows, group * kKeyTile, s);
      if (last && !released) release_after_reads(control.empty[k_stage]);
      const bool whole = p.plain && first_key >= piece.whole_begin && first_key + kKeyTile <= piece.whole_end;
      std::uint32_t kept[2] = {0xFFFFFFFF, 0xFFFFFFFF};
      finish_scores(piece, first_key, whole, s, kept);
      std::uint32_t probabilities[kTiles][4];
      if constexpr (C::kKeyScales) measure_values();
#pragma unroll
      for (int m = 0; m < kTiles; ++m) {
        float correction[2];
        softmax(s[m], state[m], correction, second());
        if constexpr (C::kKeyScales) scale_probabilities(s[m], second());
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
      if constexpr (C::kKeyScales) {
        // The scales of this warp's next keys are loaded now, as they come from global memory.
        const int next = last ? from + p.plan.block + split * kKeyTile : slot + p.plan.key_splits * kKeyTile;
        scales = scale_at(scale_place(piece, next));
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
    release_after_reads(control.empty[v_stage]);
  }

  // Scales, options and masks. kept: which of this thread's values (those of two neighbouring keys in the halves of a
  // word, keys 8 further in the second) some row of the warp attends.
  __device__ void finish_scores(const Piece& piece, int first_key, bool whole, ScoreTile (&s)[kTiles],
                                std::uint32_t (&kept)[2]) {
    const int kv_head = piece.head + head;
#pragma unroll
    for (int m = 0; m < kTiles; ++m) {
      if constexpr (C::kKeyScales) {
#pragma unroll
        for (int n = 0; n < 4; ++n) {
          const float scale = key_scale(0, n);
          s[m][n / 2][n % 2] *= factor[2 * m] * scale;
          if (second()) s[m][n / 2][2 + n % 2] *= factor[2 * m + 1] * scale;
        }
      } else if constexpr (C::kE4m3) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
#pragma unroll
          for (int n = 0; n < 4; ++n) s[m][n / 2][2 * r + n % 2] *= factor[2 * m + r];
        }
      } else {
#pragma unroll
        for (int n = 0; n < 8; ++n) s[m][n / 4][n % 4] *= p.problem.scale;
      }
    }
    if (whole) return;
    unsigned attended = 0;  // bits: key of this thread
#pragma unroll
    for (int m = 0; m < kTiles; ++m) {
      const TileRows rows(p, piece, kv_head, first_row + kRowTile * m);
      if (!p.plain) apply_options(p, piece, rows, first_key, this->merge_rows(), s[m]);
      mask_band(rows, first_key, s[m]);
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        if (s[m][n / 2][n % 2] != -INFINITY || s[m][n / 2][2 + n % 2] != -INFINITY) attended |= 1u << n;
      }
    }
    attended = any_of_quads(attended);
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      kept[n] = halves(attended >> 2 * n);
    }
  }

  __device__ static float scale_at(const float* place) { return place != nullptr ? *place : 1.0f; }

  // Writes down where the scales of this warp's sequence and kv head begin, in shared memory: to compute the address
  // each time takes more instructions than all else about scales by key, and there are no registers to keep it in.
  __device__ void find_scales(const Piece& piece) {
    const Scales& k = p.problem.k_scale;
    const Scales& v = p.problem.v_scale;
    const int kv_head = piece.head + head;
    __syncwarp();
    if (lane() == 0) {
      control.scale_row[this->warp][0] = k.data ? k.place(piece.cache_row, 0, kv_head) : nullptr;
      control.scale_row[this->warp][1] = v.data ? v.place(piece.cache_row, 0, kv_head) : nullptr;
    }
    __syncwarp();
  }

  // Where a lane's scale of the 16 keys from slot `from` on lies: of K for lanes 0 to 15, of V for the others. Slots
  // that no row attends may not exist: others' are read. Null if there are none.
  __device__ const float* scale_place(const Piece& piece, int from) const {
    const bool of_keys = lane() < kKeyTile;
    const float* const row = control.scale_row[this->warp][of_keys ? 0 : 1];
    if (row == nullptr) return nullptr;
    const int slot = min(max(from + lane() % kKeyTile, piece.k_begin + piece.begin), piece.end_slot - 1);
    if (p.problem.page_table.data != nullptr) return scale_in_page(piece, slot);
    const int stride = static_cast<int>(of_keys ? p.problem.k_scale.stride_s : p.problem.v_scale.stride_s);
    return row + std::int64_t{slot} * stride;
  }

  __device__ const float* scale_in_page(const Piece& piece, int slot) const {
    const AttentionProblem& problem = p.problem;
    const auto size = static_cast<unsigned>(problem.page_size), page = static_cast<unsigned>(slot) / size;
    const int last = static_cast<int>(problem.k_batches) - 1;
    const int batch = min(max(problem.page_table[piece.sequence * problem.page_table_stride + page], 0), last);
    const int row = slot - static_cast<int>(page * size), kv_head = piece.head + head;
    return lane() < kKeyTile ? problem.k_scale.place(batch, row, kv_head) : problem.v_scale.place(batch, row, kv_head);
  }

  // The scale of key n of this thread's four: that of K from first_lane 0 on, that of V from 16 on.
  __device__ float key_scale(int first_lane, int n) const {
    return __shfl_sync(0xffffffff, scales, first_lane + lane() % 4 * 2 + n / 2 * 8 + n % 2);
  }

  // P is multiplied with the scales of V before it is rounded to float16. So that it stays in float16's range, scales
  // and O are divided by value_unit, a power of two above the largest scale of V so far. From here on lanes 16 to 31
  // hold scales that are divided so.
  __device__ void measure_values() {
    const bool of_values = lane() >= kKeyTile;
    if (__any_sync(0xffffffff, of_values && fabsf(scales) > value_unit[0])) {
      float largest = of_values ? fabsf(scales) : 0.0f;
#pragma unroll
      for (int step = 1; step < 32; step *= 2) largest = fmaxf(largest, __shfl_xor_sync(0xffffffff, largest, step));
      const float unit = __uint_as_float((__float_as_uint(largest) & 0x7F800000u) + 0x00800000u);
      const float shrink = value_unit[0] / unit;
#pragma unroll
      for (int m = 0; m < kTiles; ++m) {
        value_unit[m] = unit;
#pragma unroll
        for (int n = 0; n < kColumns; ++n) {
#pragma unroll
          for (int c = 0; c < 4; ++c) o[m][n][c] *= shrink;
        }
      }
    }
    if (of_values) scales *= __uint_as_float(0x7F000000u - __float_as_uint(value_unit[0]));
  }

  // P times the values' scales.
  __device__ void scale_probabilities(ScoreTile& s, bool second) const {
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      const float scale = key_scale(kKeyTile, n);
      s[n / 2][n % 2] *= scale;
      if (second) s[n / 2][2 + n % 2] *= scale;
    }
  }

  // Whether there are rows lane / 4 + 8, where it pays to know.
  __device__ bool second() const { return !C::kKeyScales || p.plan.rows > 8; }

  DynamicRingPosition stage;
  float scales;  // of this warp's 16 keys, a lane each, where they differ from key to key; see scale_place()
};

}  // namespace heddle::cuda::sm90::attention_decode
