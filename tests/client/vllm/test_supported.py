"""kvferry refuses models and options that it cannot serve, and says what to change."""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvferry.client import Refused
from support.vllm_stand_ins import vllm_config
from support.vllm_version import has_vllm

SHAPE: dict[str, Any] = {"num_kv_heads": 1, "head_size": 8, "dtype": torch.int8}


def refusal(check: Any, *arguments: Any) -> str:
    """The message, or nothing if the check accepts."""
    try:
        check(*arguments)
    except Refused as error:
        return str(error)
    return ""


def of_model(**attributes: Any) -> str:
    """Of a configuration whose model has these attributes."""
    from kvferry.client.vllm.supported import check_config

    config = vllm_config("engine", {})
    config.scheduler_config = SimpleNamespace(disable_hybrid_kv_cache_manager=False)
    for name, value in attributes.items():
        target = config.cache_config if hasattr(config.cache_config, name) else config.model_config
        setattr(target, name, value)
    return refusal(check_config, config, {})


def of_layer(spec: Any, **group: Any) -> str:
    """Of KV cache groups with this spec."""
    from kvferry.client.vllm.supported import check_kv_cache

    planned = SimpleNamespace(kv_cache_spec=spec, layer_names=["layer"], **group)
    caches = SimpleNamespace(kv_cache_groups=[planned], kv_cache_tensors=[])
    return refusal(check_kv_cache, caches)


def test_options_that_would_corrupt_kv_are_refused(core: Any) -> None:
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    assert not of_model()
    full = FullAttentionSpec(block_size=16, **SHAPE)
    assert not of_layer(full)
    assert "hisparse_config" in of_layer(full, host_resident=True)


def test_models_whose_prefixes_vllm_does_not_cache_are_refused(core: Any) -> None:
    """Encoders, encoder-decoders, and models whose tokens attend to later ones."""
    from vllm.v1 import kv_cache_interface as interface

    remedy = "start vLLM without --kv-transfer-config"
    assert remedy in of_model(is_prefix_caching_supported=False, enable_prefix_caching=False)
    assert not of_model(is_prefix_caching_supported=False, enable_prefix_caching=True)
    assert "CrossAttentionSpec" in of_layer(interface.CrossAttentionSpec(block_size=16, **SHAPE))
    full = interface.FullAttentionSpec(block_size=16, **SHAPE, non_causal=True)
    assert "attend to later ones" in of_layer(full)


def test_mamba_layers_need_prefix_caching_and_a_newer_vllm(core: Any) -> None:
    from vllm.v1.kv_cache_interface import MambaSpec

    from kvferry.client.vllm import compat

    states: dict[str, Any] = {"block_size": 16, "shapes": ((1,),), "dtypes": (torch.int8,)}
    aligned = MambaSpec(**states, mamba_cache_mode="align")
    if not compat.OFFLOADS_MAMBA_STATES:
        for message in (of_model(is_hybrid=True), of_layer(aligned)):
            assert "use vLLM 0.29 to 0.33" in message
        return
    assert not of_model(is_hybrid=True)
    assert not of_layer(aligned)
    for message in (
        of_model(is_hybrid=True, enable_prefix_caching=False),
        of_layer(MambaSpec(**states, mamba_cache_mode="none")),
    ):
        assert "--enable-prefix-caching" in message


