"""Random requests of every kind of model, with vLLM's scheduler and block pool and the connector.

The worker writes blocks in the order of vLLM's model runner, v1 or v2, and compares every token and
state that attention and Mamba layers would read. --long: 100,000 loaded chunks, in about 20
minutes; and as many with vLLM's own connector.
"""

from __future__ import annotations

import random
from dataclasses import fields
from typing import Any, NamedTuple, get_args

import pytest

from support.vllm_stand_ins import prompt
from support.vllm_traffic import RandomRequests, gpu_blocks
from support.vllm_version import has_vllm


class ModelCase(NamedTuple):
    """A model of random requests. groups: of vllm_runner.specs. drafts: tokens drafted per step.

    chunk: blocks. Of larger ones, prompts with drafting layers would load none.
    """

    groups: tuple[str, ...]
    drafts: int = 0
    runner: str = "v2"
    chunk: int = 1

    def __str__(self) -> str:
        return ", ".join((*self.groups, f"{self.drafts} drafts", self.runner, str(self.chunk)))


MODELS = [
    ModelCase(("full",), drafts=2),
    ModelCase(("full",), chunk=4),
    ModelCase(("window",)),
    ModelCase(("full", "window"), chunk=4),
    ModelCase(("full", "aligned states")),
    ModelCase(("full", "all states")),
    ModelCase(("full", "narrow")),
    ModelCase(("full", "narrow", "aligned states")),
    ModelCase(("full", "local")),
    ModelCase(("latent", "window")),
    ModelCase(("latent", "window", "local")),
    ModelCase(("latent", "window", "compressor")),
    ModelCase(("full", "draft"), drafts=2),
    ModelCase(("full", "aligned states", "draft"), drafts=2),
    ModelCase(("full", "partial states")),
    ModelCase(("full", "partial states", "draft"), drafts=2),
    ModelCase(("full", "narrow", "aligned states"), runner="v1"),
    ModelCase(("full", "aligned states", "draft"), drafts=2, runner="v1"),
    ModelCase(("full", "partial states"), runner="v1"),
]
# Models whose blocks change before they are stored, unless kvferry prevents it.
CHANGING = [
    ModelCase(("full", "aligned states")),
    ModelCase(("full", "narrow")),
    ModelCase(("latent", "window", "compressor")),
    ModelCase(("full", "partial states")),
    ModelCase(("full", "aligned states"), runner="v1"),
    ModelCase(("full", "partial states"), runner="v1"),
]
HOST_BYTES = 1 << 18
LONG_CHUNKS = 100_000


@pytest.fixture(autouse=True)
def runner(core: Any, monkeypatch: pytest.MonkeyPatch, case: ModelCase) -> None:
    """Model runner v2 is the default from vLLM 0.29."""
    uses_v2 = core.ONE_ALLOCATION and case.runner == "v2"
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", str(int(uses_v2)))


def has_model(core: Any, case: ModelCase) -> bool:
    """Whether this vLLM has models with these groups, and kvferry does not refuse them."""
    from vllm.config import cache

    compat = core.compat
    has = {
        "aligned states": compat.OFFLOADS_MAMBA_STATES,
        "all states": compat.OFFLOADS_MAMBA_STATES and "all" in get_args(cache.MambaCacheMode),
        "partial states": compat.OFFLOADS_MAMBA_STATES
        and "prefix_match_unit" in {field.name for field in fields(cache.CacheConfig)},
        "local": compat.can_offload_local_attention(),
        "draft": core.ONE_ALLOCATION,  # before 0.29 in the group of the model's layers
    }
    return all(has.get(group, True) for group in case.groups)


def open_engine(
    start: Any, case: ModelCase, mode: str = "at_once", nbytes: int = HOST_BYTES, **options: Any
) -> Any:
    blocks = gpu_blocks(case.groups, case.drafts)
    extra = {"blocks_per_chunk": case.chunk, "kvferry_store": mode}
    options |= {"drafts": case.drafts, "host_bytes": nbytes}
    return start(*case.groups, blocks=blocks, extra=extra, **options)


def wanted_chunks(core: Any, config: pytest.Config) -> int:
    models = sum(has_model(core, case) for case in MODELS)
    return LONG_CHUNKS // (2 * models) if config.option.long else 1


