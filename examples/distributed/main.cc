// Attention over the processes of an MPI job, forward and backward, held against one process.
//
// usage: mpiexec -n RANKS heddle_distributed [ROWS [gather|ring|needed|ulysses|2d|auto]]
#include <heddle/attention.h>
#include <heddle/distributed_mpi.h>
#include <heddle/error.h>
#include <mpi.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <exception>
#include <random>
#include <string>
#include <vector>

namespace {

using heddle::DType, heddle::TensorView;
using namespace heddle::distributed;
using std::int64_t;

constexpr int64_t kHeads = 8, kKvHeads = 2, kHeadSize = 64;
constexpr auto kTimeout = std::chrono::seconds(60);

// Values of `width` numbers a row, the same on every rank.
std::vector<float> drawn(unsigned seed, int64_t rows, int64_t width) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> x(static_cast<std::size_t>(rows * width));
  for (float& value : x) value = normal(random);
  return x;
}

TensorView view(const std::vector<float>& x, int64_t heads) {
  const int64_t rows = std::ssize(x) / (heads * kHeadSize);
  return {x.data(), DType::f32, {1, rows, heads, kHeadSize}};
}

// Everything of some rows that a call reads and writes.
struct Tensors {
  std::vector<float> q, k, v, d_o, o, lse, dq, dk, dv;

  Tensors(std::vector<float> q, std::vector<float> k, std::vector<float> v, std::vector<float> d_o)
      : q(std::move(q)), k(std::move(k)), v(std::move(v)), d_o(std::move(d_o)) {
    o.resize(this->q.size()), dq.resize(this->q.size()), dk.resize(this->k.size()), dv.resize(this->v.size());
    lse.resize(this->q.size() / kHeadSize);
  }
  TensorView lse_view() const { return {lse.data(), DType::f32, {1, kHeads, std::ssize(lse) / kHeads}}; }
};

std::vector<float> rows_of(const std::vector<float>& x, const std::vector<int64_t>& rows, int64_t width) {
  std::vector<float> out;
  for (const int64_t row : rows) out.insert(out.end(), x.begin() + row * width, x.begin() + (row + 1) * width);
  return out;
}

// The largest difference of a rank's rows from the whole's.
double farthest(const std::vector<float>& found, const std::vector<float>& whole, const std::vector<int64_t>& rows,
                int64_t width) {
  const std::vector<float> right = rows_of(whole, rows, width);
  double most = 0;
  for (std::size_t n = 0; n < right.size(); ++n) most = std::max<double>(most, std::abs(found[n] - right[n]));
  return most;
}

void in_one_process(const Tensors& t) {
  heddle::AttentionOptions options;
  options.causal = heddle::Causal::top_left;
  const heddle::AttentionGradients gradients{
      .dq = view(t.dq, kHeads), .dk = view(t.dk, kKvHeads), .dv = view(t.dv, kKvHeads), .dbias = {}, .dsink = {}};
  const TensorView q = view(t.q, kHeads), k = view(t.k, kKvHeads), v = view(t.v, kKvHeads), o = view(t.o, kHeads);
  heddle::WorkspaceBuffer buffer;
  heddle::Runtime runtime;
  runtime.workspace = buffer.get(heddle::attention_forward_workspace(q, k, v, options));
  heddle::attention_forward(q, k, v, o, t.lse_view(), options, runtime);
  runtime.workspace = buffer.get(heddle::attention_backward_workspace(q, k, v, gradients, options));
  heddle::attention_backward(q, k, v, o, t.lse_view(), view(t.d_o, kHeads), {}, gradients, options, runtime);
}

void run(int64_t rows, Scheme scheme) {
  const auto ranks = mpi_communicator(MPI_Comm_c2f(MPI_COMM_WORLD), kTimeout);
  const Plan plan({.rows = rows,
                   .ranks = ranks->size(),
                   .heads = kHeads,
                   .kv_heads = kKvHeads,
                   .head_size = kHeadSize,
                   .head_size_v = kHeadSize,
                   .dtype = DType::f32,
                   .causal = heddle::Causal::top_left});
  constexpr int64_t kRow = kHeads * kHeadSize, kKeyRow = kKvHeads * kHeadSize;
  const Tensors whole(drawn(1, rows, kRow), drawn(2, rows, kKeyRow), drawn(3, rows, kKeyRow), drawn(4, rows, kRow));

  // A program that is in earnest never has the whole: each rank reads its own rows.
  std::vector<int64_t> own;
  for (const Run& part : plan.runs(ranks->rank())) {
    for (int64_t n = 0; n < part.count; ++n) own.push_back(part.begin + part.step * n);
  }
  const Tensors mine(rows_of(whole.q, own, kRow), rows_of(whole.k, own, kKeyRow), rows_of(whole.v, own, kKeyRow),
                     rows_of(whole.d_o, own, kRow));
  const TensorView q = view(mine.q, kHeads), k = view(mine.k, kKvHeads), v = view(mine.v, kKvHeads),
                   o = view(mine.o, kHeads);
  RankAttention attention(plan, *ranks, scheme);
  attention.forward(q, k, v, o, mine.lse_view());
  attention.backward(
      q, k, v, o, mine.lse_view(), view(mine.d_o, kHeads), {},
      {.dq = view(mine.dq, kHeads), .dk = view(mine.dk, kKvHeads), .dv = view(mine.dv, kKvHeads), .dsink = {}});

  in_one_process(whole);
  double off = std::max({farthest(mine.o, whole.o, own, kRow), farthest(mine.dq, whole.dq, own, kRow),
                         farthest(mine.dk, whole.dk, own, kKeyRow), farthest(mine.dv, whole.dv, own, kKeyRow)});
  MPI_Allreduce(MPI_IN_PLACE, &off, 1, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
  if (!(off < 1e-4)) throw heddle::RuntimeError("off by " + std::to_string(off) + " from one process");
  if (ranks->rank() == 0) {
    std::printf("%d ranks, %s: o and gradients of %lld rows, %.1e the farthest from one process\n", ranks->size(),
                name_of(attention.scheme()), static_cast<long long>(rows), off);
  }
}

}  // namespace

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  try {
    run(argc > 1 ? std::stoll(argv[1]) : 4096, scheme_named(argc > 2 ? argv[2] : "auto", "heddle_distributed"));
  } catch (const std::exception& error) {
    std::fprintf(stderr, "heddle_distributed: %s\n", error.what());
    MPI_Abort(MPI_COMM_WORLD, 1);
  }
  MPI_Finalize();
}
