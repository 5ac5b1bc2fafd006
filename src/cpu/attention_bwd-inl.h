// Backward, after Dao et al., arXiv 2205.14135, appendix B.4, with P recomputed from lse. One tile of query rows
// against its keys, block by block: S^T and dP^T with rows in lanes, as in the forward; then
//   dV[key, d] += P^T[key, row] dO[row, d]    dK[key, d] += dS^T[key, row] Q[row, d]    dQ^T[d, row] += K[key, d]
//   dS^T[key, row]
// where P^T and dS^T are the broadcast operand for dV and dK and the lane operand for dQ.

HWY_BEFORE_NAMESPACE();
namespace heddle::cpu::HEDDLE_TARGET {

template <class W>
class BackwardTile {
  using T = typename W::T;

 public:
  // row_limit: most query rows loaded at a time.
  BackwardTile(const AttentionBackwardProblem& p, std::int64_t row_limit, std::byte* memory)
      : p_(p),
        w_(p),
        limit_(round_up(ceil_div(row_limit, kGroup), kSpan)),
        scratch_(memory),
        rows_(p, limit_, scratch_),
        scores_(p, scratch_) {
    dq_ = scratch_.take<float>(limit_ * kGroup * w_.dp);
    k_ = scratch_.take<T>(kKeyBlock * w_.dp / W::kPair);
    v_ = scratch_.take<T>(kKeyBlock * w_.dvp / W::kPair);
    k_panels_ = scratch_.take<T>(w_.dp / kTileM * PanelStride<W>(kKeyBlock));
    if (natural_logits(p)) max_and_sum_ = scratch_.take<float>(2 * limit_ * kGroup);
    if (W::kPair == 2) {
      p_words_ = scratch_.take<T>(kKeyBlock * kSpanRows / 2);
      ds_words_ = scratch_.take<T>(kKeyBlock * kSpanRows / 2);
      ds_pairs_ = scratch_.take<T>(kKeyBlock / 2 * kGroup);
    }
  }
  std::size_t bytes() const { return scratch_.used(); }

  void run(const BackwardTask& task) {
    const Sequence s = p_.sequence(task.b);
    const Head head{p_, task.b, task.kv_head, s};
    std::memset(task.dk, 0, static_cast<std::size_t>(s.k_rows * w_.dl) * 4);
    std::memset(task.dv, 0, static_cast<std::size_t>(s.k_rows * w_.dvl) * 4);
    const std::int64_t all = s.q_rows * p_.G, tile = backward_rows(p_);
    for (std::int64_t begin = task.first_tile * tile; begin < all; begin += task.tile_step * tile) {
      const TaskWalk walk = load(head, {begin, std::min(begin + tile, all)}, task.tiles);
      std::memset(dq_, 0, static_cast<std::size_t>(rows_.groups() * kGroup * w_.dp) * 4);
      for (std::int64_t n = 0; n < walk.count(); ++n) {
        pack(head, walk.tile(n));
        const std::int64_t calls = rows_.groups() * (kKeyBlock + w_.dp) / kTileM;
        Prefetcher prefetcher(p_, head.b, head.s, head.kv_head, walk.next(n), calls);
        for (std::int64_t group = 0; group < rows_.groups(); group += kSpan) {
          add_gradients(head, group, walk.tile(n), task, prefetcher);
        }
      }
      store_dq(head);
    }
  }

  // Gradients of the logits of rows [row_begin, row_end) are added to sums[i - row_begin][j]; p.G must be 1.
  void add_bias_gradient(const Head& head, std::int64_t row_begin, std::int64_t row_end, float* sums,
                         std::int64_t sums_row) {
    const TaskWalk walk = load(head, {row_begin, row_end}, {});
    for (std::int64_t n = 0; n < walk.count(); ++n) {
      const KeyRange tile = walk.tile(n);
      pack(head, tile);
      for (std::int64_t group = 0; group < rows_.groups(); ++group) {
        const GroupRows& g = rows_.group(group);
        const TilePart part(g, tile);
        if (part.empty()) continue;
        Prefetcher none(p_, head.b, head.s, head.kv_head, {}, 1);
        scores_.compute(head, rows_, group, 0, k_, v_, part, false, none);
        for (std::int64_t j = tile.begin + part.first; j < std::min(tile.begin + part.last, head.s.sk); ++j) {
          for (std::int64_t lane = 0; lane < g.count; ++lane) {
            sums[(g.begin - row_begin + lane) * sums_row + j] += scores_.ds()[(j - tile.begin) * kSpanRows + lane];
          }
        }
      }
    }
  }

