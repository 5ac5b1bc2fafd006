// heddle memory: what a problem needs before it is run.
#include <iostream>
#include <memory>

#include "choices.h"
#include "cuda/backend.h"
#include "heddle/error.h"
#include "machine.h"
#include "output.h"
#include "problem.h"
#include "verbs.h"

namespace heddle::cli {
namespace {

double bytes_of(const TensorView& view) {
  return view.given() ? static_cast<double>(view.elements()) * static_cast<double>(size_of(view.dtype)) : 0.0;
}

// Bytes of the tensors of one pass; the backward pass keeps o, lse and the gradients as well.
struct Tensors {
  double q = 0, k = 0, v = 0, o = 0, lse = 0, extra = 0, gradients = 0;
  double total() const { return q + k + v + o + lse + extra + gradients; }
};

Tensors tensors_of(const ProblemTensors& t, Pass pass) {
  Tensors bytes{bytes_of(t.q), bytes_of(t.k), bytes_of(t.v), bytes_of(t.o), bytes_of(t.lse), 0, 0};
  bytes.extra = bytes_of(t.options.bias) + bytes_of(t.options.mask);
  if (pass == Pass::backward) bytes.gradients = bytes.o + bytes.q + bytes.k + bytes.v;  // d_o, dq, dk, dv
  return bytes;
}

// Tensors and workspace together, or the sentence why this method cannot serve the problem.
struct Need {
  double bytes = 0, workspace = 0;
  std::string refusal;
};

Need need(ProblemFlags problem, const std::string& candidate, Pass pass) {
  const ProblemTensors tensors(problem, ProblemTensors::Memory::none);
  for (const Candidate& c : pass == Pass::forward
                                ? explain_attention(tensors.q, tensors.k, tensors.v, tensors.options)
                                : explain_attention_backward(tensors.q, tensors.k, tensors.v, {}, tensors.options)) {
    if (c.name != candidate) continue;
    if (!c.supported) return {0, 0, c.reason};
    const auto workspace = static_cast<double>(c.workspace);
    return {tensors_of(tensors, pass).total() + workspace, workspace, ""};
  }
  return {0, 0, "it does not serve this pass"};
}

// The largest length (Sq = Sk) whose need is within `limit`; 0 if not even 1 is.
std::int64_t longest(ProblemFlags problem, const std::string& candidate, Pass pass, double limit) {
  const auto fits = [&](std::int64_t length) {
    problem.length_q = problem.length_k = length;
    // The keys and values alone; asked first, because a page table of a length that cannot be is large itself.
    const double cache = static_cast<double>(problem.batch * problem.Hkv() * (problem.head_size + problem.Dv())) *
                         static_cast<double>(size_of(dtype_named(problem.dtype)));
    if (cache * static_cast<double>(length) > limit) return false;
    try {
      const Need found = need(problem, candidate, pass);
      return found.refusal.empty() && found.bytes <= limit;
    } catch (const Error&) {
      return false;  // lengths that 32-bit index data cannot count
    }
  };
  std::int64_t good = 0, bad = 1;
  while (bad < std::int64_t{1} << 40 && fits(bad)) {
    good = bad;
    bad *= 2;
  }
  while (bad - good > 1) {
    const std::int64_t middle = good + (bad - good) / 2;
    (fits(middle) ? good : bad) = middle;
  }
  return good;
}

struct MemoryVerb {
  CommonFlags common;
  ProblemFlags problem;
  std::string pass = "forward", limit;
  std::int64_t layers = 1;

  // Bytes that are free here, or all of the current GPU's.
  double available() const {
    if (problem.device != "cuda") return static_cast<double>(machine().memory.available);
    const cuda::Gpus seen = cuda::gpus();
    return static_cast<double>(seen.list.at(seen.current).memory);
  }

