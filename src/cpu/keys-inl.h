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
  for (std::int64_t j = 0; j < count; ++j) {
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

// Rows [begin, begin + count) of v as panels of kTileM columns: out[d / kTileM][j][d % kTileM], panels PanelStride
// apart; for pairs, word j / 2 holds rows (j, j + 1) of one column. padded columns and padded_rows are zero-filled.
// Returns whether a value is infinite or NaN. line: 2 * padded f32.
template <class W>
bool PackPanels(const AttentionProblem& p, const Operand& x, std::int64_t width, std::int64_t padded, std::int64_t b,
                const Sequence& s, std::int64_t head, std::int64_t begin, std::int64_t count, std::int64_t padded_rows,
                typename W::T* HWY_RESTRICT out, float* HWY_RESTRICT line) {
  const std::int64_t stride = PanelStride<W>(padded_rows);
  if constexpr (W::kPair == 1) {
    constexpr int kStep = HWY_MIN(kLanes, kTileM);
    const hn::CappedTag<float, kStep> d;
    auto bad = hn::Zero(d);  // x * 0 is 0 for finite x and NaN otherwise
    for (std::int64_t j = 0; j < padded_rows; ++j) {
      if (j < count) {
        LoadRow(p.key_row(x, b, s, begin + j, head), x.dtype, x.stride_d, width, padded, line);
      } else if (j == count) {
        std::memset(line, 0, static_cast<std::size_t>(padded) * 4);
      }
      for (std::int64_t i = 0; i < padded; i += kStep) {
        const auto value = hn::LoadU(d, line + i);
        bad = hn::MulAdd(value, hn::Zero(d), bad);
        hn::StoreU(value, d, out + i / kTileM * stride + j * kTileM + i % kTileM);
      }
    }
    return !hn::AllTrue(d, hn::Eq(bad, hn::Zero(d)));
  }
#if HEDDLE_TARGET_BF16
  else {
    auto* half = reinterpret_cast<std::uint16_t*>(line);
    const hn::FixedTag<std::uint16_t, 8> d16;
    const hn::FixedTag<std::uint32_t, 8> d32;
    static_assert(kTileM == 8);
    auto top = hn::Zero(d16);  // largest exponent field
    const auto exponent = hn::Set(d16, 0x7f80);
    for (std::int64_t j = 0; j < padded_rows; j += 2) {
      for (std::int64_t k = 0; k < 2; ++k) {
        if (j + k < count) {
          CopyBf16Row(p.key_row(x, b, s, begin + j + k, head), x.stride_d, width, padded, half + k * padded);
        } else {
          std::memset(half + k * padded, 0, static_cast<std::size_t>(padded) * 2);
        }
      }
      for (std::int64_t i = 0; i < padded; i += kTileM) {
        const auto even = hn::LoadU(d16, half + i), odd = hn::LoadU(d16, half + padded + i);
        top = hn::Max(top, hn::Max(hn::And(even, exponent), hn::And(odd, exponent)));
        const auto word = hn::Or(hn::PromoteTo(d32, even), hn::ShiftLeft<16>(hn::PromoteTo(d32, odd)));
        hn::StoreU(word, d32, out + i / kTileM * stride + j / 2 * kTileM);
      }
    }
    return !hn::AllFalse(d16, hn::Eq(top, exponent));
  }
#endif
}

// Spreads the fetching of a block of keys and values over the products on the block before: packing it would otherwise
// wait for memory.
class Prefetcher {
 public:
  // Keys [begin, end), over `calls` calls of some().
  Prefetcher(const AttentionProblem& p, std::int64_t b, const Sequence& s, std::int64_t head, std::int64_t begin,
             std::int64_t end, std::int64_t calls)
      : p_(p),
        s_(s),
        b_(b),
        head_(head),
        begin_(begin),
        rows_(std::max<std::int64_t>(end - begin, 0) * 2),
        calls_(calls) {}

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
