"""KV tensors with marked blocks, and a timeline that is signalled after they are written."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from kvferry.client import Timeline
from kvferry.client.tensors import shared_empty
from support.block_marks import Marker, Words
from support.traffic_statistics import TrafficOptions


class MarkedTensors:
    """Two KV tensors with one page per GPU block each, and the timeline of their engine."""

    def __init__(self, options: TrafficOptions) -> None:
        self.device = torch.device(options.device)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        self.marker = Marker(options.block_words)
        self.timeline = Timeline.create(options.device)
        shape = options.gpu_blocks, options.page
        self.tensors = {
            f"layer.{n}": shared_empty(shape, torch.uint8, self.device) for n in range(2)
        }

    def write(self, blocks: Sequence[int], labels: Sequence[int]) -> None:
        pages = np.split(self.marker.make_blocks(labels).view(np.uint8), 2, axis=1)
        for tensor, page in zip(self.tensors.values(), pages, strict=True):
            tensor[list(blocks)] = torch.from_numpy(np.ascontiguousarray(page)).to(self.device)

    def read(self, blocks: Sequence[int]) -> Words:
        pages = [tensor[list(blocks)].cpu().numpy() for tensor in self.tensors.values()]
        return np.concatenate(pages, axis=1).view(np.uint64)

    def close(self) -> None:
        self.timeline.close()
