"""The bytes of a GPU block of each KV cache group, if one buffer has the blocks of all groups.

vLLM packs the layers of models with several page sizes (DeepSeek V4) into rows. A row is as large
as the largest group, and a GPU block of any group is the front of a row:

    row 0, a block of group A    | page | page | page | page |
    row 1, a block of group B    | page | page |   unused    |

vLLM's own connector copies whole rows. Here a host block of a group has the bytes of its group.
Read from the KVCacheConfig, which the scheduler's process and the workers' have alike: the
fingerprint and the registered tensors follow from it. Does not import vLLM.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from kvferry.client.arrays import int8_view
from kvferry.client.tensors.canonical import CanonicalKVCaches
from kvferry.proto.specs import KVLayout, TensorLayout, TensorRef


class ByteRun(NamedTuple):
    """Contiguous bytes of every row."""

    offset: int
    nbytes: int

    @property
    def end(self) -> int:
        return self.offset + self.nbytes


@dataclass(frozen=True, slots=True)
class PackedGroups:
    """The groups of a KV cache whose layers share one row per block.

    runs: for each offloaded group, where its bytes are in a row, in order of offsets.
    """

    num_blocks: int
    row_bytes: int
    runs: tuple[tuple[ByteRun, ...], ...]

    @property
    def group_bytes(self) -> tuple[int, ...]:
        """For each group, the bytes of one GPU block."""
        return tuple(sum(run.nbytes for run in runs) for runs in self.runs)

    def canonical(self, kv_cache: Any, factor: int) -> CanonicalKVCaches:
        """The groups as views of the buffer. kv_cache: the tensor of any layer."""
        views: list[Any] = []
        layouts: list[TensorLayout] = []
        groups: list[tuple[TensorRef, ...]] = []
        for runs in self.runs:
            first = len(layouts)
            groups.append(tuple(TensorRef(first + n, run.nbytes) for n, run in enumerate(runs)))
            for run in runs:
                layouts.append(TensorLayout(self.num_blocks, run.nbytes, self.row_bytes))
                views.append(self._view(kv_cache, run))
        layout = KVLayout(tuple(layouts), tuple(groups), factor)
        return CanonicalKVCaches(layout, tuple(views))

    def _view(self, kv_cache: Any, run: ByteRun) -> Any:
        # The buffer is an allocation of its own, so row 0 is at the start of its storage.
        before = kv_cache.storage_offset() * kv_cache.element_size()
        shape = self.num_blocks, run.nbytes
        return int8_view(kv_cache, run.offset - before, shape, self.row_bytes)


def read_packed_groups(
    kv_cache_config: Any, groups: Sequence[Any], layout: str
) -> PackedGroups | None:
    """The groups of a packed buffer; None if there is none, or if each group fills the rows.

    groups: those that are offloaded. layout: the KV cache layout, as "BLHNC"; before vLLM 0.29
    it does not tell.
    """
    tensors, num_blocks = kv_cache_config.kv_cache_tensors, kv_cache_config.num_blocks
    is_one_allocation = bool(tensors) and hasattr(tensors[0], "layers")  # since vLLM 0.29
    if is_one_allocation:
        # In other layouts with blocks outermost, the bytes of a page are not contiguous.
        packed = layout.startswith("BL")
    else:
        packed = all(getattr(tensor, "block_stride", 0) for tensor in tensors)
    if not packed or not tensors:
        return None
    row_bytes = tensors[0].size // num_blocks
    pages = list(_placements(tensors) if is_one_allocation else _slots(tensors, row_bytes))
    found = PackedGroups(
        num_blocks, row_bytes, tuple(_runs_of(group.layer_names, pages) for group in groups)
    )
    return None if set(found.group_bytes) == {row_bytes} else found


def _placements(tensors: Sequence[Any]) -> Iterator[tuple[Sequence[str], ByteRun]]:
    """The layers of each tensor, and their bytes in a row."""
    for tensor in tensors:
        yield tensor.layers, ByteRun(tensor.offset, len(tensor.layers) * tensor.layer_stride)


def _slots(tensors: Sequence[Any], row_bytes: int) -> Iterator[tuple[Sequence[str], ByteRun]]:
    """Before vLLM 0.29 a tensor is a slot of the row, which one layer of each group has."""
    ordered = sorted(tensors, key=lambda tensor: tensor.offset)
    ends = [*(tensor.offset for tensor in ordered[1:]), row_bytes]
    for tensor, end in zip(ordered, ends, strict=True):
        yield tensor.shared_by, ByteRun(tensor.offset, end - tensor.offset)


def _runs_of(
    layer_names: Sequence[str], pages: Sequence[tuple[Sequence[str], ByteRun]]
) -> tuple[ByteRun, ...]:
    """The bytes of these layers. Adjacent pages are one run."""
    own = set(layer_names)
    runs: list[ByteRun] = []
    for run in sorted(run for layers, run in pages if not own.isdisjoint(layers)):
        if runs and runs[-1].end == run.offset:
            run = ByteRun(runs[-1].offset, runs.pop().nbytes + run.nbytes)
        runs.append(run)
    return tuple(runs)
