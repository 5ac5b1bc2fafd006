#include "explain_ranks.h"

#include <algorithm>
#include <cstdio>
#include <iostream>
#include <utility>
#include <vector>

#include "choices.h"
#include "heddle/error.h"
#include "output.h"

namespace heddle::cli {
namespace {

using distributed::Order;
using distributed::Plan;
using distributed::Scheme;
using distributed::SchemeCost;

constexpr Order kOrders[] = {Order::contiguous, Order::zigzag, Order::striped, Order::per_document, Order::balanced};

// 2d where it is none of the others.
std::vector<Scheme> schemes_of(const Plan& plan) {
  std::vector<Scheme> out = {Scheme::gather, Scheme::ring, Scheme::needed, Scheme::ulysses};
  const int size = plan.ulysses(Scheme::two_dimensional);
  if (1 < size && size < plan.problem().ranks) out.push_back(Scheme::two_dimensional);
  return out;
}

// "2d, ulysses of 4 and ring"
std::string scheme_text(const Plan& plan, Scheme scheme) {
  if (scheme != Scheme::two_dimensional) return name_of(scheme);
  return std::string(name_of(scheme)) + ", ulysses of " + std::to_string(plan.ulysses(scheme)) + " and " +
         name_of(plan.across());
}

std::string digest_text(std::uint64_t digest) {
  char text[17];
  std::snprintf(text, sizeof text, "%016llx", static_cast<unsigned long long>(digest));
  return text;
}

Json json_of(const Plan& plan) {
  Json out = {{"order", name_of(plan.problem().order)},
              {"digest", digest_text(plan.digest())},
              {"balance", plan.balance()},
              {"ring_hops", plan.ring_hops()},
              {"scheme", name_of(plan.chosen())},
              {"ranks", Json::array()},
              {"schemes", Json::array()}};
  for (int rank = 0; rank < plan.problem().ranks; ++rank) {
    Json runs = Json::array();
    for (const distributed::Run& run : plan.runs(rank)) {
      runs.push_back({{"begin", run.begin}, {"step", run.step}, {"count", run.count}});
    }
    out["ranks"].push_back({{"rows", plan.rows(rank)},
                            {"pairs", plan.pairs(rank)},
                            {"keys_needed", plan.keys_needed(rank)},
                            {"runs", runs}});
  }
  for (const Scheme scheme : schemes_of(plan)) {
    const SchemeCost cost = plan.cost(scheme);
    Json of_scheme = {{"name", name_of(scheme)},
                      {"forward_bytes", cost.forward_bytes},
                      {"forward_seconds", cost.forward_seconds},
                      {"backward_bytes", cost.backward_bytes},
                      {"backward_seconds", cost.backward_seconds}};
    if (scheme == Scheme::two_dimensional) {
      of_scheme["ulysses"] = plan.ulysses(scheme);
      of_scheme["across"] = name_of(plan.across());
    }
    out["schemes"].push_back(of_scheme);
  }
  return out;
}

void print(const Plan& plan) {
  double most = 0;
  for (int rank = 0; rank < plan.problem().ranks; ++rank) most = std::max(most, plan.pairs(rank));
  Table ranks({{"rank", Align::right},
               {"rows", Align::right},
               {"runs", Align::right},
               {"pairs of a head", Align::right},
               {"work", Align::right},
               {"keys needed", Align::right}});
  for (int rank = 0; rank < plan.problem().ranks; ++rank) {
    ranks.add({std::to_string(rank), std::to_string(plan.rows(rank)), std::to_string(plan.runs(rank).size()),
               fixed(plan.pairs(rank), 0), most > 0 ? fixed(plan.pairs(rank) / most, 3) : "-",
               std::to_string(plan.keys_needed(rank))});
  }
  ranks.print();
  std::cout << '\n';
  Table schemes({{"scheme"},
                 {"sends forward", Align::right},
                 {"backward", Align::right},
                 {"predicted forward", Align::right},
                 {"backward", Align::right},
                 {"verdict"}});
  const Scheme chosen = plan.chosen();
  for (const Scheme scheme : schemes_of(plan)) {
    const SchemeCost cost = plan.cost(scheme);
    schemes.add({scheme_text(plan, scheme), bytes_text(cost.forward_bytes), bytes_text(cost.backward_bytes),
                 seconds_text(cost.forward_seconds), seconds_text(cost.backward_seconds),
                 scheme == chosen ? green("chosen") : "possible"});
  }
  schemes.print();
  const distributed::Costs& c = plan.problem().costs;
  std::cout << "\npredicted from " << fixed(c.forward_flops / 1e12, 0) << " and " << fixed(c.backward_flops / 1e12, 0)
            << " TFLOP/s, " << fixed(c.link_bandwidth / 1e9, 0) << " GB/s between ranks, ";
  if (c.ranks_per_host > 0) {
    std::cout << fixed(c.network_bandwidth / 1e9, 0) << " GB/s between hosts of " << c.ranks_per_host << ", ";
  }
  std::cout << seconds_text(c.link_latency) << " an exchange\n";
}

}  // namespace

void add_order_flag(CLI::App& verb, std::string& order) {
  std::vector<std::string> orders;
  for (const Order known : kOrders) orders.emplace_back(name_of(known));
  one_of(verb.add_option("--order", order, "Which rows each rank has, beside --ranks"), orders)->capture_default_str();
}

std::vector<std::int64_t> bounds_of(const std::vector<std::int64_t>& lengths) {
  if (lengths.empty()) return {};
  std::vector<std::int64_t> out = {0};
  for (const std::int64_t length : lengths) out.push_back(out.back() + length);
  return out;
}

void RankFlags::add_to(CLI::App& verb) {
  verb.add_option("--ranks", ranks, "A plan for so many processes, instead of candidates");
  add_order_flag(verb, order);
  verb.add_option("--ulysses", ulysses,
                  "Of 2d: ranks that exchange heads for rows, beside --ranks; 0: the plan's choice")
      ->capture_default_str();
  verb.add_option("--documents", documents, "Lengths of documents that --length is packed of, beside --ranks");
  for (const auto& [flag, value, what] :
       {std::tuple{"--rate", &costs.forward_flops, "FLOP/s of a rank forward, beside --ranks"},
        {"--backward-rate", &costs.backward_flops, "FLOP/s of a rank backward, beside --ranks"},
        {"--link", &costs.link_bandwidth, "Bytes/s that a rank sends, beside --ranks"},
        {"--network", &costs.network_bandwidth, "Bytes/s that a rank sends to other hosts, beside --ranks-per-host"},
        {"--latency", &costs.link_latency, "Seconds of an exchange, beside --ranks"}}) {
    verb.add_option(flag, *value, what)->capture_default_str();
  }
  verb.add_option("--ranks-per-host", costs.ranks_per_host, "Ranks on one host, beside --ranks; 0: all of them")
      ->capture_default_str();
}

void RankFlags::check(const ProblemFlags& problem) const {
  if (ranks == 0) {
    if (!documents.empty())
      throw Error("--documents is given without --ranks: it is about a plan for several processes");
    if (ulysses != 0) throw Error("--ulysses is given without --ranks: it is about a plan for several processes");
    if (costs.ranks_per_host != 0) {
      throw Error("--ranks-per-host is given without --ranks: it is about a plan for several processes");
    }
    return;
  }
  for (const auto& [given, flag] : {std::pair{problem.bias, "--bias"},
                                    {problem.mask, "--mask"},
                                    {problem.page_size > 0, "--page-size"},
                                    {problem.options.dropout > 0, "--dropout"},
                                    {problem.options.q_step != 1, "--q-step"},
                                    {problem.options.key_step != 1, "--key-step"},
                                    {problem.Sk() != problem.length_q, "--keys"},
                                    {problem.packed, "--packed"}}) {
    if (given) {
      throw Error(std::string(flag) +
                  " is given beside --ranks: plans are of rows that are queries and keys at once, with " +
                  "causality, window and --documents");
    }
  }
}

distributed::Problem RankFlags::problem_of(const ProblemFlags& problem) const {
  AttentionOptions options;
  problem.options.fill(options);
  distributed::Problem out{.rows = problem.length_q, .ranks = ranks};
  out.batch = problem.batch, out.heads = problem.heads, out.kv_heads = problem.Hkv();
  out.head_size = problem.head_size, out.head_size_v = problem.Dv();
  out.dtype = dtype_named(problem.dtype);
  out.causal = options.causal;
  out.window_left = options.window_left, out.window_right = options.window_right;
  out.cu_seqlens = bounds_of(documents);
  out.order = distributed::order_named(order, "explain");
  out.ulysses = ulysses;
  out.costs = costs;
  out.costs.split_keys = true;
  return out;
}

void RankFlags::tell(const ProblemFlags& problem, bool json) const {
  problem.check();
  const Plan plan(problem_of(problem));
  if (json) {
    Json asked = problem.json();
    asked["ranks"] = ranks;
    if (!documents.empty()) asked["documents"] = documents;
    std::cout << Json{{"problem", asked}, {"plan", json_of(plan)}}.dump(2) << '\n';
    return;
  }
  std::cout << ranks << " ranks, " << order << ", " << problem.name();
  if (!documents.empty()) std::cout << " of " << documents.size() << " documents";
  std::cout << ", " << name_of(dtype_named(problem.dtype)) << ": balance " << fixed(plan.balance(), 3) << ", plan "
            << digest_text(plan.digest()) << "\n\n";
  print(plan);
}

}  // namespace heddle::cli
