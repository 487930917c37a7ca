"""The blocks of a prompt's last prefill step are stored although no other request follows.

vLLM's connector offers a block in the step that computes it, and its worker submits the store in
the next step. vLLM's core loop runs steps until the stores have ended, also without requests.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import pytest

from kvferry.testing.plugin import StartKvferryd
from support.vllm_stand_ins import prompt

# A step computes up to 256 tokens, so these take two: 24 blocks.
PROMPT, OTHER = prompt(0, 384), prompt(1, 384)
MODELS = [("full",), ("full", "window"), ("full", "aligned states")]
MODES: dict[str, Any] = {
    "synchronous": {},
    "asynchronous": {"overlaps": True},
    "pipeline": {"pipeline": True},
}
SMALL_CHUNKS = {"blocks_per_chunk": 1}


class RecordedSteps:
    """Of each step the tokens that it computes, by request, and the keys whose stores it submits.

    `executed` is called after each step of the worker, before the scheduler gets its output.
    """

    def __init__(self, engine: Any) -> None:
        self.tokens: list[dict[str, int]] = []
        self.stored: list[list[bytes]] = []
        self.executed: Any = lambda tokens: None
        worker = engine.worker.connector_worker.worker
        execute, submit = engine.execute, worker.submit_store

        def record(output: Any) -> Any:
            self.tokens.append(dict(output.num_scheduled_tokens))
            self.stored.append([])
            result = execute(output)
            self.executed(self.tokens[-1])
            return result

        def record_store(job_id: int, blocks: Any, keys: Any) -> bool:
            self.stored[-1] += keys.keys
            return bool(submit(job_id, blocks, keys))

        engine.execute, worker.submit_store = record, record_store

    def last_prefill(self, name: str, tokens: int) -> int:
        """The number of the step that computes the last one of this many tokens of a request."""
        computed = accumulate(step.get(name, 0) for step in self.tokens)
        return next(number for number, total in enumerate(computed) if total >= tokens)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("tokens", [1, 4])
@pytest.mark.parametrize("groups", MODELS, ids=", ".join)
def test_the_next_step_submits_all_stores_of_a_prompt(
    core: Any, start: Any, groups: tuple[str, ...], tokens: int, mode: str
) -> None:
    """With one token to generate, the engine is idle after the prompt."""
    if "aligned states" in groups and not core.compat.OFFLOADS_MAMBA_STATES:
        pytest.skip("kvferry refuses Mamba with this vLLM")
    engine = start(*groups, extra=SMALL_CHUNKS, **MODES[mode])
    steps = RecordedSteps(engine)
    name = engine.add(PROMPT, tokens)
    engine.run_until_idle()
    last = steps.last_prefill(name, len(PROMPT))
    assert steps.stored[last + 1]
    if tokens == 1:
        assert not steps.tokens[last + 1]
    assert not any(steps.stored[last + 2 :])
    if groups == ("full",):
        assert len({key for keys in steps.stored for key in keys}) == 24
    engine.close()
    # Of a window, vLLM 0.33 stores what a request with the same prompt needs.
    assert start(*groups, extra=SMALL_CHUNKS).run([*PROMPT, 7])[0] >= 368


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("is_reused", [False, True])
def test_a_request_that_is_aborted_in_its_last_prefill_step(
    start: Any, start_kvferryd: StartKvferryd, is_reused: bool, mode: str
) -> None:
    """is_reused: another request gets its blocks at once, before a copy can have ended."""
    place: dict[str, Any] = {
        "directory": start_kvferryd(reference_stall=0.1).directory,
        "extra": SMALL_CHUNKS,
    }
    engine = start(**place, blocks=26, **MODES[mode])
    steps, name = RecordedSteps(engine), engine.add(PROMPT, 40)

    def abort(tokens: dict[str, int]) -> None:
        if tokens.get(name) == 128:
            engine.abort(name)
            if is_reused:
                engine.add(OTHER, 1)

    steps.executed = abort
    engine.run_until_idle()
    assert steps.stored[steps.last_prefill(name, len(PROMPT)) + 1]
    engine.close()
    second = start(**place)
    assert second.run([*PROMPT, 7], [*OTHER, 7]) == [384, 384 if is_reused else 0]


@pytest.mark.parametrize("mode", MODES)
def test_a_request_that_is_preempted_after_its_last_prefill_step(
    start: Any, start_kvferryd: StartKvferryd, mode: str
) -> None:
    """The first token that the older request generates takes a block of the newer one."""
    place: dict[str, Any] = {
        "directory": start_kvferryd(reference_stall=0.1).directory,
        "extra": SMALL_CHUNKS,
    }
    older, newer = PROMPT[:48], OTHER[:96]
    engine = start(**place, blocks=1 + 3 + 6, **MODES[mode])
    steps = RecordedSteps(engine)
    names = engine.add(older, 4), engine.add(newer, 2)
    preempted = engine.scheduler.requests[names[1]]
    engine.run_until_idle()
    assert preempted.num_preemptions == 1
    assert steps.tokens[0] == {names[0]: 48, names[1]: 96}
    assert names[1] not in steps.tokens[1]
    assert len(steps.stored[1]) == 3 + 6
    engine.close()
    assert start(**place).run([*newer, 7]) == [96]