 private:
  // Rows [begin, end) of the kv head, and the walk over their keys.
  TaskWalk load(const Head& head, Interval<std::int64_t> rows, const TileList& tiles) {
    const TaskWalk walk(p_, head.s, rows, {0, head.s.sk}, kKeyBlock, tiles);
    rows_.load(head, rows.begin, rows.end);
    bool absorbed = false;
    for (std::int64_t group = 0; group < rows_.groups(); ++group) absorbed |= rows_.absorbed(group);
    if (absorbed) find_denominators(head, walk);
    return walk;
  }

  // Where lse holds no denominator, it is found again from the scores.
  void find_denominators(const Head& head, const TaskWalk& walk) {
    const auto max = [&](std::int64_t group) { return max_and_sum_ + 2 * group * kGroup; };
    const auto sum = [&](std::int64_t group) { return max(group) + kGroup; };
    for (std::int64_t group = 0; group < rows_.groups(); ++group) {
      std::fill_n(max(group), kGroup, -kInfinity);
      std::fill_n(sum(group), kGroup, 0.0f);
    }
    for (std::int64_t n = 0; n < walk.count(); ++n) {
      const KeyRange tile = walk.tile(n);
      PackRows<W>(p_, p_.k, p_.D, w_.dp, head.b, head.s, head.kv_head, tile.begin, tile.size(),
                  round_up(tile.size(), kPad), k_);
      for (std::int64_t group = 0; group < rows_.groups(); ++group) {
        const TilePart part(rows_.group(group), tile);
        if (!rows_.absorbed(group) || part.empty()) continue;
        scores_.join_statistics(head, rows_, group, k_, part, max(group), sum(group));
      }
    }
    for (std::int64_t group = 0; group < rows_.groups(); ++group) {
      for (std::int64_t lane = 0; lane < rows_.group(group).count; ++lane) {
        if (!rows_.absorbed(group, lane) || max(group)[lane] == -kInfinity) continue;
        float total = sum(group)[lane];
        if (p_.sink) {
          const std::int64_t h = row_at(p_, head.kv_head, rows_.group(group).begin + lane).h;
          total += std::exp(p_.sink.template as<const float>()[h * p_.sink.stride_h] - max(group)[lane]);
        }
        rows_.replace_lse(group, lane, max(group)[lane], total);
      }
    }
  }

  void pack(const Head& head, KeyRange tile) {
    packed_ = round_up(tile.size(), kPad);
    PackRows<W>(p_, p_.k, p_.D, w_.dp, head.b, head.s, head.kv_head, tile.begin, tile.size(), packed_, k_);
    PackRows<W>(p_, p_.v, p_.Dv, w_.dvp, head.b, head.s, head.kv_head, tile.begin, tile.size(), packed_, v_);
    k_non_finite_ = PanelsFromRows<W>(k_, w_.dp, packed_, k_panels_);
  }

