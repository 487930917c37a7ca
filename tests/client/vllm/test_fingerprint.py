"""Which engines share blocks: what is in a fingerprint beside plain options. No vLLM needed."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from kvferry.client import Fingerprint
from kvferry.client.validation import check_fields
from kvferry.client.vllm.engine_config import BlockSizes
from kvferry.client.vllm.fingerprint import ENVIRONMENT
from kvferry.proto.messages import OpenNamespace
from support.fingerprint_helpers import (
    BF16,
    BLOCKS,
    FP8,
    NVFP4,
    SPARSE,
    TWO_MIB,
    caches,
    nothing,
    one_buffer,
    read,
)

# Blocks, pages and layouts


def test_bytes_of_a_host_block() -> None:
    assert read(blocks=replace(BLOCKS, factor=4)).host_block_bytes == 4 * TWO_MIB
    assert read(caches(stride=1)).host_block_bytes == TWO_MIB // 2
    assert read(one_buffer("LBHNC")).host_block_bytes == 2 * 4096
    assert read(one_buffer("BLHNC")).host_block_bytes == 2 * 4096
    # The same bytes of other blocks.
    assert read(blocks=BlockSizes((32,), 16, 1)) != read()


def test_engines_with_another_layout_do_not_share(monkeypatch: pytest.MonkeyPatch) -> None:
    layouts = "LBHNC", "LBNHC", "BLHNC", "BLNHC", "BHLNC"
    prints = [read(one_buffer(layout)) for layout in layouts]
    assert [one.kv_layout for one in prints] == list(layouts)
    assert len({one.name for one in prints}) == len(layouts)

    # Before 0.29 the user's is the only one that is known in every process.
    def unresolved(config: Any) -> None:
        config.cache_config.kv_cache_layout = None

    monkeypatch.setenv("VLLM_KV_CACHE_LAYOUT", "HND")
    assert read(change=unresolved).kv_layout == "HND"
    assert read(one_buffer("LBHNC")).kv_layout == "LBHNC"


def test_a_restart_with_another_number_of_blocks_finds_its_own() -> None:
    for layout in ("LBHNC", "BLHNC"):
        assert read(one_buffer(layout, 10)) == read(one_buffer(layout, 11))
    assert read(caches(num_blocks=10)) == read(caches(num_blocks=11))


def test_the_places_of_pages_in_a_block_of_all_layers_are_in_the_fingerprint() -> None:
    packed = one_buffer("BLHNC", offset=4096)
    assert read(packed).host_block_bytes == read(one_buffer("BLHNC")).host_block_bytes
    assert read(packed) != read(one_buffer("BLHNC"))
    # A layer's own region may be anywhere.
    assert read(one_buffer("LBHNC", offset=4096)) == read(one_buffer("LBHNC"))


@pytest.mark.parametrize(
    "field",
    [
        {"num_head_slots": 2},
        {"state_content_bytes": 132},
        {"sliding_window": 128},
        {"shapes": ((4, 64),)},
    ],
)
def test_the_page_of_an_attention_backend_is_in_the_fingerprint(
    field: dict[str, Any],
) -> None:
    changed = caches(SimpleNamespace(**vars(BF16), **field))
    assert read(changed) != read()
    # Ranks of a pipeline have other layers, of which the scheduler knows nothing.
    assert read(changed, change=pipeline) == read(change=pipeline)


def pipeline(config: Any) -> None:
    config.parallel_config.pipeline_parallel_size = 2


def test_only_groups_that_are_offloaded_are_in_the_fingerprint() -> None:
    """Since 0.30 a group may be replayed, or a scratch buffer, in place of being offloaded."""
    both, one = caches(BF16, FP8, prefix_cacheable_group_ids=(0, 1)), caches(BF16)
    first = caches(BF16, FP8, prefix_cacheable_group_ids=(0,))
    assert read(first) == read(one)
    assert read(both) != read(one)
    assert read(both) == read(caches(BF16, FP8))


def kept_as(said: str, *specs: Any, change: Callable[[Any], None] = nothing) -> Fingerprint:
    """Of groups of these specs, where vLLM's cache_dtype says so in this process."""

    def dtype(config: Any) -> None:
        config.cache_config.cache_dtype = said
        change(config)

    return read(caches(*specs), change=dtype)


