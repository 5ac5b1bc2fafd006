// heddle explain sparse: attention over lists of key blocks, or its gradients.
#include <memory>

#include "explain.h"

namespace heddle::cli {
namespace {

struct ExplainSparse {
  Explained explained;
  ProblemFlags asked;
  std::int64_t block_size = 64, query_rows = 1, entries = 16, units = 1;
  bool counts = false;
  std::string pass = "forward";

  void run() {
    require_at_least_one(block_size, "--block-size");
    require_at_least_one(query_rows, "--query-rows");
    require_at_least_one(entries, "--entries");
    require_at_least_one(units, "--list-heads");
    const GpuModel* const gpu = explained.begin();
    ProblemFlags problem = asked;
    problem.device = explained.device;
    const ProblemTensors tensors(problem, ProblemTensors::Memory::none);
    const TensorView &q = tensors.q, &k = tensors.k, &v = tensors.v;
    StandIns views(explained.where());
    const BlockLists over = lists(views, q);
    const AttentionOptions& options = tensors.options;
    const auto candidates = [&] {
      if (pass == "forward") {
        return gpu != nullptr ? explain_sparse_attention_on(*gpu, q, k, v, over, options)
                              : explain_sparse_attention(q, k, v, over, options);
      }
      return gpu != nullptr ? explain_sparse_attention_backward_on(*gpu, q, k, v, over, {}, options)
                            : explain_sparse_attention_backward(q, k, v, over, {}, options);
    }();
    Json json = problem.json();
    json["lists"] = {{"block_size", block_size}, {"query_rows", query_rows}, {"heads", units}, {"entries", entries}};
    explained.tell(problem.name() + ", lists " + over.blocks.shape_text() + " of blocks of " +
                       std::to_string(block_size) + " keys, " + name_of(dtype_named(problem.dtype)) + ", " + pass,
                   {{"problem", json}, {"pass", pass}}, candidates);
  }

  BlockLists lists(StandIns& views, const TensorView& q) const {
    BlockLists over{.blocks = {}, .counts = {}, .offsets = {}, .block_size = block_size, .query_rows = query_rows};
    const auto view = [&](const std::vector<std::int64_t>& shape) {
      std::int64_t count = 1;
      for (const std::int64_t extent : shape) count *= extent;
      return views.indices(std::vector<std::int32_t>(static_cast<std::size_t>(count)),
                           shape);  // entries may be anything
    };
    if (asked.packed) {
      const std::int64_t rows = q.shape[0], number = query_rows == 1 ? rows : rows / query_rows + asked.batch;
      over.blocks = view({number, units, entries});
      if (counts) over.counts = view({number, units});
    } else {
      const std::int64_t number = (asked.length_q + query_rows - 1) / query_rows;
      over.blocks = view({asked.batch, number, units, entries});
      if (counts) over.counts = view({asked.batch, number, units});
    }
    return over;
  }
};

}  // namespace

void add_explain_sparse(CLI::App& explain) {
  CLI::App* verb = explain.add_subcommand("sparse", "Attention over lists of key blocks, or its gradients");
  examples(*verb, {"heddle explain sparse --heads 32 --kv-heads 8 --length 4096 --list-heads 8 --entries 16",
                   "heddle explain sparse --query-rows 64 --packed --counts --pass backward --dtype bf16 --gpu h100"});
  const auto self = std::make_shared<ExplainSparse>();
  self->explained.add_to(*verb);
  self->asked.add_to(*verb);
  verb->add_option("--block-size", self->block_size, "Keys of a block: 16, 32, 64 or 128")->capture_default_str();
  verb->add_option("--query-rows", self->query_rows, "Neighbouring rows that share a list")->capture_default_str();
  verb->add_option("--list-heads", self->units, "Lists of a row, L: 1, Hkv or H")->capture_default_str();
  verb->add_option("--entries", self->entries, "Blocks that a list names")->capture_default_str();
  verb->add_flag("--counts", self->counts, "With how many entries of each list count");
  add_pass_flag(*verb, self->pass);
  verb->callback([self] { self->run(); });
}

}  // namespace heddle::cli
