"""The alternative without a daemon: a kernel that reads or writes pinned memory, page by page.

Needs triton, which compiles it at the first launch.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch

triton: Any = import_module("triton")
tl = import_module("triton.language")
PROGRAMS = 1056
BLOCK = 512


def launch(sources: torch.Tensor, targets: torch.Tensor, page_bytes: int) -> Callable[[], object]:
    """Copies of pages between two tables of addresses, (n,) int64 on the device, to be called."""
    pages, grid = sources.numel(), (min(PROGRAMS, sources.numel()),)
    return lambda: _kernel[grid](sources, targets, pages, page_bytes // 8, BLOCK, num_warps=4)


def _copy_pages(sources, targets, pages, words, BLOCK: tl.constexpr):  # type: ignore  # noqa: N803
    for page in range(tl.program_id(0), pages, tl.num_programs(0)):
        source = tl.load(sources + page).to(tl.pointer_type(tl.int64))
        target = tl.load(targets + page).to(tl.pointer_type(tl.int64))
        for start in range(0, words, BLOCK):
            at = start + tl.arange(0, BLOCK)
            inside = at < words
            tl.store(target + at, tl.load(source + at, mask=inside), mask=inside)


_kernel = triton.jit(_copy_pages)
