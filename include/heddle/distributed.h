// Attention over several processes (context parallelism): each rank holds some rows of one long problem, their queries,
// keys and values; together they compute what one process would (docs/distributed.md).
//
// Words: S rows in all, P ranks. A row is a token: its query, key and value are on the same rank. A rank's rows are a
// few runs, one after the other in its tensors, [B, rows, H, D] and so on. A scheme is how keys get to rows:
//   gather   all keys to every rank, then a call or a few
//   ring     keys go from rank to rank; a call or a few for each rank's keys, merged (heddle/partial.h)
//   needed   to every rank those keys that some row of its own attends, then as gather
//   ulysses  heads for rows: every rank gets all rows of some heads, computes them, and sends back what is others'
//   2d       ulysses inside of groups of ranks; across groups, of which each has some rows, one of the first three
// Liu, Zaharia and Abbeel (ring attention), arXiv 2310.01889; Brandon et al. (striped), arXiv 2311.09431; Dubey et al.
// (keys gathered, two chunks a rank), arXiv 2407.21783; Jacobs et al. (Ulysses), arXiv 2309.14509; Fang and Zhao (both
// together), arXiv 2405.07719.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "heddle/attention.h"

namespace heddle::distributed {

// How rows are dealt out.
//   contiguous    rank r has the r-th of P parts
//   zigzag        2 P parts, of which rank r has the r-th and the r-th from the end
//   striped       rank r has rows r, r + P, r + 2 P ...
//   per_document  zigzag inside of each document; where documents leave remainders, ranks take turns
//   balanced      parts of about S / (16 P) rows, cut at documents, by a solver: pairs as even as it gets while no rank
//                 has more than ceil(S / P) rows
enum class Order : std::uint8_t { contiguous, zigzag, striped, per_document, balanced };
// automatic: whichever is predicted to take the least time, forward and backward together.
enum class Scheme : std::uint8_t { automatic, gather, ring, needed, ulysses, two_dimensional };

const char* name_of(Order order);    // "contiguous", "zigzag", "striped", "per_document", "balanced"
const char* name_of(Scheme scheme);  // "auto", "gather", "ring", "needed", "ulysses", "2d"
// By these names. Throw Error "[operation] order is 'x': it must be one of ...".
Order order_named(const std::string& name, const std::string& operation);
Scheme scheme_named(const std::string& name, const std::string& operation);

// Rows [q_begin, q_end) attend keys [key_begin, key_end), as one call of attention over them: causality and window mean
// what they mean there.
struct Area {
  std::int64_t q_begin, q_end, key_begin, key_end;
  Causal causal = Causal::none;
  std::int64_t window_left = -1, window_right = -1;
};

// What times are predicted from. The defaults are those of one H200 of two that are joined by NVLink: bfloat16, head
// size 128, exchanges of 512 MB by NCCL, and what its smallest call takes from Python. Of the network it is what 400
// Gb/s for each GPU come to, nominally.
struct Costs {
  double forward_flops = 680e12, backward_flops = 560e12;  // FLOP/s of one rank
  double memory_bandwidth = 4e12;                          // bytes/s, of a ring's sums
  double link_bandwidth = 350e9;                           // bytes/s that a rank sends while it receives as many
  double link_latency = 50e-6;                             // s of an exchange
  // Ranks on one host, one after the other; the last host may have fewer. 0: all of them. What goes to another host
  // takes network_bandwidth, bytes/s of each rank, in place of link_bandwidth, at the same time as the rest.
  int ranks_per_host = 0;
  double network_bandwidth = 50e9;
  // Whether keys of `gather` and `needed` may come in two exchanges, as in heddle.distributed of Python, which sets
  // this, and `heddle explain`. Those of RankAttention come in one, before all products.
  bool split_keys = false;
};

struct Problem {
  std::int64_t rows = 0;  // S
  int ranks = 1;          // P
  // What bytes and times are about; attention itself takes these from its tensors.
  std::int64_t batch = 1, heads = 1, kv_heads = 1, head_size = 128, head_size_v = 128;
  DType dtype = DType::bf16;

  // Documents: cu_seqlens from 0 to S, never decreasing; empty: one. Rows attend keys of their own document alone.
  std::vector<std::int64_t> cu_seqlens = {};
  Causal causal = Causal::none;  // in each document, whose corners are the same
  std::int64_t window_left = -1, window_right = -1;
  // Or any areas instead, no pair in two of them. Not beside documents, causal, window and Order::per_document.
  std::vector<Area> areas = {};

