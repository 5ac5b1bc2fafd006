// Which layers a model's rules take, by name.
#include "checkpoint/quantize_rules.h"

#include <utility>

#include <gtest/gtest.h>

namespace heddle::lowbit {
namespace {

TEST(QuantizeRules, WhichLayersAreLinear) {
  for (const char* name : {"model.layers.0.self_attn.q_proj", "encoder.layer.11.attention.output.dense",
                           "h.3.mlp.dense_4h_to_h", "model.layers.2.block_sparse_moe.experts.7.w1",
                           "decoder.block.0.layer.1.EncDecAttention.q", "transformer.layer.0.attention.q_lin"}) {
    EXPECT_TRUE(linear_layer(name)) << name;
  }
  for (const char* name :
       {"model.embed_tokens", "lm_head", "pooler.dense", "classifier", "embeddings.word_embeddings",
        "model.layers.0.input_layernorm", "model.layers.2.block_sparse_moe.gate", "model.layers.2.mlp.router",
        "h.0.attn.c_attn", "encoder.block.0.layer.0.SelfAttention.relative_attention_bias", "layers.0.conv1d",
        "encoder.layers.0.LayerNorm", ""}) {
    EXPECT_FALSE(linear_layer(name)) << name;
  }
}

TEST(QuantizeRules, Patterns) {
  for (const auto& [pattern, name] : {std::pair{"*", ""},
                                      {"*", "a.b"},
                                      {"a*c", "abc"},
                                      {"a*c", "ac"},
                                      {"a?c", "abc"},
                                      {"*.q_proj", "x.1.q_proj"},
                                      {"*a*b*", "xaybz"},
                                      {"a*b*c", "abbbc"},
                                      {"x**y", "xy"},
                                      {"*aab", "aaab"},
                                      {"layers.[0-3].*", "layers.2.q"},
                                      {"[ab]c", "bc"},
                                      {"[!ab]c", "cc"},
                                      {"*[12]", "layer.12"},
                                      {"x[]]", "x]"},
                                      {"x[!]]", "x["},
                                      {"[a-]", "-"},
                                      {"a[0", "a[0"},
                                      {"[[]0]", "[0]"},
                                      {"*[ab]*[cd]", "xaxbxcxd"}}) {
    EXPECT_TRUE(matches(pattern, name)) << pattern << " " << name;
  }
  for (const auto& [pattern, name] : {std::pair{"", "a"},
                                      {"a", ""},
                                      {"a?c", "ac"},
                                      {"*.q", "x.qq"},
                                      {"a*b", "abc"},
                                      {"?", ""},
                                      {"A", "a"},
                                      {"layers.[0-3].*", "layers.4.q"},
                                      {"[ab]c", "cc"},
                                      {"[!ab]c", "ac"},
                                      {"[ab]", ""},
                                      {"[ab]", "ab"},
                                      {"a[0", "a0"}}) {
    EXPECT_FALSE(matches(pattern, name)) << pattern << " " << name;
  }
  EXPECT_EQ(fused_name("a.0.q_proj"), fused_name("a.0.v_proj"));
  EXPECT_EQ(fused_name("a.0.query"), fused_name("a.0.key"));
  EXPECT_NE(fused_name("a.0.q_proj"), fused_name("a.1.q_proj"));
  EXPECT_NE(fused_name("a.0.gate_proj"), fused_name("a.0.q_proj"));
  EXPECT_EQ(fused_name("a.0.o_proj"), "a.0.o_proj");
}

}  // namespace
}  // namespace heddle::lowbit