def run(requests: RandomRequests, steps: int) -> None:
    for _ in range(steps):
        requests.step()
    requests.finish()


@pytest.mark.timeout(3600)  # the long form
@pytest.mark.parametrize("mode", ["at_once", "auto", "at_eviction"])
@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("case", MODELS, ids=str)
def test_nothing_wrong_is_read(
    core: Any,
    start: Any,
    pytestconfig: pytest.Config,
    case: ModelCase,
    overlaps: bool,
    mode: str,
) -> None:
    """With `auto`, host memory is full most of the time."""
    if not has_model(core, case):
        pytest.skip("this vLLM has no such model, or kvferry refuses it")
    nbytes = 2 * core.PAGE * gpu_blocks(case.groups, case.drafts) if mode == "auto" else HOST_BYTES
    engine = open_engine(start, case, mode, nbytes, overlaps=overlaps)
    if mode != "at_once" and engine.scheduler.connector._late is None:
        pytest.skip("this model always stores at once")
    requests = RandomRequests(engine, random.Random(pytestconfig.option.seed))
    wanted = wanted_chunks(core, pytestconfig)
    while not requests.resets or (engine.loaded < wanted and not engine.wrong):
        run(requests, 300)
    engine.settle()
    print(f"{engine.runner.compared} blocks compared, {engine.loaded} chunks loaded")
    assert engine.namespace().hints_accepted
    assert not engine.wrong, f"seed {pytestconfig.option.seed}"


@pytest.mark.parametrize("case", CHANGING, ids=str)
def test_other_bytes_are_read_if_blocks_change_before_they_are_stored(
    core: Any, start: Any, case: ModelCase
) -> None:
    """So these tests can see it."""
    if not core.ONE_ALLOCATION:
        pytest.skip("this vLLM lets a connector wait for stores before it writes blocks")
    engine = open_engine(start, case)
    assert engine.writes_early == (engine.scheduler.connector._held is not None)
    engine.writes_early = True
    engine.scheduler.connector._held = None
    requests = RandomRequests(engine, random.Random(0))
    for _ in range(200):  # a round usually is enough, but the store may always be faster
        if not engine.wrong:
            run(requests, 500)
    assert engine.wrong
    engine.wrong.clear()


@pytest.mark.parametrize("case", [ModelCase(("full", "partial states"))], ids=str)
def test_a_state_in_the_middle_of_a_block_is_found(
    core: Any, start: Any, case: ModelCase, caplog: pytest.LogCaptureFixture
) -> None:
    """The last multiple of four tokens in a prompt that leaves one to compute.

    vLLM may copy such a block too early, so there is a warning at start.
    """
    if not has_model(core, case):
        pytest.skip("this vLLM has no such states")
    engine = open_engine(start, case)
    assert "inside blocks of 16" in caplog.text
    assert engine.run(prompt(0, 151)) == [0]
    assert engine.run_anew(prompt(0, 151)) == [148]


@pytest.mark.timeout(3600)  # the long form
@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("case", MODELS, ids=str)
def test_vllms_own_connector_reads_other_bytes(
    core: Any,
    pytestconfig: pytest.Config,
    case: ModelCase,
    overlaps: bool,
) -> None:
    """It stores blocks that vLLM has set to zero, although this worker copies at once."""
    if not has_vllm(0, 33) or not has_model(core, case):
        pytest.skip("vLLM 0.33 is not installed, nor a newer one, or has no such model")
    is_short = case == ModelCase(("full", "narrow"))
    if not is_short and not pytestconfig.option.long:
        pytest.skip("only with --long")
    from support.vllm_own import OwnEngineCore

    blocks = gpu_blocks(case.groups, case.drafts)
    engine: Any = OwnEngineCore(
        case.groups, 4096, blocks=blocks, drafts=case.drafts, overlaps=overlaps
    )
    requests = RandomRequests(engine, random.Random(pytestconfig.option.seed))
    while engine.loaded < wanted_chunks(core, pytestconfig):
        run(requests, 1500)
    print(
        f"{engine.loaded} chunks loaded; {len(engine.wrong)} of {engine.runner.reads} reads wrong"
    )
    assert engine.wrong or not is_short
    engine.close()
