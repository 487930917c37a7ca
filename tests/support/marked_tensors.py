"""KV tensors with marked blocks, and a timeline that is signalled after they are written."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import torch

from kvferry.client import Timeline
from kvferry.client.tensors import shared_empty
from support.block_marks import Marker, Words
from support.traffic_statistics import TrafficOptions

Bytes: TypeAlias = np.ndarray[Any, np.dtype[np.uint8]]

# A byte as bfloat16: its sign and mantissa, between the bits of an exponent.
_SIGN, _MANTISSA, _EXPONENT = 0x80, 0x7F, 0x3F80


class MarkedTensors:
    """Two KV tensors with one page per GPU block each, and the timeline of their engine."""

    def __init__(self, options: TrafficOptions) -> None:
        self.device = torch.device(options.device)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        self.marker = Marker(options.block_words)
        self.timeline = Timeline.create(options.device)
        self._packed = options.packed
        shape = options.gpu_blocks, options.page * (2 if options.packed else 1)
        self.tensors = {
            f"layer.{n}": shared_empty(shape, torch.uint8, self.device) for n in range(2)
        }

    def write(self, blocks: Sequence[int], labels: Sequence[int]) -> None:
        pages = np.split(self.marker.make_blocks(labels).view(np.uint8), 2, axis=1)
        for tensor, page in zip(self.tensors.values(), pages, strict=True):
            page = to_bfloat16(page) if self._packed else np.ascontiguousarray(page)
            tensor[list(blocks)] = torch.from_numpy(page).to(self.device)

    def read(self, blocks: Sequence[int]) -> Words:
        pages = [tensor[list(blocks)].cpu().numpy() for tensor in self.tensors.values()]
        if self._packed:
            pages = list(map(from_bfloat16, pages))
        return np.concatenate(pages, axis=1).view(np.uint64)

    def close(self) -> None:
        self.timeline.close()


def to_bfloat16(marks: Bytes) -> Bytes:
    """Twice as many bytes per page."""
    wide = marks.astype(np.uint16)
    return ((wide & _SIGN) << 8 | _EXPONENT | wide & _MANTISSA).view(np.uint8)


def from_bfloat16(page: Bytes) -> Bytes:
    """Zeros stand for other values than those of to_bfloat16; no label has them in all words."""
    values = page.view(np.uint16)
    marks = (values >> 8 & _SIGN | values & _MANTISSA).astype(np.uint8)
    return np.where(values & 0x7F80 == _EXPONENT, marks, 0).astype(np.uint8)
