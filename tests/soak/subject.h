// A call that can be repeated: its inputs and outputs on the GPU, and what the outputs must be.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "heddle/attention.h"
#include "heddle/linear.h"
#include "kit/device_mirror.h"
#include "soak/device.h"
#include "soak/reference.h"

namespace heddle::soak {

using kit::DeviceMemory;

constexpr int kSlots = 4;  // sets of outputs: calls that follow each other without a pause

// One output in all slots, [rows, width].
struct Output {
  std::string name;
  DType dtype;
  std::int64_t rows, width;
  double tolerance;   // of a row's length; see count_far_rows()
  bool exact = true;  // the same bits every time; else each call is held to the reference
  DeviceMemory expected;
  double average = 0;
  DeviceMemory first;  // what the first call wrote
  std::vector<DeviceMemory> slots;

  Output(std::string name, DType dtype, std::int64_t rows, std::int64_t width, double tolerance);
  std::int64_t row_bytes() const { return width * static_cast<std::int64_t>(size_of(dtype)); }
  void* slot(int n) const { return slots[static_cast<std::size_t>(n)].data(); }
  double* reference() const { return static_cast<double*>(expected.data()); }
};

class Subject {
 public:
  virtual ~Subject() = default;
  // Puts the call on the stream, with the outputs of a slot.
  virtual void launch(int slot, void* stream) = 0;
  // Of what calls leave in memory that all of them share, so that only the last of some calls in a row can be seen:
  // copies it to the slot's outputs; spoils it.
  virtual void keep(int /*slot*/, void* /*stream*/) {}
  virtual void spoil(void* /*stream*/) {}
  std::vector<Output> outputs;
};

// What can be asked of attention here. Lengths of packed sequences, and of a cache, differ.
struct AttentionSubject {
  enum class Plane : std::uint8_t { none, keys, rows, f32_rows };

  std::string candidate;
  Pass pass = Pass::forward;
  DType dtype = DType::bf16;
  Precision precision = Precision::f32;
  int B = 1, H = 4, Hkv = 4, Sq = 1, Sk = 0, D = 128;  // Sk 0: as Sq
  bool causal = false;
  int key_step = 1;  // above 1: causal from the top left
  int window = -1;   // keys to the left; causal
  float softcap = 0.0f;
  bool alibi = false, sink = false;
  Plane bias = Plane::none, mask = Plane::none;
  bool poison = false;  // keys that a mask by keys removes are NaN, and their values: Hopper computes such tiles twice
  bool packed = false;
  bool lengths = false;  // seqused_k, from half to all
  int page_size = 0;
  bool appends = false;  // the last two keys of each sequence, in the same call; to an f8_cache with scales_by_token
  int rotary = 0;        // with appends: the dims that rotate,
  bool pairs = false;    // 2 n with 2 n + 1
  bool f8_cache = false;
  bool scales = false, scales_by_token = false;  // of f8e4m3 operands
  bool batch_invariant = false;
  bool deterministic = true;
  // A backward of two halves of the keys, one after the other, from the o and lse of all: in f32, added to zeros.
  bool pieces = false;
};

struct LinearSubject {
  std::string candidate, format;
  WeightOrder order = WeightOrder::fragments16;
  DType dtype = DType::bf16;
  std::int64_t rows, n, k;
  bool int8_x = false;
  Activation activation = Activation::none;  // none, silu or swiglu
  bool bias = false, rms_norm = false;
  bool kept = false;       // W besides in 16 bits
  bool gradients = false;  // of x, and of the bias if there is one
};

// Over a cache in 4 bits.
struct Int4Subject {
  DType dtype = DType::bf16;
  int B, H, Hkv, keys, D;
  bool batch_invariant = false;
};

// Over lists of key blocks, causal.
struct SparseSubject {
  std::string candidate = "sm80";
  Pass pass = Pass::forward;
  DType dtype = DType::bf16;
  int B, H, Hkv, S, rows = 0, D, block = 64, query_rows = 1;  // rows: the last positions; 0: all
  int units, entries;                                         // lists of a row, and numbers of one
  bool deterministic = true;                                  // gradients
  bool by_offsets = false;                                    // one behind the other, of up to that many entries each
};

// What native sparse attention has beside attention, over keys [B, S, Hkv, D].
struct NsaSubject {
  enum class What : std::uint8_t { pool, select, gate, step };

  What what;
  Pass pass = Pass::forward;  // of gate
  DType dtype = DType::bf16;
  int B, H = 1, Hkv = 1, S, rows = 0, D, block = 64;  // rows: the last positions; 0: all. step: S keys before it
  int entries = 16;                                   // of a list
  bool finds_lse = false;                             // select without lse
  std::string candidate = {};                         // of select; empty: what is chosen
  int window = 0;                                     // of step
};

std::unique_ptr<Subject> make_subject(const AttentionSubject& spec, std::uint64_t seed);
std::unique_ptr<Subject> make_subject(const LinearSubject& spec, std::uint64_t seed);
std::unique_ptr<Subject> make_subject(const Int4Subject& spec, std::uint64_t seed);
std::unique_ptr<Subject> make_subject(const SparseSubject& spec, std::uint64_t seed);
std::unique_ptr<Subject> make_subject(const NsaSubject& spec, std::uint64_t seed);

// A subject by name: "sm90 bf16 d128 causal s256".
struct SoakCase {
  std::string name;
  std::function<std::unique_ptr<Subject>(std::uint64_t seed)> make;
  bool needs_cublaslt = false;
};
// Those that this GPU has candidates for.
std::vector<SoakCase> soak_cases(int compute_major);
// Why cuBLASLt's candidates do not run here; empty if they do.
std::string cublaslt_refusal();

// Memory on the GPU with a copy of these.
template <class T>
DeviceMemory uploaded(const std::vector<T>& values) {
  DeviceMemory memory(values.size() * sizeof(T));
  memory.write(0, values.data(), memory.bytes());
  return memory;
}

}  // namespace heddle::soak
