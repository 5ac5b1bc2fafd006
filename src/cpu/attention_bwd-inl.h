// Backward, after Dao et al., arXiv 2205.14135, appendix B.4, with P recomputed from lse. One tile of query rows
// against its keys, block by block: S^T and dP^T with rows in lanes, as in the forward; then
//   dV[key, d] += P^T[key, row] dO[row, d]    dK[key, d] += dS^T[key, row] Q[row, d]    dQ^T[d, row] += K[key, d]
//   dS^T[key, row]
// where P^T and dS^T are the broadcast operand for dV and dK and the lane operand for dQ.

HWY_BEFORE_NAMESPACE();
namespace heddle::cpu::HEDDLE_TARGET {

// Groups whose P^T and dS^T stand side by side, so that the sums over rows run over 2 * kGroup of them at a time.
constexpr int kSpan = 2;
constexpr std::int64_t kSpanRows = kSpan * kGroup;

constexpr std::int64_t PadLanes(std::int64_t width) { return round_up(width, kLanes); }

template <class W>
class BackwardTile {
  using T = typename W::T;

 public:
  // row_limit: most query rows loaded at a time.
  BackwardTile(const AttentionBackwardProblem& p, std::int64_t row_limit, std::byte* memory)
      : p_(p),
        dp_(round_up(p.D, kPad)),
        dvp_(round_up(p.Dv, kPad)),
        dl_(PadLanes(dp_)),
        dvl_(PadLanes(dvp_)),
        groups_(round_up(ceil_div(row_limit, kGroup), kSpan)) {
    Scratch scratch(memory);
    const std::int64_t rows = groups_ * kGroup;
    line_ = scratch.take<float>(4 * std::max(dl_, dvl_));
    rows_ = scratch.take<GroupRows>(groups_);
    lse_ = scratch.take<float>(rows);
    delta_ = scratch.take<float>(rows);
    q_ = scratch.take<T>(rows * dp_ / W::kPair);
    do_ = scratch.take<T>(rows * dvp_ / W::kPair);
    q_rows_ = scratch.take<T>(rows * dl_ / W::kPair);
    do_rows_ = scratch.take<T>(rows * dvl_ / W::kPair);
    dq_ = scratch.take<float>(rows * dp_);
    k_ = scratch.take<T>(kKeyBlock * dp_ / W::kPair);
    v_ = scratch.take<T>(kKeyBlock * dvp_ / W::kPair);
    k_panels_ = scratch.take<T>(dp_ / kTileM * PanelStride<W>(kKeyBlock));
    p_tile_ = scratch.take<float>(kKeyBlock * kSpanRows);
    ds_tile_ = scratch.take<float>(kKeyBlock * kSpanRows);
    if (W::kPair == 2) {
      p_words_ = scratch.take<T>(kKeyBlock * kSpanRows / 2);
      ds_words_ = scratch.take<T>(kKeyBlock * kSpanRows / 2);
      ds_pairs_ = scratch.take<T>(kKeyBlock / 2 * kGroup);
    }
    if (p.has_planes()) extra_ = scratch.take<float>(kKeyBlock * kGroup);
    if (p.dropout.p > 0) factors_ = scratch.take<float>(kKeyBlock * kGroup);
    if (p.softcap > 0) slope_ = scratch.take<float>(kKeyBlock * kGroup);
    bytes_ = scratch.used();
  }
  std::size_t bytes() const { return bytes_; }

  void run(const BackwardTask& task) {
    const Sequence s = p_.sequence(task.b);
    const Head head{p_, task.b, task.kv_head, s};
    std::memset(task.dk, 0, static_cast<std::size_t>(s.k_rows * dl_) * 4);
    std::memset(task.dv, 0, static_cast<std::size_t>(s.k_rows * dvl_) * 4);
    const std::int64_t all = s.q_rows * p_.G, tile = backward_rows(p_);
    for (std::int64_t begin = task.first_tile * tile; begin < all; begin += task.tile_step * tile) {
      load_rows(head, begin, std::min(begin + tile, all));
      std::memset(dq_, 0, static_cast<std::size_t>(groups_ * kGroup * dp_) * 4);
      for_blocks(head, [&](std::int64_t block, std::int64_t end) {
        pack(head, block, end);
        const std::int64_t next = block + kKeyBlock, calls = groups_ * (kKeyBlock + dp_) / kTileM;
        Prefetcher prefetcher(p_, head.b, head.s, head.kv_head, next, std::min(next + kKeyBlock, last_key_), calls);
        for (std::int64_t group = 0; group < groups_; group += kSpan) {
          add_gradients(head, group, block, end, task, prefetcher);
        }
      });
      store_dq(head);
    }
  }