  Order order = Order::zigzag;
  // Of Scheme::two_dimensional: how many ranks, one after the other, exchange heads for rows; a divisor of `ranks`. 0:
  // the largest divisor below `ranks` that is no more than kv_heads, or the least above 1.
  int ulysses = 0;
  Costs costs = {};
};

// Rows begin, begin + step, ... of the whole, `count` of them, which lie from row `local` of a rank's tensors on. Runs
// of one wave attend keys that do not overlap and ascend with them, so that one packed call may serve them.
struct Run {
  std::int64_t begin = 0, step = 1, count = 0, local = 0;
  int wave = 0;
};

// A call of attention as a piece of the whole (docs/partial.md): rows [q_begin, q_end) of a rank's against keys
// [key_begin, key_end) of a buffer. Its n sequences are packed; one alone is a call without cu_seqlens.
struct Piece {
  std::int64_t q_begin = 0, q_end = 0, key_begin = 0, key_end = 0;
  Causal causal = Causal::none;  // none or top_left
  std::int64_t window_left = -1, window_right = -1, q_step = 1, key_step = 1;
  std::vector<std::int32_t> cu_seqlens_q, cu_seqlens_k;  // n + 1, from 0 to q_end - q_begin and key_end - key_begin
  std::vector<std::int32_t> q_offset, key_offset;        // n
  std::int64_t max_seqlen_q = 0, max_seqlen_k = 0;
  bool first = false;  // no piece before it has any of these rows: its result needs no merge
  double pairs = 0;    // (row, key) pairs of a head that it has
};

// Of one scheme, the largest of all ranks.
struct SchemeCost {
  double forward_bytes = 0, backward_bytes = 0;      // that a rank sends, all gradients wanted
  double forward_seconds = 0, backward_seconds = 0;  // predicted: see costs.cc and docs/many_ranks.md
};

// Query heads [begin, end), and the key heads that they attend with.
struct HeadShare {
  std::int64_t begin = 0, end = 0, kv_begin = 0, kv_end = 0;
  bool operator==(const HeadShare&) const = default;
};
// Heads dealt out to ranks that exchange them for rows, ascending: no rank has more than ceil(heads / ranks), and the
// last ones may have fewer, or none. A share ends with a group of query heads where that rule leaves the choice; a key
// head whose group is cut is of several shares.
std::vector<HeadShare> head_shares(std::int64_t heads, std::int64_t kv_heads, int ranks);

// Which rank has which rows, and what follows from that. Needs no processes. The same problem gives the same plan.
class Plan {
 public:
  // Throws Error on a bad argument.
  explicit Plan(Problem problem);

  const Problem& problem() const { return problem_; }
  // Each document, or the areas that were given.
  const std::vector<Area>& areas() const { return areas_; }
  const std::vector<Run>& runs(int rank) const { return ranks_[static_cast<std::size_t>(rank)].runs; }
  std::int64_t rows(int rank) const { return ranks_[static_cast<std::size_t>(rank)].rows; }
  // (row, key) pairs of one head that the rank's rows attend, and the mean of all ranks over the largest: 1 is even.
  double pairs(int rank) const { return ranks_[static_cast<std::size_t>(rank)].pairs; }
  double balance() const;
  // Keys of other ranks that some row of the rank attends: the least that it must be sent.
  std::int64_t keys_needed(int rank) const;

  // The whole's row at each place, rank 0's rows first, and the place of each row.
  std::vector<std::int64_t> permutation() const;
  std::vector<std::int64_t> inverse() const;
  // Of each of the rank's rows its position in its document; with areas, in the whole.
  std::vector<std::int32_t> positions(int rank) const;

  // The calls over all keys in the whole's order.
  std::vector<Piece> gather_pieces(int rank) const;
  // The calls of each step: of step t over the keys of rank (rank - t) mod P as that rank has them. Steps that no rank
  // needs are left out at the end.
  std::vector<std::vector<Piece>> ring_pieces(int rank) const;
  // How often keys are sent on: P - 1, or less where windows or documents let the ring end early.
  int ring_hops() const { return ring_hops_; }
  // The keys that some row of the rank attends, its own among them, ascending: runs of the whole, one after the other
  // in a buffer, whose row each begins at is `local`. And the calls over that buffer.
  std::vector<Run> needed_keys(int rank) const;
  std::vector<Piece> needed_pieces(int rank) const;

