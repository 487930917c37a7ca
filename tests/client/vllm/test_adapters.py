"""LoRA adapters whose weights change while the engine runs."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvferry.client.vllm.adapters import Adapters
from support.vllm_stand_ins import prompt

HASHED = ("sql", "/adapters/sql")


def lora(number: int = 1, path: object = HASHED[1], *, inplace: bool = False) -> Any:
    return SimpleNamespace(
        lora_name=HASHED[0], lora_int_id=number, lora_path=str(path), load_inplace=inplace
    )


def write_weights(folder: Path, weights: str) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "adapter_model.safetensors").write_text(weights)
    return folder


def usable(adapters: Adapters, *loras: Any) -> list[bool]:
    """Whether requests that arrive with these may load and store."""
    for name, one in enumerate(loras):
        adapters.begin_request(str(name), HASHED, one)
    return [adapters.may_use_keys(str(name)) for name in range(len(loras))]


@pytest.mark.parametrize("event", ["id", "path", "in place", "removed", "in place by the engine"])
def test_an_adapter_that_changes_is_not_offloaded_until_a_reset(
    event: str, caplog: pytest.LogCaptureFixture
) -> None:
    adapters, changed = Adapters(), lora()
    assert usable(adapters, lora(), lora()) == [True, True]
    if event == "id":
        changed = lora(2)
    elif event == "path":
        changed = lora(path="/adapters/other")
    elif event == "in place":
        assert usable(adapters, lora(inplace=True)) == [False]
    elif event == "removed":
        adapters.remove(2)
        assert usable(adapters, lora()) == [True]
        adapters.remove(1)
    else:
        adapters.load(HASHED, lora(inplace=True))
    adapters.begin_request("before", HASHED, changed)
    assert not adapters.may_use_keys("before")
    assert "reset_connector" in caplog.text
    adapters.reset()
    assert adapters.may_use_keys("before")
    assert usable(adapters, changed, changed) == [True, True]
    assert len(caplog.records) == 1


def test_a_request_that_a_change_has_met_is_never_offloaded() -> None:
    """It may have KV of both weights."""
    adapters = Adapters()
    adapters.begin_request("old", HASHED, lora())
    adapters.load(HASHED, lora(inplace=True))
    adapters.reset()
    assert not adapters.may_use_keys("old")
    adapters.begin_request("new", HASHED, lora())
    assert adapters.may_use_keys("new")
    adapters.end_request("old")
    adapters.load(HASHED, lora(inplace=True))
    assert usable(adapters, lora(), lora()) == [False, False]


def test_other_adapters_and_requests_without_one_are_offloaded() -> None:
    adapters = Adapters()
    assert usable(adapters, lora(1), lora(2)) == [False, False]
    adapters.begin_request("other", ("chat", "/adapters/chat"), lora(3))
    assert adapters.may_use_keys("other")
    assert adapters.may_use_keys("without")


@pytest.mark.parametrize(("weights", "may"), [("one", True), ("two", False)])
def test_a_load_of_the_same_files_changes_nothing(tmp_path: Path, weights: str, may: bool) -> None:
    adapters, folder = Adapters(), write_weights(tmp_path / "sql", "one")
    adapters.load(HASHED, lora(1, folder))
    write_weights(folder, weights)
    adapters.load(HASHED, lora(1, folder, inplace=True))
    assert usable(adapters, lora(1, folder)) == [may]
    adapters.reset()
    write_weights(folder, "three")
    assert usable(adapters, lora(2, folder)) == [False]


def test_a_request_that_vllm_loads_the_adapter_for_in_each_step_is_never_offloaded(
    tmp_path: Path,
) -> None:
    adapters, folder = Adapters(), write_weights(tmp_path / "sql", "one")
    for _ in range(2):
        assert usable(adapters, lora(1, folder, inplace=True)) == [False]
        adapters.reset()


def request(number: int = 1, **options: Any) -> Any:
    from vllm.lora.request import LoRARequest

    return LoRARequest("sql", number, "/adapters/sql", **options)


@pytest.mark.parametrize(
    ("changes", "caches_prefixes"),
    [("another id", True), ("another id", False), ("in place", True), ("removed", True)],
)
def test_the_kv_of_an_adapter_ends_with_its_weights(
    start: Any, changes: str, caches_prefixes: bool
) -> None:
    """As vLLM's own cache after reset_prefix_cache, and as vLLM without prefix caching."""
    from vllm.config import LoRAConfig
    from vllm.v1.engine.core import EngineCore

    def configure(config: Any) -> None:
        config.lora_config = LoRAConfig(max_lora_rank=8, max_loras=1)
        config.cache_config.enable_prefix_caching = caches_prefixes

    engine = start(configure=configure)

    def find(adapter: Any) -> int:
        """Run a request. Returns the tokens that were found in host memory."""
        engine.settle()
        assert engine.scheduler.reset_prefix_cache()
        name = engine.add(prompt(0), lora=adapter)
        engine.run_until(lambda: name in engine.finished)
        found: int = engine.finished[name]
        return found

    assert find(request()) == 0
    assert find(request()) >= 128
    engine.runner.weights = 2
    new = request(2) if changes == "another id" else request()
    executor = SimpleNamespace(add_lora=lambda lora: lora.load_inplace, remove_lora=lambda _: True)
    vllm_engine: Any = SimpleNamespace(scheduler=engine.scheduler, model_executor=executor)
    if changes == "in place":
        assert EngineCore.add_lora(vllm_engine, request(load_inplace=True))
    elif changes == "removed":
        assert EngineCore.remove_lora(vllm_engine, 1)
    assert [find(new), find(new)] == [0, 0]
    assert engine.scheduler.reset_prefix_cache(reset_connector=True)
    assert find(new) == 0
    assert find(new) >= 128


def test_vllm_still_reads_the_types_of_its_methods(core: Any) -> None:
    """It converts the arguments of a remote call by them."""
    from inspect import signature

    from vllm.lora.request import LoRARequest
    from vllm.v1.engine.core import EngineCore

    from kvferry.client.vllm.adapters import watch_loads

    watch_loads()
    method: Any = EngineCore.__new__(EngineCore).add_lora
    assert hasattr(method, "__wrapped__")
    (parameter,) = signature(method).parameters.values()
    assert parameter.annotation is LoRARequest
