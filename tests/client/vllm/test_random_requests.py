"""Random requests of every kind of model, with vLLM's scheduler and block pool and the connector.

The worker writes blocks in the order of vLLM's model runner v2, and compares every token and state
that attention and Mamba layers would read. --long: 100,000 loaded chunks, in about 20 minutes.
"""

from __future__ import annotations

import random
from importlib.util import find_spec
from typing import Any

import pytest

from kvferry.testing.plugin import StartKvferryd
from support.vllm_traffic import RandomRequests, create_engine

pytestmark = pytest.mark.filterwarnings("ignore")  # vLLM's own

# KV cache groups (vllm_runner.specs), and tokens drafted per step.
MODELS = [
    (("full", "aligned states"), 0),
    (("full", "narrow"), 0),
    (("full", "narrow", "aligned states"), 0),
    (("full", "local"), 0),
    (("latent", "window", "local"), 0),
    (("full", "draft"), 2),
    (("full", "aligned states", "draft"), 2),
]
# In these vLLM writes blocks before it lets a connector wait for stores.
EARLY = [(("full", "aligned states"), 0), (("full", "narrow"), 0)]
HOST_BYTES = 1 << 18
LONG_CHUNKS = 100_000


@pytest.fixture(scope="module")
def core() -> Any:
    if find_spec("vllm") is None:
        pytest.skip("vLLM is not installed")
    from support import vllm_core

    return vllm_core


@pytest.fixture(autouse=True)
def environment(core: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Model runner v2 is the default from vLLM 0.29; before, its configuration needs Triton."""
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", str(int(core.ONE_ALLOCATION)))


def run(requests: RandomRequests, steps: int) -> None:
    for _ in range(steps):
        requests.step()
    requests.finish()


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize(("groups", "drafts"), MODELS)
def test_nothing_wrong_is_read(
    core: Any,
    start_kvferryd: StartKvferryd,
    pytestconfig: pytest.Config,
    groups: tuple[str, ...],
    drafts: int,
    overlaps: bool,
) -> None:
    if not core.ONE_ALLOCATION and groups != ("full", "narrow"):
        pytest.skip("the runner of the test has the Mamba states and groups of vLLM 0.29 and newer")
    directory = start_kvferryd().directory
    engine = create_engine(directory, groups, drafts, host_bytes=HOST_BYTES, overlaps=overlaps)
    requests = RandomRequests(engine, random.Random(pytestconfig.option.seed))
    wanted = LONG_CHUNKS // (2 * len(MODELS)) if pytestconfig.option.long else 1
    while not requests.resets or (engine.loaded < wanted and not engine.wrong):
        run(requests, 1500)
    print(f"{engine.runner.compared} blocks compared, {engine.loaded} chunks loaded")
    assert not engine.wrong, f"seed {pytestconfig.option.seed}"
    engine.close()


@pytest.mark.parametrize(("groups", "drafts"), EARLY)
def test_without_holding_blocks_other_bytes_are_read(
    core: Any, start_kvferryd: StartKvferryd, groups: tuple[str, ...], drafts: int
) -> None:
    """So these tests can see that a block changed before it was stored."""
    if not core.ONE_ALLOCATION:
        pytest.skip("this vLLM lets a connector wait for stores before it writes blocks")
    engine = create_engine(start_kvferryd().directory, groups, drafts, host_bytes=HOST_BYTES)
    assert engine.scheduler.connector._held is not None
    engine.scheduler.connector._held = None
    requests = RandomRequests(engine, random.Random(0))
    for _ in range(200):  # a round usually is enough, but the store may always be faster
        if not engine.wrong:
            run(requests, 500)
    assert engine.wrong
    engine.close()
