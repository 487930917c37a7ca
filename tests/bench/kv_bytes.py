"""The table of deploy/README.md: how much host memory the KV of public models takes.

    export PYTHONPATH=tests
    python tests/bench/kv_bytes.py            # prints it
    python tests/bench/kv_bytes.py --write    # replaces it in the page

MODELS has what the config.json of each model says about its KV. The formulas:
tests/support/kv_bytes.py.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

from support.kv_bytes import FULL, kv_bytes, layers

PAGE = Path(__file__).parents[2] / "deploy" / "README.md"
BEGIN, END = "<!-- made by tests/bench/kv_bytes.py -->\n", "<!-- end of the table -->\n"
KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
POOL = 64 * GIB
MILLION = 1_000_000
HEAD = (
    "| model | layers, of which keep each token | KV of a token in a layer | bytes per token "
    "| 1 million tokens | tokens in 64 GiB | at the end of a prefix |\n"
    "|---|---|---|---|---|---|---|\n"
)

LINEAR, SLIDING, ATTENTION = "linear_attention", "sliding_attention", "full_attention"
LATENT = {"kv_lora_rank": 512, "qk_rope_head_dim": 64}
QWEN_HYBRID = {
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
K3_ATTENTION = [*range(4, 93, 4), 93]
LINEAR_ATTENTION_27 = [4, 8, 12, 16, 20, 24, 27]


def heads(model_type: str, count: int, kv_heads: int, size: int, **more: Any) -> dict[str, Any]:
    """The configuration of a model with attention heads."""
    return {
        "model_type": model_type,
        "num_hidden_layers": count,
        "num_key_value_heads": kv_heads,
        "head_dim": size,
        **more,
    }


def hybrid(model_type: str, count: int, **more: Any) -> dict[str, Any]:
    """The configuration of a Qwen with gated delta nets in three of four layers."""
    layer_types = ([LINEAR] * 3 + [ATTENTION]) * (count // 4)
    named = {"model_type": model_type, "num_hidden_layers": count, "layer_types": layer_types}
    return QWEN_HYBRID | named | more


def kimi(count: int, attention: list[int], delta_heads: int) -> dict[str, Any]:
    """The configuration of a Kimi with delta attention in the layers that `attention` lacks."""
    linear = {
        "full_attn_layers": attention,
        "kda_layers": sorted({*range(1, count + 1)} - {*attention}),
        "head_dim": 128,
        "num_heads": delta_heads,
        "short_conv_kernel_size": 4,
    }
    return {
        "model_type": "kimi_linear",
        "num_hidden_layers": count,
        "linear_attn_config": linear,
        **LATENT,
    }


MODELS: dict[str, dict[str, Any]] = {
    "Llama-3.1-8B": heads("llama", 32, 8, 128),
    "Llama-3.3-70B": heads("llama", 80, 8, 128),
    "Qwen3-32B": heads("qwen3", 64, 8, 128),
    "Qwen3-235B-A22B": heads("qwen3_moe", 94, 4, 128),
    "Gemma 3 27B": heads(
        "gemma3_text",
        62,
        16,
        128,
        layer_types=([SLIDING] * 5 + [ATTENTION]) * 10 + [SLIDING] * 2,
        sliding_window=1024,
    ),
    "gpt-oss-120b": heads(
        "gpt_oss", 36, 8, 64, layer_types=[SLIDING, ATTENTION] * 18, sliding_window=128
    ),
    "Llama 4 Scout": heads(
        "llama4_text", 48, 8, 128, no_rope_layers=[1, 1, 1, 0] * 12, attention_chunk_size=8192
    ),
    "DeepSeek V3": {"model_type": "deepseek_v3", "num_hidden_layers": 61, **LATENT},
    "DeepSeek V3.2": {
        "model_type": "deepseek_v32",
        "num_hidden_layers": 61,
        "index_head_dim": 128,
        **LATENT,
    },
    "GLM-5": {
        "model_type": "glm_moe_dsa",
        "num_hidden_layers": 78,
        "index_head_dim": 128,
        **LATENT,
    },
    "DeepSeek V4 Flash": {
        "model_type": "deepseek_v4",
        "num_hidden_layers": 43,
        "head_dim": 512,
        "index_head_dim": 128,
        "sliding_window": 128,
        # compress_ratios of its config.json: 0, 0, then 4 and 128 in turns.
        "layer_types": [
            *[SLIDING] * 2,
            *["compressed_sparse_attention", "heavily_compressed_attention"] * 20,
            "compressed_sparse_attention",
        ],
    },
    "Qwen3-Next-80B-A3B": hybrid("qwen3_next", 48),
    "Qwen3.5-35B-A3B, Qwen3.6-35B-A3B": hybrid("qwen3_5_moe_text", 40, mamba_ssm_dtype="float32"),
    "Kimi-Linear-48B-A3B": kimi(27, LINEAR_ATTENTION_27, 32),
    "Kimi K3": kimi(93, K3_ATTENTION, 96),
    "Nemotron-3-Nano-30B-A3B": heads(
        "nemotron_h",
        52,
        2,
        128,
        hybrid_override_pattern="MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
        mamba_num_heads=64,
        mamba_head_dim=64,
        ssm_state_size=128,
        n_groups=8,
        conv_kernel=4,
    ),
    "Granite-4.0-H-Small": heads(
        "granitemoehybrid",
        40,
        8,
        128,
        layer_types=["mamba"] * 36 + ["attention"] * 4,
        mamba_n_heads=128,
        mamba_d_head=64,
        mamba_d_state=128,
        mamba_n_groups=1,
        mamba_d_conv=4,
    ),
    "Falcon-H1-7B": heads(
        "falcon_h1",
        44,
        2,
        128,
        mamba_n_heads=24,
        mamba_d_head=128,
        mamba_d_state=256,
        mamba_n_groups=1,
        mamba_d_conv=4,
    ),
    "LFM2-8B-A1B": heads(
        "lfm2_moe",
        24,
        8,
        64,
        layer_types=["conv"] * 18 + [ATTENTION] * 6,
        conv_L_cache=3,
        conv_dim=2048,
    ),
}


def stored(config: dict[str, Any]) -> str:
    """What a layer stores of a token."""
    if config["model_type"] == "deepseek_v4":
        return "latents of 4 or 128 tokens, fp8"
    if "kv_lora_rank" not in config:
        return f"{config['num_key_value_heads']} heads of {config['head_dim']}, bf16"
    indexer = f", indexer of {config['index_head_dim']}, fp8" if "index_head_dim" in config else ""
    return f"latent of {config['kv_lora_rank']} + {config['qk_rope_head_dim']}, bf16{indexer}"


def row(name: str, config: dict[str, Any]) -> str:
    size = kv_bytes(config)
    count = config["num_hidden_layers"]
    keeping = layers(config)[FULL]
    cells = [
        name,
        f"{count}, {keeping}" if keeping < count else f"{count}, all",
        stored(config),
        f"{math.ceil(size.per_token):,}",
        f"{float(size.per_token) * MILLION / GIB:,.1f} GiB",
        f"{math.floor(POOL / size.per_token):,}",
        f"{size.per_prefix / MIB:,.1f} MiB" if size.per_prefix else "",
    ]
    return f"| {' | '.join(cells)} |\n".replace("|  |", "| |")


def table() -> str:
    return HEAD + "".join(row(name, config) for name, config in MODELS.items())


def with_table(page: str) -> str:
    """The page, with the table between both marks."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    return f"{before}{begin}\n{table()}\n{end}{after}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="replace the table in the page")
    if parser.parse_args().write:
        PAGE.write_text(with_table(PAGE.read_text()))
    else:
        print(table(), end="")


if __name__ == "__main__":
    main()
