"""vLLM on a GPU that is only planned with: its models are built and its KV cache is planned.

Importing this replaces vLLM's platform by an H100 without kernels, so it must be imported before
vLLM, in a process of its own (vllm_families.py). Models are built on torch's "meta" device: they
have layers and no weights. Tensors of the KV cache are in shared memory. Needs vLLM 0.33.
"""

from __future__ import annotations

import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch
from torch import _ops

# Kernels that vLLM imports, and the namespaces of their operators.
for _name in ("_C_stable_libtorch", "vllm_flash_attn._vllm_fa2_C", "vllm_flash_attn._vllm_fa3_C"):
    sys.modules[f"vllm.{_name}"] = ModuleType(_name)
NAMESPACES = "_C", "_moe_C", "_C_cache_ops"


# Packages with kernels, or for images, which vLLM's wheel requires.
PACKAGES = "cuda", "cutlass", "deep_gemm", "flashinfer", "torchvision"


def missing(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return MissingType(name, (), {})


class MissingType(type):
    """A class in a missing package, or anything else in it."""

    def __getattr__(cls, name: str) -> Any:
        return missing(name)

    def __call__(cls, *_: Any, **__: Any) -> Any:
        return cls

    def __getitem__(cls, _: Any) -> Any:
        return cls

    def __index__(cls) -> int:
        return 1


class MissingModule(ModuleType):
    def __getattr__(self, name: str) -> Any:
        return missing(name)


class MissingPackages(MetaPathFinder, Loader):
    def find_spec(self, name: str, *_: Any) -> ModuleSpec | None:
        found = name.partition(".")[0] in PACKAGES
        return ModuleSpec(name, self, is_package=True) if found else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = MissingModule(spec.name)
        module.__path__ = []
        return module

    def exec_module(self, module: ModuleType) -> None: ...


class MissingKernel:
    """An operator that is not compiled. Layers keep it; "is this supported?" is answered by no."""

    building = False

    def __call__(self, *_: Any, **__: Any) -> bool:
        return False

    @property
    def default(self) -> MissingKernel:
        return self


_find_operator = _ops._OpNamespace.__getattr__


def find_operator(namespace: Any, name: str) -> Any:
    """Modules ask for operators at their import, to register variants only of those that exist."""
    try:
        return _find_operator(namespace, name)
    except AttributeError:
        needed = MissingKernel.building or "support" in name
        if namespace.name in NAMESPACES and needed and not name.startswith("__"):
            return MissingKernel()
        raise


class NoStream:
    def __init__(self, *_: Any, **__: Any) -> None: ...


_ops._OpNamespace.__getattr__ = find_operator  # type: ignore[method-assign]
torch.cuda.Stream = torch.cuda.Event = NoStream  # type: ignore[assignment,misc]
torch.cuda.current_stream = NoStream  # type: ignore[assignment]

import vllm.platforms  # noqa: E402
from vllm.platforms.cuda import NonNvmlCudaPlatform  # noqa: E402
from vllm.platforms.interface import DeviceCapability  # noqa: E402


class PlannedGPU(NonNvmlCudaPlatform):
    """An H100, whose tensors are on no device."""

    device_type = "meta"

    @classmethod
    def current_device(cls) -> Any:
        return torch.device("meta")

    @classmethod
    def get_device_capability(cls, device_id: int = 0) -> Any:
        return DeviceCapability(9, 0)

    @classmethod
    def has_device_capability(cls, capability: Any, device_id: int = 0) -> bool:
        wanted = divmod(capability, 10) if isinstance(capability, int) else tuple(capability)
        return wanted <= (9, 0)

    @classmethod
    def get_device_name(cls, device_id: int = 0) -> str:
        return "NVIDIA H100 80GB HBM3"

    @classmethod
    def get_device_total_memory(cls, device_id: int = 0) -> int:
        return 80 << 30

    @classmethod
    def num_compute_units(cls, device_id: int = 0) -> int:
        return 132

    @classmethod
    def device_count(cls) -> int:
        return 1

    @classmethod
    def is_integrated_gpu(cls, device_id: int = 0) -> bool:
        return False

    @classmethod
    def import_kernels(cls) -> None: ...


vllm.platforms.current_platform = PlannedGPU()

import vllm.config.vllm  # noqa: E402
from vllm.model_executor.models import registry  # noqa: E402
from vllm.triton_utils import triton  # noqa: E402


class TritonConfig:
    def __init__(
        self, kwargs: Any = None, num_warps: int = 4, num_stages: int = 1, **_: Any
    ) -> None:
        self.kwargs, self.num_warps, self.num_stages = kwargs or {}, num_warps, num_stages


def inspect_model(_: str, model: Any) -> Any:
    """In this process; vLLM inspects models in another one, which has no planned GPU."""
    return registry._ModelInfo.from_model_cls(model.load_model_cls())


triton.Config = TritonConfig
vllm.config.vllm.HAS_TRITON = True
# Later than transformers, which looks for torchvision's version.
sys.meta_path.append(MissingPackages())
registry._try_inspect_model_cls = inspect_model
