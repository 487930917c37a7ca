"""A small Llama with a paged KV cache, whose tokens depend on every byte of the cache.

RMSNorm, rotary positions, grouped-query attention and SwiGLU, as in Llama 3. The weights are
random, the tokens are bytes, and decoding is greedy. One KV tensor per layer, of shape (num_blocks,
2, block_size, kv_heads, head_dim): the keys and values of position p of a request are in block
block_table[p // block_size] at offset p % block_size, and attention reads them only from there. So
the output depends on every byte in those pages, and on nothing else that was computed before. It
depends on their order, too: keys are stored before the rotation and rotated when they are read,
because attention over keys that are rotated when written is the same in any order.

A random model depends on its KV cache only with special weights. Queries are scaled up until a head
attends to few positions; else attention is a mean over thousands of positions, one page has no
effect, and greedy decoding reaches a fixed point. The output of attention weighs more than the
residual stream that it is added to. Keys and values have unit variance, so that a page of normal
noise has as much effect as a computed page. Then a wrong or misplaced page changes the tokens
within a few steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np

VOCAB = 256
Array: TypeAlias = np.ndarray[Any, np.dtype[np.float32]]
# The blocks of a request, in the order of its positions.
BlockTable: TypeAlias = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True)
class LlamaConfig:
    layers: int = 4
    hidden: int = 256
    heads: int = 8
    kv_heads: int = 4
    head_dim: int = 32
    ffn: int = 512
    block_size: int = 16
    rope_theta: float = 500_000.0

    @property
    def block_bytes(self) -> int:
        """Bytes of one block in all layers together."""
        page = 2 * self.block_size * self.kv_heads * self.head_dim
        return self.layers * page * np.dtype(np.float32).itemsize


class Layer(NamedTuple):
    q: Array
    k: Array
    v: Array
    out: Array
    gate: Array
    up: Array
    down: Array


class PagedLlama:
    """A model with weights from `seed`, in numpy."""

    def __init__(self, config: LlamaConfig, seed: int = 0) -> None:
        self.config = config
        generator = np.random.default_rng(seed)

        def weight(rows: int, columns: int, gain: float = 1.0) -> Array:
            values = generator.standard_normal((rows, columns), dtype=np.float32)
            return values * np.float32(gain / math.sqrt(rows))

        self.embedding = weight(VOCAB, config.hidden, math.sqrt(VOCAB))
        self.layers = [_layer(config, weight) for _ in range(config.layers)]
        self.head = weight(config.hidden, VOCAB)

    def kv_cache_shape(self, num_blocks: int) -> tuple[int, int, int, int, int]:
        """The shape of one layer's KV tensor."""
        config = self.config
        return num_blocks, 2, config.block_size, config.kv_heads, config.head_dim

    def forward(
        self,
        tokens: Sequence[int],
        start: int,
        block_table: Sequence[int] | BlockTable,
        kv_caches: Sequence[Array],
    ) -> Array:
        """Logits, (VOCAB,), after the last of `tokens`, which begin at position `start`.

        Prefills a chunk, or decodes one token. Writes the pages of these positions and reads those
        of all positions before. `block_table` covers both.
        """
        positions, table = np.arange(start, start + len(tokens)), np.asarray(block_table)
        x = self.embedding[np.asarray(tokens)]
        for layer, cache in zip(self.layers, kv_caches, strict=True):
            x = x + self._attend(layer, _norm(x), positions, table, cache)
            x = x + _swiglu(layer, _norm(x))
        logits: Array = _norm(x[-1]) @ self.head
        return logits

    def generate(
        self,
        prompt_tail: Sequence[int],
        start: int,
        steps: int,
        block_table: Sequence[int] | BlockTable,
        kv_caches: Sequence[Array],
    ) -> list[int]:
        """`steps` greedy tokens after a prompt whose first `start` positions are in the pages."""
        chunk, generated = list(prompt_tail), list[int]()
        for _ in range(steps):
            logits = self.forward(chunk, start, block_table, kv_caches)
            start += len(chunk)
            chunk = [int(logits.argmax())]
            generated += chunk
        return generated

    def _attend(
        self, layer: Layer, x: Array, positions: BlockTable, table: BlockTable, cache: Array
    ) -> Array:
        config, end = self.config, int(positions[-1]) + 1
        query, key, value = (
            (x @ weight).reshape(len(x), -1, config.head_dim)
            for weight in (layer.q, layer.k, layer.v)
        )
        blocks, offsets = table[positions // config.block_size], positions % config.block_size
        cache[blocks, 0, offsets], cache[blocks, 1, offsets] = key, value
        pages = cache[table[: -(-end // config.block_size)]].swapaxes(0, 1)
        keys, values = pages.reshape(2, -1, config.kv_heads, config.head_dim)[:, :end]
        every = np.arange(end)
        keys = _rotate(keys, every, config.rope_theta)
        query = _rotate(query, positions, config.rope_theta)
        # (KV heads, queries per KV head, tokens, head_dim) x (KV heads, 1, head_dim, positions)
        heads = query.reshape(len(x), config.kv_heads, -1, config.head_dim).transpose(1, 2, 0, 3)
        scores = heads @ keys.transpose(1, 2, 0)[:, None] * np.float32(config.head_dim**-0.5)
        weights = _softmax(np.where(every > positions[:, None], np.float32(-np.inf), scores))
        attention = weights @ values.swapaxes(0, 1)[:, None]
        output: Array = attention.transpose(2, 0, 1, 3).reshape(len(x), -1) @ layer.out
        return output


def _layer(config: LlamaConfig, weight: Callable[..., Array]) -> Layer:
    wide, narrow = config.heads * config.head_dim, config.kv_heads * config.head_dim
    return Layer(
        q=weight(config.hidden, wide, 9.0),
        k=weight(config.hidden, narrow),
        v=weight(config.hidden, narrow),
        out=weight(wide, config.hidden, 2.0),
        gate=weight(config.hidden, config.ffn),
        up=weight(config.hidden, config.ffn),
        down=weight(config.ffn, config.hidden),
    )


def _norm(x: Array) -> Array:
    normed: Array = x / np.sqrt((x * x).mean(-1, keepdims=True) + np.float32(1e-5))
    return normed


def _softmax(scores: Array) -> Array:
    weights: Array = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return weights


def _swiglu(layer: Layer, x: Array) -> Array:
    gate = x @ layer.gate
    with np.errstate(over="ignore"):  # a large negative value becomes zero
        silu = gate / (1 + np.exp(-gate))
    output: Array = (silu * (x @ layer.up)) @ layer.down
    return output


def _rotate(x: Array, positions: BlockTable, theta: float) -> Array:
    """Rotary embedding of (tokens, heads, head_dim). Element i is paired with i + head_dim / 2."""
    half = x.shape[-1] // 2
    angles = (positions[:, None] * theta ** (-np.arange(half) / half))[:, None]
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    first, second = x[..., :half], x[..., half:]
    return np.concatenate((first * cos - second * sin, second * cos + first * sin), -1)
