"""The distance of two answers of a model with weights whose outputs depend on the KV cache.

With the weights of sensitive_loader.py one wrong block of 16 tokens among 1,500 changes the log
probabilities of the likeliest tokens by 0.4 to 1.3. Rounding (bfloat16 against float32) changes
them by at most 0.1. Both figures are from a CPU, for the shape of vllm_models.SMALL.
"""

from __future__ import annotations

import math
from typing import Any

# Number of likeliest tokens of each step whose log probabilities are compared. The weights are
# random, so many tokens are within TIE of the first, and rounding decides which one is sampled.
TOP = 20
# Nats by which log probabilities may differ. Between tokens that are closer, rounding decides.
TIE = 0.25


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
