"""The figures of deploy/vllm.md on prefixes that prompts share, with sparse KV cache groups."""

from __future__ import annotations

from typing import Any

import pytest

from support.vllm_stand_ins import prompt

WINDOW, MAMBA, DRAFT = ("full", "window"), ("full", "aligned states"), ("full", "window", "draft")


@pytest.mark.parametrize(
    ("groups", "shared", "numbers", "empties", "found"),
    [
        (WINDOW, 128, (1, 2), False, (0, 128)),
        (WINDOW, 128, (1, 2, 3), False, (128, 128)),
        (WINDOW, 128, (1, 2, 3), True, (0, 128)),
        (DRAFT, 128, (1, 1), False, (0, 208)),
        (MAMBA, 1024, (1, 2), False, (0, 1024)),
    ],
)
def test_windows_and_states_are_found_at_the_retention_interval(
    start: Any,
    groups: tuple[str, ...],
    shared: int,
    numbers: tuple[int, ...],
    empties: bool,
    found: tuple[int, int],
) -> None:
    """Of the last prompt, after a reset of the GPU's cache. empties: and after one before each."""
    from vllm.config import CacheConfig

    if getattr(CacheConfig(), "prefix_cache_retention_interval", None) != 0:
        pytest.skip("this vLLM keeps all windows and states")
    *first, last = (prompt(0, shared) + prompt(number, 100) for number in numbers)
    for interval, tokens in zip((0, 64), found, strict=True):
        drafts = 2 if "draft" in groups else 0
        engine = start(*groups, blocks=512, host_bytes=4 << 20, drafts=drafts, retention=interval)
        engine.scheduler.reset_prefix_cache(reset_connector=True)
        engine.settle()
        for one in first:
            engine.run(one)
            engine.settle()
            if empties:
                assert engine.scheduler.reset_prefix_cache()
        assert engine.run_anew(last) == [tokens], interval
        engine.close()
