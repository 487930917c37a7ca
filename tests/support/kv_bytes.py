"""How many bytes the KV of a model takes, computed from its config.json.

Used by tests/bench/kv_bytes.py, which makes the table of deploy/README.md.
tests/client/vllm/test_families.py compares the formulas with the KV cache that vLLM 0.33 plans. All
sizes are those of all tensor-parallel ranks together, with `--kv-cache-dtype auto` of a model in
bf16, and without padding.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

BF16, FLOAT32 = 2, 4
# A page of DeepSeek V4 in vLLM: 448 values in fp8 with 8 bytes of scales, 64 in bf16.
V4_LATENT = 584
# Tokens that vLLM keeps of the states of DeepSeek V4's compressors, by the tokens per compression.
V4_COMPRESSING = {4: 8, 128: 128}

FULL, WINDOW, STATE = "full", "window", "state"
KINDS = {
    "attention": FULL,
    "full_attention": FULL,
    "compressed_sparse_attention": FULL,
    "heavily_compressed_attention": FULL,
    "sliding_attention": WINDOW,
    "chunked_attention": WINDOW,
    "linear_attention": STATE,
    "mamba": STATE,
    "conv": STATE,
    "*": FULL,
    "M": STATE,
}


@dataclass(frozen=True)
class KVBytes:
    """per_token: of the layers that keep each token. per_prefix: at the end of a kept prefix."""

    per_token: Fraction
    per_prefix: int = 0


def layers(config: dict[str, Any]) -> Counter[str]:
    """The numbers of layers of each kind."""
    count = config["num_hidden_layers"]
    if config["model_type"] == "falcon_h1":  # each layer has both
        return Counter({FULL: count, STATE: count})
    if "linear_attn_config" in config:
        linear = config["linear_attn_config"]
        return Counter({FULL: len(linear["full_attn_layers"]), STATE: len(linear["kda_layers"])})
    if "no_rope_layers" in config:
        return Counter(WINDOW if rope else FULL for rope in config["no_rope_layers"])
    names = config.get("layer_types") or config.get("hybrid_override_pattern")
    return Counter(KINDS[name] for name in names or ["*"] * count if name in KINDS)


def attention(config: dict[str, Any]) -> int:
    """Bytes of a token in an attention layer."""
    if "kv_lora_rank" not in config:
        return 2 * int(config["num_key_value_heads"]) * head_size(config) * BF16
    latent = (int(config["kv_lora_rank"]) + int(config["qk_rope_head_dim"])) * BF16
    if index := config.get("index_head_dim"):  # in fp8, with a scale of float32 per 128 values
        latent += index + index // 128 * FLOAT32
    return latent


def head_size(config: dict[str, Any]) -> int:
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def state(config: dict[str, Any]) -> int:
    """Bytes of a state of a Mamba, linear attention or convolution layer."""
    if "linear_attn_config" in config:  # KDA
        linear = config["linear_attn_config"]
        width, size = linear["num_heads"] * linear["head_dim"], linear["head_dim"]
        convolved, recurrent = 3 * width, width * size * FLOAT32
        kernel = linear["short_conv_kernel_size"]
    elif "linear_num_value_heads" in config:  # gated delta net
        keys = config["linear_num_key_heads"] * config["linear_key_head_dim"]
        values = config["linear_num_value_heads"] * config["linear_value_head_dim"]
        precision = FLOAT32 if config.get("mamba_ssm_dtype") == "float32" else BF16
        convolved, recurrent = 2 * keys + values, values * config["linear_key_head_dim"] * precision
        kernel = config["linear_conv_kernel_dim"]
    elif "conv_L_cache" in config:
        convolved, recurrent, kernel = config["conv_dim"], 0, config["conv_L_cache"]
    else:
        convolved, recurrent = mamba(config)
        kernel = config.get("mamba_d_conv") or config.get("conv_kernel", 4)
    return int((kernel - 1) * convolved * BF16 + recurrent)


def mamba(config: dict[str, Any]) -> tuple[int, int]:
    """(values that are convolved, bytes of the recurrent state) of a Mamba 2 layer."""
    if config["model_type"] == "nemotron_h":
        heads, size, precision = config["mamba_num_heads"], config["mamba_head_dim"], FLOAT32
        groups, states = config["n_groups"], config["ssm_state_size"]
    else:
        heads, size, precision = config["mamba_n_heads"], config["mamba_d_head"], BF16
        groups, states = config["mamba_n_groups"], config["mamba_d_state"]
    return heads * size + 2 * groups * states, heads * size * states * precision


def deepseek_v4(config: dict[str, Any]) -> KVBytes:
    """Latents of 4 or 128 tokens each, windows of latents, and the states that compress them."""
    kinds, head = Counter(config["layer_types"]), config["head_dim"]
    sparse, heavy = kinds["compressed_sparse_attention"], kinds["heavily_compressed_attention"]
    index = config["index_head_dim"] + FLOAT32
    per_token = Fraction(sparse * (V4_LATENT + index), 4) + Fraction(heavy * V4_LATENT, 128)
    # Keys and gates in float32; those of the layers with ratio 4 overlap.
    overlapping = sparse * 2 * 2 * (head + config["index_head_dim"]) * FLOAT32
    states = V4_COMPRESSING[4] * overlapping + V4_COMPRESSING[128] * heavy * 2 * head * FLOAT32
    windows = config["num_hidden_layers"] * config["sliding_window"] * V4_LATENT
    return KVBytes(per_token, windows + states)


def kv_bytes(config: dict[str, Any]) -> KVBytes:
    """Bytes of the KV of a model, all ranks together, in vLLM with `--kv-cache-dtype auto`."""
    if config["model_type"] == "deepseek_v4":
        return deepseek_v4(config)
    kinds, token = layers(config), Fraction(attention(config))
    if ratio := config.get("indexer_compress_ratio"):
        keys = config["indexer_kv_heads"] * config["indexer_head_dim"] * BF16
        full = kinds[FULL] * (token + Fraction(keys, ratio))
    else:
        full = kinds[FULL] * token
    window = config.get("sliding_window") or config.get("attention_chunk_size") or 0
    windows = kinds[WINDOW] * int(token) * window
    return KVBytes(full, windows + (kinds[STATE] * state(config) if kinds[STATE] else 0))
