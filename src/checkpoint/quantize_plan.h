// What a checkpoint's tensors are to become: all of it is decided and checked before anything is written.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "checkpoint/folder.h"
#include "checkpoint/quantize_rules.h"
#include "core/check.h"
#include "heddle/checkpoint.h"
#include "heddle/error.h"

namespace heddle::lowbit {

// One tensor of the input, and what it becomes.
struct PlannedTensor {
  std::string name, layer;  // layer: "" for what is copied
  const SafeTensors::Entry* entry = nullptr;
  std::size_t file = 0;
  LayerChoice choice;
  DType dtype = DType::f32;
  float global_scale = 0;         // of nvfp4
  std::vector<float> importance;  // [K]; empty: none
  std::size_t bytes_after = 0;
};

class QuantizePlan {
 public:
  QuantizePlan(const std::string& input, const QuantizeCheckpointOptions& options);
  QuantizePlan(const QuantizePlan&) = delete;  // tensors point into the model
  QuantizePlan& operator=(const QuantizePlan&) = delete;

  std::string where(const PlannedTensor& p) const;

  // What `action` throws as "[quantize] weights[3, 5] is nan" is said of which weights.
  template <class Action>
  void said_of(const PlannedTensor& p, const Action& action) const {
    try {
      action();
    } catch (const Error& error) {
      const std::string sentence = error.what();
      throw Error(text("[quantize_checkpoint] ", where(p), ": ", sentence.substr(sentence.find(' ') + 1)));
    }
  }

  ModelFolder model;
  std::vector<PlannedTensor> tensors;
  QuantizeReport report;   // what can be said before
  std::size_t layers = 0;  // that change

 private:
  void plan();
  void check_not_quantised(std::size_t file, const std::string& tensor) const;
  void take(const std::string& layer, PlannedTensor* p) const;
  void weigh();
  std::string dtype_of_config() const;

  const QuantizeCheckpointOptions& options_;
};

}  // namespace heddle::lowbit