  void add_gradients(const Head& head, std::int64_t group0, KeyRange tile, const BackwardTask& task,
                     Prefetcher& prefetcher) {
    const std::int64_t groups = std::min<std::int64_t>(kSpan, rows_.groups() - group0);
    std::int64_t first = kKeyBlock, last = 0;
    for (std::int64_t k = 0; k < groups; ++k) {
      const TilePart part(rows_.group(group0 + k), tile);
      if (part.empty()) continue;
      first = std::min(first, part.first);
      last = std::max(last, part.last);
    }
    if (first >= last) return;
    for (std::int64_t k = 0; k < groups; ++k) {
      const TilePart part(rows_.group(group0 + k), tile);
      const std::int64_t column = k * kGroup;
      if (part.empty()) {
        scores_.clear(first, last, column);
        continue;
      }
      scores_.clear(first, part.first, column);
      scores_.clear(part.last, last, column);
      scores_.compute(head, rows_, group0 + k, column, k_, v_, part, true, prefetcher);
    }
    const std::int64_t depth = groups * kGroup;
    if constexpr (W::kPair == 2) {
      round_tile(scores_.p(), first, last, depth, p_words_);
      round_tile(scores_.ds(), first, last, depth, ds_words_);
    }
    add_to_keys(first, last, depth, scores_.p(), p_words_, rows_.do_rows(group0), w_.dvl,
                task.dv + tile.begin * w_.dvl);
    add_to_keys(first, last, depth, scores_.ds(), ds_words_, rows_.q_rows(group0), w_.dl, task.dk + tile.begin * w_.dl);
    for (std::int64_t k = 0; k < groups; ++k) add_to_queries(head, group0 + k, k * kGroup, tile, prefetcher);
  }

  // tile[key][row] rounded to bf16, rows in pairs.
  static void round_tile(const float* HWY_RESTRICT tile, std::int64_t first, std::int64_t last, std::int64_t depth,
                         T* HWY_RESTRICT words) {
    const DF d;
    const hn::Rebind<std::uint16_t, DF> d16;
    for (std::int64_t j = first; j < last; ++j) {
      auto* to = reinterpret_cast<std::uint16_t*>(words) + j * kSpanRows;
      for (std::int64_t i = 0; i < depth; i += kLanes) {
        const VU bits = RoundToBf16(hn::LoadU(d, tile + j * kSpanRows + i));
        hn::StoreU(hn::TruncateTo(d16, hn::ShiftRight<16>(bits)), d16, to + i);
      }
    }
  }

  // sums[key][d] += tile[key][row] rows[row][d], keys [first, last) of the block; width in whole vectors.
  void add_to_keys(std::int64_t first, std::int64_t last, std::int64_t depth, const float* tile, const T* words,
                   const T* rows, std::int64_t width, float* sums) {
    const T* a;
    if constexpr (W::kPair == 1) {
      a = tile;
    } else {
      a = words;
    }
    const std::int64_t a_row = kSpanRows / W::kPair;
    // Vectors in equal shares: 4 as 2 + 2, since a tile of one vector would wait for its loads.
    const std::int64_t vectors = width / kLanes, share = ceil_div(vectors, ceil_div(vectors, kTileN));
    for (std::int64_t n = 0; n < vectors; n += share) {
      for (std::int64_t j = first; j < last; j += kTileM) {
        const T* b = rows + n * kLanes;
        float* c = sums + j * width + n * kLanes;
        const T* at = a + j * a_row;
        switch (std::min(share, vectors - n)) {
          case 1:
            TileProduct<W, 1, Sum::kJoin>(depth / W::kPair, at, a_row, 1, b, width, c, width, nullptr, nullptr);
            break;
          case 2:
            TileProduct<W, 2, Sum::kJoin>(depth / W::kPair, at, a_row, 1, b, width, c, width, nullptr, nullptr);
            break;
          default:
            TileProduct<W, 3, Sum::kJoin>(depth / W::kPair, at, a_row, 1, b, width, c, width, nullptr, nullptr);
        }
      }
    }
  }

