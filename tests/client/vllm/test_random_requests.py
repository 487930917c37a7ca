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
# Of a request: of the shared beginning, of its own tokens, and of its output.
SHARED, OWN, OUTPUT = 60, 60, 120
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


def start(core: Any, daemon: Any, groups: tuple[str, ...], drafts: int, **options: Any) -> Any:
    """The GPU has room for two requests, so that vLLM preempts and evicts."""
    blocks = 1 + 2 * len(groups) * ((SHARED + OWN + OUTPUT) // 16 + 1 + drafts)
    return core.EngineCore(
        daemon.directory, groups, blocks=blocks, drafts=drafts, host_bytes=1 << 18, **options
    )


def run_steps(engine: Any, rng: random.Random, steps: int) -> None:
    """Requests that share beginnings, end, are aborted and are preempted; and resets."""
    from kvferry.client.vllm import compat

    scheduler, running = engine.scheduler, set[str]()
    beginnings = [tokens(SHARED, rng) for _ in range(6)]
    prompts = [beginnings[0]]
    # Before 0.30 a failed load ends an engine with several groups, and a reset that preempts ends
    # it if the next step loads.
    fragile = not compat.REPORTS_FAILED_REQUESTS
    for _ in range(steps):
        running -= engine.finished.keys()
        if len(running) < 6 and rng.random() < 0.4:
            own = tokens(rng.randrange(1, OWN), rng)
            prompts.append(rng.choice(beginnings)[: rng.randrange(20, SHARED)] + own)
            again = rng.random() < 0.5
            running.add(
                engine.add(rng.choice(prompts[-20:] if again else prompts[-1:]), output(rng))
            )
        if running and rng.random() < 0.02 and not fragile:
            name = rng.choice(sorted(running))
            running.remove(name)
            engine.abort(name)
        if rng.random() < 0.04 and not (fragile and engine.waits_for_loads()):
            preempts = rng.random() < 0.3 and not fragile
            if preempts:  # vLLM refuses it during a step
                engine.finish_steps()
                preempts = not engine.waits_for_loads()
            done = scheduler.reset_prefix_cache(preempts, reset_connector=rng.random() < 0.2)
            assert done or not preempts
        engine.step()
    engine.run_until(lambda: running <= engine.finished.keys())


def tokens(count: int, rng: random.Random) -> list[int]:
    return [rng.randrange(900) for _ in range(count)]


def output(rng: random.Random) -> int:
    return rng.choice((4, 40, OUTPUT))


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
    engine = start(core, start_kvferryd(), groups, drafts, overlaps=overlaps)
    rng = random.Random(pytestconfig.option.seed)
    wanted = LONG_CHUNKS // (2 * len(MODELS)) if pytestconfig.option.long else 1
    run_steps(engine, rng, 1500)
    while engine.loaded < wanted and not engine.wrong:
        run_steps(engine, rng, 1500)
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
    rng = random.Random(0)
    for _ in range(200):  # a round usually is enough, but the store may always be faster
        if not engine.wrong:
            run_steps(engine, rng, 500)
    assert engine.wrong
    engine.close()
