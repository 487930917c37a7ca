"""How an engine stand-in is shaped. Imports no torch."""

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
    """A KV cache group: its layers, and what one of its GPU blocks holds in each."""

    layers: int = 2
    page: tuple[int, int, int] = (4, 2, 8)
    """Tokens, heads, head size."""


@dataclass(frozen=True)
class EngineOptions:
    """name: the engine's, as the daemon knows it. device: torch's name of where the tensors are.

    form: how the tensors are shaped, see kv.py; memory: where from, on the CPU.
    kernel_blocks: blocks of the kernel in one GPU block. shared_groups: all groups use the tensors
        of the first. daemon_owned: the daemon allocates the tensors, with `row_padding` bytes
        between rows, and with `keep` keeps them for the next worker.
    host_bytes: how much of the pool to take. timeline: whether the engine has one.
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
