"""The GPU blocks of SGLang's transfers: slots of the tree, on the device, become block numbers.

Used in the scheduler's thread, which must not wait for the device: the slots of a store are copied
to host memory behind the kernels that wrote them, and are there when `ready`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from kvferry.proto.errors import Code, Refused
from kvferry.proto.keys import OffloadKey
from kvferry.proto.specs import GPULoadStoreSpec

if TYPE_CHECKING:
    from kvferry.client.sglang.pools import Source


@dataclass(frozen=True, slots=True)
class SourcePages:
    """Pages of one source: their keys, and the slots that they have on the device."""

    source: Source
    keys: list[tuple[OffloadKey, ...]]
    indices: torch.Tensor


class BlockIds:
    """The block numbers of some pages, in the order of their sources' groups.

    groups: the number of KV cache groups of all sources.
    """

    def __init__(self, pages: Sequence[SourcePages], groups: int) -> None:
        self._pages, self._groups = pages, groups
        firsts = [each.indices[:: each.source.slots] for each in pages]
        on_device = torch.cat([first.reshape(-1) for first in firsts])
        self._event: Any = None
        if on_device.device.type == "cpu":
            self._slots = on_device
        else:
            self._slots = torch.empty_like(on_device, device="cpu", pin_memory=True)
            self._slots.copy_(on_device, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()

    @property
    def ready(self) -> bool:
        """Whether the slots are in host memory."""
        return self._event is None or bool(self._event.query())

    def wait(self) -> None:
        """Wait until the current stream has reached the copy."""
        if self._event is not None:
            self._event.synchronize()

    def spec(self, wanted: Sequence[OffloadKey] | None = None) -> GPULoadStoreSpec:
        """The blocks of these keys, or of all; in the order of `keys`. Call it when ready.

        Raises Refused (BAD_SPEC) if a page is not aligned.
        """
        chosen = None if wanted is None else set(wanted)
        slots = self._slots.numpy()
        ids: list[np.ndarray[Any, Any]] = []
        sizes = [0] * self._groups
        start = 0
        for each in self._pages:
            source, count = each.source, len(each.keys)
            first = slots[start : start + count]
            start += count
            if len(first) != count or (first % source.slots).any():
                message = f"{len(first)} slots of {source.name} are not the pages of {count} keys"
                raise Refused(Code.BAD_SPEC, message, first[:4].tolist())
            blocks = first // source.slots
            for at, group in enumerate(source.groups):
                own = blocks
                if chosen is not None:
                    own = blocks[[keys[at] in chosen for keys in each.keys]]
                ids.append(own)
                sizes[group] = len(own)
        return GPULoadStoreSpec(np.concatenate(ids), tuple(sizes), (0,) * self._groups)

    def keys(self) -> list[OffloadKey]:
        """All keys, in the order of the blocks of `spec`: group by group."""
        return [
            keys[at]
            for each in self._pages
            for at in range(len(each.source.groups))
            for keys in each.keys
        ]
