"""Fields of requests, and prefixes, that end the engine if vLLM gets them."""

from __future__ import annotations

from typing import Any

import pytest

from kvferry.testing.plugin import StartKvferryd

pytestmark = pytest.mark.filterwarnings("ignore")  # vLLM's own

PROMPT = [n * 7 % 900 for n in range(74)]


@pytest.fixture(autouse=True)
def seed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "0")


@pytest.mark.parametrize(("limit", "found"), [(None, 72), (0, 0), (8, 0), (64, 64), (72, 72)])
def test_the_state_of_a_prompts_end_is_stored_within_the_limit_of_its_request(
    core: Any, start_kvferryd: StartKvferryd, limit: int | None, found: int
) -> None:
    from kvferry.client.vllm import compat

    if not compat.OFFLOADS_MAMBA_STATES:
        pytest.skip("this vLLM offloads no states")
    engine = core.EngineCore(start_kvferryd().directory, ("full", "partial states"))
    name = engine.add(PROMPT, max_offload_tokens=limit)
    engine.run_until(lambda: name in engine.finished)
    engine.settle()
    assert engine.scheduler.reset_prefix_cache()
    assert engine.run(PROMPT + [5] * 20) == [found]
    assert not engine.wrong
    engine.close()


@pytest.mark.parametrize("parameters", ["text", ["do_remote_prefill"], 3])
def test_transfer_parameters_of_another_type_are_ignored(
    core: Any, start_kvferryd: StartKvferryd, parameters: Any, caplog: pytest.LogCaptureFixture
) -> None:
    from vllm import SamplingParams
    from vllm.v1.request import Request

    engine = core.EngineCore(start_kvferryd().directory, ("full",))
    sampling = SamplingParams(
        max_tokens=2, ignore_eos=True, extra_args={"kv_transfer_params": parameters}
    )
    engine.scheduler.add_request(
        Request("odd", PROMPT, sampling, None, block_hasher=engine._hasher)
    )
    engine.run_until(lambda: "odd" in engine.finished)
    assert f"kv_transfer_params of type {type(parameters).__name__}" in caplog.text
    engine.close()


def test_nothing_is_loaded_after_a_prefix_that_ends_within_a_block(
    core: Any, start_kvferryd: StartKvferryd
) -> None:
    """vLLM asserts that its own cache's prefix ends at a block of each group."""
    engine = core.EngineCore(start_kvferryd().directory, ("full",))
    engine.run(PROMPT * 3)
    engine.settle()
    assert engine.scheduler.reset_prefix_cache()
    request = engine.scheduler.requests[engine.add(PROMPT * 3)]
    connector = engine.scheduler.connector
    assert connector.get_num_new_matched_tokens(request, core.TOKENS)[0] > 0
    assert connector.get_num_new_matched_tokens(request, core.TOKENS + 8) == (0, False)
    engine.run_until(lambda: request.request_id in engine.finished)
    assert not engine.wrong
    engine.close()
