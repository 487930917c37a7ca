"""What is dropped leaves nothing behind, also where a GPU has yet to write to it."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest
import torch

from kvferry.client import Timeline

pytestmark = pytest.mark.gpu


def pages() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:kvferry-timeline")


def test_a_timeline_that_is_dropped_while_its_stream_is_at_work() -> None:
    """The stream has yet to write to its page, and whatever lies there next is another page."""
    stream = torch.cuda.current_stream()
    Timeline.create("cuda").close()  # whatever the driver opens, it has opened
    descriptors, mapped = len(os.listdir("/proc/self/fd")), pages()
    for _ in range(10):
        timeline: Timeline | None = Timeline.create("cuda")
        assert timeline is not None
        torch.cuda._sleep(50_000_000)  # type: ignore[no-untyped-call]
        timeline.signal(stream, 1)
        timeline = None
        gc.collect()
        assert (len(os.listdir("/proc/self/fd")), pages()) == (descriptors, mapped)
    last = Timeline.create("cuda")
    last.signal(stream, 1)
    torch.cuda.synchronize()
    assert last.reached == 1
    last.close()
