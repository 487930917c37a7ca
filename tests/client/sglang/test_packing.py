"""Which KV is packed in host memory, by SGLang's pools."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvferry.client.engines.options import PackMode
from kvferry.client.sglang.packing import packs
from kvferry.proto.errors import Code, Refused


def source(name: str = "kv", *buffers: torch.Tensor) -> Any:
    return SimpleNamespace(name=name, buffers=buffers or (values(), values()))


def values(dtype: torch.dtype = torch.bfloat16, count: int = 1024, device: str = "cpu") -> Any:
    return torch.empty(3, count, dtype=dtype, device=device)


class OnGpu:
    """A buffer of values(), as if on a GPU."""

    dtype, shape, itemsize, is_cuda = torch.bfloat16, (3, 1024), 2, True


def test_auto_packs_bfloat16_on_gpus() -> None:
    on_gpu: Any = OnGpu()
    assert packs(PackMode.AUTO, [source("kv", on_gpu, on_gpu)])
    assert not packs(PackMode.AUTO, [source("kv", on_gpu, values(torch.uint8))])
    assert not packs(PackMode.AUTO, [source()])
    assert packs(PackMode.ON, [source()])
    assert not packs(PackMode.OFF, [source("kv", on_gpu)])


@pytest.mark.parametrize(
    ("sources", "reason"),
    [
        ([source("kv", values(), values(torch.float32))], "values of float32, not bfloat16"),
        ([source("kv", values(torch.float8_e4m3fn, 2048))], "float8_e4m3fn, not bfloat16"),
        ([source("kv", values(), values(count=1536))], "has 3072 bytes, no multiple of 2048"),
        ([source(), source("swa")], "swa pages beside those of full attention"),
        ([source(), source("mamba")], "mamba pages"),
    ],
)
def test_what_is_not_packed(sources: list[Any], reason: str) -> None:
    assert not packs(PackMode.AUTO, sources)
    assert not packs(PackMode.OFF, sources)
    with pytest.raises(Refused, match=reason) as refused:
        packs(PackMode.ON, sources)
    assert refused.value.code == Code.BAD_CONFIG
