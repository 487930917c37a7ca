"""Small models of the families in deploy/vllm.md: their config.json, and options of vLLM."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from support.vllm_models import DEEPSEEK, NEMOTRON, QWEN, SMALL


@dataclass(frozen=True)
class PlannedFamily:
    """draft: the config.json of a model that drafts."""

    config: dict[str, Any]
    options: dict[str, Any] = field(default_factory=dict)
    draft: dict[str, Any] | None = None


QWEN3 = SMALL | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
GEMMA3 = SMALL | {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 2,
    "num_hidden_layers": 12,
    "sliding_window": 512,
    "query_pre_attn_scalar": 128,
    "hidden_activation": "gelu_pytorch_tanh",
}
GPT_OSS = SMALL | {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "layer_types": ["sliding_attention", "full_attention"] * 4,
    "sliding_window": 128,
    "head_dim": 64,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}
LLAMA4 = SMALL | {
    "architectures": ["Llama4ForCausalLM"],
    "model_type": "llama4_text",
    "attention_chunk_size": 512,
    "no_rope_layers": [1, 1, 1, 0] * 2,
    "intermediate_size_mlp": 4096,
    "num_local_experts": 4,
    "num_experts_per_tok": 1,
    "interleave_moe_layer_step": 2,
    "use_qk_norm": True,
}
SPARSE = {"index_head_dim": 128, "index_n_heads": 32, "index_topk": 2048}
DEEPSEEK_V32 = (
    DEEPSEEK | SPARSE | {"architectures": ["DeepseekV32ForCausalLM"], "model_type": "deepseek_v32"}
)
GLM5 = DEEPSEEK | SPARSE | {"architectures": ["GlmMoeDsaForCausalLM"], "model_type": "glm_moe_dsa"}
# Its other values are the defaults of transformers: those of DeepSeek V4 Flash.
DEEPSEEK_V4: dict[str, Any] = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "torch_dtype": "bfloat16",
    "num_hidden_layers": 6,
    "head_dim": 512,
    "index_head_dim": 128,
    "sliding_window": 128,
    "n_routed_experts": 8,
    "layer_types": [
        "sliding_attention",
        *["compressed_sparse_attention", "heavily_compressed_attention"] * 2,
        "compressed_sparse_attention",
    ],
    "mlp_layer_types": ["moe"] * 6,
}
QWEN35 = QWEN | {"architectures": ["Qwen3_5MoeForCausalLM"], "model_type": "qwen3_5_moe_text"}
# Its attention layers have an indexer, whose last keys are in a ring buffer.
QWEN4 = QWEN | {
    "architectures": ["Qwen4ExpForCausalLM"],
    "model_type": "qwen4_exp_text",
    "output_gate_type": "silu",
    "indexer_n_heads": 4,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 128,
    "indexer_budget": 2048,
    "indexer_compress_ratio": 4,
}
KIMI_LINEAR = DEEPSEEK | {
    "architectures": ["KimiLinearForCausalLM"],
    "model_type": "kimi_linear",
    "num_hidden_layers": 8,
    "head_dim": 128,
    "q_lora_rank": None,
    "mla_use_nope": True,
    "num_experts": 8,
    "num_experts_per_token": 2,
    "num_shared_experts": 1,
    "moe_router_activation_func": "sigmoid",
    "moe_renormalize": True,
    "linear_attn_config": {
        "kda_layers": [1, 2, 3, 5, 6, 7],
        "full_attn_layers": [4, 8],
        "head_dim": 128,
        "num_heads": 16,
        "short_conv_kernel_size": 4,
    },
}
KIMI_K3 = {
    "architectures": ["KimiK3ForConditionalGeneration"],
    "model_type": "kimi_k3",
    "torch_dtype": "bfloat16",
    "text_config": {key: value for key, value in KIMI_LINEAR.items() if key != "architectures"},
}
GRANITE = SMALL | {
    "architectures": ["GraniteMoeHybridForCausalLM"],
    "model_type": "granitemoehybrid",
    "layer_types": (["mamba"] * 3 + ["attention"]) * 2,
    "shared_intermediate_size": 4096,
    "num_local_experts": 0,
    "num_experts_per_tok": 0,
    "mamba_n_heads": 64,
    "mamba_d_head": 64,
    "mamba_d_state": 128,
    "mamba_n_groups": 1,
    "mamba_expand": 2,
    "mamba_chunk_size": 256,
    "position_embedding_type": "nope",
}
FALCON_H1 = SMALL | {
    "architectures": ["FalconH1ForCausalLM"],
    "model_type": "falcon_h1",
    "num_hidden_layers": 4,
    "mamba_d_ssm": 2048,
    "mamba_n_heads": 32,
    "mamba_d_head": 64,
    "mamba_d_state": 128,
    "mamba_n_groups": 1,
    "mamba_expand": 2,
    "mamba_chunk_size": 128,
}
LFM2 = SMALL | {
    "architectures": ["Lfm2ForCausalLM"],
    "model_type": "lfm2",
    "layer_types": ["conv", "conv", "full_attention", "conv"] * 2,
    "conv_L_cache": 3,
    "conv_dim": 2048,
    "block_dim": 2048,
    "block_ff_dim": 4096,
    "norm_eps": 1e-5,
}
EAGLE = SMALL | {
    "architectures": ["LlamaForCausalLMEagle3"],
    "num_hidden_layers": 1,
    "draft_vocab_size": 32000,
}
WHISPER = {
    "architectures": ["WhisperForConditionalGeneration"],
    "model_type": "whisper",
    "torch_dtype": "bfloat16",
    "max_target_positions": 1024,
}
BERT = {"architectures": ["BertModel"], "model_type": "bert", "torch_dtype": "bfloat16"}


def drafting(method: str, **options: Any) -> dict[str, Any]:
    return {"speculative_config": {"method": method, "num_speculative_tokens": 2, **options}}


FAMILIES = {
    "llama": PlannedFamily(SMALL),
    "qwen3": PlannedFamily(QWEN3),
    "gemma3": PlannedFamily(GEMMA3),
    "gpt-oss": PlannedFamily(GPT_OSS),
    "llama4": PlannedFamily(LLAMA4),
    "deepseek-v3": PlannedFamily(DEEPSEEK),
    "deepseek-v3.2": PlannedFamily(DEEPSEEK_V32),
    "glm-5": PlannedFamily(GLM5),
    "deepseek-v4": PlannedFamily(DEEPSEEK_V4),
    "qwen3-next": PlannedFamily(QWEN),
    "qwen3.5": PlannedFamily(QWEN35),
    "qwen4-exp": PlannedFamily(QWEN4),
    "kimi-linear": PlannedFamily(KIMI_LINEAR),
    "kimi-k3": PlannedFamily(KIMI_K3, {"limit_mm_per_prompt": {"image": 0, "video": 0}}),
    "nemotron-h": PlannedFamily(NEMOTRON),
    "granite4": PlannedFamily(GRANITE),
    "falcon-h1": PlannedFamily(FALCON_H1),
    "lfm2": PlannedFamily(LFM2),
    "eagle3": PlannedFamily(SMALL, drafting("eagle3"), EAGLE),
    "mtp": PlannedFamily(DEEPSEEK | {"num_nextn_predict_layers": 1}, drafting("mtp")),
    "mtp hybrid": PlannedFamily(QWEN | {"num_nextn_predict_layers": 1}, drafting("mtp")),
    "fp8": PlannedFamily(SMALL, {"kv_cache_dtype": "fp8"}),
    "nvfp4": PlannedFamily(SMALL, {"kv_cache_dtype": "nvfp4"}),
    "turboquant": PlannedFamily(SMALL, {"kv_cache_dtype": "turboquant_4bit_nc"}),
    "whisper": PlannedFamily(WHISPER),
    "bert": PlannedFamily(BERT),
}
