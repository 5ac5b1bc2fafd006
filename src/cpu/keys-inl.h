// Packing a block of keys or values as the A operand of the matrix product, whatever their dtype, strides or pages.

HWY_BEFORE_NAMESPACE();
namespace heddle::cpu::HEDDLE_TARGET {

// Panels of V and rows of K are packed once for all the groups of a tile.

// Rows [begin, begin + count) of k, as they lie: out[j][d] in words, d padded with zeros, rows up to `padded_rows`
// zero.
template <class W>
void PackRows(const AttentionProblem& p, const Operand& x, std::int64_t width, std::int64_t padded, std::int64_t b,
              const Sequence& s, std::int64_t head, std::int64_t begin, std::int64_t count, std::int64_t padded_rows,
              typename W::T* HWY_RESTRICT out) {
  const std::int64_t row_words = padded / W::kPair;
  if constexpr (W::kPair == 1) {
    if (widened(p)) KeyWidener(p, b, s, head).load(&x == &p.v, begin, count, padded, out);
  }
  for (std::int64_t j = 0; j < count && !widened(p); ++j) {
    LoadWords<W>(x, p.key_row(x, b, s, begin + j, head), width, padded, out + j * row_words);
  }
  std::memset(out + count * row_words, 0, static_cast<std::size_t>((padded_rows - count) * row_words) * sizeof(*out));
}

// Panels of kTileM columns stand this many words apart: a multiple of the page size would put all of them in one cache
// set.
template <class W>
constexpr std::int64_t PanelStride(std::int64_t padded_rows) {
  return padded_rows / W::kPair * kTileM + 16;
}

// Distributes rows over panels of kTileM columns: out[d / kTileM][j][d % kTileM], panels PanelStride apart; for pairs,
// word j / 2 holds rows (j, j + 1) of one column. Remembers whether a value was infinite or NaN.
template <class W>
class PanelWriter {
  using T = typename W::T;

 public:
  PanelWriter(std::int64_t padded, std::int64_t padded_rows, T* out)
      : padded_(padded), stride_(PanelStride<W>(padded_rows)), out_(out) {}

  // Row j, or rows (j, j + 1) that lie one after the other.
  HWY_INLINE void put(const T* HWY_RESTRICT words, std::int64_t j) {
    T* HWY_RESTRICT out = out_ + j / W::kPair * kTileM;
    if constexpr (W::kPair == 1) {
      for (std::int64_t i = 0; i < padded_; i += kStep) {
        const auto value = hn::LoadU(DStep(), words + i);
        bad_ = hn::MulAdd(value, hn::Zero(DStep()), bad_);
        hn::StoreU(value, DStep(), out + i / kTileM * stride_ + i % kTileM);
      }
    }
#if HEDDLE_TARGET_BF16
    else {
      const hn::FixedTag<std::uint16_t, 8> d16;
      const hn::FixedTag<std::uint32_t, 8> d32;
      static_assert(kTileM == 8);
      const auto* half = reinterpret_cast<const std::uint16_t*>(words);
      const auto exponent = hn::Set(d16, 0x7f80);
      for (std::int64_t i = 0; i < padded_; i += kTileM) {
        const auto even = hn::LoadU(d16, half + i), odd = hn::LoadU(d16, half + padded_ + i);
        const auto fields = hn::Max(hn::And(even, exponent), hn::And(odd, exponent));
        bad_ = hn::Max(bad_, hn::BitCast(DStep(), hn::PromoteTo(d32, fields)));
        hn::StoreU(hn::Or(hn::PromoteTo(d32, even), hn::ShiftLeft<16>(hn::PromoteTo(d32, odd))), d32,
                   out + i / kTileM * stride_);
      }
    }
#endif
  }

  bool non_finite() const {
    if constexpr (W::kPair == 1) {
      return !hn::AllTrue(DStep(), hn::Eq(bad_, hn::Zero(DStep())));  // x * 0 is 0 for finite x and NaN otherwise
    } else {
      return !hn::AllFalse(DStep(), hn::Eq(bad_, hn::Set(DStep(), 0x7f80u)));
    }
  }

 private:
  static constexpr int kStep = HWY_MIN(kLanes, kTileM);
  using DStep = hn::CappedTag<T, kStep>;
  const std::int64_t padded_, stride_;
  T* out_;
  hn::Vec<DStep> bad_ = hn::Zero(DStep());
};

// Rows [begin, begin + count) of x as panels; padded columns and padded_rows are zero-filled. Returns whether a value
// is infinite or NaN. line: 2 * padded f32.
template <class W>
bool PackPanels(const AttentionProblem& p, const Operand& x, std::int64_t width, std::int64_t padded, std::int64_t b,
                const Sequence& s, std::int64_t head, std::int64_t begin, std::int64_t count, std::int64_t padded_rows,
                typename W::T* out, float* HWY_RESTRICT line) {
  auto* words = reinterpret_cast<typename W::T*>(line);
  const std::int64_t row_words = padded / W::kPair;
  PanelWriter<W> panels(padded, padded_rows, out);
  for (std::int64_t j = 0; j < padded_rows; j += W::kPair) {
    for (std::int64_t k = 0; k < W::kPair; ++k) {
      if (j + k < count && widened(p)) {
        if constexpr (W::kPair == 1) KeyWidener(p, b, s, head).load(&x == &p.v, begin + j, 1, padded, words);
      } else if (j + k < count) {
        LoadWords<W>(x, p.key_row(x, b, s, begin + j + k, head), width, padded, words + k * row_words);
      } else {
        std::memset(words + k * row_words, 0, static_cast<std::size_t>(row_words) * 4);
      }
    }
    panels.put(words, j);
  }
  return panels.non_finite();
}

// The same from rows that PackRows packed.
template <class W>
bool PanelsFromRows(const typename W::T* rows, std::int64_t padded, std::int64_t padded_rows, typename W::T* out) {
  PanelWriter<W> panels(padded, padded_rows, out);
  for (std::int64_t j = 0; j < padded_rows; j += W::kPair) panels.put(rows + j * padded / W::kPair, j);
  return panels.non_finite();
}

// Spreads the fetching of a block of keys and values over the products on the block before: packing it would otherwise
// wait for memory.
class Prefetcher {
 public:
  // Over `calls` calls of some().
  Prefetcher(const AttentionProblem& p, std::int64_t b, const Sequence& s, std::int64_t head, KeyRange keys,
             std::int64_t calls)
      : p_(p), s_(s), b_(b), head_(head), begin_(keys.begin), rows_(p.int4 ? 0 : keys.size() * 2), calls_(calls) {}

  HWY_INLINE void some() {
    for (due_ += rows_; due_ >= calls_; due_ -= calls_) {
      if (next_ >= rows_) return;
      const Operand& x = next_ % 2 == 0 ? p_.k : p_.v;
      const std::int64_t width = next_ % 2 == 0 ? p_.D : p_.Dv;
      const std::byte* row = p_.key_row(x, b_, s_, begin_ + next_ / 2, head_);
      const std::int64_t bytes = x.stride_d == 1 ? width * static_cast<std::int64_t>(size_of(x.dtype)) : 1;
      for (std::int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(row + at, 0, 2);
      ++next_;
    }
  }

 private:
  const AttentionProblem& p_;
  const Sequence& s_;
  const std::int64_t b_, head_, begin_, rows_, calls_;
  std::int64_t next_ = 0, due_ = 0;
};

}  // namespace heddle::cpu::HEDDLE_TARGET
HWY_AFTER_NAMESPACE();