@pytest.mark.parametrize(
    ("scheduler", "worker", "spec"),
    [
        ("auto", "fp8", FP8),
        ("fp8", "fp8_ds_mla", SPARSE),
        ("nvfp4", "nvfp4_ds_mla", NVFP4),
        ("auto", "bfloat16", BF16),
    ],
)
def test_both_sides_read_the_same_cache_dtype_from_the_layers(
    scheduler: str, worker: str, spec: Any
) -> None:
    """vLLM's layers write it into the configuration of their process, a worker's."""
    assert kept_as(scheduler, spec) == kept_as(worker, spec)
    of_layers = SimpleNamespace(kv_cache_specs={"a": spec, "b": BF16})
    assert kept_as(scheduler, spec) == kept_as(worker, of_layers)


def test_ranks_of_a_pipeline_agree_on_the_dtype() -> None:
    """Rank 1 may begin with a layer that is not quantized."""
    assert kept_as("fp8", FP8, change=pipeline) == kept_as("fp8", BF16, change=pipeline)
    assert kept_as("fp8", FP8, change=pipeline) != kept_as("fp8_e5m2", FP8, change=pipeline)


def test_the_dtype_of_kv_is_in_the_fingerprint() -> None:
    states = (SimpleNamespace(dtypes=(of, of)) for of in ("torch.float32", "torch.bfloat16"))
    kinds = [kept_as("fp8_e5m2", BF16, one) for one in states]
    kinds += [kept_as("auto", one) for one in (BF16, FP8, SPARSE, NVFP4)]
    kinds += [kept_as(said, FP8) for said in ("fp8_e5m2", "turboquant_4bit_nc")]
    assert len({fingerprint.kv_dtype for fingerprint in kinds}) == len(kinds)


