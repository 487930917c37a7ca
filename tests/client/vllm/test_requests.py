"""Requests of special kinds, through vLLM's own scheduler."""

from __future__ import annotations

from typing import Any

import pytest

from support.vllm_stand_ins import prompt

PROMPT = prompt(0)
GROUPS = [("full",), ("full", "window")]
# Of 74 tokens.
ODD = prompt(1, 74)


# Roles


@pytest.mark.parametrize("groups", GROUPS)
def test_a_producer_only_stores_and_a_consumer_only_loads(
    start: Any, groups: tuple[str, ...]
) -> None:
    consumer = start(*groups, kv_role="kv_consumer")
    assert consumer.run(PROMPT) + consumer.run_anew(PROMPT) == [0, 0]  # it has stored nothing
    assert consumer.known_chunks() == 0
    producer = start(*groups, kv_role="kv_producer")
    assert producer.run(PROMPT) + producer.run_anew(PROMPT) == [0, 0]  # it does not look up
    consumer.run_until(lambda: consumer.known_chunks() == producer.known_chunks() > 0)
    assert consumer.run_anew(PROMPT) == [192]


def test_a_request_that_waits_for_a_prefill_engine_is_not_looked_up(start: Any) -> None:
    engine = start()
    engine.run(PROMPT)
    assert engine.run_anew(PROMPT) == [192]
    # The other connector clears the key when it begins. Later its load has failed.
    for waits, found in ((True, 0), (False, 192)):
        engine.settle()
        assert engine.scheduler.kv_cache_manager.reset_prefix_cache()
        name = engine.add(PROMPT, do_remote_prefill=waits)
        engine.run_until(lambda name=name: name in engine.finished)
        assert engine.finished[name] == found


# What would end the engine if vLLM got it


@pytest.mark.parametrize(("limit", "found"), [(None, 72), (0, 0), (8, 0), (64, 64), (72, 72)])
def test_the_state_of_a_prompts_end_is_stored_within_the_limit_of_its_request(
    core: Any, start: Any, limit: int | None, found: int
) -> None:
    if not core.compat.OFFLOADS_MAMBA_STATES:
        pytest.skip("this vLLM offloads no states")
    engine = start("full", "partial states")
    name = engine.add(ODD, max_offload_tokens=limit)
    engine.run_until(lambda: name in engine.finished)
    assert engine.run_anew([*ODD, *[5] * 20]) == [found]


@pytest.mark.parametrize("parameters", ["text", ["do_remote_prefill"], 3])
def test_transfer_parameters_of_another_type_are_ignored(
    start: Any, parameters: Any, caplog: pytest.LogCaptureFixture
) -> None:
    from vllm import SamplingParams
    from vllm.v1.request import Request

    engine, extra = start(), {"kv_transfer_params": parameters}
    sampling = SamplingParams(max_tokens=2, ignore_eos=True, extra_args=extra)
    engine.scheduler.add_request(Request("odd", ODD, sampling, None, block_hasher=engine._hasher))
    engine.run_until(lambda: "odd" in engine.finished)
    assert f"kv_transfer_params of type {type(parameters).__name__}" in caplog.text


def test_nothing_is_loaded_after_a_prefix_that_ends_within_a_block(start: Any) -> None:
    """vLLM asserts that its own cache's prefix ends at a block, of 16 tokens, of each group."""
    engine = start()
    engine.run(PROMPT)
    engine.settle()
    assert engine.scheduler.reset_prefix_cache()
    request = engine.scheduler.requests[engine.add(PROMPT)]
    connector = engine.scheduler.connector
    assert connector.get_num_new_matched_tokens(request, 16)[0] > 0
    assert connector.get_num_new_matched_tokens(request, 24) == (0, False)


# Sessions: vLLM's resumable requests, which keep their blocks between inputs


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("groups", GROUPS)
def test_the_tokens_that_a_session_keeps_are_found(
    core: Any, start: Any, groups: tuple[str, ...], overlaps: bool
) -> None:
    """The last token before an input is not kept. After the first input there are 64 tokens."""
    from vllm import SamplingParams
    from vllm.v1.request import Request, RequestStatus

    inputs, output = [prompt(number, 55) for number in range(5)], [*range(55, 64)]
    parameters = SamplingParams(max_tokens=len(output), ignore_eos=True)
    engine = start(*groups, overlaps=overlaps)
    requests, waits = engine.scheduler.requests, RequestStatus.WAITING_FOR_STREAMING_REQ
    options = {"block_hasher": engine._hasher, "resumable": True}
    for tokens in inputs:
        request = Request("session", list(tokens), parameters, None, **options)
        engine.scheduler.add_request(request)
        engine.run_until(lambda: requests["session"].status == waits)
        engine.finish_steps()
    kept = list(requests["session"].prompt_token_ids)
    engine.abort("session")
    found = [*engine.run_anew(kept), *engine.run_anew(kept)]
    if not core.compat.STORES_SESSIONS:
        del found[0]  # the first request has stored what the session did not
    assert min(found) >= len(kept) - 64
    # It has a token that the session dropped: its KV is checked.
    engine.run_anew(inputs[0] + output + inputs[1])


# Drafting layers


@pytest.mark.parametrize(("lost", "counted"), [(-1, 2), (0, 0), (None, 0)])
def test_requests_that_miss_the_draft_alone_are_counted_and_warned_of_once(
    core: Any,
    start: Any,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    lost: int | None,
    counted: int,
) -> None:
    """lost: the group whose stores fail. The last one drafts."""
    from kvferry.client.vllm.draft_groups import DRAFT_MISSES

    # Before 0.29 vLLM plans only groups of different kinds.
    groups = ("full", "draft") if core.ONE_ALLOCATION else ("full", "window", "draft")
    engine = start(*groups, host_bytes=4 << 20, drafts=2)
    side = core.kvferry_of(engine.scheduler.connector).connector_scheduler.manager
    offer = side.offer_keys

    def offer_others(keys: Any, *rest: Any, **named: Any) -> Any:
        if lost is not None:
            end = range(len(groups))[lost].to_bytes(4, "big")
            keys = [key for key in keys if key[-4:] != end]
        return offer(keys, *rest, **named)

    monkeypatch.setattr(side, "offer_keys", offer_others)
    engine.run(PROMPT)
    found = [*engine.run_anew(PROMPT), *engine.run_anew(PROMPT)]
    engine.settle()
    assert found == [0, 0] if lost is not None else min(found) >= 128
    assert engine.counted(DRAFT_MISSES) == counted
    assert caplog.text.count("none of its drafting layers") == (counted > 0)
