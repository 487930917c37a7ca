"""Weights whose outputs depend on the KV cache, and a comparison of two outputs.

With vLLM's dummy weights the output does not depend on the KV cache: rounding removes what a layer
adds, and a token depends only on the token before it. The weights here are random, with the usual
initial size, and with queries three times as large, so that attention selects few tokens. Then one
wrong block of 16 tokens among 1,500 changes the log probabilities of the likeliest tokens by 0.4 to
1.3. Rounding (bfloat16 against float32) changes them by at most 0.1. Both figures are from a CPU,
for the shape of vllm_models.SMALL.
"""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import torch

# Number of likeliest tokens of each step whose log probabilities are compared. The weights are
# random, so many tokens are within TIE of the first, and rounding decides which one is sampled.
TOP = 20
# Nats by which log probabilities may differ. Between tokens that are closer, rounding decides.
TIE = 0.25
# Standard deviations of weights.
USUAL, QUERIES = 0.02, 0.06


def write_weights(folder: Path, model: dict[str, Any]) -> None:
    """Write the weights of a Llama with this configuration, if the folder does not have them.

    They are the same each time. Needs safetensors, which vLLM depends on.
    """
    file = folder / "model.safetensors"
    if file.exists():
        return
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(0)
    weights = {
        name: torch.ones(shape, dtype=torch.bfloat16)
        if len(shape) == 1
        else (torch.randn(shape, generator=generator) * deviation(name)).bfloat16()
        for name, shape in shapes(model).items()
    }
    unfinished = file.with_name(f"{os.getpid()}.part")
    save_file(weights, unfinished, metadata={"format": "pt"})
    unfinished.replace(file)  # several engines may write at the same time


def deviation(name: str) -> float:
    return QUERIES if "q_proj" in name else USUAL


def shapes(model: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """The shape of each tensor of the checkpoint, by name. Norms have one dimension."""
    hidden, intermediate, vocabulary = (
        model[key] for key in ("hidden_size", "intermediate_size", "vocab_size")
    )
    queries, keys = (
        model[key] * model["head_dim"] for key in ("num_attention_heads", "num_key_value_heads")
    )
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocabulary, hidden)}
    for number in range(model["num_hidden_layers"]):
        layer = f"model.layers.{number}"
        found |= {
            f"{layer}.input_layernorm.weight": (hidden,),
            f"{layer}.self_attn.q_proj.weight": (queries, hidden),
            f"{layer}.self_attn.k_proj.weight": (keys, hidden),
            f"{layer}.self_attn.v_proj.weight": (keys, hidden),
            f"{layer}.self_attn.o_proj.weight": (hidden, queries),
            f"{layer}.post_attention_layernorm.weight": (hidden,),
            f"{layer}.mlp.gate_proj.weight": (intermediate, hidden),
            f"{layer}.mlp.up_proj.weight": (intermediate, hidden),
            f"{layer}.mlp.down_proj.weight": (hidden, intermediate),
        }
    return found | {"model.norm.weight": (hidden,), "lm_head.weight": (vocabulary, hidden)}


def answer_distance(first: dict[str, Any], second: dict[str, Any]) -> float:
    """The distance of two answers to a prompt, in nats. Beyond TIE their KV caches differ.

    An answer has `tokens`, and `top`: for each token the likeliest ones with log probabilities. If
    the answers differ in a token, later tokens are not compared, because they continue another
    text.
    """
    if len(first["tokens"]) != len(second["tokens"]):
        return math.inf
    distance = 0.0
    steps = zip(first["tokens"], second["tokens"], first["top"], second["top"], strict=True)
    for token_1, token_2, top_1, top_2 in steps:
        logprobs_1, logprobs_2 = dict(map(tuple, top_1)), dict(map(tuple, top_2))
        both = logprobs_1.keys() & logprobs_2.keys()
        if not {token_1, token_2} <= both:
            return math.inf
        differences = [abs(logprobs_1[token] - logprobs_2[token]) for token in both]
        if token_1 != token_2:  # half of the difference between the two tokens
            differences.append(abs(logprobs_1[token_1] - logprobs_1[token_2]) / 2)
        if not all(map(math.isfinite, differences)):
            return math.inf
        distance = max(distance, *differences)
        if token_1 != token_2:
            break
    return distance
