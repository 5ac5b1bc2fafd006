// A quantised layer in the layout of a checkpoint: its tensors, known from format and shape alone, and their contents.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "checkpoint/safetensors_writer.h"
#include "heddle/checkpoint.h"

namespace heddle::lowbit {

// The layout that a format is written in: there is one for every format but e2m1_row.
Layout layout_for(const Format& format);

// Of layer `name`; `dtype` is that of its weights.
std::vector<SafeTensorsWriter::Tensor> tensors_of_layer(const std::string& name, const Format& format,
                                                        std::int64_t rows, std::int64_t columns, DType dtype);

// Writes them. The matrix' codes are reordered in place where the layout has another order.
void write_layer(const std::string& name, const QuantizedMatrix& matrix, DType dtype, SafeTensorsWriter& writer);

// The global scale of nvfp4 for matrices whose largest |weight| this is: the least power of two that is not below the
// rule's. Readers that divide by the inverse, as compressed-tensors does, then find the same weights as those that
// multiply, and all of them the product that bfloat16 holds.
float power_of_two_global_scale(ScaleRule rule, float largest);

// What config.json says of layers (by name) in these formats; `kept`: 2-D weights that stay as they are. JSON.
std::string quantization_config_of(const std::map<std::string, Format>& layers, const std::vector<std::string>& kept,
                                   const std::string& compute_dtype);

}  // namespace heddle::lowbit
