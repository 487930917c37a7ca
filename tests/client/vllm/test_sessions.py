"""Sessions with several inputs: vLLM's resumable requests, which keep their blocks between them.

The last token before an input is not kept.
"""

from __future__ import annotations

from typing import Any

import pytest

from kvferry.testing.plugin import StartKvferryd

pytestmark = pytest.mark.filterwarnings("ignore")  # vLLM's own

INPUTS = [[(number * 37 + n * 11) % 900 for n in range(55)] for number in range(5)]
# After the first input the session has 64 tokens.
OUTPUT = [position % 100 for position in range(55, 64)]


@pytest.fixture(autouse=True)
def seed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "0")


def add_input(engine: Any, tokens: list[int]) -> None:
    from vllm import SamplingParams
    from vllm.v1.request import Request

    parameters = SamplingParams(max_tokens=len(OUTPUT), ignore_eos=True)
    hasher = engine._hasher
    request = Request(
        "session", list(tokens), parameters, None, block_hasher=hasher, resumable=True
    )
    engine.scheduler.add_request(request)


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("groups", [("full",), ("full", "window")])
def test_the_tokens_that_a_session_keeps_are_found(
    core: Any, start_kvferryd: StartKvferryd, groups: tuple[str, ...], overlaps: bool
) -> None:
    from vllm.v1.request import RequestStatus

    from kvferry.client.vllm import compat

    engine = core.EngineCore(start_kvferryd().directory, groups, overlaps=overlaps)
    requests, waits = engine.scheduler.requests, RequestStatus.WAITING_FOR_STREAMING_REQ
    for tokens in INPUTS:
        add_input(engine, tokens)
        engine.run_until(lambda: requests["session"].status == waits)
        engine.finish_steps()
    kept = list(requests["session"].prompt_token_ids)
    engine.abort("session")
    found = []
    for tokens in (kept, kept, INPUTS[0] + OUTPUT + INPUTS[1]):
        engine.settle()
        assert engine.scheduler.kv_cache_manager.reset_prefix_cache()
        found += engine.run(tokens)
    assert not engine.wrong
    if not compat.STORES_SESSIONS:
        del found[0]  # the first request has stored what the session did not
    # The last prompt has a token that the session dropped: only its KV is checked.
    assert min(found[:-1]) >= len(kept) - 64
    engine.close()
