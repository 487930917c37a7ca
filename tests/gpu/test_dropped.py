"""A dropped timeline leaves no descriptor and no mapping, even if a GPU still writes to it."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest
import torch

from kvferry.client import Timeline

pytestmark = pytest.mark.gpu


def count_pages() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:kvferry-timeline")


def test_a_timeline_dropped_while_its_stream_runs() -> None:
    """The stream still has to write to the page, so the page must not be unmapped before that."""
    stream = torch.cuda.current_stream()
    Timeline.create("cuda").close()  # the driver has opened all its files now
    descriptors, mapped = len(os.listdir("/proc/self/fd")), count_pages()
    for _ in range(10):
        timeline: Timeline | None = Timeline.create("cuda")
        assert timeline is not None
        torch.cuda._sleep(50_000_000)  # type: ignore[no-untyped-call]
        timeline.signal(stream, 1)
        timeline = None
        gc.collect()
        assert (len(os.listdir("/proc/self/fd")), count_pages()) == (descriptors, mapped)
    last = Timeline.create("cuda")
    last.signal(stream, 1)
    torch.cuda.synchronize()
    assert last.reached == 1
    last.close()