  void add_to_queries(const Head& head, std::int64_t group, std::int64_t column, KeyRange tile,
                      Prefetcher& prefetcher) {
    const GroupRows& g = rows_.group(group);
    const KeyRange keys = tile.common(g.keys);
    if (keys.empty()) return;
    const std::int64_t from = (keys.begin - tile.begin) / W::kPair, to = ceil_div(keys.end - tile.begin, W::kPair);
    const T* lanes;
    std::int64_t ld = kSpanRows;
    if constexpr (W::kPair == 1) {
      lanes = scores_.ds() + column;
    } else {
      PairRows(scores_.ds() + column, kSpanRows, from, to, kTileN, ds_pairs_);
      lanes = ds_pairs_;
      ld = kGroup;
    }
    if (k_non_finite_) DropUnattended<W>(head, g, tile.begin, packed_, w_.dp, k_panels_);
    for (std::int64_t i = 0; i < w_.dp; i += kTileM) {
      TileProduct<W, kTileN, Sum::kJoin>(to - from, k_panels_ + i / kTileM * PanelStride<W>(packed_) + from * kTileM, 1,
                                         kTileM, lanes + from * ld, ld, dq_ + (group * w_.dp + i) * kGroup, kGroup,
                                         nullptr, nullptr);
      prefetcher.some();
    }
    if (k_non_finite_) {
      PanelsFromRows<W>(k_, w_.dp, packed_, k_panels_);
    }
  }

  void store_dq(const Head& head) {
    if (!p_.dq) return;
    const DF d;
    const VF scale = hn::Set(d, p_.scale);
    for (std::int64_t group = 0; group < rows_.groups(); ++group) {
      float* dq = dq_ + group * w_.dp * kGroup;
      for (std::int64_t i = 0; i < w_.dp * kGroup; i += kLanes)
        hn::StoreU(hn::Mul(hn::LoadU(d, dq + i), scale), d, dq + i);
      rows_.store_dq(head, group, dq);
    }
  }

  const AttentionBackwardProblem& p_;
  const BackwardWidths w_;
  const std::int64_t limit_;
  Scratch scratch_;
  BackwardRows<W> rows_;
  BackwardScores<W> scores_;
  std::int64_t packed_ = 0;  // rows of the packed block, padded
  bool k_non_finite_ = false;
  T *k_ = nullptr, *v_ = nullptr, *k_panels_ = nullptr, *p_words_ = nullptr, *ds_words_ = nullptr, *ds_pairs_ = nullptr;
  float *dq_ = nullptr, *max_and_sum_ = nullptr;
};

template <class F>
auto WithBackwardTile(const AttentionBackwardProblem& p, std::int64_t row_limit, std::byte* memory, const F& f) {
#if HEDDLE_TARGET_BF16
  if (p.dtype == DType::bf16) {
    BackwardTile<Bf16Word> tile(p, row_limit, memory);
    return f(tile);
  }
#endif
  BackwardTile<F32Word> tile(p, row_limit, memory);
  return f(tile);
}

inline std::int64_t GradientWidth(std::int64_t width) { return PadLanes(round_up(width, kPad)); }

inline std::size_t BackwardScratch(const AttentionBackwardProblem& p) {
  return WithBackwardTile(p, backward_rows(p), nullptr, [](auto& tile) { return tile.bytes(); });
}
inline void Backward(const AttentionBackwardProblem& p, const BackwardTask& task, std::byte* memory) {
  WithBackwardTile(p, backward_rows(p), memory, [&](auto& tile) { tile.run(task); });
}

inline void WriteGradient(const AttentionBackwardProblem& p, const Operand& to, std::int64_t width, float factor,
                          std::int64_t b, std::int64_t kv_head, float* sums, std::int64_t count, std::int64_t stride) {
  const DF d;
  const Sequence s = p.sequence(b);
  const std::int64_t padded = GradientWidth(width);
  for (std::int64_t j = 0; j < s.k_rows; ++j) {
    float* row = sums + j * padded;
    for (std::int64_t i = 0; i < padded; i += kLanes) {
      VF sum = hn::LoadU(d, row + i);
      for (std::int64_t n = 1; n < count; ++n) sum = hn::Add(sum, hn::LoadU(d, row + n * stride + i));
      hn::StoreU(hn::Mul(sum, hn::Set(d, factor)), d, row + i);
    }
    // Padding of the last block adds to rows beyond the used keys; what is there is no gradient.
    if (j >= s.sk) std::memset(row, 0, static_cast<std::size_t>(width) * 4);
    StoreRow(row, width, to.at(b, s.k_begin + j, kv_head), to.dtype, to.stride_d);
  }
}

}  // namespace heddle::cpu::HEDDLE_TARGET
HWY_AFTER_NAMESPACE();