  // Gradients of the logits of rows [row_begin, row_end) are added to sums[i - row_begin][j]; p.G must be 1.
  void add_bias_gradient(const Head& head, std::int64_t row_begin, std::int64_t row_end, float* sums,
                         std::int64_t sums_row) {
    load_rows(head, row_begin, row_end);
    for_blocks(head, [&](std::int64_t block, std::int64_t end) {
      pack(head, block, end);
      for (std::int64_t group = 0; group < groups_; ++group) {
        const GroupRows& g = rows_[group];
        std::int64_t first, last;
        if (!range(g, block, end, first, last)) continue;
        Prefetcher none(p_, head.b, head.s, head.kv_head, 0, 0, 1);
        probabilities(head, g, group, 0, block, first, last, false, none);
        for (std::int64_t j = block + first; j < std::min(block + last, head.s.sk); ++j) {
          for (std::int64_t lane = 0; lane < g.count; ++lane) {
            sums[(g.begin - row_begin + lane) * sums_row + j] += ds_tile_[(j - block) * kSpanRows + lane];
          }
        }
      }
    });
  }

 private:
  void load_rows(const Head& head, std::int64_t begin, std::int64_t end) {
    groups_ = ceil_div(end - begin, kGroup);
    for (std::int64_t group = 0; group < groups_; ++group) {
      GroupRows& g = rows_[group];
      const std::int64_t at = begin + group * kGroup, lanes = kGroup;
      PrepareRows(p_, head.b, head.s, head.kv_head, at, std::min<std::int64_t>(kGroup, end - at), g);
      load_statistics(head, g, lse_ + group * kGroup, delta_ + group * kGroup);
      GatherRowsTransposed<W>(p_, p_.q, p_.D, dp_, head.b, head.s, head.kv_head, at, g.count, lanes,
                              q_ + group * dp_ / W::kPair * kGroup, kGroup, line_);
      GatherRowsTransposed<W>(p_, p_.d_o, p_.Dv, dvp_, head.b, head.s, head.kv_head, at, g.count, lanes,
                              do_ + group * dvp_ / W::kPair * kGroup, kGroup, line_);
      gather_rows(head, p_.q, p_.D, dl_, g, lse_ + group * kGroup, q_rows_ + group * kGroup * dl_ / W::kPair);
      gather_rows(head, p_.d_o, p_.Dv, dvl_, g, lse_ + group * kGroup, do_rows_ + group * kGroup * dvl_ / W::kPair);
    }
  }

  // Rows as they lie, [row][d]; for pairs, word [row / 2][d] holds rows (row, row + 1). Rows without a probability may
  // hold anything and become zeros.
  void gather_rows(const Head& head, const Operand& x, std::int64_t width, std::int64_t padded, const GroupRows& g,
                   const float* lse, T* HWY_RESTRICT out) {
    for (std::int64_t lane = 0; lane < kGroup; ++lane) {
      const Row row = row_at(p_, head.kv_head, g.begin + lane);
      const bool used = !(lse[lane] == kInfinity);
      if constexpr (W::kPair == 1) {
        if (used) {
          LoadWords<W>(x, x.at(head.b, head.s.q_begin + row.i, row.h), width, padded, out + lane * padded);
        } else {
          std::memset(out + lane * padded, 0, static_cast<std::size_t>(padded) * 4);
        }
      } else {
        auto* half = reinterpret_cast<std::uint16_t*>(line_) + lane % 2 * padded;
        if (used) {
          CopyBf16Row(x.at(head.b, head.s.q_begin + row.i, row.h), x.stride_d, width, padded, half);
        } else {
          std::memset(half, 0, static_cast<std::size_t>(padded) * 2);
        }
        if (lane % 2 == 1) InterleaveRows(half - padded, half, padded, out + lane / 2 * padded);
      }
    }
  }

  static void InterleaveRows(const std::uint16_t* HWY_RESTRICT even, const std::uint16_t* HWY_RESTRICT odd,
                             std::int64_t count, T* HWY_RESTRICT out) {
    const DU d;
    const hn::Rebind<std::uint16_t, DU> d16;
    for (std::int64_t i = 0; i < count; i += kLanes) {
      const VU low = hn::PromoteTo(d, hn::LoadU(d16, even + i)), high = hn::PromoteTo(d, hn::LoadU(d16, odd + i));
      hn::StoreU(hn::Or(low, hn::ShiftLeft<16>(high)), d, reinterpret_cast<std::uint32_t*>(out) + i);
    }
  }