  // How many ranks exchange heads for rows: in `ulysses` all, in `2d` Problem::ulysses or what 0 stands for, else 1.
  int ulysses(Scheme scheme) const;
  // The plan in which each `size` ranks, one after the other, are one, with all their rows. Throws Error unless size
  // divides the ranks.
  Plan grouped(int size) const;
  // Of `2d`: how keys get from group to group, whichever of gather, ring and needed is predicted to take the least
  // time.
  Scheme across() const;

  SchemeCost cost(Scheme scheme) const;  // not of Scheme::automatic
  Scheme chosen() const;                 // what Scheme::automatic is
  // Of `gather` and `needed` with Costs::split_keys: whether it is predicted to be faster, both passes together, that
  // ranks are first sent the keys that their first pieces have, and the rest while these are computed, than one
  // exchange in front of all products. Of `2d` the plan of groups knows. False of other schemes.
  bool splits_keys(Scheme scheme) const;

  // What a rank sends in a scheme; `cost` has the largest of these.
  struct Bytes {
    double forward = 0, backward = 0;
  };
  Bytes bytes(Scheme scheme, int rank) const;

  // Of the problem without its costs, and of all runs: ranks with the same digest have the same plan.
  std::uint64_t digest() const { return digest_; }

 private:
  struct Rank {
    std::vector<Run> runs;
    std::int64_t rows = 0;
    double pairs = 0;
  };
  Plan(Problem problem, std::vector<Area> areas, std::vector<std::vector<Run>> runs);
  void deal(std::vector<std::vector<Run>> runs);

  Problem problem_;
  std::vector<Area> areas_;
  std::vector<Rank> ranks_;
  int ring_hops_ = 0;
  std::uint64_t digest_ = 0;
};

// What an exchange is for, as errors name it: "[operation] exchange: rank 0 waits for rank 1, within 60 s, plan
// 25727c32a69e0bdf: it has not ended". A string alone is the exchange.
struct Purpose {
  Purpose(const char* exchange) : exchange(exchange) {}
  Purpose(std::string exchange, std::string operation = "distributed", std::string plan = {})
      : exchange(std::move(exchange)), operation(std::move(operation)), plan(std::move(plan)) {}
  std::string exchange, operation = "distributed";
  std::string plan = {};  // its digest, or nothing
};

// An exchange on its way. Its memory stays where it is, and what is sent unchanged, until it was waited for.
class Transfer {
 public:
  virtual ~Transfer() = default;
  // Memory of the host: returns when the exchange is done. A GPU's: what is put on the communicator's stream from now
  // on finds it done; the host itself waits only where the transport was told so (NcclOptions::host_waits). Throws
  // RuntimeError, with the exchange and the rank that it waited for, if that takes longer than the timeout.
  virtual void wait() = 0;
};

// How ranks reach each other. Every rank makes the same calls in the same order, from one thread. A transport says how
// two ranks exchange; what is summed, and in which order, is said here once.
//
// Messages lie in the host's memory, or, where device() says so, in that of the GPU that was current when the transport
// was made and that is current in each call. All functions below but all_gather_on_host() and barrier() then take
// memory of that GPU and return without waiting for it: they are in the order of one stream, use_stream()'s. An
// exchange begins when what was put on the stream before it is done, and what is put there after wait() comes after it;
// between the two the stream goes on beside it. So a capture of the stream holds exchanges, too, where the host does
// not wait for them.
class Communicator {
 public:
  virtual ~Communicator() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;
  virtual const char* name() const = 0;  // of the transport
  virtual Device device() const { return Device::cpu; }
  // The CUDA stream of later calls; null at first, the default stream. Nothing where messages lie in the host's memory.
  // RankAttention calls it with Runtime::stream.
  virtual void use_stream(void* stream);
  virtual void* stream() const { return nullptr; }
  // Throws RuntimeError, with the exchange and the rank, if an exchange has failed beside the host: after an error of
  // CUDA it says whether that was the reason. Nothing in a transport whose calls throw themselves.
  virtual void throw_if_failed() {}
  // Starts sending `out` to one rank and receiving `in`, as many bytes as that sends, from another; what is empty is
  // not sent. Exchanges that receive from the same rank are waited for in the order in which they were started, which
  // is that of its sending. On a GPU exchanges are done one after the other: two ranks that send to each other do so in
  // one exchange of each.
  virtual std::unique_ptr<Transfer> exchange(std::span<const std::byte> out, int to, std::span<std::byte> in, int from,
                                             const Purpose& purpose) = 0;

