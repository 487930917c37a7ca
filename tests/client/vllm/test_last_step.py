"""The blocks of a prompt's last prefill step are stored although no other request follows.

vLLM's connector offers a block in the step that computes it, and its worker submits the store in
the next step. vLLM's core loop runs steps until the stores have ended, also without requests.
"""

from __future__ import annotations

from typing import Any

import pytest

from kvferry.testing.plugin import StartKvferryd

pytestmark = pytest.mark.filterwarnings("ignore")  # vLLM's own

# A step computes up to 256 tokens, so these take two: 24 blocks.
PROMPT = [n * 11 % 900 for n in range(384)]
OTHER = [n * 7 % 900 for n in range(384)]
MODELS = [("full",), ("full", "window"), ("full", "aligned states")]
# Whether scheduling is asynchronous, and how many batches are in flight.
MODES = {"synchronous": (False, 1), "asynchronous": (True, 2), "pipeline": (False, 2)}


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    monkeypatch.setattr("vllm.config.vllm.HAS_TRITON", True)


@pytest.fixture(scope="module")
def loop(core: Any) -> Any:
    from support import vllm_loop

    return vllm_loop


def start(
    core: Any,
    daemon: Any,
    mode: str = "synchronous",
    groups: tuple[str, ...] = ("full",),
    blocks: int = 128,
) -> Any:
    """An engine with one block per chunk."""
    extra = core.kvferry_options(daemon.directory, 1 << 20) | {"blocks_per_chunk": 1}
    overlaps, _ = MODES[mode]
    return core.EngineCore(
        daemon.directory, groups, blocks, overlaps=overlaps, kv_connector_extra_config=extra
    )


def found_elsewhere(
    core: Any, daemon: Any, prompt: list[int], groups: tuple[str, ...] = ("full",)
) -> int:
    """The tokens of a prompt that another engine loads. They must have the right KV."""
    engine = start(core, daemon, groups=groups)
    (found,) = engine.run([*prompt, 7])
    assert not engine.wrong
    engine.close()
    return int(found)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("tokens", [1, 4])
@pytest.mark.parametrize("groups", MODELS, ids=", ".join)
def test_the_next_step_submits_all_stores_of_a_prompt(
    core: Any,
    loop: Any,
    start_kvferryd: StartKvferryd,
    groups: tuple[str, ...],
    tokens: int,
    mode: str,
) -> None:
    """With one token to generate, the engine is idle after the prompt."""
    from kvferry.client.vllm import compat

    if "aligned states" in groups and not compat.OFFLOADS_MAMBA_STATES:
        pytest.skip("kvferry refuses Mamba with this vLLM")
    daemon = start_kvferryd()
    engine = start(core, daemon, mode, groups)
    running = loop.CoreLoop(engine, batches=MODES[mode][1])
    name = engine.add(PROMPT, tokens)
    running.run_until_idle()
    last = running.last_prefill_step(name, len(PROMPT))
    assert running.steps[last + 1].stored
    if tokens == 1:
        assert not running.steps[last + 1].tokens
    assert not any(step.stored for step in running.steps[last + 2 :])
    if groups == ("full",):
        assert len({key for step in running.steps for key in step.stored}) == 24
    engine.close()
    # Of a window, vLLM 0.33 stores what a request with the same prompt needs.
    assert found_elsewhere(core, daemon, PROMPT, groups) >= 368


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("is_reused", [False, True])
def test_a_request_that_is_aborted_in_its_last_prefill_step(
    core: Any, loop: Any, start_kvferryd: StartKvferryd, is_reused: bool, mode: str
) -> None:
    """is_reused: another request gets its blocks at once, before a copy can have ended."""
    daemon = start_kvferryd(reference_stall=0.1)
    engine = start(core, daemon, mode, blocks=26)

    def abort(step: Any) -> None:
        if step.tokens.get(name) == 128:
            running.aborts_queue.put([name])
            if is_reused:
                engine.add(OTHER, 1)

    running = loop.CoreLoop(engine, abort, batches=MODES[mode][1])
    name = engine.add(PROMPT, 40)
    running.run_until_idle()
    last = running.last_prefill_step(name, len(PROMPT))
    assert running.steps[last + 1].stored
    assert not engine.wrong
    engine.close()
    assert found_elsewhere(core, daemon, PROMPT) == 384
    assert found_elsewhere(core, daemon, OTHER) == (384 if is_reused else 0)


@pytest.mark.parametrize("mode", MODES)
def test_a_request_that_is_preempted_after_its_last_prefill_step(
    core: Any, loop: Any, start_kvferryd: StartKvferryd, mode: str
) -> None:
    """The first token that the older request generates takes a block of the newer one."""
    daemon = start_kvferryd(reference_stall=0.1)
    older, newer = PROMPT[:48], OTHER[:96]
    engine = start(core, daemon, mode, blocks=1 + 3 + 6)
    running = loop.CoreLoop(engine, batches=MODES[mode][1])
    names = engine.add(older, 4), engine.add(newer, 2)
    preempted = engine.scheduler.requests[names[1]]
    running.run_until_idle()
    assert preempted.num_preemptions == 1
    assert running.steps[0].tokens == {names[0]: 48, names[1]: 96}
    assert names[1] not in running.steps[1].tokens
    assert len(running.steps[1].stored) == 3 + 6
    assert not engine.wrong
    engine.close()
    assert found_elsewhere(core, daemon, newer) == 96
