// Low-bit weights as other tools write them into safetensors files, read into plain storage (heddle/lowbit.h). Bits are
// moved, nothing is quantised again: what plain storage cannot hold exactly is refused with the tensor, the value and
// the rule. docs/formats.md, "Reading checkpoints", lists what is read and what is not. And whole checkpoints quantised
// and written in these layouts: docs/quantize.md.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
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
  compressed_tensors_int8,   // the same with 4 codes to a word, or x.weight of I8 ("int-quantized"); a scale a row
  compressed_tensors_fp8,    // x.weight of F8_E4M3, x.weight_scale of each row ("float-quantized")
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
  // is written, for what layer() refuses and for values that the format does not have: a scale that is NaN or infinite,
  // of nvfp4 also times the global scale or negative, of int4 that float16 does not hold, a zero point of 16, a code of
  // fp8_row that is NaN.
  void load(const std::string& name, const QuantizedMatrix& out, const LoadOptions& options = {},
            const Runtime& runtime = {}) const;

  const std::vector<SafeTensors>& files() const { return files_; }

 private:
  std::vector<SafeTensors> files_;
  std::map<std::string, std::size_t> file_of_;  // by tensor
  int gptq_version_ = 0;
};

// What becomes of the layers whose name matches `pattern`: "*" stands for any characters, dots too, "?" for one,
// "[0-3]" for one of those, "[!0-3]" for any other.
struct LayerRule {
  std::string pattern;
  // "keep": as it is; "16bit": f32 becomes bf16, what has 16 bits stays; or a format's name, or one with a scale rule:
  // "int4_g64:mse".
  std::string format;
};

// Before each tensor, and at the end.
struct QuantizeProgress {
  std::string tensor;                           // the next one; "" at the end
  std::string format;                           // what it becomes; "" if it stays
  std::size_t bytes_done = 0, bytes_total = 0;  // of the input
  std::size_t layers_done = 0, layers_total = 0;
};

struct QuantizeCheckpointOptions {
  std::string format = "nvfp4";  // of layers that no rule names and linear_layer() is true for; as LayerRule::format
  ScaleRule rule = ScaleRule::mse;
  // The first that matches decides, also over layers that linear_layer() would leave out. Each must match a layer.
  std::vector<LayerRule> layers;
  // f32 [K] by a layer's name, or a view that is not given: QuantizeOptions::importance. Asked for once for each layer
  // that is quantised, before anything is written; it is copied.
  std::function<TensorView(const std::string& layer)> importance;
  // Names that `importance` has values for. Each must be that of a 2-D weight, less .weight; layers that stay as they
  // are may be among them.
  std::vector<std::string> importance_layers;
  // What it throws ends the work; nothing is left written then.
  std::function<void(const QuantizeProgress&)> progress;
};

struct LayerReport {
  std::string name, file;
  std::string format;  // name of a format, or "bfloat16"
  std::string rule;    // "" for bfloat16
  std::int64_t rows = 0, columns = 0;
  QuantizationError error;
  std::size_t bytes_before = 0, bytes_after = 0;  // in the files: codes, scales and what else belongs to the layer
  float global_scale = 0;                         // 0: it has none
};

struct CopiedTensor {
  std::string name, file;
  std::vector<std::int64_t> shape;
  std::size_t bytes = 0;
};

struct QuantizeReport {
  std::vector<LayerReport> layers;  // changed, in the order of their names
  std::vector<std::string> kept;    // names of 2-D weights that stay as they are
  // F32, F16 and BF16 tensors of three extents, by name, which stay too, as no rule can name them: experts of a mixture
  // in one tensor, most of such a model, or a convolution.
  std::vector<CopiedTensor> copied_3d;
  std::vector<std::string> files;                 // in the output folder
  std::size_t bytes_before = 0, bytes_after = 0;  // of all tensors
  std::string quantization_config;                // JSON, as in the output's config.json
  std::string dtype;                              // the model's, as config.json says; "" where it does not
};

// Whether a weight of this name, less ".weight", is a linear layer of a Transformer: it lies in a numbered layer, and
// is no embedding, norm, convolution, router or position table. docs/quantize.md has the list.
bool linear_layer(const std::string& name);

// Quantises the 2-D weights of a checkpoint and writes the result as a folder that Hugging Face's tools load and this
// file's Checkpoint reads back to the bit. `input`: a safetensors file, or a folder of them with or without an index;
// `output` must not exist. Files that are links are read through and written under their own names; links to folders,
// pipes and devices among what belongs to the model are refused. One tensor at a time is in memory. Layers whose
// products run as one (q, k and v; gate and up) share an nvfp4 global scale. Throws Error naming file and tensor for a
// layer whose K is no multiple of the group, that is not floating point or holds a NaN or an infinity, whose format
// does not have the rule, or whose importance is not as QuantizeOptions wants it, for formats without a layout
// (e2m1_row) or whose layouts exclude each other, for a checkpoint that is quantised already; RuntimeError where a file
// cannot be read or written. Nothing is left written then: the folder is written under another name beside `output` and
// renamed at the end.
QuantizeReport quantize_checkpoint(const std::string& input, const std::string& output,
                                   const QuantizeCheckpointOptions& options = {}, const Runtime& runtime = {});

}  // namespace heddle::lowbit