  // lse * log2(e), +inf for lanes without a probability; delta = sum_d dO O - d_lse.
  void load_statistics(const Head& head, const GroupRows& g, float* HWY_RESTRICT lse, float* HWY_RESTRICT delta) {
    const DF d;
    for (std::int64_t lane = 0; lane < kGroup; ++lane) {
      lse[lane] = kInfinity;
      delta[lane] = 0.0f;
      const Row row = row_at(p_, head.kv_head, g.begin + lane);
      if (lane >= g.count || row.i >= head.s.sq) continue;
      const std::int64_t at = head.s.q_begin + row.i;
      const float value = p_.lse.as<const float>()[p_.lse.offset(head.b, row.h, at)];
      if (value == -kInfinity) continue;
      lse[lane] = value * kLog2e;
      float *o = line_, *d_o = line_ + dvl_;
      LoadRow(p_.o.at(head.b, at, row.h), p_.o.dtype, p_.o.stride_d, p_.Dv, dvl_, o);
      LoadRow(p_.d_o.at(head.b, at, row.h), p_.d_o.dtype, p_.d_o.stride_d, p_.Dv, dvl_, d_o);
      VF sum = hn::Zero(d);
      for (std::int64_t i = 0; i < dvl_; i += kLanes) sum = hn::MulAdd(hn::LoadU(d, o + i), hn::LoadU(d, d_o + i), sum);
      delta[lane] = hn::GetLane(hn::SumOfLanes(d, sum));
      // o = 0 and all of the denominator from the sink: the row attends no key, and its dO may hold anything.
      if (p_.sink && value == p_.sink.as<const float>()[row.h * p_.sink.stride_h] &&
          std::all_of(o, o + p_.Dv, [](float x) { return x == 0.0f; })) {
        lse[lane] = kInfinity;
        delta[lane] = 0.0f;
        continue;
      }
      if (p_.d_lse) delta[lane] -= p_.d_lse.as<const float>()[p_.d_lse.offset(head.b, row.h, at)];
    }
  }

  // Calls f(block, end) for each block of keys that a loaded row needs.
  template <class F>
  void for_blocks(const Head& head, const F& f) {
    std::int64_t first = head.s.sk, last = 0;
    for (std::int64_t group = 0; group < groups_; ++group) {
      first = std::min(first, rows_[group].key_begin);
      last = std::max(last, rows_[group].key_end);
    }
    last_key_ = last;
    for (std::int64_t block = first / kKeyBlock * kKeyBlock; block < last; block += kKeyBlock) {
      f(block, std::min(block + kKeyBlock, last));
    }
  }

  void pack(const Head& head, std::int64_t block, std::int64_t end) {
    packed_ = round_up(end - block, kPad);
    PackRows<W>(p_, p_.k, p_.D, dp_, head.b, head.s, head.kv_head, block, end - block, packed_, k_);
    PackRows<W>(p_, p_.v, p_.Dv, dvp_, head.b, head.s, head.kv_head, block, end - block, packed_, v_);
    k_non_finite_ = PanelsFromRows<W>(k_, dp_, packed_, k_panels_);
  }

  // Padded keys [first, last) of the block that the group needs; false if none.
  static bool range(const GroupRows& g, std::int64_t block, std::int64_t end, std::int64_t& first, std::int64_t& last) {
    const std::int64_t key_begin = std::max(block, g.key_begin), key_end = std::min(end, g.key_end);
    first = (key_begin - block) / kPad * kPad;
    last = round_up(key_end - block, kPad);
    return key_begin < key_end;
  }