@pytest.mark.parametrize(
    ("kv_cache_config", "quantization", "shared"),
    [
        (caches(), None, False),
        (one_buffer("LBHNC"), None, True),
        (one_buffer("LBHNC"), "fp8", False),
    ],
    ids=["layout not resolved", "layout resolved", "quantized"],
)
def test_gpus_of_another_kind_share_unless_vllm_chooses_by_their_capability(
    kv_cache_config: Any, quantization: str | None, shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def on(capability: str) -> Fingerprint:
        platforms = ModuleType("vllm.platforms")
        made = SimpleNamespace(as_version_str=lambda: capability)
        vars(platforms)["current_platform"] = SimpleNamespace(get_device_capability=lambda: made)
        monkeypatch.setitem(sys.modules, "vllm.platforms", platforms)

        def change(config: Any) -> None:
            config.model_config.quantization = quantization

        return read(kv_cache_config, change=change)

    if "vllm" not in sys.modules:
        monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
    assert on("9.0") == on("9.0")
    assert (on("9.0") == on("10.0")) is shared


def test_a_model_in_the_hubs_cache_is_the_same_wherever_the_cache_is() -> None:
    """With HF_HUB_OFFLINE vLLM's model is its path there; else its name."""
    commit = "0123456789" * 4

    def named(model: str, known: str | None = commit) -> Fingerprint:
        def change(config: Any) -> None:
            config.model_config.model = model
            config.model_config.hf_config = SimpleNamespace(_commit_hash=known)

        return read(change=change)

    online = named("org/model")
    for root in ("/root/.cache/huggingface/hub", "/mnt"):
        assert named(f"{root}/models--org--model/snapshots/{commit}", None) == online
    assert named(f"/mnt/models--org--model/snapshots/{commit[::-1]}", None) != online
    assert named(f"/mnt/models--org--other/snapshots/{commit}", None) != online


@pytest.mark.parametrize("name", ENVIRONMENT)
def test_variables_that_change_bytes_are_in_the_fingerprint(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = read()
    monkeypatch.setenv(name, "DS")
    assert read().differences(before)


# Context parallelism


def context(dcp: int = 1, cp: int = 1, size: int = 2) -> Fingerprint:
    def change(config: Any) -> None:
        vars(config.parallel_config).update(
            decode_context_parallel_size=size,
            dcp_kv_cache_interleave_size=dcp,
            cp_kv_cache_interleave_size=cp,
        )

    return read(change=change)


def test_how_context_parallel_ranks_interleave_tokens_is_in_the_fingerprint() -> None:
    """vLLM copies the first option to the other one later."""
    kinds = [context(), context(cp=16), context(dcp=16, cp=32), context(size=4)]
    assert len({fingerprint.name for fingerprint in kinds}) == len(kinds)
    assert context(dcp=16) == context(dcp=16, cp=16)
    assert context(cp=16, size=1) == context(size=1) == read()


# Ranks that hold the same bytes


class MLAAttentionSpec(SimpleNamespace):
    """As vLLM's."""


LATENT = MLAAttentionSpec(dtype="torch.bfloat16", kv_quant_mode=0)


def of_ranks(
    *specs: Any, ranks: int = 2, replicas: int | None = None, drafts: Any = None, **options: Any
) -> list[Fingerprint]:
    """The fingerprints of tensor-parallel ranks. options: of the parallel configuration."""

    def set_rank(config: Any, rank: int) -> None:
        tensor_parallel = {"rank": rank, "world_size": ranks, "tensor_parallel_size": ranks}
        vars(config.parallel_config).update(tensor_parallel | options)
        config.speculative_config = drafts

    planned = caches(*specs)
    if replicas is not None:
        planned.kv_tp_replicas = replicas
    return [read(planned, change=partial(set_rank, rank=rank)) for rank in range(ranks)]


@pytest.mark.parametrize(
    ("specs", "options", "same"),
    [
        ([LATENT], {}, True),
        ([LATENT, LATENT], {"ranks": 8}, True),
        ([LATENT, BF16], {}, False),
        ([BF16], {}, False),
        ([LATENT], {"decode_context_parallel_size": 2}, False),
        ([LATENT], {"world_size": 4, "pipeline_parallel_size": 2}, False),
        ([LATENT], {"world_size": 4, "prefill_context_parallel_size": 2}, False),
        # Its layers may be in the same group.
        ([LATENT], {"drafts": SimpleNamespace(draft_model_config=None)}, False),
        # Since 0.33 vLLM counts the ranks that hold the same.
        ([BF16], {"replicas": 2}, True),
        ([LATENT], {"replicas": 1}, False),
    ],
)
def test_ranks_that_hold_the_same_bytes_have_one_fingerprint(
    specs: list[Any], options: dict[str, Any], same: bool
) -> None:
    prints = of_ranks(*specs, **options)
    assert len({one.name for one in prints}) == (1 if same else len(prints))
    assert prints[0] != read(caches(*specs))  # of one rank


# The model


def other(path: str = "", value: Any = None) -> Fingerprint:
    """With another value at a path of vLLM's configuration."""

    def change(config: Any) -> None:
        config.instance_id = "start"
        config.speculative_config = SimpleNamespace(
            draft_model_config=SimpleNamespace(model="draft"), target_model_config=None
        )
        if path:
            *names, last = path.split(".")
            target = config
            for name in names:
                target = getattr(target, name)
            setattr(target, last, value)

    return read(change=change)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("model_config.hf_config._commit_hash", "bbbb"),
        ("model_config.hf_overrides", print),
        ("use_v2_model_runner", True),  # the first one keeps all layers of a head together
        ("cache_config.kv_cache_dtype_skip_layers", [*map(str, range(99))]),
        ("attention_config", SimpleNamespace(backend_per_kind=dict.fromkeys(map(str, range(99))))),
        ("speculative_config", None),
        ("speculative_config.draft_model_config.hf_overrides", {"num_hidden_layers": 2}),
    ],
)
def test_options_of_the_computation_are_in_the_fingerprint(path: str, value: Any) -> None:
    changed = other(path, value)
    assert changed.differences(other())
    assert changed == other(path, value)  # workers read it as the scheduler does
    check_fields(OpenNamespace, fingerprint=changed)


def test_speculation_without_a_model_changes_nothing() -> None:
    """ngram: vLLM names the target model as the draft."""

    def ngram(config: Any) -> None:
        target = config.model_config
        config.speculative_config = SimpleNamespace(
            method="ngram", draft_model_config=target, target_model_config=target
        )

    assert read(change=ngram) == read()


def test_a_plug_in_may_have_an_additional_config_with_a_hash() -> None:
    """An object without a text of its own would differ from process to process."""

    class Additional:
        def compute_hash(self) -> str:
            return "hash"

    assert other("additional_config", Additional()) == other("additional_config", Additional())
    assert other("additional_config", Additional()) != other()


def test_a_model_may_write_into_its_configuration_when_it_is_made() -> None:
    """Workers' have; the scheduler's has not."""
    made = SimpleNamespace(_commit_hash="aaaa", rope_parameters={"rope_theta": 10000})
    assert other("model_config.hf_config", made) == other()
