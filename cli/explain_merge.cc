// heddle explain merge: partial results of attention joined, or the gradients of that.
#include <memory>
#include <vector>

#include "explain.h"

namespace heddle::cli {
namespace {

struct ExplainMerge {
  Explained explained;
  std::int64_t parts = 2, batch = 1, heads = 8, length = 1024, head_size = 64;
  std::string dtype, pass = "forward", force;
  bool packed = false, sink = false, float32_out = false;

  void run() {
    require_at_least_one(parts, "--parts");
    require_at_least_one(batch, "--batch");
    require_at_least_one(heads, "--heads");
    require_at_least_one(length, "--length");
    require_at_least_one(head_size, "--head-size");
    const GpuModel* const gpu = explained.begin();
    StandIns views(explained.where());
    const DType type = dtype_named(dtype_or_default(dtype, explained.where()));
    const auto rows = [&](DType of) {
      return packed ? views.tensor(of, {batch * length, heads, head_size})
                    : views.tensor(of, {batch, length, heads, head_size});
    };
    const TensorView lse =
        packed ? views.tensor(DType::f32, {heads, batch * length}) : views.tensor(DType::f32, {batch, heads, length});
    const std::vector<Partial> partials(static_cast<std::size_t>(parts), Partial{rows(type), lse});
    const TensorView o = rows(float32_out ? DType::f32 : type);
    MergeOptions options{.force = force};
    if (sink) options.sink = views.tensor(DType::f32, {heads});
    const auto candidates = [&] {
      if (pass == "forward") {
        return gpu != nullptr ? explain_merge_attention_on(*gpu, partials, o, lse, options)
                              : explain_merge_attention(partials, o, lse, options);
      }
      const auto &d_o = o, &d_lse = lse, &dsink = options.sink;
      const auto& gradients = partials;
      return gpu != nullptr ? explain_merge_attention_backward_on(*gpu, partials, d_o, d_lse, gradients, dsink, options)
                            : explain_merge_attention_backward(partials, d_o, d_lse, gradients, dsink, options);
    }();
    explained.tell(std::to_string(parts) + " partial results " + partials[0].o.shape_text() + " " + name_of(type) +
                       (sink ? ", sink" : "") + " to " + name_of(o.dtype) + ", " + pass,
                   {{"problem", json(type)}, {"pass", pass}}, candidates);
  }

  Json json(DType type) const {
    Json problem = {{"parts", parts},    {"batch", batch},         {"heads", heads},
                    {"queries", length}, {"head_size", head_size}, {"dtype", name_of(type)}};
    for (const auto& [given, word] : {std::pair{packed, "packed"}, {sink, "sink"}, {float32_out, "float32_out"}}) {
      if (given) problem[word] = true;
    }
    if (explained.device != "cpu") problem["device"] = explained.device;
    return problem;
  }
};

}  // namespace

void add_explain_merge(CLI::App& explain) {
  CLI::App* verb = explain.add_subcommand("merge", "Partial results of attention joined, or the gradients of that");
  examples(*verb, {"heddle explain merge --parts 4 --heads 32 --length 8192 --head-size 128 --dtype bf16",
                   "heddle explain merge --packed --pass backward --gpu a100"});
  const auto self = std::make_shared<ExplainMerge>();
  self->explained.add_to(*verb);
  verb->add_option("--parts", self->parts, "Partial results of the same rows")->capture_default_str();
  verb->add_option("-b,--batch", self->batch, "Sequences, B")->capture_default_str();
  verb->add_option("-n,--heads", self->heads, "Query heads, H")->capture_default_str();
  verb->add_option("-s,--length", self->length, "Queries of a sequence, Sq")->capture_default_str();
  verb->add_option("-d,--head-size", self->head_size, "Head size of v and o, Dv")->capture_default_str();
  add_dtype_flag(*verb, self->dtype, "Of the partial results (default: f32, on a GPU bf16)");
  verb->add_flag("--packed", self->packed, "Results packed without padding");
  verb->add_flag("--sink", self->sink, "With an attention sink [H]");
  verb->add_flag("--float32-out", self->float32_out, "The joined result in f32, whatever the partial ones are");
  add_force_flag(*verb, self->force);
  add_pass_flag(*verb, self->pass);
  verb->callback([self] { self->run(); });
}

}  // namespace heddle::cli
