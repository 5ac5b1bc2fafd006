// The warp that cuts the work and copies K and V to shared memory.
#pragma once

#include "cuda/common/hand_over.cuh"
#include "cuda/common/ptx/barrier.cuh"
#include "cuda/common/ptx/tma.cuh"
#include "cuda/common/ring.cuh"
#include "cuda/sm90/attention_decode/address.cuh"
#include "cuda/sm90/attention_decode/schedule.cuh"

namespace heddle::cuda::sm90::attention_decode {

template <class C>
class Producer {
 public:
  __device__ Producer(const Params& params, SharedMemory<C> memory)
      : p(params),
        shared(memory),
        control(memory.control()),
        lane(static_cast<int>(threadIdx.x) % 32),
        schedule(params) {
    if (lane == 0) {
      for (const auto* map : {&p.k, &p.v}) ptx::prefetch_tensor_map(*map);
    }
  }

  // start() is called when the first piece is found.
  __device__ void run() {
    bool started = false;
    std::uint32_t phase = 0;
    for (RingPosition<kPieces> slot;; slot.next(), phase ^= 1) {
      Piece piece;
      const bool more = schedule.next(piece);
      if (!more) piece.sequence = -1;
      if (!started) start();
      started = true;
      const auto publish = [&] {
        ptx::barrier_wait(control.piece_free[slot.index], slot.phase ^ 1);
        if (lane == 0) {
          control.pieces[slot.index] = piece;
          ptx::barrier_arrive(control.piece_ready[slot.index]);
        }
      };
      // Queries are asked for before keys, behind which they would arrive last. The piece is announced to the other
      // warps when both are asked for.
      bool published = !copies_q<C>(p) || piece.blocks <= 0 || !more;
      if (copies_q<C>(p) && more) {
        await_free(control.q_free, phase);
        copy_q(piece);
      }
      if (published) publish();
      if (!more) return;
      if (C::kQInRegisters && !copies_q<C>(p)) ptx::barrier_wait(control.q_requested, phase);
      bool waits = p.problem.append.k_new.data != nullptr;  // once a piece, before the first block with new keys
#pragma unroll 1
      for (int block = 0; block < piece.blocks; ++block) {
        const int from = piece.first_slot + block * p.plan.block;
        if (waits && (from + p.plan.block > piece.new_slot || block == piece.blocks - 1)) {
          ptx::barrier_wait(control.appended, phase);
          waits = false;
        }
        load(p.k, piece, from);
        load(p.v, piece, from);
        if (!published) publish();
        published = true;
      }
      if (waits) ptx::barrier_wait(control.appended, phase);
    }
  }

 private:
  // Rows of q that do not exist are not copied: shared memory keeps what it had there, and nothing of it reaches o.
  __device__ void copy_q(const Piece& piece) {
    const int rows = p.plan.heads * p.plan.rows, bytes = static_cast<int>(p.problem.D) * 2;
    int copied = 0;
#pragma unroll 1
    for (int first = 0; first < rows; first += 32) {
      const QueryRow row(p, piece, first + lane);
      const bool exists = first + lane < rows && row.i < piece.sq;
      if (exists) {
        ptx::bulk_load(shared.q() + (first + lane) * C::kQPitch, row.address(p, piece), bytes, control.q_ready);
      }
      copied += __popc(__ballot_sync(0xffffffff, exists));
    }
    if (lane == 0) ptx::barrier_arrive_expect(control.q_ready, copied * bytes);
    __syncwarp();
  }

  // One tile of keys or values from slot `from` on.
  __device__ void load(const CUtensorMap& map, const Piece& piece, int from) {
    const Plan& plan = p.plan;
    const AttentionProblem& problem = p.problem;
    const int boxes = min(plan.block, piece.end_slot - from + plan.box - 1) >> plan.box_shift;
    await_free(control.empty[stage.index], stage.phase);
    ptx::Barrier& full = control.full[stage.index];
    if (lane == 0) ptx::barrier_arrive_expect(full, boxes * C::kPanels * plan.box * plan.heads * kPanel);
    __syncwarp();
    std::byte* tile = shared.tile(stage.index);
#pragma unroll 1
    for (int n = lane; n < boxes * C::kPanels; n += 32) {
      const int box = n / C::kPanels, panel = n % C::kPanels;
      int row = from + (box << plan.box_shift), batch = piece.cache_row;
      if (problem.page_table.data != nullptr) {
        const int size = static_cast<int>(problem.page_size), page = row / size;
        batch = static_cast<int>(
            clamped(problem.page_table[piece.sequence * problem.page_table_stride + page], 0, problem.k_batches - 1));
        row -= page * size;
      }
      ptx::tma_load_4d(tile + panel * plan.panel_bytes + box * plan.box_pitch * kPanel, map, full,
                       panel * C::kPanelElements, row, piece.head, batch, ptx::L2::evict_first);
    }
    __syncwarp();
    stage.next(plan.stages);
  }

  const Params& p;
  const SharedMemory<C> shared;
  Control& control;
  const int lane;
  Schedule schedule;
  DynamicRingPosition stage;
};

}  // namespace heddle::cuda::sm90::attention_decode
