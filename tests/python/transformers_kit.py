"""Models of transformers with few and random weights, a family each, on Heddle and by eager attention."""

import contextlib

import torch
import transformers

VOCABULARY = 61
_SMALL = dict(
    vocab_size=VOCABULARY,
    hidden_size=32,
    intermediate_size=40,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=128,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=None,
)
_ENCODER = {name: value for name, value in _SMALL.items() if name != "num_key_value_heads"}
_BOTH = dict(
    vocab_size=VOCABULARY,
    d_model=32,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=None,
    decoder_start_token_id=2,
)

#: name -> (config's class, what differs from it). Windows are shorter than the prompts of the tests.
DECODERS = {
    "llama": (transformers.LlamaConfig, dict()),
    "mistral": (transformers.MistralConfig, dict(sliding_window=4, head_dim=8)),
    "qwen3": (transformers.Qwen3Config, dict(head_dim=16)),
    "gemma2": (
        transformers.Gemma2Config,
        dict(head_dim=8, sliding_window=4, attn_logit_softcapping=2.0, query_pre_attn_scalar=3),
    ),
    "gemma3": (
        transformers.Gemma3TextConfig,
        dict(head_dim=8, sliding_window=4, layer_types=["sliding_attention", "full_attention"]),
    ),
    "gpt_oss": (
        transformers.GptOssConfig,
        dict(head_dim=8, sliding_window=4, num_local_experts=2, num_experts_per_tok=1),
    ),
    "deepseek_v3": (
        transformers.DeepseekV3Config,
        dict(
            num_key_value_heads=4,
            q_lora_rank=8,
            kv_lora_rank=8,
            qk_rope_head_dim=8,
            qk_nope_head_dim=8,
            v_head_dim=12,
            first_k_dense_replace=2,
        ),
    ),
}
ENCODERS = {
    "bert": (transformers.BertConfig, dict()),
    "modernbert": (
        transformers.ModernBertConfig,
        dict(num_hidden_layers=3, global_attn_every_n_layers=2, local_attention=6, reference_compile=False),
    ),
}
ENCODER_DECODERS = {
    "bart": (
        transformers.BartConfig,
        dict(
            encoder_layers=1,
            decoder_layers=1,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            encoder_ffn_dim=40,
            decoder_ffn_dim=40,
            max_position_embeddings=64,
        ),
    ),
    "t5": (transformers.T5Config, dict(d_kv=8, d_ff=40, num_layers=1, num_decoder_layers=1, num_heads=4)),
}


def make(family, **changes):
    """The family's model, with weights large enough that attention is far from uniform."""
    torch.manual_seed(7)
    for table, base, maker in (
        (DECODERS, _SMALL, transformers.AutoModelForCausalLM),
        (ENCODERS, _ENCODER, transformers.AutoModelForMaskedLM),
        (ENCODER_DECODERS, _BOTH, transformers.AutoModelForSeq2SeqLM),
    ):
        if family in table:
            kind, options = table[family]
            model = maker.from_config(kind(**{**base, **options, **changes}), attn_implementation="eager")
    with torch.no_grad():
        for name, x in model.named_parameters():
            if "sinks" in name:
                x.normal_(0, 1)
            elif x.dim() == 2:
                x.mul_(4)
    return model.eval()


@contextlib.contextmanager
def attending(model, name):
    before = model.config._attn_implementation
    model.set_attn_implementation(name)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def tokens(rows, length, seed=0):
    return torch.randint(3, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(seed))


def padded(rows, length, where):
    """attention_mask of sequences of different lengths."""
    mask = torch.ones(rows, length, dtype=torch.long)
    for row in range(rows):
        n = 3 * row
        if n and where == "left":
            mask[row, :n] = 0
        elif n:
            mask[row, length - n :] = 0
    return mask
