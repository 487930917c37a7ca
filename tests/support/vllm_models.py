"""Shapes of the models that the engines of vllm_process.py use."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from support.answers import TIE

COMMON: dict[str, Any] = {
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
    "vocab_size": 32000,
    "max_position_embeddings": 131072,
}
LLAMA: dict[str, Any] = COMMON | {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "head_dim": 128,
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
# Nemotron-H: Mamba 2 layers, MLPs, and few layers of attention.
NEMOTRON: dict[str, Any] = COMMON | {
    "architectures": ["NemotronHForCausalLM"],
    "model_type": "nemotron_h",
    "hybrid_override_pattern": "M-M*-M-M*-",
    "num_hidden_layers": 10,
    "hidden_size": 2048,
    "intermediate_size": 4096,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "mamba_num_heads": 32,
    "mamba_head_dim": 64,
    "ssm_state_size": 128,
    "n_groups": 8,
    "conv_kernel": 4,
    "chunk_size": 128,
    "mamba_hidden_act": "silu",
    "mlp_hidden_act": "relu2",
    "layer_norm_epsilon": 1e-5,
    "use_conv_bias": True,
    "use_bias": False,
    "mlp_bias": False,
    "attention_bias": False,
}
# Qwen3-Next: gated delta nets in three of four layers, and experts. Each token uses all experts: of
# random weights, the choice of some would change with the last bit of a sum.
QWEN: dict[str, Any] = COMMON | {
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 2,
    "num_hidden_layers": 8,
    "hidden_size": 2048,
    "intermediate_size": 4096,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "partial_rotary_factor": 0.25,
    "rope_theta": 1e7,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 8,
    "linear_num_value_heads": 16,
    "num_experts": 8,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "decoder_sparse_step": 1,
    "norm_topk_prob": True,
    "mlp_only_layers": [],
}
# DeepSeek V3: multi-head latent attention (MLA), and experts, of which each token uses all.
DEEPSEEK: dict[str, Any] = COMMON | {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "num_hidden_layers": 6,
    "hidden_size": 2048,
    "intermediate_size": 4096,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "kv_lora_rank": 512,
    "q_lora_rank": 768,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 512,
    "moe_layer_freq": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
}


@dataclass(frozen=True)
class Family:
    """A model, and the options of vLLM that it needs.

    gpu_blocks: they hold about a quarter of 48 conversations of 2,100 tokens. tie: see answers.TIE.
    """

    model: dict[str, Any]
    options: dict[str, Any] = field(default_factory=dict)
    gpu_blocks: int = 1536
    tie: float = TIE


FAMILIES = {
    "small": Family(SMALL),
    "windows": Family(HYBRID),
    # Answers of an engine without kvferry differ by up to 0.30: fp8 rounds more.
    "fp8": Family(SMALL, {"kv_cache_dtype": "fp8"}, tie=0.38),
    "mla": Family(DEEPSEEK, {"attention_backend": "TRITON_MLA"}),
    "nemotron": Family(NEMOTRON, gpu_blocks=540),
    # FlashInfer's kernel, the default, is not everywhere.
    "qwen": Family(
        QWEN,
        {"additional_config": {"gdn_prefill_backend": "triton"}},
        gpu_blocks=192,
    ),
}


def kv_bytes(model: dict[str, Any], tokens: int) -> int:
    """Bytes of the KV cache of `tokens` tokens, on all ranks together."""
    width = 2 * model["num_key_value_heads"] * model["head_dim"] * 2
    return int(tokens * model["num_hidden_layers"] * width)
