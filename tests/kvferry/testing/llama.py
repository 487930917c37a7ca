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
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

VOCAB = 256


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
    dtype: torch.dtype = torch.float32

    @property
    def block_bytes(self) -> int:
        """Bytes of one block in all layers together."""
        page = 2 * self.block_size * self.kv_heads * self.head_dim
        return self.layers * page * self.dtype.itemsize


class Layer(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    gate: Tensor
    up: Tensor
    down: Tensor


class PagedLlama:
    """A model with weights from `seed`: the same ones each time on the same kind of device."""

    def __init__(self, config: LlamaConfig, device: str | torch.device, seed: int = 0) -> None:
        self.config = config
        self.device = torch.device(device)
        generator = torch.Generator(self.device).manual_seed(seed)

        def weight(rows: int, columns: int, gain: float = 1.0) -> Tensor:
            values = torch.randn(rows, columns, generator=generator, device=self.device)
            return (values * (gain / math.sqrt(rows))).to(config.dtype)

        self.embedding = weight(VOCAB, config.hidden, math.sqrt(VOCAB))
        self.layers = [_layer(config, weight) for _ in range(config.layers)]
        self.head = weight(config.hidden, VOCAB)

    def kv_cache_shape(self, num_blocks: int) -> tuple[int, int, int, int, int]:
        """The shape of one layer's KV tensor."""
        config = self.config
        return num_blocks, 2, config.block_size, config.kv_heads, config.head_dim

    @torch.inference_mode()
    def forward(
        self,
        tokens: Sequence[int] | Tensor,
        start: int,
        block_table: Sequence[int] | Tensor,
        kv_caches: Sequence[Tensor],
    ) -> Tensor:
        """Logits, (VOCAB,) float32, after the last of `tokens`, which begin at position `start`.

        Prefills a chunk, or decodes one token. Writes the pages of these positions and reads those
        of all positions before. `block_table` covers both.
        """
        ids = torch.as_tensor(tokens, dtype=torch.long, device=self.device)
        positions = torch.arange(start, start + len(ids), device=self.device)
        table = torch.as_tensor(block_table, dtype=torch.long, device=self.device)
        x = self.embedding[ids]
        for layer, cache in zip(self.layers, kv_caches, strict=True):
            x = x + self._attend(layer, _norm(x), positions, start + len(ids), table, cache)
            x = x + _swiglu(layer, _norm(x))
        return (_norm(x[-1]) @ self.head).float()

    def generate(
        self,
        prompt_tail: Sequence[int],
        start: int,
        steps: int,
        block_table: Sequence[int] | Tensor,
        kv_caches: Sequence[Tensor],
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
        self, layer: Layer, x: Tensor, positions: Tensor, end: int, table: Tensor, cache: Tensor
    ) -> Tensor:
        config = self.config
        query, key, value = (
            (x @ weight).view(len(x), -1, config.head_dim) for weight in (layer.q, layer.k, layer.v)
        )
        blocks, offsets = table[positions // config.block_size], positions % config.block_size
        cache[blocks, 0, offsets], cache[blocks, 1, offsets] = key, value
        pages = cache[table[: -(-end // config.block_size)]]
        keys, values = pages.transpose(0, 1).flatten(1, 2)[:, :end]
        every = torch.arange(end, device=self.device)
        keys = _rotate(keys, every, config.rope_theta)
        query = _rotate(query, positions, config.rope_theta)
        query = query.view(len(x), config.kv_heads, -1, config.head_dim)
        scores = torch.einsum("tkgd,skd->kgts", query, keys).float() * config.head_dim**-0.5
        future = every > positions[:, None]
        weights = scores.masked_fill(future, float("-inf")).softmax(-1).to(values.dtype)
        return torch.einsum("kgts,skd->tkgd", weights, values).flatten(1) @ layer.out


def _layer(config: LlamaConfig, weight: Callable[..., Tensor]) -> Layer:
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


def _norm(x: Tensor) -> Tensor:
    return functional.rms_norm(x, x.shape[-1:], eps=1e-5)


def _swiglu(layer: Layer, x: Tensor) -> Tensor:
    return (functional.silu(x @ layer.gate) * (x @ layer.up)) @ layer.down


def _rotate(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """Rotary embedding of (tokens, heads, head_dim). Element i is paired with i + head_dim / 2."""
    half = x.shape[-1] // 2
    frequencies = theta ** (-torch.arange(half, device=x.device) / half)
    angles = (positions[:, None] * frequencies)[:, None]
    cos, sin = angles.cos(), angles.sin()
    first, second = x.float().chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(x.dtype)