  void run() const {
    common.apply();
    require_device("memory", problem.device);
    if (layers < 1) throw Error("--layers is " + std::to_string(layers) + ": it must be at least 1");
    const Pass which = pass == "forward" ? Pass::forward : Pass::backward;
    const double allowed = limit.empty() ? available() : static_cast<double>(bytes_from(limit));
    const ProblemTensors views(problem, ProblemTensors::Memory::none);
    const Tensors tensors = tensors_of(views, which);
    const double cache = (tensors.k + tensors.v) * static_cast<double>(layers);
    const double scores = 4.0 * static_cast<double>(problem.batch) * static_cast<double>(problem.heads) *
                          static_cast<double>(problem.length_q) * static_cast<double>(problem.Sk());
    struct Row {
      Candidate candidate;
      Need need;
      std::int64_t longest;
    };
    std::vector<Row> rows;
    for (const Candidate& c : which == Pass::forward
                                  ? explain_attention(views.q, views.k, views.v, views.options)
                                  : explain_attention_backward(views.q, views.k, views.v, {}, views.options)) {
      rows.push_back({c, need(problem, c.name, which), longest(problem, c.name, which, allowed)});
    }
    if (common.json) {
      Json out = {{"problem", problem.json()}, {"pass", pass}};
      add_place(out, problem.device);
      out["tensors"] = {{"q", tensors.q},
                        {"k", tensors.k},
                        {"v", tensors.v},
                        {"o", tensors.o},
                        {"lse", tensors.lse},
                        {"bias_and_mask", tensors.extra},
                        {"gradients", tensors.gradients},
                        {"total", tensors.total()}};
      out["kv_cache_bytes"] = cache;
      out["layers"] = layers;
      out["score_matrix_bytes"] = scores;
      out["limit_bytes"] = allowed;
      out["candidates"] = Json::array();
      for (const Row& row : rows) {
        Json entry = {{"name", row.candidate.name}, {"method", row.candidate.method}};
        if (row.need.refusal.empty()) {
          entry["workspace_bytes"] = row.need.workspace;
          entry["total_bytes"] = row.need.bytes;
          entry["longest_within_limit"] = row.longest;
        } else {
          entry["refusal"] = row.need.refusal;
        }
        out["candidates"].push_back(entry);
      }
      std::cout << out.dump(2) << '\n';
      return;
    }
    std::cout << problem.name() << ", " << name_of(dtype_named(problem.dtype)) << ", " << pass << ", "
              << place_text(problem.device) << "\n\n";
    Table table({{"what"}, {"memory", Align::right}});
    for (const auto& [name, bytes] : {std::pair{"q", tensors.q},
                                      {"k", tensors.k},
                                      {"v", tensors.v},
                                      {"o", tensors.o},
                                      {"lse", tensors.lse},
                                      {"bias and mask", tensors.extra},
                                      {"d_o, dq, dk, dv", tensors.gradients}}) {
      if (bytes > 0) table.add({name, bytes_text(bytes)});
    }
    table.add({"all tensors", bytes_text(tensors.total())});
    table.add({"KV cache, " + std::to_string(layers) + (layers == 1 ? " layer" : " layers"), bytes_text(cache)});
    table.add({"score matrix, 4 B H Sq Sk", bytes_text(scores)});
    table.print();
    std::cout << '\n';
    Table methods({{"candidate"},
                   {"method"},
                   {"workspace", Align::right},
                   {"with tensors", Align::right},
                   {"longest in " + bytes_text(allowed), Align::right}});
    for (const Row& row : rows) {
      const bool serves = row.need.refusal.empty();
      methods.add({row.candidate.name, row.candidate.method, serves ? bytes_text(row.need.workspace) : "-",
                   serves ? bytes_text(row.need.bytes) : row.need.refusal, serves ? std::to_string(row.longest) : "-"});
    }
    methods.print();
  }
};

}  // namespace

void add_memory(CLI::App& app) {
  CLI::App* verb = app.add_subcommand("memory", "What a problem needs before it is run");
  examples(*verb, {"heddle memory --heads 32 --kv-heads 8 --length 8192 --head-size 128 --dtype bf16 --layers 32",
                   "heddle memory --length 2048 --pass backward --limit 16GiB --json"});
  const auto self = std::make_shared<MemoryVerb>();
  self->common.add_to(*verb);
  self->problem.add_to(*verb);
  add_device_flag(*verb, self->problem.device);
  add_pass_flag(*verb, self->pass);
  verb->add_option("--limit", self->limit,
                   "Memory that may be used, such as 2GiB (default: what is available now, or all that the GPU has)");
  verb->add_option("--layers", self->layers, "Layers that keep a KV cache")->capture_default_str();
  verb->callback([self] { self->run(); });
}

}  // namespace heddle::cli
