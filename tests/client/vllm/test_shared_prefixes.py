"""The figures of deploy/vllm.md on prefixes that prompts share, with sparse KV cache groups."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvferry.testing.plugin import StartKvferryd

pytestmark = pytest.mark.filterwarnings("ignore")  # vLLM's own

WINDOW, MAMBA, DRAFT = ("full", "window"), ("full", "aligned states"), ("full", "window", "draft")


def prompt(number: int, shared: int, own: int) -> list[int]:
    """`number` names its tokens after the shared ones."""
    return [n * 7 % 900 for n in range(shared)] + [(number * 37 + n * 11) % 900 for n in range(own)]


@pytest.mark.parametrize(
    ("groups", "prompts", "empties", "found"),
    [
        (WINDOW, [(1, 128, 100), (2, 128, 100)], False, (0, 128)),
        (WINDOW, [(1, 128, 100), (2, 128, 100), (3, 128, 100)], False, (128, 128)),
        (WINDOW, [(1, 128, 100), (2, 128, 100), (3, 128, 100)], True, (0, 128)),
        (DRAFT, [(1, 128, 100), (1, 128, 100)], False, (0, 208)),
        (MAMBA, [(1, 1024, 300), (2, 1024, 300)], False, (0, 1024)),
    ],
)
def test_windows_and_states_are_found_at_the_retention_interval(
    core: Any,
    start_kvferryd: StartKvferryd,
    monkeypatch: pytest.MonkeyPatch,
    groups: tuple[str, ...],
    prompts: list[tuple[int, int, int]],
    empties: bool,
    found: tuple[int, int],
) -> None:
    """The last prompt, after a reset of the GPU's cache. empties: and after one before each."""
    from vllm.config import CacheConfig

    if getattr(CacheConfig(), "prefix_cache_retention_interval", None) != 0:
        pytest.skip("this vLLM keeps all windows and states")
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    daemon = start_kvferryd()
    for interval, tokens in zip((0, 64), found, strict=True):

        class Engine(core.EngineCore):  # type: ignore[misc]  # vLLM has no types
            retention = interval

            def _set_up(self, config: Any, groups: tuple[str, ...]) -> None:
                config.cache_config.prefix_cache_retention_interval = self.retention

            def _plan_caches(self, groups: Any, blocks: int, drafts: int) -> Any:
                plan = super()._plan_caches(groups, blocks, drafts)
                return replace(plan, prefix_cache_retention_interval=self.retention)

        engine = Engine(
            daemon.directory,
            groups,
            blocks=512,
            host_bytes=4 << 20,
            drafts=2 if "draft" in groups else 0,
        )
        engine.scheduler.reset_prefix_cache(reset_connector=True)
        engine.settle()
        *first, last = (prompt(*numbers) for numbers in prompts)
        for one in first:
            engine.run(one)
            engine.settle()
            if empties:
                assert engine.scheduler.reset_prefix_cache()
        engine.scheduler.reset_prefix_cache()
        assert engine.run(last) == [tokens], interval
        assert not engine.wrong
        engine.close()
