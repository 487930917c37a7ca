"""Options of a small engine. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Form = Literal[
    "blocks_first",
    "blocks_first_hnd",
    "split",
    "split_hnd",
    "separate",
    "mla",
    "cross_layer",
    "interleaved",
    "padded",
    "tail",
]


@dataclass(frozen=True)
class GroupOptions:
    """A KV cache group: its layers, and the shape of one GPU block in each of them."""

    layers: int = 2
    # Tokens, heads, head size.
    page: tuple[int, int, int] = (4, 2, 8)


@dataclass(frozen=True)
class EngineOptions:
    """Options of an Engine.

    name: of the engine, for the daemon. device: of the tensors, as torch names it.

    form: shape of the tensors, see kv.py. memory: how they are allocated on the CPU.
    kernel_blocks: blocks of the kernel in one GPU block. shared_groups: all groups use the tensors
        of the first. daemon_owned: the daemon allocates the tensors, with `row_padding` bytes
        between rows, and with `keep` keeps them for the next worker.
    host_bytes: size of the region in the pool. timeline: whether the engine has one.
    """

    name: str = "engine"
    device: str = "cpu"
    num_blocks: int = 32
    groups: tuple[GroupOptions, ...] = (GroupOptions(),)
    block_size_factor: int = 1
    form: Form = "blocks_first"
    dtype: str = "bfloat16"
    memory: Literal["shared_empty", "share_memory"] = "shared_empty"
    kernel_blocks: int = 1
    shared_groups: bool = False
    daemon_owned: bool = False
    row_padding: int = 0
    keep: bool = False
    host_bytes: int | None = None
    timeline: bool = True
