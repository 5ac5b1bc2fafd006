// The keys and values that a call appends to its cache, and what the cache must then hold.
#pragma once

#include "heddle/kv_cache.h"
#include "soak/subject.h"

namespace heddle::soak {

class AppendedRows {
 public:
  static constexpr int kNew = 2;  // keys of each sequence

  // The cache of `options` and the two tensors; its lengths are those before the append. One in 8 bits has scales for
  // each row. Everything must outlive this.
  AppendedRows(const AttentionSubject& spec, const AttentionOptions& options, const TensorView& k, const TensorView& v,
               std::uint64_t seed);

  // Gives the reference operands of its own: q rotated, and a cache with the rows in it. They lie in what is returned.
  std::vector<DeviceMemory> describe(const TensorView& q, Attention& reference) const;
  // The rows in the cache, as outputs behind those that are there.
  void add_outputs(std::vector<Output>& outputs, double tolerance);
  void keep(const std::vector<Output>& outputs, int slot, void* stream) const;
  void spoil(void* stream) const;

  TensorView k_new, v_new;
  Rotary rotary;

 private:
  // The new rows of a cache, or of its scales.
  SlotRows slots_of(const TensorView& cache) const;
  std::vector<SlotRows> all_slots() const;
  void make_tables();
  // Where row i of each sequence's q or new keys stands.
  RotatedRows rows_of(const TensorView& x, bool together) const;
  DeviceMemory reference_cache(const TensorView& cache, const DeviceMemory& rows) const;

  const AttentionSubject& s;
  const AttentionOptions& options_;
  const TensorView k_, v_;
  Rotation rotation_;
  DeviceMemory k_memory_, v_memory_, cos_, sin_;
  DeviceMemory k_rows_, v_rows_, k_scales_, v_scales_;  // in double; scales: of a cache in 8 bits
  std::size_t first_output_ = 0;
};

}  // namespace heddle::soak
