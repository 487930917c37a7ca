"""Outputs that tell whether a KV cache holds the right bytes.

vLLM's dummy weights are deaf: what a layer adds to them is lost in rounding, and a token follows
from the one before it alone. These are random, of the size that training starts from, and with
queries three times as long: so attention picks some tokens out of all, and one wrong block of 16
among 1,500 moves the log probabilities of the likeliest tokens by 0.4 to 1.3, where rounding (all
in bfloat16 against float32) moves them by 0.1 at most; computed on a CPU for the shape of
vllm_models.SMALL.
"""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import torch

TOP = 5
"""Likeliest tokens of each step whose log probabilities are compared."""
TIE = 0.25
"""Nats by which they may differ, and below which it is chance which of two tokens comes out."""
USUAL, QUERIES = 0.02, 0.06
"""Standard deviations of weights."""


def write_weights(folder: Path, model: dict[str, Any]) -> None:
    """The weights of a Llama of this configuration, the same each time, where they are not there.

    Needs safetensors, which vLLM brings along.
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
    unfinished.replace(file)  # several engines may come at once


def deviation(name: str) -> float:
    return QUERIES if "q_proj" in name else USUAL


def shapes(model: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Every tensor of the checkpoint, by its name there; norms have one dimension."""
    hidden, between, words = (
        model[key] for key in ("hidden_size", "intermediate_size", "vocab_size")
    )
    queries, keys = (
        model[key] * model["head_dim"] for key in ("num_attention_heads", "num_key_value_heads")
    )
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (words, hidden)}
    for number in range(model["num_hidden_layers"]):
        layer = f"model.layers.{number}"
        found |= {
            f"{layer}.input_layernorm.weight": (hidden,),
            f"{layer}.self_attn.q_proj.weight": (queries, hidden),
            f"{layer}.self_attn.k_proj.weight": (keys, hidden),
            f"{layer}.self_attn.v_proj.weight": (keys, hidden),
            f"{layer}.self_attn.o_proj.weight": (hidden, queries),
            f"{layer}.post_attention_layernorm.weight": (hidden,),
            f"{layer}.mlp.gate_proj.weight": (between, hidden),
            f"{layer}.mlp.up_proj.weight": (between, hidden),
            f"{layer}.mlp.down_proj.weight": (hidden, between),
        }
    return found | {"model.norm.weight": (hidden,), "lm_head.weight": (words, hidden)}


def apart(one: dict[str, Any], other: dict[str, Any]) -> float:
    """How far two answers to a prompt are from each other, in nats: beyond TIE they come from
    different KV caches.

    Each has `tokens`, and `top`: for each token the likeliest ones with their log probabilities.
    Where two tokens were as good as equal either may come out; what follows is another text.
    """
    if len(one["tokens"]) != len(other["tokens"]):
        return math.inf
    farthest = 0.0
    steps = zip(one["tokens"], other["tokens"], one["top"], other["top"], strict=True)
    for mine, theirs, my_top, their_top in steps:
        here, there = dict(map(tuple, my_top)), dict(map(tuple, their_top))
        both = here.keys() & there.keys()
        if not {mine, theirs} <= both:
            return math.inf
        differences = [abs(here[token] - there[token]) for token in both]
        if mine != theirs:  # each one's lead where it was found, half of it for each
            differences.append(abs(here[mine] - here[theirs]) / 2)
        if not all(map(math.isfinite, differences)):
            return math.inf
        farthest = max(farthest, *differences)
        if mine != theirs:
            break
    return farthest
