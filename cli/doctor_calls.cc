// Typical calls, and which candidate each would get.
#include <algorithm>
#include <array>
#include <exception>

#include "doctor.h"
#include "heddle/error.h"
#include "operations.h"
#include "ops/choice.h"
#include "output.h"

namespace heddle::cli {
namespace {

constexpr std::int64_t kLayer = 4096;

struct Call {
  const char* name;
  // Which are the quickest for it, by what was measured: on Hopper and what follows it, on Ampere and Ada.
  const char *on_hopper, *on_ampere;
  const char* flags;  // of `heddle explain`
  std::vector<Candidate> (*candidates)(Device device);
};

ProblemTensors attention(Device device, std::int64_t length, std::int64_t keys) {
  ProblemFlags flags;
  flags.heads = 32;
  flags.kv_heads = 8;
  flags.length_q = length;
  flags.length_k = keys;
  flags.head_size = 128;
  flags.dtype = "bf16";
  flags.device = device == Device::cuda ? "cuda" : "cpu";
  flags.options.causal = "bottom_right";
  return {flags, ProblemTensors::Memory::none};
}

std::vector<Candidate> forward(const ProblemTensors& t) { return explain_attention(t.q, t.k, t.v, t.options); }

constexpr std::array kCalls = {
    Call{"prefill", "sm90", "sm80",
         "--heads 32 --kv-heads 8 --length 4096 --head-size 128 --dtype bf16 --causal bottom_right",
         [](Device device) { return forward(attention(device, 4096, 4096)); }},
    Call{"decoding", "sm90_decode", "sm80_decode",
         "--heads 32 --kv-heads 8 --length 1 --keys 32768 --head-size 128 --dtype bf16 --causal bottom_right",
         [](Device device) { return forward(attention(device, 1, 32768)); }},
    Call{"gradients", "sm90", "sm80",
         "--pass backward --heads 32 --kv-heads 8 --length 4096 --head-size 128 --dtype bf16 --causal bottom_right",
         [](Device device) {
           const ProblemTensors t = attention(device, 4096, 4096);
           return explain_attention_backward(t.q, t.k, t.v, {}, t.options);
         }},
    Call{"nvfp4 layer", "sm80_gemv", "sm80_gemv",
         "linear --rows 1 --outputs 4096 --inputs 4096 --format nvfp4 --dtype bf16",
         [](Device device) {
           const PackedOrder order = packed_order_for(lowbit::format_named("nvfp4"), kLayer, kLayer, {device});
           if (!order.refusal.empty()) throw Error(order.refusal);
           const LinearSample sample(device, "nvfp4", order.order, kLayer);
           return explain_linear(sample.x, sample.weights);
         }},
};

Finding examine(const Call& call, Device device, const char* quickest) {
  const bool gpu = device == Device::cuda;
  Finding out{std::string(call.name) + (gpu ? ", GPU" : ", CPU"), Verdict::ok, ""};
  const std::string ask = std::string("heddle explain ") + call.flags + (gpu ? " --device cuda" : "");
  out.more = {{"call", call.name}, {"device", gpu ? "cuda" : "cpu"}, {"ask", ask}};
  if (const std::string forced = setting("HEDDLE_KERNEL"); !forced.empty() && !names_a_kernel(forced)) {
    out.verdict = Verdict::problem;
    out.found = "refused: HEDDLE_KERNEL names no kernel";
    out.advice = "see the line of HEDDLE_KERNEL above.";
    return out;
  }
  std::vector<Candidate> candidates;
  try {
    candidates = call.candidates(device);
  } catch (const std::exception& refusal) {
    out.verdict = Verdict::problem;
    out.found = refusal.what();
    out.advice = "such calls are refused: see the lines above.";
    return out;
  }
  const auto chosen = std::ranges::find_if(candidates, &Candidate::chosen);
  const auto better = std::ranges::find(candidates, quickest, &Candidate::name);
  if (chosen == candidates.end()) {
    out.verdict = Verdict::problem;
    out.found = "no candidate runs";
  } else {
    out.found = chosen->name + ", estimated " + seconds_text(chosen->seconds) + ": " + chosen->plan;
    out.more["candidate"] = chosen->name;
    out.more["estimated_seconds"] = chosen->seconds;
    out.more["plan"] = chosen->plan;
  }
  // One that could run, and by its estimate is not the quicker one, has no reason to give.
  if (better == candidates.end() || better->chosen || better->reason.empty()) return out;
  out.verdict = std::max(out.verdict, Verdict::note);
  out.found += (chosen == candidates.end() ? "; " : "; not ") + better->name + ": " + better->reason;
  out.more["better"] = {{"name", better->name}, {"reason", better->reason}};
  out.advice = setting("HEDDLE_KERNEL").empty() ? ask + " has every candidate's reason." : "take HEDDLE_KERNEL away.";
  return out;
}

}  // namespace

Findings examine_calls(const cuda::Gpus& seen) {
  Findings out;
  for (const Call& call : kCalls) out.push_back(examine(call, Device::cpu, "cpu"));
  if (const cuda::Gpu* const gpu = served_gpu(seen)) {
    for (const Call& call : kCalls) {
      out.push_back(examine(call, Device::cuda, gpu->major >= 9 ? call.on_hopper : call.on_ampere));
    }
  }
  return out;
}

}  // namespace heddle::cli
