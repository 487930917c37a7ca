"""The KV cache that vLLM 0.33 plans for a model, and the connector's start with it.

    python -m support.vllm_families DIRECTORY gemma3 qwen3-next ...

For each family (family_configs.py) it does what `vllm serve` does with the command of README.md,
except loading weights: vLLM's configuration, the model's layers, their KV cache specs, groups,
layout and tensors, then the connector's both sides with the daemon in DIRECTORY. Two blocks of each
group are stored and loaded to other blocks. Prints a line of JSON for each family: its groups; or
the code and message with which its configuration is refused; or a traceback.
"""

from __future__ import annotations

from support.planned_gpu import MissingKernel  # isort: skip

import json
import sys
import tempfile
import traceback
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from vllm.config import set_current_vllm_config
from vllm.distributed import (
    destroy_distributed_environment,
    destroy_model_parallel,
    init_distributed_environment,
    initialize_model_parallel,
)
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.utils import get_current_attn_backends
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.model_loader.utils import get_model_architecture, initialize_model
from vllm.platforms import current_platform
from vllm.utils.torch_utils import set_default_torch_dtype
from vllm.v1.attention.backends.utils import (
    get_supported_kv_cache_layouts,
    resolve_kv_cache_layout,
)
from vllm.v1.core.kv_cache_planning import (
    get_global_kv_cache_groups,
    get_kv_cache_configs,
    kv_cache_groups_tp_replicas,
)
from vllm.v1.core.kv_cache_utils import (
    generate_scheduler_kv_cache_config,
    resolve_cache_hit_alignment_tokens,
    resolve_kv_cache_block_sizes,
)
from vllm.v1.kv_cache_interface import MambaSpec, iter_layer_specs
from vllm.v1.worker.gpu.attn_utils import get_kv_cache_spec
from vllm.v1.worker.utils import AttentionGroup, allocate_kv_cache, prepare_kernel_block_sizes

from kvferry.client import KVFerryError, shared_empty
from kvferry.client.vllm.kv_cache_plan import offloaded_groups
from kvferry.client.vllm.scheduler_side import KeysSpec
from support.family_configs import FAMILIES, PlannedFamily
from support.vllm_stand_ins import finished, wait_connected

GPU_BLOCKS = 512
MAX_TOKENS = 512
# Allocates on a GPU.
FLASHINFER_BUFFER = "vllm.v1.attention.backends.flashinfer._get_multi_ctas_kv_counter_buffer"


def configure(family: PlannedFamily, directory: str) -> Any:
    """The VllmConfig that `vllm serve` makes with the command of README.md."""
    folder = Path(tempfile.mkdtemp(prefix="kvferry-family-"))
    (folder / "config.json").write_text(json.dumps(family.config))
    transfer = {
        "kv_connector": "KVFerryConnector",
        "kv_connector_module_path": "kvferry.client.vllm",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"kvferry_dirs": directory, "kvferry_salt": "test"},
    }
    options = dict(family.options)
    if family.draft is not None:
        draft = folder / "draft"
        draft.mkdir()
        (draft / "config.json").write_text(json.dumps(family.draft))
        options["speculative_config"] = {**options["speculative_config"], "model": str(draft)}
    return EngineArgs(
        model=str(folder),
        tokenizer=str(folder),
        skip_tokenizer_init=True,
        load_format="dummy",
        max_model_len=MAX_TOKENS,
        max_num_batched_tokens=4 * MAX_TOKENS,
        num_gpu_blocks_override=GPU_BLOCKS,
        enforce_eager=True,  # no compiler is here
        kv_transfer_config=transfer,
        **options,
    ).create_engine_config()


def build_layers(config: Any) -> None:
    """Build the model, and the one that drafts, without weights."""
    models = [config.model_config]
    if config.speculative_config is not None:
        models.append(config.speculative_config.draft_model_config)
    for model in models:
        known = set(config.compilation_config.static_forward_context)
        get_model_architecture(model)
        with ExitStack() as stack:
            stack.enter_context(mock.patch.object(MissingKernel, "building", True))
            stack.enter_context(mock.patch(FLASHINFER_BUFFER))
            stack.enter_context(set_default_torch_dtype(model.dtype))
            stack.enter_context(torch.device("meta"))
            initialize_model(config, model_config=model)
        if model is not config.model_config:
            for name, layer in config.compilation_config.static_forward_context.items():
                if name not in known and isinstance(layer, AttentionLayerBase):
                    layer.is_draft_layer = True


