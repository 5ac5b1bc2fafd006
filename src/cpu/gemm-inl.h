// The one matrix product of the CPU kernels: C[m, n] (+)= sum_k A(m, k) * B[k, n], n in vector lanes, A broadcast.
//   forward   S^T[key, row] = K[key, d] Q^T[d, row]        O^T[d, row] += V[key, d] P^T[key, row]
// Rows of queries lie in the lanes, so softmax needs no operation across lanes and K and V are read as they lie.

HWY_BEFORE_NAMESPACE();
namespace heddle::cpu::HEDDLE_TARGET {

// What becomes of the register tile. A sum that goes on has the same bits wherever it is cut. One that is summed from
// zero and joined is nearer the truth: a value meets the roundings of its own call and one for each other call, not one
// for every value before it.
enum class Sum {
  kStore,      // C = A B
  kStoreMax,   // C = A B, and running column maxima
  kGoOn,       // C = ((C + a b) + a b) + ...
  kJoin,       // C = C + A B
  kScaleJoin,  // C = C * scale[n] + A B
};

// One kTileM x (N vectors) tile. Not inlined: a caller's live vectors would push the operands out of the registers
// (seen to cost 33 % of the product). a_row, a_step: distance of A(m+1, k) and A(m, k+1); b_row, c_row: of rows of B
// and C.
template <class W, int N, Sum kSum>
HWY_NOINLINE void TileProduct(std::int64_t depth, const typename W::T* HWY_RESTRICT a, std::int64_t a_row,
                              std::int64_t a_step, const typename W::T* HWY_RESTRICT b, std::int64_t b_row,
                              float* HWY_RESTRICT c, std::int64_t c_row, const VF* scale, VF* max) {
  const DF d;
  VF sum[kTileM][N];
  HWY_UNROLL(kTileM)
  for (int m = 0; m < kTileM; ++m) {
    HWY_UNROLL(kTileN)
    for (int n = 0; n < N; ++n) {
      sum[m][n] = kSum == Sum::kGoOn ? hn::LoadU(d, c + m * c_row + n * kLanes) : hn::Zero(d);
    }
  }
  for (std::int64_t k = 0; k < depth; ++k) {
    decltype(W::Load(b)) row[N];
    HWY_UNROLL(kTileN)
    for (int n = 0; n < N; ++n) row[n] = W::Load(b + n * kLanes);
    HWY_UNROLL(kTileM)
    for (int m = 0; m < kTileM; ++m) {
      const auto x = W::Broadcast(a + m * a_row);
      HWY_UNROLL(kTileN)
      for (int n = 0; n < N; ++n) sum[m][n] = W::MulAdd(x, row[n], sum[m][n]);
    }
    a += a_step;
    b += b_row;
  }
  HWY_UNROLL(kTileM)
  for (int m = 0; m < kTileM; ++m) {
    HWY_UNROLL(kTileN)
    for (int n = 0; n < N; ++n) {
      float* to = c + m * c_row + n * kLanes;
      if constexpr (kSum == Sum::kJoin) sum[m][n] = hn::Add(hn::LoadU(d, to), sum[m][n]);
      if constexpr (kSum == Sum::kScaleJoin) sum[m][n] = hn::MulAdd(hn::LoadU(d, to), scale[n], sum[m][n]);
      hn::StoreU(sum[m][n], d, to);
      if constexpr (kSum == Sum::kStoreMax) max[n] = hn::Max(max[n], sum[m][n]);
    }
  }
}

}  // namespace heddle::cpu::HEDDLE_TARGET
HWY_AFTER_NAMESPACE();
