// Inference over the processes of an MPI job, held against one process: decoding over a cache that is spread, a
// Transformer block whose weights are split, and blocks in stages.
//
// usage: mpiexec -n RANKS heddle_distributed_inference [decode|tensor|sequence|pipeline]
#include <heddle/distributed_block.h>
#include <heddle/distributed_mpi.h>
#include <heddle/error.h>
#include <mpi.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <exception>
#include <random>
#include <string>
#include <utility>
#include <vector>

namespace {

using heddle::DType, heddle::TensorView;
using namespace heddle::distributed;
using std::int64_t;
using Values = std::vector<float>;

constexpr auto kTimeout = std::chrono::seconds(60);

// The same on every rank.
Values drawn(unsigned seed, int64_t count, float size = 1) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0, size);
  Values x(static_cast<std::size_t>(count));
  for (float& value : x) value = normal(random);
  return x;
}

double farthest(const Values& a, const Values& b) {
  double most = 0;
  for (std::size_t n = 0; n < a.size(); ++n) most = std::max<double>(most, std::abs(a[n] - b[n]));
  return most;
}

// One step: a row of one sequence, whose keys are dealt out to ranks in turn.
double decode(Communicator& ranks) {
  constexpr int64_t kKeys = 1001, kHeads = 8, kKvHeads = 2, kSize = 64, kRow = kKvHeads * kSize;
  const Values q = drawn(1, kHeads * kSize), k = drawn(2, kKeys * kRow), v = drawn(3, kKeys * kRow);
  const auto cache = [](const Values& x) {
    return TensorView(x.data(), DType::f32, {1, std::ssize(x) / kRow, kKvHeads, kSize});
  };
  const auto row = [](const Values& x) { return TensorView(x.data(), DType::f32, {1, 1, kHeads, kSize}); };
  // A program that is in earnest appends each new key on the rank that is to hold it.
  Values own_k, own_v;
  for (int64_t key = ranks.rank(); key < kKeys; key += ranks.size()) {
    own_k.insert(own_k.end(), k.begin() + key * kRow, k.begin() + (key + 1) * kRow);
    own_v.insert(own_v.end(), v.begin() + key * kRow, v.begin() + (key + 1) * kRow);
  }
  Values o(q.size()), whole(q.size());
  RankDecode(ranks).forward(row(q), cache(own_k), cache(own_v), row(o), {});

  heddle::WorkspaceBuffer buffer;
  heddle::Runtime runtime;
  runtime.workspace = buffer.get(heddle::attention_forward_workspace(row(q), cache(k), cache(v), {}));
  heddle::attention_forward(row(q), cache(k), cache(v), row(whole), {}, {}, runtime);
  return farthest(o, whole);
}

// A block's weights, drawn, and the views of them.
class Weights {
 public:
  heddle::TransformerBlockOptions options{.hidden = 256,
                                          .heads = 8,
                                          .kv_heads = 4,
                                          .intermediate = 512,
                                          .norm = heddle::Norm::rms_norm,
                                          .activation = heddle::Activation::swiglu,
                                          .causal = heddle::Causal::top_left,
                                          .layers = {{"up", "nvfp4"}, {"*", "int8_row"}}};
  explicit Weights(unsigned seed) : seed_(seed) {
    const int64_t h = options.hidden, inner = options.intermediate;
    qkv_ = matrix(h + 2 * options.kv_heads * (h / options.heads), h);
    out_ = matrix(h, h);
    up_ = matrix(2 * inner, h);
    down_ = matrix(h, inner);
    norm_.assign(static_cast<std::size_t>(h), 1);
  }
  heddle::TransformerBlockWeights views() const {
    const int64_t h = options.hidden;
    const auto of = [](const Values& x, int64_t columns) {
      return TensorView(x.data(), DType::f32, {std::ssize(x) / columns, columns});
    };
    heddle::TransformerBlockWeights w;
    w.qkv = of(qkv_, h), w.out = of(out_, h), w.up = of(up_, h), w.down = of(down_, options.intermediate);
    w.norm1 = w.norm2 = TensorView(norm_.data(), DType::f32, {h});
    return w;
  }