  // P^T (times the dropout factors) and dS^T of one group into columns [column, column + kGroup) of the tiles. dS is
  // with respect to scale * q.k if through_softcap, else with respect to the finished logits.
  void probabilities(const Head& head, const GroupRows& g, std::int64_t group, std::int64_t column, std::int64_t block,
                     std::int64_t first, std::int64_t last, bool through_softcap, Prefetcher& prefetcher) {
    const DF d;
    const T* q = q_ + group * dp_ / W::kPair * kGroup;
    const T* d_o = do_ + group * dvp_ / W::kPair * kGroup;
    const std::int64_t depth = dp_ / W::kPair, depth_v = dvp_ / W::kPair, count = last - first;
    float* s_tile = p_tile_ + column;
    float* dp_tile = ds_tile_ + column;
    for (std::int64_t j = first; j < last; j += kTileM) {
      TileProduct<W, kTileN, Sum::kStore>(depth, k_ + j * depth, depth, 1, q, kGroup, s_tile + j * kSpanRows, kSpanRows,
                                          nullptr, nullptr);
      TileProduct<W, kTileN, Sum::kStore>(depth_v, v_ + j * depth_v, depth_v, 1, d_o, kGroup, dp_tile + j * kSpanRows,
                                          kSpanRows, nullptr, nullptr);
      prefetcher.some();
    }
    s_tile += first * kSpanRows;
    dp_tile += first * kSpanRows;
    const bool plain = block + first >= g.full_begin && block + last <= g.full_end && !has_score_options(p_);
    const bool capped = p_.softcap > 0 && through_softcap;
    if (capped) softcap_slopes(s_tile, count);
    if (!plain) {
      VF unused[kTileN] = {hn::Zero(d), hn::Zero(d), hn::Zero(d)};
      FinishScores(head, g, block + first, count, s_tile, kSpanRows, extra_, unused);
    }
    if (p_.dropout.p > 0) DropoutFactors(head, g, block + first, count, factors_);
    const VF factor = hn::Set(d, plain ? p_.scale * kLog2e : 1.0f);
    for (int n = 0; n < kTileN; ++n) {
      const VF lse = hn::LoadU(d, lse_ + group * kGroup + n * kLanes),
               delta = hn::LoadU(d, delta_ + group * kGroup + n * kLanes);
      const auto idle = hn::Eq(lse, hn::Set(d, kInfinity));
      for (std::int64_t j = 0; j < count; ++j) {
        float* s = s_tile + j * kSpanRows + n * kLanes;
        float* dp = dp_tile + j * kSpanRows + n * kLanes;
        // Lanes without a probability (lse = +inf) may hold anything.
        const VF p = hn::IfThenZeroElse(idle, Exp2(hn::MulSub(hn::LoadU(d, s), factor, lse)));
        VF dropped = p, dprob = hn::LoadU(d, dp);
        if (p_.dropout.p > 0) {
          const VF keep = hn::LoadU(d, factors_ + j * kGroup + n * kLanes);
          dropped = hn::Mul(p, keep);
          dprob = hn::Mul(dprob, keep);
        }
        VF ds = hn::Mul(p, hn::Sub(dprob, delta));
        // A pair without probability has no gradient, whatever its value holds.
        ds = hn::IfThenZeroElse(hn::Eq(p, hn::Zero(d)), ds);
        if (capped) ds = hn::Mul(ds, hn::LoadU(d, slope_ + j * kGroup + n * kLanes));
        hn::StoreU(dropped, d, s);
        hn::StoreU(ds, d, dp);
      }
    }
  }

  // slope = d softcap(x) / dx = 1 - tanh(x / softcap)^2, from raw products.
  void softcap_slopes(const float* HWY_RESTRICT products, std::int64_t count) {
    const DF d;
    const VF to_tanh = hn::Set(d, p_.scale / p_.softcap);
    for (std::int64_t j = 0; j < count; ++j) {
      for (int n = 0; n < kTileN; ++n) {
        const VF t = Tanh(hn::Mul(hn::LoadU(d, products + j * kSpanRows + n * kLanes), to_tanh));
        hn::StoreU(hn::NegMulAdd(t, t, hn::Set(d, 1.0f)), d, slope_ + j * kGroup + n * kLanes);
      }
    }
  }

  void add_gradients(const Head& head, std::int64_t group0, std::int64_t block, std::int64_t end,
                     const BackwardTask& task, Prefetcher& prefetcher) {
    const std::int64_t groups = std::min<std::int64_t>(kSpan, groups_ - group0);
    std::int64_t first = kKeyBlock, last = 0;
    for (std::int64_t k = 0; k < groups; ++k) {
      std::int64_t f, l;
      if (!range(rows_[group0 + k], block, end, f, l)) continue;
      first = std::min(first, f);
      last = std::max(last, l);
    }
    if (first >= last) return;
    for (std::int64_t k = 0; k < groups; ++k) {
      const GroupRows& g = rows_[group0 + k];
      std::int64_t f, l;
      if (!range(g, block, end, f, l)) f = l = first;
      clear(first, f, k * kGroup);
      clear(l, last, k * kGroup);
      if (f < l) probabilities(head, g, group0 + k, k * kGroup, block, f, l, true, prefetcher);
    }
    const std::int64_t depth = groups * kGroup;
    if constexpr (W::kPair == 2) {
      round_tile(p_tile_, first, last, depth, p_words_);
      round_tile(ds_tile_, first, last, depth, ds_words_);
    }
    add_to_keys(first, last, depth, p_tile_, p_words_, do_rows_ + group0 * kGroup * dvl_ / W::kPair, dvl_,
                task.dv + block * dvl_);
    add_to_keys(first, last, depth, ds_tile_, ds_words_, q_rows_ + group0 * kGroup * dl_ / W::kPair, dl_,
                task.dk + block * dl_);
    for (std::int64_t k = 0; k < groups; ++k) add_to_queries(head, group0 + k, k * kGroup, block, end, prefetcher);
  }

