"""Shapes of the models that the engines of vllm_process.py use."""

from __future__ import annotations

from typing import Any

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "rms_norm_eps": 1e-5,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "head_dim": 128,
    "vocab_size": 32000,
    "max_position_embeddings": 131072,
}
# A few hundred million parameters.
SMALL = LLAMA | {
    "hidden_size": 2048,
    "intermediate_size": 4096,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
}
# The shape of Llama-3.1-8B.
LARGE = LLAMA | {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}
# SMALL, with a sliding window in three of four layers: several KV cache groups.
HYBRID = SMALL | {
    "layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 2,
    "sliding_window": 512,
}


def kv_bytes(model: dict[str, Any], tokens: int) -> int:
    """Bytes of the KV cache of `tokens` tokens, on all ranks together."""
    width = 2 * model["num_key_value_heads"] * model["head_dim"] * 2
    return int(tokens * model["num_hidden_layers"] * width)