 private:
  Values matrix(int64_t rows, int64_t columns) {
    return drawn(seed_++, rows * columns, 1 / std::sqrt(static_cast<float>(columns)));
  }
  unsigned seed_;
  Values qkv_, out_, up_, down_, norm_;
};

// Rows of four sequences.
struct Rows {
  std::vector<std::int32_t> cu_seqlens = {0, 40, 41, 90, 100};
  int64_t hidden, total = 100;
  Values x;

  explicit Rows(int64_t of) : hidden(of), x(drawn(7, total * of)) {}
  TensorView offsets() const { return {cu_seqlens.data(), DType::i32, {std::ssize(cu_seqlens)}}; }
  TensorView view(const Values& of) const { return {of.data(), DType::f32, {std::ssize(of) / hidden, hidden}}; }
};

void run_in_one_process(const heddle::TransformerBlock& block, const Rows& rows, Values& x) {
  heddle::WorkspaceBuffer buffer;
  heddle::Runtime runtime;
  runtime.workspace = buffer.get(block.workspace(rows.total, std::ssize(rows.cu_seqlens) - 1, rows.total));
  block.forward(rows.view(x), rows.offsets(), rows.view(x), runtime);
}

double tensor_parallel(Communicator& ranks, bool sequence_parallel) {
  const Weights weights(11);
  const Rows rows(weights.options.hidden);
  TensorParallelBlock block(weights.options, weights.views(), ranks, sequence_parallel);
  Range own{0, rows.total};
  if (sequence_parallel) own = even_range(rows.total, ranks.size(), ranks.rank());
  const auto of_rank = [&](const Values& x) {
    return Values(x.begin() + own.begin * rows.hidden, x.begin() + own.end * rows.hidden);
  };
  const Values x = of_rank(rows.x);
  Values y(x.size()), whole = rows.x;
  block.forward(rows.view(x), rows.offsets(), rows.view(y));
  run_in_one_process(heddle::TransformerBlock(weights.options, weights.views()), rows, whole);
  return farthest(y, of_rank(whole));
}

// A block on each rank, the rows in two micro-batches.
double pipeline(Communicator& ranks) {
  const auto made = [](int rank) {
    const Weights weights(100 * static_cast<unsigned>(rank + 1));
    return heddle::TransformerBlock(weights.options, weights.views());
  };
  std::vector<heddle::TransformerBlock> blocks;
  blocks.push_back(made(ranks.rank()));
  const Rows rows(blocks[0].options().hidden);
  const bool first = ranks.rank() == 0, last = ranks.rank() + 1 == ranks.size();
  PipelineStage stage(std::move(blocks), ranks);
  Values y(rows.x.size()), whole = rows.x;
  stage.forward(first ? rows.view(rows.x) : TensorView(), rows.offsets(), last ? rows.view(y) : TensorView(), 2);
  for (int rank = 0; rank < ranks.size(); ++rank) run_in_one_process(made(rank), rows, whole);
  return last ? farthest(y, whole) : 0;
}

void run(const std::string& what) {
  const auto ranks = mpi_communicator(MPI_Comm_c2f(MPI_COMM_WORLD), kTimeout);
  double off = 0;
  if (what == "decode") {
    off = decode(*ranks);
  } else if (what == "tensor" || what == "sequence") {
    off = tensor_parallel(*ranks, what == "sequence");
  } else if (what == "pipeline") {
    off = pipeline(*ranks);
  } else {
    throw heddle::Error("what is '" + what + "': it must be decode, tensor, sequence or pipeline");
  }
  MPI_Allreduce(MPI_IN_PLACE, &off, 1, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
  if (!(off < 1e-4)) throw heddle::RuntimeError("off by " + std::to_string(off) + " from one process");
  if (ranks->rank() == 0) {
    std::printf("%d ranks, %s: %.1e the farthest from one process\n", ranks->size(), what.c_str(), off);
  }
}

}  // namespace

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  try {
    run(argc > 1 ? argv[1] : "decode");
  } catch (const std::exception& error) {
    std::fprintf(stderr, "heddle_distributed_inference: %s\n", error.what());
    MPI_Abort(MPI_COMM_WORLD, 1);
  }
  MPI_Finalize();
}
