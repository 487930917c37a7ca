"""Layouts, keys, and random transfers that name keys, for the model of namespaces."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

from hypothesis import strategies as st

from kvferry.proto.fingerprint import Fingerprint
from kvferry.proto.specs import (
    GPULoadStoreSpec,
    KVLayout,
    TensorLayout,
    TensorRef,
)

GPU_BLOCKS = 64
PLAIN = KVLayout((TensorLayout(GPU_BLOCKS, 1024, 1024),), ((TensorRef(0, 1024),),))
HYBRID = KVLayout(
    (TensorLayout(GPU_BLOCKS, 256, 256), TensorLayout(GPU_BLOCKS, 128, 128)),
    ((TensorRef(0, 256),), (TensorRef(1, 128),)),
    3,
)
SHORT = KVLayout(HYBRID.tensors, HYBRID.groups, 2)
# The layout that fills the host blocks of each namespace.
LAYOUTS = {
    Fingerprint("m", layout.host_block_bytes, key_bytes=1): layout for layout in (PLAIN, HYBRID)
}
# Layouts whose host blocks fit into those of this one.
FITTING = {PLAIN: [PLAIN, HYBRID, SHORT], HYBRID: [HYBRID, SHORT]}
# The keys of each group.
LETTERS = [[bytes([letter]) for letter in letters] for letters in (b"abcdefghij", b"uvwxyz")]


def group_of(key: bytes) -> int:
    return int(key in LETTERS[1])


@dataclass(frozen=True)
class MovedBlock:
    """A GPU block of a transfer. position: of its key in the request. sub: its sub-block."""

    group: int
    gpu_block: int
    position: int
    key: bytes
    sub: int


@dataclass(frozen=True)
class KeyRequest:
    gpu: GPULoadStoreSpec
    keys: tuple[bytes, ...]
    blocks: tuple[MovedBlock, ...]

    def first_blocks(self, key: bytes) -> list[MovedBlock]:
        """The blocks of the first occurrence of a key. A store ignores the others."""
        position = self.keys.index(key)
        return [block for block in self.blocks if block.position == position]


@st.composite
def key_requests(draw: st.DrawFn, layout: KVLayout, keys: Sequence[Sequence[bytes]]) -> KeyRequest:
    """Requests for some of the keys of each group. The first and last host block may be partial."""
    factor, gpu_blocks = layout.block_size_factor, count(draw(st.integers(0, 20)))
    sizes, indices, names = list[int](), list[int](), list[bytes]()
    blocks: list[MovedBlock] = []
    for group in range(len(layout.groups)):
        least = draw(st.sampled_from([1, 1, 1, 0])) if keys[group] else 0
        most = 4 if keys[group] else 0
        chosen = draw(
            st.lists(st.sampled_from(keys[group] or [b""]), min_size=least, max_size=most)
        )
        skip, cut = (min(factor - 1, draw(st.sampled_from([0, 0, 0, 1, 2]))) for _ in range(2))
        if len(chosen) == 1 and skip + cut >= factor:
            cut = 0
        size = len(chosen) * factor - skip - cut if chosen else 0
        for number in range(skip, skip + size):
            at, sub = divmod(number, factor)
            blocks.append(MovedBlock(group, next(gpu_blocks), len(names) + at, chosen[at], sub))
        sizes.append(size)
        indices.append(skip + factor * draw(st.integers(0, 1)))
        names += chosen
    gpu = GPULoadStoreSpec([block.gpu_block for block in blocks], tuple(sizes), tuple(indices))
    return KeyRequest(gpu, tuple(names), tuple(blocks))


def request_of_key(layout: KVLayout, key: bytes, subs: Sequence[int]) -> KeyRequest:
    """A request for contiguous sub-blocks of one key."""
    group, groups = group_of(key), range(len(layout.groups))
    sizes = tuple(len(subs) * (each == group) for each in groups)
    gpu = GPULoadStoreSpec(range(len(subs)), sizes, (min(subs),) * len(groups))
    blocks = tuple(MovedBlock(group, at, 0, key, sub) for at, sub in enumerate(subs))
    return KeyRequest(gpu, (key,), blocks)
