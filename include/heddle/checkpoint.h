// Low-bit weights as other tools write them into safetensors files, read into plain storage (heddle/lowbit.h). Bits are
// moved, nothing is quantised again: what plain storage cannot hold exactly is refused with the tensor, the value and
// the rule. docs/formats.md, "Reading checkpoints", lists what is read and what is not.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "heddle/lowbit.h"
#include "heddle/runtime.h"
#include "heddle/safetensors.h"

namespace heddle::lowbit {

// Who wrote a layer and how. With the tensors of a layer named "x":
enum class Layout : std::uint8_t {
  gpt_oss_mxfp4,             // x.blocks, x.scales or x_blocks, x_scales: [E, N, K/32, 16], an expert is a matrix
  modelopt_nvfp4,            // x.weight, x.weight_scale, x.weight_scale_2
  compressed_tensors_nvfp4,  // x.weight_packed, x.weight_scale, x.weight_global_scale
  compressed_tensors_mxfp4,  // x.weight_packed, x.weight_scale
  compressed_tensors_int4,   // x.weight_packed of int32, x.weight_scale, x.weight_shape ("pack-quantized")
  bitsandbytes,              // x.weight, x.weight.absmax, x.weight.quant_state.bitsandbytes__nf4 or __fp4
  gptq,                      // x.qweight [K/8, N], x.qzeros, x.scales, x.g_idx
  awq,                       // x.qweight [K, N/8], x.qzeros, x.scales
};
// "gpt_oss_mxfp4", ...
const char* name_of(Layout layout);

// A layer of a checkpoint: what storage(format, rows, columns) is to be allocated for it.
struct StoredLayer {
  std::string name;
  Layout layout = Layout::gpt_oss_mxfp4;
  std::string reason;  // what it was told by
  Format format;
  std::int64_t rows = 0, columns = 0;
  std::int64_t experts = 0;          // matrices in it; 0: it is one
  bool gate_up_interleaved = false;  // row 2i is row i of the gate, row 2i + 1 that of the up projection
  // Not empty where columns that share a scale do not lie together ("act-order", g_idx): they are loaded in this order,
  // column j of the storage being column column_order[j] of the weights, so that y = x[:, column_order] W^T.
  std::vector<std::int32_t> column_order;
  std::string refusal;  // not empty: why it cannot be loaded; what is above may be incomplete then
};

struct CheckpointOptions {
  // 1: zero points of GPTQ are stored less 1, 2: as they are; the tensors do not say which. 0: take it from a
  // config.json or quantize_config.json beside the files, and refuse layers of GPTQ if there is none.
  int gptq_version = 0;
};

struct LoadOptions {
  std::int64_t expert = 0;       // which matrix of a layer with experts
  bool reorder_columns = false;  // take layers with a column_order, which are refused otherwise
};

class Checkpoint {
 public:
  // Maps the files; a folder stands for its *.safetensors. A tensor must not be in two of them. Throws RuntimeError and
  // Error as SafeTensors::open does, and where a path gives no file.
  static Checkpoint open(const std::vector<std::string>& paths, const CheckpointOptions& options = {});
  explicit Checkpoint(std::vector<SafeTensors> files, const CheckpointOptions& options = {});

  // All layers in a layout above, by name, those that cannot be loaded too. Looks at headers, g_idx and small tensors.
  std::vector<StoredLayer> layers() const;
  // One of them; throws Error if it is not there or cannot be loaded.
  StoredLayer layer(const std::string& name) const;
  // Writes the layer's matrix into `out`, storage of its format and shape in CPU memory. Throws Error, before anything
  // is written, for what layer() refuses and for scales or zero points that the format does not have: a NaN, an
  // infinity, a negative scale of nvfp4, a scale that float16 does not hold, a zero point of 16.
  void load(const std::string& name, const QuantizedMatrix& out, const LoadOptions& options = {},
            const Runtime& runtime = {}) const;

  const std::vector<SafeTensors>& files() const { return files_; }

 private:
  std::vector<SafeTensors> files_;
  std::map<std::string, std::size_t> file_of_;  // by tensor
  int gptq_version_ = 0;
};

}  // namespace heddle::lowbit
