"""The probes for differences between versions of vLLM. Skipped without vLLM."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from kvferry.client import Refused
from support.vllm_stand_ins import vllm_config


def test_events_name_host_memory(core: Any) -> None:
    assert getattr(core.compat.HOST_MEDIUM, "value", core.compat.HOST_MEDIUM) == "CPU"


@pytest.mark.parametrize("version", ["0.26.0", "0.33.1", "0.34.0", "0.1.dev1+g123"])
def test_supported_and_newer_versions_are_accepted(
    core: Any, version: str, caplog: pytest.LogCaptureFixture
) -> None:
    core.compat.check_version(version)
    assert bool(caplog.records) == (version in ("0.34.0", "0.1.dev1+g123"))


def test_other_versions_are_refused(core: Any) -> None:
    """Also one without the hook for its block pool."""
    with pytest.raises(Refused, match=r"0\.25\.1 is too old.*0\.26 to 0\.33"):
        core.compat.check_version("0.25.1")
    with pytest.raises(Refused, match=r"use vLLM 0\.26 to"):
        core.compat.check_version("0.26.0", object)


@pytest.mark.parametrize("exported", [None, False, True])
def test_sleep_mode_needs_exported_memory_and_notices(core: Any, exported: bool | None) -> None:
    from kvferry.client.vllm.connector import KVFerryConnector
    from kvferry.client.vllm.kv_memory import check_sleep_mode

    extra = {} if exported is None else {"kvferry_exported_kv": exported}
    config = vllm_config("engine", extra)
    config.model_config.enable_sleep_mode = True
    supported = core.compat.CALLS_BEFORE_SLEEP and exported is not False
    refusal = pytest.raises(Refused, match="without --enable-sleep-mode")
    with nullcontext() if supported else refusal:
        assert KVFerryConnector.supports_sleep_mode(config.kv_transfer_config)
    with nullcontext() if supported else refusal:
        check_sleep_mode(config, extra)


def test_with_mamba_layers_only_the_newer_model_runner_writes_blocks_early(core: Any) -> None:
    if not core.compat.OFFLOADS_MAMBA_STATES:
        pytest.skip("this vLLM has the older model runner")
    config = vllm_config("engine", {})
    full, mamba = (core.plan_caches(groups, 8, 0) for groups in (("full",), ("full", "all states")))
    for newer, caches, early in ((True, full, False), (True, mamba, True), (False, mamba, False)):
        config.use_v2_model_runner = newer
        assert core.compat.writes_blocks_early(config, caches) is early


def test_blocks_that_vllm_sets_to_zero_or_copies_are_written(core: Any) -> None:
    copies = [SimpleNamespace(src_block_id=3, dst_block_id=4)]
    for zeroed, copied, written in (([1, 2], copies, {1, 2, 3, 4}), (None, None, set())):
        output = SimpleNamespace(new_block_ids_to_zero=zeroed, kv_cache_block_copies=copied)
        assert core.compat.written_blocks(output) == written


def test_synchronous_loads_are_turned_off(core: Any, caplog: pytest.LogCaptureFixture) -> None:
    from kvferry.client.vllm.connector import turn_synchronous_loads_off

    config = vllm_config("engine", {"sync_load_budget_bytes": 1 << 20})
    turn_synchronous_loads_off(config)
    assert config.kv_transfer_config.kv_connector_extra_config["sync_load_budget_bytes"] == 0
    assert "sync_load_budget_bytes" in caplog.text


@pytest.mark.parametrize("error", [None, ValueError])
def test_hidden_loads_are_restored(core: Any, error: type[Exception] | None) -> None:
    """Also if vLLM raises an error."""
    state = SimpleNamespace(transfer_jobs={1, 2})
    scheduler = SimpleNamespace(_current_batch_load_jobs={2: None}, _req_status={"r": state})
    raised = nullcontext() if error is None else pytest.raises(error)
    with raised, core.compat.without_new_loads(scheduler, ["r", "unknown"]):
        assert state.transfer_jobs == {1}
        if error is not None:
            raise error
    assert state.transfer_jobs == {1, 2}


def test_states_beyond_a_requests_limit_are_not_offered(core: Any) -> None:
    """In some versions they are in the output itself."""

    @dataclass
    class BlockState:
        boundary_state_offloads: dict[str, list[tuple[int, int, int]]]

    @dataclass
    class Output:
        kv_connector_block_state: BlockState | None = None
        partial_tail_offloads: dict[str, list[tuple[int, int, int]]] | None = None

    limits = {"limited": 20, "none": 0, "free": None}
    states = {n: SimpleNamespace(max_offload_tokens=limit) for n, limit in limits.items()}
    offers = {name: [(0, 1, 16), (0, 2, 24)] for name in (*limits, "unknown")}
    kept = {"limited": [(0, 1, 16)], "none": [], "free": [(0, 1, 16), (0, 2, 24)]}
    output = Output(BlockState(offers))
    assert core.compat.limit_offers(output, states) == Output(BlockState(kept))
    assert output == Output(BlockState(offers))  # which other connectors have, too
    output = Output(partial_tail_offloads=offers)
    assert core.compat.limit_offers(output, states) == Output(partial_tail_offloads=kept)
    for output in (Output(), Output(BlockState(kept))):
        assert core.compat.limit_offers(output, states) is output