def plan(config: Any) -> tuple[Any, Any]:
    """(worker's, scheduler's) KVCacheConfig, as vLLM's engine core plans them."""
    current_platform.update_block_size_for_backend(config)
    specs = get_kv_cache_spec(config)
    backends = get_current_attn_backends(config)
    layouts = [layout.name for layout in get_supported_kv_cache_layouts(backends)]
    resolve_kv_cache_layout(config, [layouts], list(specs.values()))
    groups = get_global_kv_cache_groups(config, [specs])
    (worker,) = get_kv_cache_configs(config, [specs], [1 << 40], groups)
    worker.kv_cache_layout = config.cache_config.kv_cache_layout
    scheduler = generate_scheduler_kv_cache_config([worker])
    config.cache_config.num_gpu_blocks = scheduler.num_blocks
    sizes = [
        group.kv_cache_spec.block_size
        for group in scheduler.kv_cache_groups
        if group.kv_cache_spec.prefix_cacheable
    ]
    config.cache_config.block_size = min(sizes)
    config.validate_block_size()
    block, hash_block = resolve_kv_cache_block_sizes(scheduler, config)
    for planned in (worker, scheduler):
        planned.hash_block_size = hash_block
        planned.cache_hit_alignment_tokens = resolve_cache_hit_alignment_tokens(
            scheduler, config, block, hash_block
        )
    return worker, scheduler


def allocate(config: Any, caches: Any) -> Any:
    """The tensors of all layers, as vLLM's worker allocates them, but in shared memory."""
    layers = config.compilation_config.static_forward_context
    by_group = [
        [
            AttentionGroup(layers[name].get_attn_backend(), [name], spec, number)
            for name, spec in specs_of(group).items()
        ]
        for number, group in enumerate(caches.kv_cache_groups)
    ]
    kernel_blocks = prepare_kernel_block_sizes(caches, by_group)
    layout = config.cache_config.get_resolved_kv_cache_layout()

    def zeros(nbytes: int, **_: Any) -> torch.Tensor:
        return shared_empty((nbytes,), torch.int8, "cpu")

    with mock.patch("torch.zeros", zeros):
        return allocate_kv_cache(caches, torch.device("cpu"), layout, kernel_blocks)


def specs_of(group: Any) -> dict[str, Any]:
    """The spec of each layer of a group."""
    specs = list(iter_layer_specs(group.kv_cache_spec))
    if len(specs) == 1:
        specs *= len(group.layer_names)
    return dict(zip(group.layer_names, specs, strict=True))


def kv_bytes_of(spec: Any) -> float:
    """What a layer keeps: bytes per token; of a window or a state, bytes at the end of a prefix."""
    if isinstance(spec, MambaSpec):
        return float(spec.state_content_size_bytes)
    window = getattr(spec, "sliding_window", None) or getattr(spec, "attention_chunk_size", None)
    return float(spec.unpadded_page_size_bytes / spec.block_size * (window or 1))


def describe(group: Any, number: int, caches: Any) -> dict[str, Any]:
    kinds = {type(spec).__name__.removesuffix("Spec") for spec in specs_of(group).values()}
    return {
        "kinds": sorted(kinds),
        "layers": len(group.layer_names),
        "kv bytes": sum(map(kv_bytes_of, specs_of(group).values())),
        "tokens": group.kv_cache_spec.block_size,
        "offloaded": number in caches.prefix_cacheable_group_ids,
        "drafts": group.is_eagle_group,
    }


