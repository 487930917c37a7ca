"""The demo's model is correct, its tokens depend on every page, and the demo reports its checks."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from kvferry.testing.llama import Array, LlamaConfig, PagedLlama
from support.time_limits import TIMEOUT

CONFIG = LlamaConfig(layers=3, hidden=64, heads=4, kv_heads=2, head_dim=16, ffn=96, block_size=8)
TABLE = [7, 2, 9, 0, 5, 11, 3, 8]
TOKENS = [(7 * i * i + 3 * i) % 256 for i in range(59)]


@pytest.fixture(scope="module")
def model() -> PagedLlama:
    return PagedLlama(CONFIG, seed=3)


def empty_pages(model: PagedLlama) -> list[Array]:
    return [np.full(model.kv_cache_shape(12), np.nan, np.float32) for _ in model.layers]


def norm(x: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt()


def rotated(x: Tensor) -> Tensor:
    """Rotary positions of (heads, tokens, head_dim), as a product of complex numbers."""
    half, tokens = CONFIG.head_dim // 2, torch.arange(x.shape[1], dtype=torch.float64)
    angles = torch.outer(tokens, CONFIG.rope_theta ** -(torch.arange(half) / half).double())
    product = torch.complex(*x.double().chunk(2, -1)) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat((product.real, product.imag), -1).float()


def contiguous_logits(model: PagedLlama, tokens: list[int]) -> Tensor:
    """The same network in torch, without a cache: all tokens at once, (tokens, 256)."""
    x = torch.from_numpy(model.embedding)[torch.tensor(tokens)]
    for layer in model.layers:
        *projections, out, gate, up, down = (torch.from_numpy(weight) for weight in layer)
        q, k, v = (
            (norm(x) @ w).view(len(tokens), -1, CONFIG.head_dim).transpose(0, 1)
            for w in projections
        )
        k, v = (t.repeat_interleave(CONFIG.heads // CONFIG.kv_heads, 0) for t in (rotated(k), v))
        attention = functional.scaled_dot_product_attention(rotated(q), k, v, is_causal=True)
        x = x + attention.transpose(0, 1).flatten(1) @ out
        y = norm(x)
        x = x + (functional.silu(y @ gate) * (y @ up)) @ down
    return norm(x) @ torch.from_numpy(model.head)


@pytest.mark.parametrize("chunk", [1, 5, 59])
def test_pages_and_chunks_do_not_change_the_logits(model: PagedLlama, chunk: int) -> None:
    expected, pages = contiguous_logits(model, TOKENS), empty_pages(model)
    for start in range(0, len(TOKENS), chunk):
        tokens = TOKENS[start : start + chunk]
        logits = model.forward(tokens, start, TABLE, pages)
        right = expected[start + len(tokens) - 1].numpy()
        np.testing.assert_allclose(logits, right, atol=2e-3, rtol=1e-3)


def test_generate_equals_decoding_one_by_one(model: PagedLlama) -> None:
    tokens = TOKENS[:40]
    expected: list[int] = []
    for _ in range(6):
        expected.append(int(contiguous_logits(model, tokens + expected)[-1].argmax()))
    pages = empty_pages(model)
    model.forward(tokens[:32], 0, TABLE, pages)
    assert model.generate(tokens[32:], 32, 6, TABLE, pages) == expected


@pytest.mark.parametrize("layer", range(CONFIG.layers))
def test_a_wrong_page_of_any_layer_changes_the_tokens(model: PagedLlama, layer: int) -> None:
    pages, noise = empty_pages(model), np.random.default_rng(1)
    model.forward(TOKENS[:32], 0, TABLE, pages)
    expected = model.generate(TOKENS[32:40], 32, 24, TABLE, pages)
    assert model.generate(TOKENS[32:40], 32, 24, TABLE, pages) == expected
    page = pages[layer][TABLE[1]]
    page[...] = noise.standard_normal(page.shape)
    assert model.generate(TOKENS[32:40], 32, 24, TABLE, pages) != expected


def test_the_demo_fails_if_no_block_is_tampered() -> None:
    command = [sys.executable, "-m", "kvferry.testing.demo", "--no-tamper"]
    command += ["--prompt-tokens", "256", "--steps", "32"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=2 * TIMEOUT)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "tokens after the round trip equal the undisturbed run: yes" in done.stdout
    assert "with one tampered block: THE SAME" in done.stdout