  // Every rank's part to every rank; parts may differ in length: parts[r] is as long as rank r's `part`, and
  // parts[rank()] may be `part` itself.
  void all_gather(std::span<const std::byte> part, std::span<const std::span<std::byte>> parts, const Purpose& purpose);
  // The same in the host's memory, wherever messages lie. Waits.
  void all_gather_on_host(std::span<const std::byte> part, std::span<const std::span<std::byte>> parts,
                          const Purpose& purpose);
  // out[r] to rank r, in[r] from it, as many bytes as it sends here; what is empty is not sent. out[rank()] is copied.
  void all_to_all(std::span<const std::span<const std::byte>> out, std::span<const std::span<std::byte>> in,
                  const Purpose& purpose);
  // parts[r] is what this rank adds to rank r's sum. sum = rank 0's part + rank 1's + ..., in this order whatever comes
  // first. scratch: of sum's size; on a GPU `size()` times that, as all parts are received at once.
  void reduce_scatter(std::span<const std::span<const float>> parts, std::span<float> sum, std::span<float> scratch,
                      const Purpose& purpose);
  // x = rank 0's x + rank 1's + ..., in this order, on every rank. scratch: `size()` times x.
  void all_reduce(std::span<float> x, std::span<float> scratch, const Purpose& purpose);
  // Returns when all ranks have called it.
  void barrier();
};

// Communicators of `size` threads of this process, entry r for rank r. A rank that waits longer than `timeout`, or for
// one whose communicator is gone, throws RuntimeError.
std::vector<std::unique_ptr<Communicator>> thread_communicators(int size, std::chrono::milliseconds timeout);

struct Options {
  std::optional<float> scale;  // default 1 / sqrt(D)
  float softcap = 0.0f;
  TensorView alibi_slopes = {};  // f32 [H]; distances are in the document or area. Order::striped: in `ulysses` alone
  TensorView sink = {};          // f32 [H], the same on all ranks
  // [B or 1, H or 1, rows, S], f32 or of q's dtype: of the rank's rows, in the plan's order, and all S keys, in the
  // whole's; added to the scores, and -inf removes a pair. In `gather`, `ring` and `needed`, of one document, and not
  // of Order::striped.
  TensorView bias = {};
  // In `gather`, `ring` and `needed`: up to 8 parts of the key heads go one after the other, so that other ranks' keys,
  // and their gradients, of one part at a time are in memory. All ranks give the same.
  bool chunked = false;
  std::string force = {};  // a candidate of attention
};

// Gradients to write, f32 or of q's dtype; one that is not given is not computed, but the same for all ranks. dsink:
// f32 [H], the sum over all ranks' rows, on each of them. dbias: of an f32 bias, on the CPU, f32, contiguous, of its
// shape: that of the rank's rows.
struct Gradients {
  TensorView dq, dk, dv, dsink, dbias = {};
};

// One rank's share of a plan's attention. It owns the memory for other ranks' keys and for partial results, allocated
// by the first call that needs it and kept.
//
// Tensors lie where the communicator's messages do (Communicator::device). On a GPU a call is put on Runtime::stream
// and returns; calls on several streams are ordered by who makes them. Nothing waits on the host but the first call
// with a plan, shapes and options, which compares them, and exchanges that the transport was told to wait for. So a
// call that was made before may be captured into a CUDA graph, and be replayed where all ranks replay theirs; the graph
// is done with before this is destroyed. Sums there are the same each time (AttentionOptions::deterministic).
class RankAttention {
 public:
  // Throws Error if the communicator has not as many ranks as the plan. Plan and communicator outlive this.
  RankAttention(const Plan& plan, Communicator& communicator, Scheme scheme = Scheme::automatic);
  ~RankAttention();
  RankAttention(const RankAttention&) = delete;
  RankAttention& operator=(const RankAttention&) = delete;

  Scheme scheme() const;  // not automatic

