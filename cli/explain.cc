// heddle explain: which candidates could serve a problem, why not the others, and which one would run.
#include <iostream>
#include <memory>
#include <optional>
#include <string>
#include <tuple>

#include "heddle/explain.h"
#include "output.h"
#include "problem.h"
#include "verbs.h"

namespace heddle::cli {
namespace {

struct Explain {
  CommonFlags common;
  ProblemFlags asked;
  std::string pass = "forward";
  std::optional<std::string> gpu;  // not given: what is here

  void run() const {
    common.apply();
    const GpuModel* const model = gpu ? &gpu_model_named(*gpu) : nullptr;
    ProblemFlags problem = asked;
    if (model != nullptr) {
      problem.device = "cuda";
    } else {
      require_device("explain", problem.device);
    }
    const ProblemTensors tensors(problem, ProblemTensors::Memory::none);
    const auto& [q, k, v, options] = std::tie(tensors.q, tensors.k, tensors.v, tensors.options);
    const Pass which = pass == "forward" ? Pass::forward : Pass::backward;
    const auto candidates = model != nullptr ? explain_attention_on(*model, q, k, v, options, which)
                                             : explain_attention(q, k, v, options, which);
    if (common.json) {
      Json out = {{"problem", problem.json()}, {"pass", pass}};
      if (model != nullptr) {
        out["gpu"] = model->product;
        out["assumed"] = true;
      } else {
        add_place(out, problem.device);
      }
      out["candidates"] = Json::array();
      for (const Candidate& c : candidates) {
        Json entry = {{"name", c.name}, {"method", c.method}, {"supported", c.supported}, {"chosen", c.chosen}};
        if (!c.reason.empty()) entry["reason"] = c.reason;
        if (c.supported) {
          entry["estimated_seconds"] = c.seconds;
          entry["workspace_bytes"] = c.workspace;
          entry["plan"] = c.plan;
        }
        out["candidates"].push_back(entry);
      }
      std::cout << out.dump(2) << '\n';
      return;
    }
    std::cout << problem.name() << ", " << name_of(dtype_named(problem.dtype)) << ", " << pass << ", "
              << (model != nullptr ? std::string(model->product) + ", assumed" : place_text(problem.device)) << "\n\n";
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
      if (c.chosen) std::cout << '\n' << c.name << ": " << c.plan << '\n';
    }
  }
};

}  // namespace

void add_explain(CLI::App& app) {
  CLI::App* verb = app.add_subcommand("explain", "Say which kernel would run for a problem, and why");
  verb->footer("Example: heddle explain --heads 32 --kv-heads 8 --length 1 --keys 8192 --head-size 128");
  const auto self = std::make_shared<Explain>();
  self->common.add_to(*verb);
  self->asked.add_to(*verb);
  add_device_flag(*verb, self->asked.device);
  std::string known;
  for (const GpuModel& model : gpu_models()) known += (known.empty() ? "" : ", ") + std::string(model.name);
  verb->add_option("--gpu", self->gpu, "Candidates of a GPU that need not be here, by costs of an H200: " + known);
  verb->add_option("--pass", self->pass, "forward or backward")
      ->check(CLI::IsMember({"forward", "backward"}))
      ->capture_default_str();
  verb->callback([self] { self->run(); });
}

}  // namespace heddle::cli
