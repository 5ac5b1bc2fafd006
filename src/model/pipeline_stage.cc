// A stage of blocks: micro-batches come from the rank before, go through the blocks and on to the rank behind.
#include <algorithm>
#include <string>
#include <utility>

#include "distributed/agreement.h"
#include "distributed/memory.h"
#include "heddle/distributed_block.h"
#include "model/transformer_block_arguments.h"

namespace heddle::distributed {
namespace {

constexpr const char* kOperation = "pipeline_stage";

// Sequences that go together: their rows, and their offsets from the first of these on.
struct MicroBatch {
  Range rows;
  std::vector<std::int32_t> cu_seqlens = {0};
  std::int64_t longest = 0;
};

// At most `most`, each with rows: one ends with the sequence in which its part of all rows ends.
std::vector<MicroBatch> micro_batches_of(const Offsets& offsets, int most) {
  std::vector<MicroBatch> out;
  MicroBatch next;
  for (std::int64_t n = 0; n < offsets.count; ++n) {
    const std::int64_t end = offsets.at[n + 1];
    next.cu_seqlens.push_back(static_cast<std::int32_t>(end - next.rows.begin));
    next.longest = std::max(next.longest, end - offsets.at[n]);
    const auto ended = static_cast<std::int64_t>(out.size()) + 1;
    if (end == next.rows.begin || end * most < ended * offsets.rows) continue;
    next.rows.end = end;
    out.push_back(std::move(next));
    next = {.rows = {end, end}};
  }
  return out;
}

}  // namespace

struct PipelineStage::State {
  State(std::vector<TransformerBlock> given, Communicator& of)
      : blocks(std::move(given)), communicator(of, kOperation), agreement(communicator) {}

  bool first() const { return communicator.rank() == 0; }
  bool last() const { return communicator.rank() + 1 == communicator.size(); }

  const std::vector<TransformerBlock> blocks;
  Named communicator;
  Agreement agreement;
  WorkspaceBuffer rows, workspace;
};

PipelineStage::PipelineStage(std::vector<TransformerBlock> blocks, Communicator& communicator) {
  const Check check(kOperation);
  check.require(communicator.device() == Device::cpu, "messages by ", communicator.name(),
                " lie on a GPU: blocks over several processes are on the CPU so far");
  check.require(!blocks.empty(), "blocks is empty: each rank must have one");
  for (std::size_t n = 0; n < blocks.size(); ++n) {
    const TransformerBlockOptions &first = blocks[0].options(), &here = blocks[n].options();
    check.require(here.device == Device::cpu, "blocks[", n,
                  "] was made for a GPU: blocks over several processes are on the CPU so far");
    check.require(here.hidden == first.hidden && here.dtype == first.dtype, "blocks[", n, "] has hidden ", here.hidden,
                  " and ", name_of(here.dtype), ", blocks[0] ", first.hidden, " and ", name_of(first.dtype),
                  ": they must have the same");
  }
  state_ = std::make_unique<State>(std::move(blocks), communicator);
}

PipelineStage::~PipelineStage() = default;

void PipelineStage::forward(const TensorView& x, const TensorView& cu_seqlens, const TensorView& y, int micro_batches,
                            const Runtime& runtime) {
  State& s = *state_;
  const Check check(kOperation);
  const TransformerBlockOptions& options = s.blocks[0].options();
  const int rank = s.communicator.rank(), ranks = s.communicator.size();
  check_block_offsets(check, options, cu_seqlens);
  const std::int64_t total = static_cast<const std::int32_t*>(cu_seqlens.data)[cu_seqlens.shape[0] - 1];
  const Offsets offsets = block_offsets(cu_seqlens, total, 0);
  require_block_offsets(check, offsets);
  const auto outside = [&](const TensorView& view, const char* name, bool here, const char* where) {
    check.require(view.given() == here, name, here ? " is missing on rank " : " is given on rank ", rank, " of ", ranks,
                  ": it is the ", where, " rank's alone");
    if (!here) return;
    check_block_rows(check, options, view, name);
    check.require(view.shape[0] == total, name, " is ", view, ": cu_seqlens is of ", total, " rows");
  };
  outside(x, "x", s.first(), "first");
  outside(y, "y", s.last(), "last");
  if (s.last()) check.not_overlapping(y, "y");
  check.require(micro_batches >= 1, "micro_batches is ", micro_batches, ": it must be at least 1");
  s.agreement.require({{"hidden", options.hidden},
                       {"dtype", static_cast<std::int64_t>(options.dtype)},
                       {"micro_batches", micro_batches}});

  const std::vector<MicroBatch> batches = micro_batches_of(offsets, micro_batches);
  const std::size_t row_bytes = size_of(options.dtype) * static_cast<std::size_t>(options.hidden);
  // Every row has a place of its own: what is on its way is not written again.
  auto* const own = static_cast<std::byte*>(s.rows.get(row_bytes * static_cast<std::size_t>(total)).data);
  const auto bytes_of = [&](const MicroBatch& batch) {
    return std::span<std::byte>(own + row_bytes * static_cast<std::size_t>(batch.rows.begin),
                                row_bytes * static_cast<std::size_t>(batch.rows.size()));
  };
  const auto named = [&](std::size_t n) { return text("micro-batch ", n, " of ", batches.size(), " passed on"); };
  std::vector<std::unique_ptr<Transfer>> received, sent;
  for (std::size_t n = 0; n < batches.size() && !s.first(); ++n) {
    received.push_back(s.communicator.exchange({}, rank - 1, bytes_of(batches[n]), rank - 1, named(n)));
  }
  for (std::size_t n = 0; n < batches.size(); ++n) {
    const MicroBatch& batch = batches[n];
    if (!s.first()) received[n]->wait();
    const TensorView here(bytes_of(batch).data(), options.dtype, {batch.rows.size(), options.hidden});
    const auto part_of = [&](const TensorView& view) {
      TensorView part = view;
      part.data = static_cast<std::byte*>(view.data) +
                  batch.rows.begin * view.stride[0] * static_cast<std::int64_t>(size_of(view.dtype));
      part.shape[0] = batch.rows.size();
      return part;
    };
    const auto sequences = static_cast<std::int64_t>(batch.cu_seqlens.size()) - 1;
    const TensorView of_batch(batch.cu_seqlens.data(), DType::i32, {sequences + 1});
    for (std::size_t b = 0; b < s.blocks.size(); ++b) {
      const TransformerBlock& block = s.blocks[b];
      Runtime of_block = runtime;
      of_block.workspace = s.workspace.get(block.workspace(batch.rows.size(), sequences, batch.longest, runtime));
      block.forward(b == 0 && s.first() ? part_of(x) : here, of_batch,
                    b + 1 == s.blocks.size() && s.last() ? part_of(y) : here, of_block);
    }
    if (!s.last()) {
      sent.push_back(s.communicator.exchange(bytes_of(batch), rank + 1, {}, rank + 1, named(n)));
    }
  }
  for (const auto& transfer : sent) transfer->wait();
}

}  // namespace heddle::distributed