  // q [B, rows, H, D], k [B, rows, Hkv, D], v [B, rows, Hkv, Dv], of one dtype: the rank's rows, in the plan's order.
  // Writes o [B, rows, H, Dv], f32 or of q's dtype, and, if given, lse, f32 [B, H, rows]. The first call with a plan,
  // shapes and options compares them over all ranks: where they differ every rank throws Error. Throws Error on a bad
  // argument before anything is sent, RuntimeError where a rank is lost.
  void forward(const TensorView& q, const TensorView& k, const TensorView& v, const TensorView& o,
               const TensorView& lse, const Options& options = {}, const Runtime& runtime = {});
  // o and lse are those that forward wrote; d_o has o's shape, d_lse, if given, lse's. Keys are sent once more, and in
  // `ulysses` and `2d` all that forward sent and got. dk and dv are summed in f32: in `gather` and `needed` rank 0's
  // share, then rank 1's and so on; in `ring` that of the rank behind the one that has the keys, then the next one's,
  // and its own with that sum; in `ulysses`, where ranks share a key head, in the order of ranks; in `2d` across groups
  // first, as the scheme there does, then as `ulysses`. Bits do not depend on which rank is fast.
  void backward(const TensorView& q, const TensorView& k, const TensorView& v, const TensorView& o,
                const TensorView& lse, const TensorView& d_o, const TensorView& d_lse, const Gradients& gradients,
                const Options& options = {}, const Runtime& runtime = {});

 private:
  struct State;
  std::unique_ptr<State> state_;
};

struct DecodeOptions {
  // Of this rank's part of the cache, as AttentionOptions has them. seqused_k, int32 [B]: how many keys of each
  // sequence this rank holds, from 0 on; not given, beside caches that are not in pages alone: all slots are keys.
  TensorView seqused_k = {}, page_table = {}, cache_batch_idx = {}, k_scale = {}, v_scale = {};
  // int32 [B]: the position in the whole sequence of q's first row, and of this rank's first key. Both are needed with
  // causal, a window or alibi_slopes, and without them say nothing.
  TensorView q_offset = {}, key_offset = {};
  std::int64_t key_step = 1;     // key j stands at key_offset[b] + key_step * j: P where keys go to P ranks in turn
  Causal causal = Causal::none;  // none or top_left: keys at the row's own position and before
  std::int64_t window_left = -1, window_right = -1;
  std::optional<float> scale = {};  // default 1 / sqrt(D)
  float softcap = 0.0f;
  TensorView alibi_slopes = {};  // f32 [H] or [B, H]; not with a key_step above 1
  TensorView sink = {};          // f32 [H], the same on all ranks: in each row's denominator once
  std::string force = {};        // a candidate of attention
};

// Attention of a few rows to a cache that is spread over ranks, each of which holds some keys of every sequence, or
// none. It owns the memory for partial results, allocated by the first call that needs it and kept. On the CPU, as the
// communicator's messages are. Dao, Haziza, Massa and Sizov, "Flash-Decoding for long-context inference", 2023.
class RankDecode {
 public:
  // The communicator outlives this. Throws Error if its messages lie on a GPU.
  explicit RankDecode(Communicator& communicator);
  ~RankDecode();
  RankDecode(const RankDecode&) = delete;
  RankDecode& operator=(const RankDecode&) = delete;

  // q [B, Sq, H, D], f32, f16 or bf16, the same on all ranks; this rank's keys and values, [Bc, Smax, Hkv, D] and [Bc,
  // Smax, Hkv, Dv], or pages [pages, page_size, Hkv, D or Dv], of q's dtype or f8e4m3 beside 16-bit q. Smax and the
  // number of pages differ from rank to rank, and may be 0. Writes o [B, Sq, H, Dv], f32 or of q's dtype, rounded once,
  // and, if given, lse, f32 [B, H, Sq]. New keys are written before, by the rank that is to hold them
  // (append_kv_cache). A row attends all keys that are in the caches unless causality or a window says which.
  //
  // Every rank computes with its own keys, gets the others' (o, lse) in f32, B Sq H (Dv + 1) numbers of each, in one
  // exchange, and merges them in the order of ranks (heddle/partial.h): all have the same bits, and a call that is
  // repeated has them again. A row without any key gives o = 0 and lse = -inf (with a sink, lse = sink).
  //
  // The first call with such shapes and options compares them over all ranks: where they differ every rank throws
  // Error. Throws Error on a bad argument before anything is sent, RuntimeError where a rank is lost.
  void forward(const TensorView& q, const TensorView& k_cache, const TensorView& v_cache, const TensorView& o,
               const TensorView& lse, const DecodeOptions& options = {}, const Runtime& runtime = {});

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace heddle::distributed
