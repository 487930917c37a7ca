"""vLLM 0.33 with a model of each family in deploy/vllm.md, and no environment variable.

The models' layers and their KV cache are those of vLLM; see tests/support/vllm_families.py.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvferry.client import LocalDaemon
from support.family_configs import FAMILIES
from support.kv_bytes import kv_bytes
from support.time_limits import TIMEOUT
from support.vllm_version import has_vllm

TESTS = Path(__file__).parents[2]

FULL, LATENT, MAMBA, WINDOW = "FullAttention", "MLAAttention", "Mamba", "SlidingWindow"
# vLLM caches no prefixes of it.
RING = "CircularBuffer"
HYBRID = [MAMBA, MAMBA, MAMBA, FULL]
# The KV cache groups that vLLM makes.
GROUPS = {
    "llama": [FULL],
    "qwen3": [FULL],
    "fp8": [FULL],
    "nvfp4": [FULL],
    "turboquant": [FULL],
    "gemma3": [WINDOW] * 5 + [FULL],
    "gpt-oss": [WINDOW, FULL],
    "llama4": ["ChunkedLocalAttention"] * 3 + [FULL],
    "deepseek-v3": [LATENT],
    "deepseek-v3.2": [LATENT],
    "glm-5": [LATENT],
    "deepseek-v4": [*["SlidingWindowMLA"] * 2, LATENT, *["SlidingWindowMLA"] * 2],
    "qwen3-next": HYBRID,
    "qwen3.5": HYBRID,
    "qwen4-exp": [MAMBA, MAMBA, MAMBA, RING, f"{FULL}, {LATENT}"],
    "kimi-linear": [MAMBA, MAMBA, MAMBA, LATENT],
    "kimi-k3": [MAMBA, MAMBA, MAMBA, LATENT],
    "nemotron-h": [MAMBA, MAMBA, FULL],
    "granite4": HYBRID,
    "falcon-h1": [FULL, MAMBA],
    "lfm2": HYBRID,
    "eagle3": [FULL],
    "mtp": [LATENT],
    "mtp hybrid": [MAMBA, MAMBA, FULL],
}
WITH_DRAFT = "eagle3", "mtp", "mtp hybrid"
REFUSED = "whisper", "bert"
# Their KV has other bytes than the config.json of the model says: options, and drafting layers.
OTHER_KV = *WITH_DRAFT, "fp8", "nvfp4", "turboquant"
# All their KV is bfloat16, and their groups have blocks of one size.
PACKED = "llama", "qwen3", "gemma3", "gpt-oss", "llama4", "eagle3"
# All tensor-parallel ranks hold the same bytes.
REPLICATED = "deepseek-v3", "deepseek-v3.2", "glm-5", "deepseek-v4", "mtp"


@pytest.fixture(scope="module")
def started() -> dict[str, dict[str, Any]]:
    """The lines that the start of each family prints."""
    if not has_vllm(0, 33):
        pytest.skip("vLLM 0.33 is not installed, nor a newer one")
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("VLLM_") and name != "PYTHONHASHSEED"
    }
    with LocalDaemon("cpu", pool_bytes=512 << 20) as daemon:
        done = subprocess.run(
            [sys.executable, "-m", "support.vllm_families", str(daemon.directory), *FAMILIES],
            env={**environment, "PYTHONPATH": str(TESTS)},
            capture_output=True,
            text=True,
            timeout=20 * TIMEOUT,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    results = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {result["family"]: result for result in results}


def test_each_family_is_tested() -> None:
    assert FAMILIES.keys() == GROUPS.keys() | set(REFUSED)


@pytest.mark.parametrize("family", GROUPS)
def test_the_groups_of_a_model_are_stored_and_loaded(
    started: dict[str, dict[str, Any]], family: str
) -> None:
    result = started[family]
    assert "groups" in result, result
    groups = result["groups"]
    assert [", ".join(group["kinds"]) for group in groups] == GROUPS[family]
    assert all(group["offloaded"] == (group["kinds"] != [RING]) for group in groups)
    assert any(group["drafts"] for group in groups) == (family in WITH_DRAFT)
    assert result["stored bytes"] > 0
    assert result["runner"] == "v2"
    assert result["replicated"] == (family in REPLICATED)
    assert result["packed"] == (family in PACKED)


@pytest.mark.parametrize("family", [name for name in GROUPS if name not in OTHER_KV])
def test_the_bytes_of_a_config_are_those_that_vllm_plans(
    started: dict[str, dict[str, Any]], family: str
) -> None:
    """So the table of deploy/README.md has vLLM's sizes."""
    groups = [group for group in started[family]["groups"] if group["offloaded"]]
    per_token = [group["kv bytes"] for group in groups if {*group["kinds"]} <= {FULL, LATENT}]
    config = FAMILIES[family].config
    computed = kv_bytes(config.get("text_config", config))
    assert sum(per_token) == computed.per_token
    assert sum(group["kv bytes"] for group in groups) - sum(per_token) == computed.per_prefix


@pytest.mark.parametrize("family", REFUSED)
def test_models_without_prefixes_are_refused(
    started: dict[str, dict[str, Any]], family: str
) -> None:
    """When vLLM asks the connector for a layout: it has loaded the weights, and planned nothing."""
    result = started[family]
    assert result["code"] == "bad_config"
    assert "start vLLM without --kv-transfer-config" in result["message"]
