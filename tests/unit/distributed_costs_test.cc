// What schemes of a plan send, and the times that are predicted from it.
#include <gtest/gtest.h>

#include <algorithm>
#include <utility>

#include "heddle/distributed.h"

namespace heddle::distributed {
namespace {

TEST(DistributedCosts, BytesAreThoseOfTheFormulas) {
  // 2 (P - 1) / P S Hkv D e forward; the same again and f32 gradients backward.
  const Plan plan({.rows = 32768, .ranks = 2, .heads = 32, .kv_heads = 8, .causal = Causal::top_left});
  const double keys = 2 * 0.5 * 32768 * 8 * 128 * 2, gradients = 2 * 0.5 * 32768 * 8 * 128 * 4;
  for (const Scheme scheme : {Scheme::gather, Scheme::ring}) {
    const SchemeCost cost = plan.cost(scheme);
    EXPECT_EQ(cost.forward_bytes, keys) << name_of(scheme);
    EXPECT_EQ(cost.backward_bytes, keys + gradients) << name_of(scheme);
  }
  // Half of 2 (32768^2 / 2) pairs of 32 heads, 4 D operations a pair, at 680 TFLOP/s: 6.5 ms, of which the wire is 3 %.
  EXPECT_NEAR(plan.cost(Scheme::gather).forward_seconds, 6.5e-3, 0.4e-3);
  // By NVLink merging costs more than sending at once; by a network it is the other way round.
  EXPECT_LT(plan.cost(Scheme::gather).forward_seconds, plan.cost(Scheme::ring).forward_seconds);
  Problem far = plan.problem();
  far.costs.link_bandwidth = 10e9;
  EXPECT_GT(Plan(far).cost(Scheme::gather).forward_seconds, Plan(far).cost(Scheme::ring).forward_seconds);
  EXPECT_EQ(Plan(far).chosen(), Scheme::ring);
  const Plan four({.rows = 4096,
                   .ranks = 4,
                   .heads = 4,
                   .kv_heads = 2,
                   .head_size = 64,
                   .head_size_v = 32,
                   .dtype = DType::f32,
                   .causal = Causal::top_left});
  EXPECT_EQ(four.cost(Scheme::ring).forward_bytes, 3 * 1024 * 2 * 96 * 4);
  EXPECT_EQ(four.cost(Scheme::gather).backward_bytes, 2 * 3 * 1024 * 2 * 96 * 4);
  const Plan one({.rows = 4096, .ranks = 1, .causal = Causal::top_left});
  EXPECT_EQ(one.cost(Scheme::ring).forward_bytes + one.cost(Scheme::gather).backward_bytes, 0);
}

TEST(DistributedCosts, BytesOfNeededKeysAndOfHeads) {
  // A window of 500 in contiguous parts of 1000: each rank but the last sends 500 rows to the next.
  Problem p{.rows = 8000,
            .ranks = 8,
            .batch = 2,
            .heads = 8,
            .kv_heads = 2,
            .head_size = 64,
            .head_size_v = 32,
            .causal = Causal::top_left,
            .window_left = 500,
            .order = Order::contiguous};
  const Plan window(p);
  EXPECT_EQ(window.bytes(Scheme::needed, 0).forward, 2 * 500 * 2 * 96 * 2);
  EXPECT_EQ(window.bytes(Scheme::needed, 0).backward, 2 * 500 * 2 * 96 * 2);
  EXPECT_EQ(window.bytes(Scheme::needed, 3).backward, 2 * 500 * 2 * 96 * (2 + 4));
  EXPECT_EQ(window.bytes(Scheme::needed, 7).forward, 0);
  // (P - 1) / P^2 S of q, k, v and o, 2 kv heads to four ranks each, and 4 bytes of lse a head.
  const SchemeCost ulysses = window.cost(Scheme::ulysses);
  EXPECT_EQ(ulysses.forward_bytes, 2.0 * 7 * 1000 * (64 * 2 + 96 * 2 + 32 * 2 + 4));
  EXPECT_EQ(ulysses.backward_bytes, 2.0 * 7 * 1000 * ((64 + 96 + 2 * 32) * 2 + 2 * 4 + 64 * 2 + 96 * 4));
  // In pairs: q, k, v and o inside, k and v of one head between four groups of 2000 rows.
  EXPECT_EQ(window.ulysses(Scheme::two_dimensional), 2);
  p.window_left = -1;
  p.order = Order::zigzag;
  const Plan causal(p);
  EXPECT_EQ(causal.across(), Scheme::needed);  // sends no more than `gather`, which takes as long
  EXPECT_EQ(causal.cost(Scheme::two_dimensional).forward_bytes,
            2.0 * 1000 * (4 * 64 * 2 + 96 * 2 + 4 * (32 * 2 + 4)) + 2.0 * 3 * 2000 * 96 * 2);
  const Plan one({.rows = 4096, .ranks = 1, .causal = Causal::top_left});
  for (const Scheme scheme : {Scheme::needed, Scheme::ulysses, Scheme::two_dimensional}) {
    EXPECT_EQ(one.cost(scheme).forward_bytes + one.cost(scheme).backward_bytes, 0);
    EXPECT_EQ(one.cost(scheme).forward_seconds, one.cost(Scheme::gather).forward_seconds);
  }
}

// Hosts of two ranks: what goes to another host takes the network, whatever the link does meanwhile.
TEST(DistributedCosts, TimesBetweenHostsAreTheNetworks) {
  Problem p{.rows = 8000, .ranks = 4, .heads = 8, .kv_heads = 4, .causal = Causal::top_left};
  p.costs = {.link_latency = 0, .ranks_per_host = 2, .network_bandwidth = 1e9};
  const auto without_products = [](const Problem& problem, Scheme scheme) {
    Problem free = problem;
    free.costs.forward_flops = free.costs.backward_flops = free.costs.memory_bandwidth = 1e30;
    return Plan(free).cost(scheme);
  };
  const double keys = 2000 * 4 * 256 * 2, gradients = 2 * keys;  // of a rank's rows, 16 and 32 bits
  const SchemeCost gather = without_products(p, Scheme::gather);
  EXPECT_NEAR(gather.forward_seconds, 2 * keys / 1e9, 1e-9);  // to both ranks of the other host
  EXPECT_NEAR(gather.backward_seconds, 2 * (keys + gradients) / 1e9, 1e-9);
  // Of ranks 1 and 3 the next one is on another host; the last step's gradients go home from there, too.
  const SchemeCost ring = without_products(p, Scheme::ring);
  EXPECT_NEAR(ring.forward_seconds, 3 * keys / 1e9, 1e-9);
  // Heads for rows: half of what is sent to three others, and a third of it to the host's other rank.
  const SchemeCost ulysses = without_products(p, Scheme::ulysses);
  EXPECT_NEAR(ulysses.forward_seconds, (2 * 2000 * (2 * 128 + 256) * 2.0 + 2 * 2000 * (2 * 128 * 2 + 2 * 4)) / 1e9,
              1e-9);
  // 2d of hosts: heads by the link, a head's share of keys by the network.
  p.ulysses = 2;
  const Plan by_hosts(p);
  EXPECT_EQ(by_hosts.grouped(2).problem().costs.ranks_per_host, 1);
  const SchemeCost two = without_products(p, Scheme::two_dimensional);
  const double heads = 2000 * ((4 * 128 + 2 * 256) * 2 + 4 * 128 * 2 + 4 * 4) / p.costs.link_bandwidth;
  EXPECT_NEAR(two.forward_seconds, heads + 4000 * 2 * 256 * 2 / 1e9, 1e-9);
  EXPECT_LT(two.forward_seconds, gather.forward_seconds);
  // Groups of which each has ranks of several hosts exchange over the network alone; bytes are the same everywhere.
  Problem of_eight = p;
  of_eight.ranks = 8, of_eight.ulysses = 0, of_eight.costs.ranks_per_host = 3;
  EXPECT_EQ(Plan(of_eight).grouped(2).problem().costs.ranks_per_host, 1);
  of_eight.costs.ranks_per_host = 4;
  EXPECT_EQ(Plan(of_eight).grouped(2).problem().costs.ranks_per_host, 2);
  Problem near = p;
  near.costs.ranks_per_host = 0;
  for (const Scheme scheme : {Scheme::gather, Scheme::ring, Scheme::needed, Scheme::ulysses, Scheme::two_dimensional}) {
    // What goes across groups the plan chooses, by what links cost.
    if (scheme != Scheme::two_dimensional || Plan(near).across() == Plan(p).across()) {
      EXPECT_EQ(Plan(near).cost(scheme).backward_bytes, Plan(p).cost(scheme).backward_bytes) << name_of(scheme);
    }
    EXPECT_LT(Plan(near).cost(scheme).forward_seconds, Plan(p).cost(scheme).forward_seconds) << name_of(scheme);
  }
  EXPECT_EQ(Plan(near).digest(), Plan(p).digest());
}

TEST(DistributedCosts, NeededKeysAreChosenForShortDocuments) {
  Problem p{.rows = 64000, .ranks = 8, .heads = 32, .kv_heads = 8, .cu_seqlens = {0}, .causal = Causal::top_left};
  while (p.cu_seqlens.back() < p.rows) p.cu_seqlens.push_back(p.cu_seqlens.back() + 1600);
  const Plan plan(p);
  EXPECT_EQ(plan.chosen(), Scheme::needed);
  EXPECT_LT(plan.cost(Scheme::needed).forward_bytes, 0.1 * plan.cost(Scheme::gather).forward_bytes);
  // And heads are exchanged where rows cannot be dealt out evenly: a long document and a short one.
  p.cu_seqlens = {0, 50000, 64000};
  p.order = Order::contiguous;
  EXPECT_EQ(Plan(p).chosen(), Scheme::ulysses);
}

// One causal sequence, zigzag: rank r of P has the parts of `part` rows r and 2 P - 1 - r, and a piece of each, but the
// last rank, whose parts are neighbours, one of both.
Problem zigzag(int ranks, std::int64_t part) {
  Problem p{.rows = 2 * ranks * part, .ranks = ranks, .heads = 32, .kv_heads = 8, .causal = Causal::top_left};
  p.costs.link_latency = 0;
  p.costs.split_keys = true;
  return p;
}
constexpr double kForwardPair = 32 * 2 * 256 / 680e12, kBackwardPair = 32 * 2 * 640 / 560e12;
constexpr double kKey = 8 * 256 * 2 / 350e9, kGradient = 2 * kKey;  // s of a row

TEST(DistributedCosts, TwoRanksHideTheSecondExchangeOfKeys) {
  const double part = 16384, pairs = 4 * part * part + part;
  const Problem p = zigzag(2, 16384);
  const Plan plan(p);
  for (const Scheme scheme : {Scheme::gather, Scheme::needed}) {
    EXPECT_TRUE(plan.splits_keys(scheme));
    // Rank 1 waits for part 0. Parts 1 and 2 come while rank 0 computes part 0, which takes longer.
    EXPECT_NEAR(plan.cost(scheme).forward_seconds, part * kKey + pairs * kForwardPair, 1e-9);
    EXPECT_NEAR(plan.cost(scheme).backward_seconds, part * kKey + pairs * kBackwardPair + 2 * part * kGradient, 1e-9);
  }
  EXPECT_FALSE(plan.splits_keys(Scheme::ring) || plan.splits_keys(Scheme::ulysses));
  // Of links where that does not take longer, one exchange of parts 1 and 2 is faster than part 0 before them.
  Problem slow = p;
  slow.costs.link_bandwidth = 1e9;
  EXPECT_FALSE(Plan(slow).splits_keys(Scheme::needed));
  EXPECT_NEAR(Plan(slow).cost(Scheme::needed).forward_seconds, 2 * part * kKey * 350 + pairs * kForwardPair, 1e-9);
  // What cannot be split, and what is not.
  Problem full = p, batched = p, striped = p, one = p;
  full.causal = Causal::none, batched.batch = 2, striped.order = Order::striped, one.costs.split_keys = false;
  for (const Problem& other : {full, batched, striped, one}) EXPECT_FALSE(Plan(other).splits_keys(Scheme::needed));
  EXPECT_NEAR(Plan(one).cost(Scheme::needed).forward_seconds, 2 * part * kKey + pairs * kForwardPair, 1e-9);
}

TEST(DistributedCosts, RanksOfManyWaitForTwoExchangesOrForOne) {
  // First: part 0 to seven ranks, and to rank 7 all of 0 to 6. Then 1 to 14 to rank 0, which has a 32nd of its work to
  // compute meanwhile; in one exchange it gets as many.
  for (const auto& [part, splits] : {std::pair{8192.0, true}, {2048.0, false}}) {
    const double pairs = 16 * part * part + part, first = part * (part + 1) / 2;
    const Plan plan(zigzag(8, static_cast<std::int64_t>(part)));
    EXPECT_EQ(plan.splits_keys(Scheme::needed), splits);
    const auto keys = [&](double of_pair) {
      return splits ? 21 * part * kKey - std::min(first * of_pair, 14 * part * kKey) : 14 * part * kKey;
    };
    const SchemeCost cost = plan.cost(Scheme::needed);
    EXPECT_NEAR(cost.forward_seconds, keys(kForwardPair) + pairs * kForwardPair, 1e-9);
    EXPECT_NEAR(cost.backward_seconds, keys(kBackwardPair) + pairs * kBackwardPair + 14 * part * kGradient, 1e-9);
  }
}

// Documents of a rank's own: nothing is exchanged.
TEST(DistributedCosts, WhatIsNotSentTakesNoTime) {
  Problem p{.rows = 2000, .ranks = 2, .cu_seqlens = {0, 1000, 2000}, .causal = Causal::top_left};
  p.order = Order::contiguous;
  const Plan plan(p);
  EXPECT_NEAR(plan.cost(Scheme::needed).forward_seconds, 500500 * 2 * 256 / 680e12, 1e-12);
}

TEST(DistributedCosts, ARingPaysForItsSums) {
  Problem p{.rows = 65536, .ranks = 2, .heads = 32, .kv_heads = 8, .head_size = 128, .causal = Causal::top_left};
  const Plan plan(p);
  EXPECT_EQ(plan.chosen(), Scheme::needed);
  p.costs.memory_bandwidth = 1e30;
  const SchemeCost ring = plan.cost(Scheme::ring), free = Plan(p).cost(Scheme::ring);
  // 32768 rows of 32 heads of 128 floats: the sum three times, and of rows that have a second result four more.
  const double floats = 4.0 * 32768 * 32 * 128 / 4e12;
  EXPECT_GE(ring.forward_seconds - free.forward_seconds, 3 * floats);
  EXPECT_LE(ring.forward_seconds - free.forward_seconds, (3 + 4 * 2) * floats);
  EXPECT_GT(ring.backward_seconds, free.backward_seconds);
}

}  // namespace
}  // namespace heddle::distributed