class StartedEngine:
    """Both sides of the connector, with vLLM's tensors of all layers."""

    def __init__(self, config: Any, worker: Any, scheduler: Any) -> None:
        self._caches = worker
        create = KVConnectorFactory.create_connector
        self._scheduler = create(config, KVConnectorRole.SCHEDULER, scheduler)
        self._worker = create(config, KVConnectorRole.WORKER, worker)
        self._layers = allocate(config, worker)
        self._worker.register_kv_caches(self._layers)
        self._side: Any = self._worker.connector_worker.worker
        wait_connected(self._side.session.client)
        manager = self._scheduler.connector_scheduler.manager
        assert manager._config.fingerprint == self._side._config.fingerprint

    @property
    def packs(self) -> bool:
        """Whether host blocks are packed."""
        return bool(self._side._config.packs)

    def round_trip(self) -> int:
        """Store two chunks of each group, and load them to others. Returns the bytes stored."""
        groups = offloaded_groups(self._caches)
        count = 2 * self._side._config.factor
        source = list(range(1, 1 + count))
        target = list(range(GPU_BLOCKS - count, GPU_BLOCKS))
        generator, stored = np.random.default_rng(0), 0
        # Groups overlay each other: one at a time has these blocks.
        for number, group in zip(self._caches.prefix_cacheable_group_ids, groups, strict=True):
            pages = {name: self._pages(name, spec) for name, spec in specs_of(group).items()}
            before = {}
            for name, page in pages.items():
                if self.packs:
                    values = generator.normal(size=(count, page.shape[1] // 2))
                    noise = torch.from_numpy(values).to(torch.bfloat16).view(torch.uint8)
                else:
                    noise = torch.from_numpy(
                        generator.integers(0, 256, (count, page.shape[1]), np.uint8)
                    )
                before[name] = page[source] = noise
            keys = KeysSpec(tuple(bytes([n]) * 32 + number.to_bytes(4, "big") for n in (1, 2)))
            self._side.store(2 * number, blocks_of(groups, group, source), keys)
            (result,) = finished(self._side, 1).values()
            assert result.success
            stored += result.transfer_size or 0
            self._side.load(2 * number + 1, keys, blocks_of(groups, group, target))
            (result,) = finished(self._side, 1).values()
            assert result.success
            for name, page in pages.items():
                assert torch.equal(page[target], before[name]), name
        return stored

    def _pages(self, name: str, spec: Any) -> torch.Tensor:
        """The pages of a layer, without padding: (blocks, bytes)."""
        (placed,) = [t for t in self._caches.kv_cache_tensors if name in t.layers]
        nbytes = (
            spec.state_content_size_bytes
            if isinstance(spec, MambaSpec)
            else spec.unpadded_page_size_bytes
        )
        first = placed.offset + placed.layers.index(name) * placed.layer_stride
        buffer = torch.tensor([], dtype=torch.uint8).set_(self._layers[name].untyped_storage())
        return buffer.as_strided((GPU_BLOCKS, nbytes), (placed.block_stride, 1), first)

    def close(self) -> None:
        self._scheduler.shutdown()
        self._worker.shutdown()


def blocks_of(groups: list[Any], chosen: Any, ids: list[int]) -> Any:
    """A GPULoadStoreSpec with blocks of one group."""
    sizes = [len(ids) if group is chosen else 0 for group in groups]
    return SimpleNamespace(
        block_ids=np.array(ids, np.int64), group_sizes=sizes, block_indices=[0] * len(groups)
    )


def start(family: PlannedFamily, directory: str) -> dict[str, Any]:
    """Start a family. Returns the line to print."""
    with ExitStack() as stack:
        config = configure(family, directory)
        stack.enter_context(set_current_vllm_config(config))
        store = f"file://{tempfile.mkdtemp(prefix='kvferry-store-')}/store"
        init_distributed_environment(1, 0, store, 0, "gloo")
        stack.callback(destroy_distributed_environment)
        initialize_model_parallel(1, 1, backend="gloo")
        stack.callback(destroy_model_parallel)
        build_layers(config)
        worker, scheduler = plan(config)
        engine = StartedEngine(config, worker, scheduler)
        stack.callback(engine.close)
        return {
            "runner": "v2" if config.use_v2_model_runner else "v1",
            "layout": worker.kv_cache_layout,
            "replicated": kv_cache_groups_tp_replicas(worker.kv_cache_groups, 2) == 2,
            "groups": [describe(g, n, worker) for n, g in enumerate(worker.kv_cache_groups)],
            "packed": engine.packs,
            "stored bytes": engine.round_trip(),
        }


def main() -> None:
    directory, *names = sys.argv[1:]
    for name in names:
        try:
            result = start(FAMILIES[name], directory)
        except KVFerryError as error:
            result = {"code": str(error.code), "message": str(error)}
        except Exception:
            result = {"failure": traceback.format_exc()}
        print(json.dumps({"family": name, **result}), flush=True)


if __name__ == "__main__":
    main()