  // Keys [from, to) of a group's columns that hold no probability.
  void clear(std::int64_t from, std::int64_t to, std::int64_t column) {
    for (std::int64_t j = from; j < to; ++j) {
      std::memset(p_tile_ + j * kSpanRows + column, 0, kGroup * 4);
      std::memset(ds_tile_ + j * kSpanRows + column, 0, kGroup * 4);
    }
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
            TileProduct<W, 1, Sum::kAdd>(depth / W::kPair, at, a_row, 1, b, width, c, width, nullptr, nullptr);
            break;
          case 2:
            TileProduct<W, 2, Sum::kAdd>(depth / W::kPair, at, a_row, 1, b, width, c, width, nullptr, nullptr);
            break;
          default:
            TileProduct<W, 3, Sum::kAdd>(depth / W::kPair, at, a_row, 1, b, width, c, width, nullptr, nullptr);
        }
      }
    }
  }

  void add_to_queries(const Head& head, std::int64_t group, std::int64_t column, std::int64_t block, std::int64_t end,
                      Prefetcher& prefetcher) {
    const GroupRows& g = rows_[group];
    const std::int64_t key_begin = std::max(block, g.key_begin), key_end = std::min(end, g.key_end);
    if (key_begin >= key_end) return;
    const std::int64_t from = (key_begin - block) / W::kPair, to = ceil_div(key_end - block, W::kPair);
    const T* lanes;
    std::int64_t ld = kSpanRows;
    if constexpr (W::kPair == 1) {
      lanes = ds_tile_ + column;
    } else {
      PairRows(ds_tile_ + column, kSpanRows, from, to, kTileN, ds_pairs_);
      lanes = ds_pairs_;
      ld = kGroup;
    }
    if (k_non_finite_) DropUnattended<W>(head, g, block, packed_, dp_, k_panels_);
    for (std::int64_t i = 0; i < dp_; i += kTileM) {
      TileProduct<W, kTileN, Sum::kAdd>(to - from, k_panels_ + i / kTileM * PanelStride<W>(packed_) + from * kTileM, 1,
                                        kTileM, lanes + from * ld, ld, dq_ + (group * dp_ + i) * kGroup, kGroup,
                                        nullptr, nullptr);
      prefetcher.some();
    }
    if (k_non_finite_) {
      PanelsFromRows<W>(k_, dp_, packed_, k_panels_);
    }
  }

  void store_dq(const Head& head) {
    if (!p_.dq) return;
    const DF d;
    const VF scale = hn::Set(d, p_.scale);
    for (std::int64_t group = 0; group < groups_; ++group) {
      float* dq = dq_ + group * dp_ * kGroup;
      for (std::int64_t i = 0; i < dp_ * kGroup; i += kLanes)
        hn::StoreU(hn::Mul(hn::LoadU(d, dq + i), scale), d, dq + i);
      ScatterRows(p_, p_.dq, p_.D, dp_, head.b, head.s, head.kv_head, rows_[group].begin, rows_[group].count, dq,
                  kGroup, line_);
    }
  }

  const AttentionBackwardProblem& p_;
  const std::int64_t dp_, dvp_, dl_, dvl_;
  std::int64_t groups_;
  std::size_t bytes_ = 0;
  std::int64_t packed_ = 0;    // rows of the packed block, padded
  std::int64_t last_key_ = 0;  // end of the keys that the loaded rows need
  bool k_non_finite_ = false;
  GroupRows* rows_ = nullptr;
  float *line_ = nullptr, *lse_ = nullptr, *delta_ = nullptr;
  T *q_ = nullptr, *do_ = nullptr, *q_rows_ = nullptr, *do_rows_ = nullptr;
  T *k_ = nullptr, *v_ = nullptr, *k_panels_ = nullptr, *p_words_ = nullptr, *ds_words_ = nullptr, *ds_pairs_ = nullptr;
  float *dq_ = nullptr, *p_tile_ = nullptr, *ds_tile_ = nullptr;
  float *extra_ = nullptr, *factors_ = nullptr, *slope_ = nullptr;
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
