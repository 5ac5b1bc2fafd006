// What an encoder's hidden states and embeddings are held to.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "unit/encoder_model.h"
#include "unit/model_expected.h"
#include "unit/plain_encoder.h"

namespace heddle::test {

struct EncoderExpected {
  ExpectedTensor hidden, embeddings;

  // Of the folder's weights, which are held in `weights`; plainly in `dtype`. Outputs are f32.
  EncoderExpected(const ModelFolder& folder, DType weights, DType dtype, const Input& input)
      : hidden{"hidden", folder.config.hidden}, embeddings{"embeddings", folder.config.hidden} {
    compute<double>(folder, weights, {}, input, hidden.exact, embeddings.exact);
    for (const kit::Order order : kit::kOrders) {
      compute<float>(folder, weights, {dtype, order}, input, hidden.plain.values.emplace_back(),
                     embeddings.plain.values.emplace_back());
    }
  }

 private:
  template <class T>
  static void compute(const ModelFolder& folder, DType weights, const kit::PlainLayers<T>& how, const Input& input,
                      std::vector<double>& hidden, std::vector<double>& embeddings) {
    const PlainEncoder<T> encoder(folder, weights, how);
    for (std::int64_t i = 0; i < input.sequences(); ++i) {
      const kit::ModelRows<T> rows = encoder(input.sequence(i));
      append<T>(rows, hidden);
      append<T>({how.mean(rows, static_cast<std::size_t>(folder.config.hidden), true)}, embeddings);
    }
  }
};

}  // namespace heddle::test