def test_local_attention_needs_a_newer_vllm(core: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM 0.26 and 0.27 cannot offload it."""
    from vllm.platforms import current_platform
    from vllm.v1.kv_cache_interface import ChunkedLocalAttentionSpec

    from kvferry.client.vllm import compat
    from kvferry.client.vllm.supported import check_config

    local = ChunkedLocalAttentionSpec(block_size=16, **SHAPE, attention_chunk_size=32)
    monkeypatch.setattr(type(current_platform), "support_hybrid_kv_cache", lambda _: True)
    options = {"kvferry_dirs": "nowhere", "cpu_bytes_to_use": 1 << 20}
    monkeypatch.setattr(core.engine_config(options).model_config, "attention_chunk_size", 32)
    configured = refusal(check_config, core.engine_config(options), options)
    if compat.can_offload_local_attention():
        assert not configured
        assert not of_layer(local)
        return
    for message in (configured, of_layer(local)):
        assert message.startswith("[bad_config]")
        assert "use vLLM 0.28 to 0.33" in message
        assert "--disable-hybrid-kv-cache-manager" in message


# When vLLM calls the checks


def in_multi_connector(child: dict[str, Any]) -> dict[str, Any]:
    return {
        "kv_connector": "MultiConnector",
        "kv_connector_module_path": None,
        "kv_connector_extra_config": {"connectors": [child]},
    }


@pytest.fixture(params=[False, True], ids=["alone", "in a MultiConnector"])
def transfer(core: Any, request: pytest.FixtureRequest) -> Callable[[dict[str, Any]], Any]:
    """Fields of a KVTransferConfig for kvferry with these options."""
    from support.vllm_plan import kvferry_transfer

    def fields(options: dict[str, Any]) -> dict[str, Any]:
        own = kvferry_transfer(options)
        return in_multi_connector(own) if request.param else own

    return fields


@pytest.fixture
def full_graphs(core: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM captures full CUDA graphs, which is its default on a GPU."""
    from vllm.platforms import current_platform

    monkeypatch.setattr(type(current_platform), "support_static_graph_mode", lambda _: True)


@pytest.mark.usefixtures("full_graphs")
def test_options_are_checked_before_vllm_loads_weights(
    core: Any, transfer: Callable[[dict[str, Any]], Any]
) -> None:
    options = {"kvferry_dirs": "nowhere", "cpu_bytes_to_use": "64 apples"}
    assert "64 apples" in refusal(lambda: core.engine_config({}, **transfer(options)))
    options["cpu_bytes_to_use"] = "64GiB"
    assert not refusal(lambda: core.engine_config({}, **transfer(options)))


@pytest.mark.usefixtures("full_graphs")
def test_the_layout_of_the_environment_is_checked_before_vllm_loads_weights(
    core: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_KV_CACHE_LAYOUT", "LHBNC")
    options = {"kvferry_dirs": "nowhere"}
    assert "unset VLLM_KV_CACHE_LAYOUT" in refusal(core.engine_config, options)


def test_sleep_mode_is_checked_before_vllm_loads_weights(
    core: Any, monkeypatch: pytest.MonkeyPatch, transfer: Callable[[dict[str, Any]], Any]
) -> None:
    from kvferry.client.vllm import compat

    if not compat.CALLS_BEFORE_SLEEP:
        pytest.skip("this vLLM asks no connector whether it supports sleep mode")
    options = {"kvferry_dirs": "nowhere", "kvferry_exported_kv": False}
    monkeypatch.setattr(core.engine_config({}).model_config, "enable_sleep_mode", True)
    message = refusal(lambda: core.engine_config({}, **transfer(options)))
    assert "remove kvferry_exported_kv" in message


def test_the_configuration_is_checked_before_vllm_profiles_the_memory(
    core: Any, monkeypatch: pytest.MonkeyPatch, transfer: Callable[[dict[str, Any]], Any]
) -> None:
    """In vLLM before 0.29 when it creates the connector, which it does in any case."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
    from vllm.v1.attention.backends import utils

    config = core.engine_config({}, **transfer({"kvferry_dirs": "nowhere"}))
    config.scheduler_config.disable_hybrid_kv_cache_manager = True
    config.cache_config.enable_prefix_caching = False
    model = type(config.model_config)
    monkeypatch.setattr(model, "is_prefix_caching_supported", False, raising=False)
    create, caches = KVConnectorFactory.create_connector, core.plan_caches(("full",), 8, 0)
    for role in KVConnectorRole:
        assert "vLLM caches no prefixes" in refusal(create, config, role, caches)
    if (resolve := getattr(utils, "resolve_kv_cache_layout", None)) is not None:
        assert "vLLM caches no prefixes" in refusal(resolve, config, [["LBHNC"]], [])
        config.cache_config.enable_prefix_caching = True
        assert not refusal(resolve, config, [["LBHNC"]], [])


@pytest.mark.parametrize("backend", ["native", "lmcache"])
def test_the_flag_that_replaces_the_connector_is_named(
    core: Any, monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    from vllm.config import CacheConfig

    from support import vllm_plan

    sized = {"kv_offloading_size": 1.0, "kv_offloading_backend": backend}
    configured = CacheConfig
    monkeypatch.setattr(vllm_plan, "CacheConfig", lambda **fields: configured(**fields, **sized))
    message = refusal(core.engine_config, {"kvferry_dirs": "nowhere"})
    assert "--kv-offloading-size" in message
    assert "set cpu_bytes_to_use" in message


def test_the_layout_that_vllm_resolved_is_checked(
    core: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvferry.client.vllm.supported.kv_layout", lambda _: "LHBNC")
    assert "unset VLLM_KV_CACHE_LAYOUT" in of_model()


def test_groups_that_vllm_does_not_cache_are_named_in_the_log(
    core: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from vllm.v1 import kv_cache_interface as interface

    from kvferry.client.vllm.supported import check_kv_cache, log_excluded_groups

    if not hasattr(interface.KVCacheConfig, "prefix_cacheable_group_ids"):
        pytest.skip("this vLLM offloads all groups")
    ring = interface.CircularBufferSpec(block_size=4, **SHAPE)
    full = interface.FullAttentionSpec(block_size=16, **SHAPE)
    groups = [
        interface.KVCacheGroupSpec(["keys"], ring),
        interface.KVCacheGroupSpec(["attention"], full),
    ]
    caches = interface.KVCacheConfig(8, [], groups)
    check_kv_cache(caches)
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    caplog.set_level("INFO", "vllm.kvferry")
    log_excluded_groups(caches)
    assert "CircularBufferSpec of keys" in caplog.text
    assert "FullAttentionSpec" not in caplog.text


def warning(
    caplog: pytest.LogCaptureFixture, mamba: int, attention: int, tokens: int | None, context: int
) -> str:
    """Of a hybrid model with blocks of so many tokens, and prefixes that end every `tokens`."""
    from vllm.v1 import kv_cache_interface as interface

    from kvferry.client.vllm.supported import warn_of_unwritten_copies

    states = {"shapes": ((1,),), "dtypes": (torch.int8,), "mamba_cache_mode": "align"}
    specs: list[Any] = [interface.FullAttentionSpec(block_size=attention, **SHAPE)]
    if mamba:
        specs.append(interface.MambaSpec(block_size=mamba, **states))
    groups = [interface.KVCacheGroupSpec([str(n)], spec) for n, spec in enumerate(specs)]
    caches = SimpleNamespace(kv_cache_groups=groups, cache_hit_alignment_tokens=tokens)
    config = vllm_config("engine", {})
    config.parallel_config.decode_context_parallel_size = context
    caplog.clear()
    warn_of_unwritten_copies(config, caches)
    return caplog.text


def test_prefixes_that_end_inside_blocks_are_warned_of(
    core: Any, caplog: pytest.LogCaptureFixture
) -> None:
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    assert not warning(caplog, mamba=16, attention=16, tokens=16, context=1)
    assert not warning(caplog, mamba=16, attention=16, tokens=None, context=1)
    assert not warning(caplog, mamba=0, attention=16, tokens=4, context=1)
    found = warning(caplog, mamba=16, attention=16, tokens=4, context=1)
    assert "every 4 tokens, inside blocks of 16" in found
    assert "start vLLM without --prefix-match-unit" in found
    if hasattr(FullAttentionSpec, "dcp_sharded"):
        found = warning(caplog, mamba=16, attention=16, tokens=16, context=2)
        assert "every 16 tokens, inside blocks of 32" in found


def test_vllm_copies_a_block_that_is_not_written_yet(start: Any) -> None:
    """Why `warn_of_unwritten_copies` warns. kvferry stores and loads nothing here."""
    if not has_vllm(0, 33):
        pytest.skip("shown with vLLM 0.33 and newer")
    engine = start("full", "partial states", blocks=23, kv_role="kv_consumer")
    numbers = iter(range(1, 900))

    def tokens(count: int) -> list[int]:
        return [next(numbers) for _ in range(count)]

    prefix = tokens(16)
    # The state after 12 tokens of the prefix remains cached, its attention block does not: the
    # short requests need 17 blocks, which evicts the block but leaves 17 without a hash.
    engine.run(prefix)
    assert engine.run([*prefix[:12], *tokens(20)]) == [12]
    engine.run(*[tokens(3) for _ in range(8)])
    # In one step, the first computes the prefix, and the second begins at that state.
    assert engine.run([*prefix, *tokens(40)], [*prefix, *tokens(30)]) == [0, 12]
    assert engine.wrong[0].startswith("request-11 in full, at 12 tokens")
    engine.wrong.clear()
