"""Random requests of every kind of model, with vLLM's scheduler and block pool and the connector.

The worker writes blocks in the order of vLLM's model runner v2, and compares every token and state
that attention and Mamba layers would read. --long: 100,000 loaded chunks, in about 20 minutes; and
as many with vLLM's own connector.
"""

from __future__ import annotations

import random
from importlib.util import find_spec
from typing import Any, get_args

import pytest

from kvferry.proto.version import installed_version
from kvferry.testing.plugin import StartKvferryd
from support.vllm_traffic import RandomRequests, create_engine, gpu_blocks

pytestmark = pytest.mark.filterwarnings("ignore")  # vLLM's own

# KV cache groups (vllm_runner.specs), and tokens drafted per step.
MODELS = [
    (("full",), 2),
    (("full", "aligned states"), 0),
    (("full", "all states"), 0),
    (("full", "narrow"), 0),
    (("full", "narrow", "aligned states"), 0),
    (("full", "local"), 0),
    (("latent", "window"), 0),
    (("latent", "window", "local"), 0),
    (("full", "draft"), 2),
    (("full", "aligned states", "draft"), 2),
]
# In these vLLM's model runner v2 writes blocks before it lets a connector wait for stores.
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
    """Model runner v2 is the default from vLLM 0.29."""
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", str(int(core.ONE_ALLOCATION)))
    monkeypatch.setattr("vllm.config.vllm.HAS_TRITON", True)


def has_model(core: Any, groups: tuple[str, ...]) -> bool:
    """Whether this vLLM has models with these groups, and kvferry does not refuse them."""
    from vllm.config import cache

    from kvferry.client.vllm import compat

    has = {
        "aligned states": compat.OFFLOADS_MAMBA_STATES,
        "all states": compat.OFFLOADS_MAMBA_STATES and "all" in get_args(cache.MambaCacheMode),
        "local": compat.can_offload_local_attention(),
        "draft": core.ONE_ALLOCATION,  # before 0.29 in the group of the model's layers
    }
    return all(has.get(group, True) for group in groups)


def start(core: Any, daemon: Any, groups: tuple[str, ...], drafts: int, **options: Any) -> Any:
    """With one block per chunk: of larger ones, prompts with drafting layers would load none."""
    extra = core.kvferry_options(daemon.directory, HOST_BYTES) | {"blocks_per_chunk": 1}
    return create_engine(
        daemon.directory, groups, drafts, kv_connector_extra_config=extra, **options
    )


def wanted_chunks(core: Any, config: pytest.Config) -> int:
    models = sum(has_model(core, groups) for groups, _ in MODELS)
    return LONG_CHUNKS // (2 * models) if config.option.long else 1


def run(requests: RandomRequests, steps: int) -> None:
    for _ in range(steps):
        requests.step()
    requests.finish()


@pytest.mark.timeout(3600)  # the long form
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
    if not has_model(core, groups):
        pytest.skip("this vLLM has no such model, or kvferry refuses it")
    engine = start(core, start_kvferryd(), groups, drafts, overlaps=overlaps)
    requests = RandomRequests(engine, random.Random(pytestconfig.option.seed))
    wanted = wanted_chunks(core, pytestconfig)
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
    engine = start(core, start_kvferryd(), groups, drafts)
    assert engine.scheduler.connector._held is not None
    engine.scheduler.connector._held = None
    requests = RandomRequests(engine, random.Random(0))
    for _ in range(200):  # a round usually is enough, but the store may always be faster
        if not engine.wrong:
            run(requests, 500)
    assert engine.wrong
    engine.close()


@pytest.mark.timeout(3600)  # the long form
@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize(("groups", "drafts"), MODELS)
def test_what_vllms_own_connector_reads(
    core: Any,
    pytestconfig: pytest.Config,
    groups: tuple[str, ...],
    drafts: int,
    overlaps: bool,
) -> None:
    """It stores blocks that vLLM has set to zero, although this worker copies at once."""
    if not (installed_version("vllm") or "").startswith("0.33.") or not has_model(core, groups):
        pytest.skip("vLLM 0.33 is not installed, or has no such model")
    if groups != ("full", "narrow") and not pytestconfig.option.long:
        pytest.skip("only with --long")
    from support.vllm_own import OwnEngineCore

    engine: Any = OwnEngineCore(
        groups, 4096, blocks=gpu_blocks(groups, drafts), drafts=drafts, overlaps=overlaps
    )
    requests = RandomRequests(engine, random.Random(pytestconfig.option.seed))
    while engine.loaded < wanted_chunks(core, pytestconfig):
        run(requests, 1500)
    print(
        f"{engine.loaded} chunks loaded; {len(engine.wrong)} of {engine.runner.reads} reads wrong"
    )
    assert engine.wrong or groups != ("full", "narrow")
    engine.close()
