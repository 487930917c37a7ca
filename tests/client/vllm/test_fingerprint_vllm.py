"""Fingerprints of vLLM's real configuration and of the KV caches that it plans. Needs vLLM."""

from __future__ import annotations

import copy
import dataclasses
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from kvferry.client.vllm.engine_config import BlockSizes
from kvferry.client.vllm.fingerprint import read_fingerprint
from kvferry.client.vllm.kv_cache_plan import block_bytes
from kvferry.proto.fingerprint import Fingerprint

interface = pytest.importorskip("vllm.v1.kv_cache_interface")

# vLLM imports names that are deprecated in the installed torch.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

GIB = 1 << 30
LAYERS = 4
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
    "max_position_embeddings": 2048,
    "torch_dtype": "bfloat16",
}
SHAPE = {"block_size": 16, "num_kv_heads": 2, "head_size": 64, "dtype": torch.bfloat16}
LATENT = {"block_size": 16, "num_kv_heads": 1, "head_size": 576, "dtype": torch.bfloat16}
if "max_tp_shards" in {field.name for field in dataclasses.fields(interface.MLAAttentionSpec)}:
    LATENT["max_tp_shards"] = 1  # as the layers of models with MLA


def full() -> Any:
    return interface.FullAttentionSpec(**SHAPE)


def window() -> Any:
    return interface.SlidingWindowSpec(**SHAPE, sliding_window=128)


def latent() -> Any:
    return interface.MLAAttentionSpec(**LATENT)


def indexer() -> Any:
    return interface.MLAAttentionSpec(**LATENT | {"head_size": 132, "dtype": torch.uint8})


def mamba() -> Any:
    states = {"shapes": ((3, 64), (8, 16)), "dtypes": (torch.bfloat16, torch.float32)}
    padded = full().page_size_bytes
    return interface.MambaSpec(block_size=16, **states, page_size_padded=padded)


MODELS: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "full attention": (full, full),
    "sliding window": (full, window),
    "Mamba": (mamba, full),
    "latent with an indexer": (indexer, latent),
}


@pytest.fixture
def engine_args(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """engine_args(**args): a VllmConfig. No platform is needed, and the model is not imported."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.models import registry
    from vllm.platforms import current_platform

    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    monkeypatch.setattr(type(current_platform), "device_type", "cpu")
    monkeypatch.setattr(type(current_platform), "support_hybrid_kv_cache", lambda _: True)
    names = (field.name for field in dataclasses.fields(registry._ModelInfo))
    info: dict[str, Any] = dict.fromkeys(names, False)
    info |= {"architecture": "LlamaForCausalLM", "is_text_generation_model": True}
    inspected = registry._ModelInfo(**info)
    monkeypatch.setattr(registry, "_try_inspect_model_cls", lambda *_: inspected)
    transfer = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}

    def create(**args: Any) -> Any:
        model = {"model": str(tmp_path), "tokenizer": str(tmp_path), "skip_tokenizer_init": True}
        return EngineArgs(
            **model,
            load_format="dummy",
            kv_transfer_config=transfer,
            max_model_len=2048,
            **args,
        ).create_engine_config()

    return create


def layouts() -> list[str]:
    """The layouts that vLLM can have with blocks that are copied whole; "" before 0.29."""
    try:
        from vllm.v1.kv_cache_layout import KVCacheLayout
    except ImportError:
        return [""]
    return [layout.name for layout in KVCacheLayout if layout.is_block_compact]


def plan(config: Any, model: str, layout: str, nbytes: int, ranks: int = 1) -> tuple[Any, Any]:
    """(scheduler's, last worker's) KVCacheConfig, as vLLM's engine core plans them."""
    from vllm.v1.core import kv_cache_utils

    kinds = MODELS[model]
    specs = [{f"layer.{n}": kinds[n % 2]() for n in range(LAYERS)}] * ranks
    if layout:
        config.cache_config.kv_cache_layout = layout
    try:  # since 0.33
        from vllm.v1.core import kv_cache_planning as planning
    except ImportError:
        planned = kv_cache_utils.get_kv_cache_configs(config, specs, [nbytes] * ranks)
    else:
        groups = planning.get_global_kv_cache_groups(config, specs)
        planned = planning.get_kv_cache_configs(config, specs, [nbytes] * ranks, groups)
    worker = planned[-1]
    if layout:
        worker.kv_cache_layout = layout
    scheduler = kv_cache_utils.generate_scheduler_kv_cache_config([copy.deepcopy(worker)])
    return scheduler, pickle.loads(pickle.dumps(worker))


def read(config: Any, kv_cache_config: Any) -> Fingerprint:
    groups = len(kv_cache_config.kv_cache_groups)
    return read_fingerprint(config, kv_cache_config, BlockSizes((16,) * groups, 16, 1))


@pytest.mark.parametrize("layout", layouts())
@pytest.mark.parametrize("model", MODELS)
def test_the_scheduler_the_workers_and_another_start_read_the_same(
    model: str, layout: str, engine_args: Any
) -> None:
    config = engine_args()
    scheduler, worker = plan(config, model, layout, GIB)
    expected = read(config, scheduler)
    assert expected.kv_layout == layout
    assert read(pickle.loads(pickle.dumps(config)), worker) == expected
    assert expected.host_block_bytes == block_bytes(worker)
    # With more memory, and so other numbers and strides of blocks.
    later = engine_args(max_num_seqs=7, gpu_memory_utilization=0.5)
    larger, _ = plan(later, model, layout, GIB + GIB // 4)
    assert larger.num_blocks > scheduler.num_blocks
    assert read(later, larger) == expected


@pytest.mark.parametrize("model", MODELS)
def test_ranks_of_a_latent_model_have_one_fingerprint(model: str, engine_args: Any) -> None:
    config = engine_args()
    config.parallel_config.tensor_parallel_size = config.parallel_config.world_size = 2
    scheduler, worker = plan(config, model, layouts()[0], GIB, ranks=2)
    expected = read(config, scheduler)
    config.parallel_config.rank = 1
    found = read(pickle.loads(pickle.dumps(config)), worker)
    assert (found == expected) == (model == "latent with an indexer")
