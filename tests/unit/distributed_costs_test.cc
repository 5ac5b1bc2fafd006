// What schemes of a plan send, and the times that are predicted from it.
#include <gtest/gtest.h>

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

}  // namespace

// Seconds of a forward by `gather` that products do not take.
double awaited(Problem p) {
  const double with = Plan(p).cost(Scheme::gather).forward_seconds;
  p.costs.link_bandwidth = 1e30;
  return with - Plan(p).cost(Scheme::gather).forward_seconds;
}

TEST(DistributedCosts, HalfOfTheKeysComeDuringTheFirstCall) {
  Problem p{.rows = 65536, .ranks = 2, .heads = 32, .kv_heads = 8, .head_size = 128};
  p.costs.link_latency = 0;
  p.order = Order::zigzag;
  const double of_all = awaited(p);
  EXPECT_GT(of_all, 0);
  p.causal = Causal::top_left;
  EXPECT_NEAR(of_all / awaited(p), 2, 1e-9);
  p.costs.link_bandwidth = 1e9;  // longer than an eighth of the products
  const double slow = awaited(p);
  p.causal = Causal::none;
  EXPECT_LT(awaited(p) / slow, 1.9);
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

}  // namespace heddle::distributed
