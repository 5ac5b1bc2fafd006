// heddle explain: which candidates could serve a call, why not the others, and which one would run. Attention by
// itself; other operations are verbs below it.
#include "explain.h"

#include <iostream>
#include <memory>
#include <utility>

#include "explain_ranks.h"
#include "output.h"
#include "verbs.h"

namespace heddle::cli {
namespace {

struct ExplainAttention {
  Explained explained;
  ProblemFlags asked;
  RankFlags ranks;
  std::string pass = "forward";

  void run() {
    ranks.check(asked);
    if (ranks.ranks != 0) return ranks.tell(asked, explained.common.json);
    const GpuModel* const model = explained.begin();
    ProblemFlags problem = asked;
    problem.device = explained.device;
    const ProblemTensors tensors(problem, ProblemTensors::Memory::none);
    const TensorView &q = tensors.q, &k = tensors.k, &v = tensors.v;
    const AttentionOptions& options = tensors.options;
    const auto candidates = [&] {
      if (pass == "forward") {
        return model != nullptr ? explain_attention_on(*model, q, k, v, options) : explain_attention(q, k, v, options);
      }
      return model != nullptr ? explain_attention_backward_on(*model, q, k, v, {}, options)
                              : explain_attention_backward(q, k, v, {}, options);
    }();
    explained.tell(problem.name() + ", " + name_of(dtype_named(problem.dtype)) + ", " + pass,
                   {{"problem", problem.json()}, {"pass", pass}}, candidates);
  }
};

Json json_of(const Candidate& c) {
  Json entry = {{"name", c.name}, {"method", c.method}, {"supported", c.supported}, {"chosen", c.chosen}};
  if (!c.reason.empty()) entry["reason"] = c.reason;
  if (c.supported) {
    entry["estimated_seconds"] = c.seconds;
    entry["workspace_bytes"] = c.workspace;
    entry["plan"] = c.plan;
    if (c.of_16bit > 0) entry["of_16bit"] = c.of_16bit;
  }
  return entry;
}

}  // namespace

void Explained::add_to(CLI::App& verb) {
  common.add_to(verb);
  add_device_flag(verb, device);
  std::vector<std::string> known;
  for (const GpuModel& model : gpu_models()) known.emplace_back(model.name);
  one_of(verb.add_option("--gpu", gpu, "Candidates of a GPU that need not be here, by costs of an H200"), known);
}

const GpuModel* Explained::begin() {
  common.apply();
  if (!gpu) {
    require_device("explain", device);
    return nullptr;
  }
  device = "cuda";
  return &gpu_model_named(*gpu);
}

void Explained::tell(const std::string& line, Json call, const std::vector<Candidate>& candidates) const {
  const GpuModel* const model = gpu ? &gpu_model_named(*gpu) : nullptr;
  if (common.json) {
    if (model != nullptr) {
      call["gpu"] = model->product;
      call["assumed"] = true;
    } else {
      add_place(call, device);
    }
    call["candidates"] = Json::array();
    for (const Candidate& c : candidates) call["candidates"].push_back(json_of(c));
    std::cout << call.dump(2) << '\n';
    return;
  }
  std::cout << line << ", " << (model != nullptr ? std::string(model->product) + ", assumed" : place_text(device))
            << "\n\n";
  Table table({{"candidate"}, {"method"}, {"estimate", Align::right}, {"workspace", Align::right}, {"verdict"}});
  for (const Candidate& c : candidates) {
    table.add({c.name, c.method, c.supported ? seconds_text(c.seconds) : "-",
               c.supported ? bytes_text(static_cast<double>(c.workspace)) : "-",
               c.chosen           ? green("chosen")
               : c.reason.empty() ? "possible"
                                  : c.reason});
  }
  table.print();
  for (const Candidate& c : candidates) {
    if (!c.chosen) continue;
    std::cout << '\n' << c.name << ": " << c.plan << '\n';
    if (c.of_16bit > 0) std::cout << fixed(c.of_16bit, 2) << " of the time over weights in 16 bits\n";
  }
}

void add_explain(CLI::App& app) {
  CLI::App* verb =
      app.add_subcommand("explain", "Say which kernel would run for a call, and why: of attention, or ...");
  examples(*verb, {"heddle explain --heads 32 --kv-heads 8 --length 1 --keys 8192 --head-size 128",
                   "heddle explain --length 4096 --head-size 128 --dtype bf16 --pass backward --gpu h100",
                   "heddle explain --ranks 8 --length 131072 --heads 32 --kv-heads 8 --dtype bf16 --causal top_left",
                   "heddle explain linear --format int4_g64"});
  const auto self = std::make_shared<ExplainAttention>();
  self->explained.add_to(*verb);
  self->asked.add_to(*verb);
  self->ranks.add_to(*verb);
  add_pass_flag(*verb, self->pass);
  add_explain_sparse(*verb);
  add_explain_adaptive(*verb);
  add_explain_nsa(*verb);
  add_explain_merge(*verb);
  add_explain_linear(*verb);
  add_explain_caches(*verb);
  add_explain_lowbit(*verb);
  verb->require_subcommand(0, 1);
  verb->callback([verb, self] {
    if (verb->get_subcommands().empty()) self->run();
  });
}

}  // namespace heddle::cli
