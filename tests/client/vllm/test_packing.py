"""Which KV is packed in host memory, as vLLM's configuration tells."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvferry.client.vllm import packing
from kvferry.client.vllm.packing import packs
from kvferry.proto.errors import Code, Refused

BYTES = 2 << 20


def group(dtype: str = "torch.bfloat16", page: int = 65536, **fields: Any) -> Any:
    return SimpleNamespace(
        layer_names=["layer"] * (BYTES // page),
        kv_cache_spec=SimpleNamespace(dtype=dtype, page_size_bytes=page, **fields),
    )


def decide(
    mode: str | None, *groups: Any, nbytes: int = BYTES, stages: int = 1, rows: bool = False
) -> bool:
    config = SimpleNamespace(
        kv_transfer_config=SimpleNamespace(kv_connector_extra_config={"kvferry_pack": mode}),
        parallel_config=SimpleNamespace(pipeline_parallel_size=stages),
    )
    return packs(config, groups or [group()], nbytes, rows=rows)


def test_auto_packs_bfloat16_on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not decide(None)  # this machine has none
    monkeypatch.setattr(packing, "_on_gpu", lambda: True)
    assert decide(None)
    assert decide("auto")
    assert not decide("off")
    assert not decide("auto", group(), group("torch.float8_e4m3fn"))


@pytest.mark.parametrize(
    ("options", "groups", "reason"),
    [
        ({}, [group("torch.float16")], "float16, not bfloat16"),
        ({}, [group(), group(dtypes=("torch.bfloat16",))], "not bfloat16"),
        ({}, [group(page=6144)], "a page has 6144 bytes, no multiple of 4096"),
        ({}, [group(page=8192, real_page_size_bytes=6144)], "a page has 6144 bytes"),
        # Quantized but for its first layer, as the scheduler sees it.
        ({"nbytes": BYTES - 1024}, [group()], "pages of several sizes"),
        ({}, [group(), group(page=32768, layers=32)], "pages of several sizes"),
        ({"stages": 2}, [group()], "pipeline parallelism"),
        ({"rows": True}, [group()], "blocks of several sizes"),
    ],
)
def test_what_is_not_packed(options: dict[str, Any], groups: list[Any], reason: str) -> None:
    assert not decide("auto", *groups, **options)
    assert not decide("off", *groups, **options)
    with pytest.raises(Refused, match=reason) as refused:
        decide("on", *groups, **options)
    assert refused.value.code == Code.BAD_CONFIG


def test_all_layers_of_a_group_that_are_known_must_be_bfloat16() -> None:
    layers = group()
    specs = {"a": layers.kv_cache_spec}
    layers.kv_cache_spec = SimpleNamespace(kv_cache_specs=specs)
    assert decide("on", layers)
    specs["b"] = group("torch.uint8").kv_cache_spec
    with pytest.raises(Refused, match="uint8, not bfloat16"):
        decide("on", layers)
