// Few query rows (decode): bound by reading K and V once, so both are read where they lie, with head dimensions in lanes.

HWY_BEFORE_NAMESPACE();
namespace heddle::cpu::HEDDLE_TARGET {

constexpr std::int64_t kFewRows = HWY_MIN(8, kLanes);  // query rows of one kv head up to which a key row is not packed
constexpr std::int64_t kFetchAhead = 12;  // key rows between a prefetch and its use

// Whether a kv head with that many query rows takes this path; a matter of the problem alone.
inline bool few_rows(const AttentionProblem& p, const Sequence& s) {
  return s.q_rows * p.G <= kFewRows && p.k.stride_d == 1 && p.v.stride_d == 1;
}

inline void PrefetchRow(const std::byte* row, std::int64_t bytes) {
  for (std::int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(row + at, 0, 3);
}

// One vector of f32 from kLanes elements of a row.
template <DType kType>
HWY_INLINE VF LoadWide(const std::byte* row, std::int64_t i) {
  const DF d;
  if constexpr (kType == DType::f32) {
    return hn::LoadU(d, reinterpret_cast<const float*>(row) + i);
  } else if constexpr (kType == DType::bf16) {
    const hn::Rebind<std::uint16_t, DF> d16;
    const auto half = hn::LoadU(d16, reinterpret_cast<const std::uint16_t*>(row) + i);
    return hn::BitCast(d, hn::ShiftLeft<16>(hn::PromoteTo(DU(), half)));
  } else {
    const hn::Rebind<hwy::float16_t, DF> d16;
    return hn::PromoteTo(d, hn::LoadU(d16, reinterpret_cast<const hwy::float16_t*>(row) + i));
  }
}

// Products of key rows with kRows query rows: scores[j][g] for keys [begin, end). q: [kRows][q_row] f32. The last, partial
// vector of a key row goes through `line`.
template <DType kType, int kRows>
void FewScores(const AttentionProblem& p, std::int64_t b, const Sequence& s, std::int64_t head, std::int64_t begin,
               std::int64_t end, std::int64_t fetch_end, const float* HWY_RESTRICT q, std::int64_t q_row,
               float* HWY_RESTRICT scores, float* HWY_RESTRICT line) {
  const DF d;
  const std::int64_t whole = p.D / kLanes * kLanes, rest = p.D - whole;
  constexpr std::int64_t kBytes = kType == DType::f32 ? 4 : 2;
  const std::int64_t k_bytes = p.D * kBytes, v_bytes = p.Dv * kBytes;
  for (std::int64_t j = begin; j < end; ++j) {
    if (j + kFetchAhead < fetch_end) PrefetchRow(p.key_row(p.k, b, s, j + kFetchAhead, head), k_bytes);
    PrefetchRow(p.key_row(p.v, b, s, j, head), v_bytes);
    const std::byte* k = p.key_row(p.k, b, s, j, head);
    VF sum[kRows];
    HWY_UNROLL(4)
    for (int g = 0; g < kRows; ++g) sum[g] = hn::Zero(d);
    for (std::int64_t i = 0; i < whole; i += kLanes) {
      const VF x = LoadWide<kType>(k, i);
      HWY_UNROLL(4)
      for (int g = 0; g < kRows; ++g) sum[g] = hn::MulAdd(x, hn::LoadU(d, q + g * q_row + i), sum[g]);
    }
    if (rest > 0) {
      LoadRow(k + whole * kBytes, kType, 1, rest, kLanes, line);
      const VF x = hn::LoadU(d, line);
      HWY_UNROLL(4)
      for (int g = 0; g < kRows; ++g) sum[g] = hn::MulAdd(x, hn::LoadU(d, q + g * q_row + whole), sum[g]);
    }
    HWY_UNROLL(4)
    for (int g = 0; g < kRows; ++g) scores[(j - begin) * kGroup + g] = hn::GetLane(hn::SumOfLanes(d, sum[g]));
  }
}

// o[g][i] += sum_j weights[j][g] v[j][i] for kRows query rows and kVectors vectors from column i on. A key without weight is
// not read.
template <DType kType, int kRows, int kVectors>
HWY_INLINE void FewValues(const AttentionProblem& p, std::int64_t b, const Sequence& s, std::int64_t head, std::int64_t begin,
                          std::int64_t end, const float* HWY_RESTRICT weights, std::int64_t i, float* HWY_RESTRICT o,
                          std::int64_t o_row) {
  const DF d;
  VF sum[kRows][kVectors];
  HWY_UNROLL(4)
  for (int g = 0; g < kRows; ++g) {
    HWY_UNROLL(4)
    for (int n = 0; n < kVectors; ++n) sum[g][n] = hn::LoadU(d, o + g * o_row + i + n * kLanes);
  }
  for (std::int64_t j = begin; j < end; ++j) {
    const float* w = weights + (j - begin) * kGroup;
    bool any = false;
    for (int g = 0; g < kRows; ++g) any |= w[g] != 0.0f;
    if (!any) continue;
    const std::byte* v = p.key_row(p.v, b, s, j, head);
    VF x[kVectors];
    HWY_UNROLL(4)
    for (int n = 0; n < kVectors; ++n) x[n] = LoadWide<kType>(v, i + n * kLanes);
    HWY_UNROLL(4)
    for (int g = 0; g < kRows; ++g) {
      const VF weight = hn::Set(d, w[g]);
      HWY_UNROLL(4)
      for (int n = 0; n < kVectors; ++n) sum[g][n] = hn::MulAdd(weight, x[n], sum[g][n]);
    }
  }
  HWY_UNROLL(4)
  for (int g = 0; g < kRows; ++g) {
    HWY_UNROLL(4)
    for (int n = 0; n < kVectors; ++n) hn::StoreU(sum[g][n], d, o + g * o_row + i + n * kLanes);
  }
}

template <DType kType, int kRows>
void FewValuesAll(const AttentionProblem& p, std::int64_t b, const Sequence& s, std::int64_t head, std::int64_t begin,
                  std::int64_t end, const float* HWY_RESTRICT weights, float* HWY_RESTRICT o, std::int64_t o_row) {
  std::int64_t i = 0;
  for (; i + 4 * kLanes <= p.Dv; i += 4 * kLanes) FewValues<kType, kRows, 4>(p, b, s, head, begin, end, weights, i, o, o_row);
  for (; i + kLanes <= p.Dv; i += kLanes) FewValues<kType, kRows, 1>(p, b, s, head, begin, end, weights, i, o, o_row);
  if (i == p.Dv) return;
  for (std::int64_t j = begin; j < end; ++j) {
    const float* w = weights + (j - begin) * kGroup;
    const std::byte* v = p.key_row(p.v, b, s, j, head);
    for (int g = 0; g < kRows; ++g) {
      if (w[g] == 0.0f) continue;
      for (std::int64_t c = i; c < p.Dv; ++c) o[g * o_row + c] += w[g] * load_element(v, kType, c);
    }
  }
}

// Calls f.template operator()<dtype, rows>(first row) for up to 4 query rows at a time.
template <class F>
void ForFewRows(DType dtype, std::int64_t rows, const F& f) {
  const auto with_rows = [&]<DType kType>() {
    for (std::int64_t g = 0; g < rows; g += 4) {
      switch (std::min<std::int64_t>(rows - g, 4)) {
        case 1: f.template operator()<kType, 1>(g); break;
        case 2: f.template operator()<kType, 2>(g); break;
        case 3: f.template operator()<kType, 3>(g); break;
        default: f.template operator()<kType, 4>(g);
      }
    }
  };
  if (dtype == DType::f32) return with_rows.template operator()<DType::f32>();
  if (dtype == DType::bf16) return with_rows.template operator()<DType::bf16>();
  with_rows.template operator()<DType::f16>();
}

}  // namespace heddle::cpu::HEDDLE_TARGET
HWY_AFTER_NAMESPACE();
