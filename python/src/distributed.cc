#include "heddle/distributed.h"

#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <span>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "convert.h"
#include "core/names.h"

namespace heddle::python {
namespace {

using namespace distributed;

constexpr NamedValue<DType> kDTypes[] = {{"float32", DType::f32}, {"float16", DType::f16}, {"bfloat16", DType::bf16}};
constexpr const char* kOperation = "distributed.plan";

// The members of Costs, in their order, but for split_keys: ranks do that here.
using CostItems = std::tuple<double, double, double, double, double, int, double>;
// q_begin, q_end, key_begin, key_end, causal, window_left, window_right; causal as heddle._options has it.
using AreaItems = std::tuple<std::int64_t, std::int64_t, std::int64_t, std::int64_t, int, std::int64_t, std::int64_t>;

Plan* make(std::int64_t rows, int ranks, const std::vector<std::int64_t>& sizes, const std::string& dtype, int causal,
           std::int64_t window_left, std::int64_t window_right, const std::vector<std::int64_t>& cu_seqlens,
           const std::vector<AreaItems>& areas, const std::string& order, int ulysses, const CostItems& costs) {
  Problem p{.rows = rows, .ranks = ranks};
  p.batch = sizes.at(0), p.heads = sizes.at(1), p.kv_heads = sizes.at(2);
  p.head_size = sizes.at(3), p.head_size_v = sizes.at(4);
  p.dtype = value_named(kDTypes, dtype, kOperation, "dtype");
  p.cu_seqlens = cu_seqlens;
  p.causal = static_cast<Causal>(causal);
  p.window_left = window_left, p.window_right = window_right;
  for (const auto& [q_begin, q_end, key_begin, key_end, of_area, left, right] : areas) {
    p.areas.push_back({q_begin, q_end, key_begin, key_end, static_cast<Causal>(of_area), left, right});
  }
  p.order = order_named(order, kOperation);
  p.ulysses = ulysses;
  p.costs = std::apply([](auto... items) { return Costs{items..., true}; }, costs);
  nb::gil_scoped_release released;
  return new Plan(std::move(p));
}

template <class Number>
nb::bytes bytes_of(const std::vector<Number>& numbers) {
  return nb::bytes(reinterpret_cast<const char*>(numbers.data()), numbers.size() * sizeof(Number));
}

int checked_rank(const Plan& plan, int rank) {
  Check(kOperation)
      .require(0 <= rank && rank < plan.problem().ranks, "rank is ", rank, ": it must be from 0 to ",
               plan.problem().ranks - 1);
  return rank;
}

// (begin, step, count, local) each
nb::list runs(const Plan& plan, int rank) {
  nb::list out;
  for (const Run& run : plan.runs(checked_rank(plan, rank))) {
    out.append(nb::make_tuple(run.begin, run.step, run.count, run.local));
  }
  return out;
}

// A list for each step, of tuples in the order of distributed::Piece's members but for its pairs; int32 as bytes.
nb::list pieces(const Plan& plan, int rank, const std::string& scheme) {
  checked_rank(plan, rank);
  const Scheme named = scheme_named(scheme, kOperation);
  std::vector<std::vector<Piece>> steps;
  if (named == Scheme::ring) {
    steps = plan.ring_pieces(rank);
  } else {
    steps.push_back(named == Scheme::needed ? plan.needed_pieces(rank) : plan.gather_pieces(rank));
  }
  nb::list out;
  for (const std::vector<Piece>& step : steps) {
    nb::list of_step;
    for (const Piece& p : step) {
      of_step.append(nb::make_tuple(p.q_begin, p.q_end, p.key_begin, p.key_end, static_cast<int>(p.causal),
                                    p.window_left, p.window_right, p.q_step, p.key_step, bytes_of(p.cu_seqlens_q),
                                    bytes_of(p.cu_seqlens_k), bytes_of(p.q_offset), bytes_of(p.key_offset),
                                    p.max_seqlen_q, p.max_seqlen_k, p.first));
    }
    out.append(of_step);
  }
  return out;
}

// (begin, end, kv_begin, kv_end) of each rank that exchanges heads for rows.
nb::list shares(std::int64_t heads, std::int64_t kv_heads, int ranks) {
  nb::list out;
  for (const HeadShare& share : head_shares(heads, kv_heads, ranks)) {
    out.append(nb::make_tuple(share.begin, share.end, share.kv_begin, share.kv_end));
  }
  return out;
}

// The whole's rows of the keys that a rank needs, ascending.
nb::bytes needed_keys(const Plan& plan, int rank) {
  std::vector<std::int64_t> out;
  for (const Run& run : plan.needed_keys(checked_rank(plan, rank))) {
    for (std::int64_t n = 0; n < run.count; ++n) out.push_back(run.begin + n);
  }
  return bytes_of(out);
}

// Forward: bytes, seconds; backward: bytes, seconds.
nb::tuple cost(const Plan& plan, const std::string& scheme) {
  const SchemeCost c = plan.cost(scheme_named(scheme, kOperation));
  return nb::make_tuple(c.forward_bytes, c.forward_seconds, c.backward_bytes, c.backward_seconds);
}

}  // namespace

void bind_distributed(nb::module_& module) {
  nb::class_<Plan>(module, "ShardPlan")
      .def_static("make", &make, nb::arg("rows"), nb::arg("ranks"), nb::arg("sizes"), nb::arg("dtype"),
                  nb::arg("causal"), nb::arg("window_left"), nb::arg("window_right"), nb::arg("cu_seqlens"),
                  nb::arg("areas"), nb::arg("order"), nb::arg("ulysses"), nb::arg("costs"),
                  nb::rv_policy::take_ownership)
      .def_prop_ro("balance", &Plan::balance)
      .def_prop_ro("digest", &Plan::digest)
      .def_prop_ro("ring_hops", &Plan::ring_hops)
      .def("across", [](const Plan& plan) { return std::string(name_of(plan.across())); })
      .def("chosen", [](const Plan& plan) { return std::string(name_of(plan.chosen())); })
      .def("cost", &cost, nb::arg("scheme"))
      .def(
          "grouped", [](const Plan& plan, int size) { return new Plan(plan.grouped(size)); }, nb::arg("size"),
          nb::rv_policy::take_ownership)
      .def_static("head_shares", &shares, nb::arg("heads"), nb::arg("kv_heads"), nb::arg("ranks"))
      .def("inverse", [](const Plan& plan) { return bytes_of(plan.inverse()); })
      .def(
          "keys_needed", [](const Plan& plan, int rank) { return plan.keys_needed(checked_rank(plan, rank)); },
          nb::arg("rank"))
      .def("needed_keys", &needed_keys, nb::arg("rank"))
      .def(
          "pairs", [](const Plan& plan, int rank) { return plan.pairs(checked_rank(plan, rank)); }, nb::arg("rank"))
      .def("permutation", [](const Plan& plan) { return bytes_of(plan.permutation()); })
      .def("pieces", &pieces, nb::arg("rank"), nb::arg("scheme"))
      .def(
          "positions", [](const Plan& plan, int rank) { return bytes_of(plan.positions(checked_rank(plan, rank))); },
          nb::arg("rank"))
      .def(
          "rows", [](const Plan& plan, int rank) { return plan.rows(checked_rank(plan, rank)); }, nb::arg("rank"))
      .def("runs", &runs, nb::arg("rank"))
      .def(
          "splits_keys",
          [](const Plan& plan, const std::string& scheme) {
            return plan.splits_keys(scheme_named(scheme, kOperation));
          },
          nb::arg("scheme"))
      .def(
          "ulysses",
          [](const Plan& plan, const std::string& scheme) { return plan.ulysses(scheme_named(scheme, kOperation)); },
          nb::arg("scheme"));
}

}  // namespace heddle::python
