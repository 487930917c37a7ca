"""A vLLM engine that receives requests as JSON lines. vllm_process.py starts this program."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from typing import Any, TypeAlias

Prompts: TypeAlias = list[list[int]]


def serve(chosen: dict[str, Any]) -> None:
    from vllm import LLM
    from vllm.config import KVTransferConfig

    if chosen["options"].get("load_format") == "sensitive":
        import support.sensitive_loader  # noqa: F401 - registers the load format

    options = {
        "skip_tokenizer_init": True,
        "load_format": "dummy",
        "dtype": "bfloat16",
        "max_model_len": 8192,
        "attention_backend": "FLASH_ATTN",
        "enable_prefix_caching": True,
        "gpu_memory_utilization": 0.25,
        "disable_log_stats": False,
        "seed": 0,
        **chosen["options"],
    }
    if chosen["transfer"] is not None:
        options["kv_transfer_config"] = KVTransferConfig(**chosen["transfer"])
    engine = Served(LLM(model=chosen["model"], **options), chosen["top"])
    engine.reply(True)
    for line in sys.stdin:
        request = json.loads(line)
        engine.reply(getattr(engine, request.pop("do"))(**request))


class Served:
    """The requests that the engine understands: a method for each value of "do"."""

    def __init__(self, llm: Any, top: int | None) -> None:
        self._llm, self._top = llm, top
        self._numbers = iter(range(1 << 40))

    def reply(self, value: Any) -> None:
        print("ANSWER " + json.dumps(value), flush=True)

    def generate(self, prompts: Prompts, tokens: int) -> dict[str, Any]:
        requests = [{"prompt_token_ids": ids} for ids in prompts]
        began = time.perf_counter()
        outputs = self._llm.generate(requests, _sampling(tokens, self._top), use_tqdm=False)
        seconds = time.perf_counter() - began
        answers = [
            {
                "tokens": list(output.outputs[0].token_ids),
                "cached": output.num_cached_tokens,
                "top": [_likeliest(step) for step in output.outputs[0].logprobs or ()],
            }
            for output in outputs
        ]
        return {"seconds": seconds, "outputs": answers}

    def abort(self, prompts: Prompts, tokens: int, steps: int) -> bool:
        """Submit requests, and abort them after `steps` steps of the engine."""
        engine = self._llm.llm_engine
        names = [self._add(ids, tokens) for ids in prompts]
        for _ in range(steps):
            engine.step()
        engine.abort_request(names)
        return True

    def reset(self, connector: bool) -> bool:
        return self._llm.reset_prefix_cache(reset_connector=connector) is not False

    def sleep(self, level: int) -> bool:
        self._llm.sleep(level=level)
        return True

    def wake(self, reload: bool) -> bool:
        """reload: the weights of sensitive_loader.py, which sleep of level 2 discards."""
        self._llm.wake_up()
        if reload:
            self._llm.collective_rpc("fill_again")
        return True

    def decode(self, prompts: Prompts, tokens: int, others: Prompts, every: int) -> dict[str, Any]:
        """Milliseconds between tokens while `prompts` decode and other requests arrive.

        `prompts` generate `tokens` tokens each. One of the others arrives every `every` steps, and
        generates one token. Also returns how many of the others' tokens were found in a cache.
        """
        engine, waiting = self._llm.llm_engine, list(others)
        streams = {self._add(ids, tokens): 0 for ids in prompts}
        last: dict[str, float] = {}
        gaps: list[float] = []
        step = cached = 0
        while engine.has_unfinished_requests():
            if waiting and len(last) == len(streams) and step % every == 0:
                self._add(waiting.pop(), 1)
            outputs, now, step = engine.step(), time.perf_counter(), step + 1
            for output in outputs:
                name = output.request_id
                if name not in streams:
                    cached += output.num_cached_tokens or 0
                    continue
                generated = len(output.outputs[0].token_ids)
                if generated > streams[name]:
                    if name in last:
                        gaps.append(1e3 * (now - last[name]))
                    streams[name], last[name] = generated, now
        return {"gaps": gaps, "cached": cached, "left": len(waiting)}

    def beside(self, prompts: Prompts, tokens: int, asked: list[int]) -> dict[str, Any]:
        """Seconds to the first token of `asked` while `prompts` decode, up to `tokens` each."""
        engine = self._llm.llm_engine
        streams = {self._add(ids, tokens) for ids in prompts}
        waiting = set(streams)
        while waiting:
            waiting -= {each.request_id for each in engine.step() if each.outputs[0].token_ids}
        began = time.perf_counter()
        name, found = self._add(asked, 1), None
        ended: set[str] = set()
        while found is None:
            for output in engine.step():
                ended |= {output.request_id} if output.finished else set()
                found = output if output.request_id == name else found
        seconds = time.perf_counter() - began
        engine.abort_request(sorted(streams - ended))
        while engine.has_unfinished_requests():
            engine.step()
        return {
            "seconds": seconds,
            "cached": found.num_cached_tokens or 0,
            "streams": len(streams - ended),
        }

    def _add(self, ids: Sequence[int], tokens: int) -> str:
        name = f"own-{next(self._numbers)}"
        prompt = {"prompt_token_ids": list(ids)}
        self._llm.llm_engine.add_request(name, prompt, _sampling(tokens))
        return name


def _sampling(tokens: int, top: int | None = None) -> Any:
    from vllm import SamplingParams

    return SamplingParams(
        max_tokens=tokens, temperature=0.0, ignore_eos=True, detokenize=False, logprobs=top
    )


def _likeliest(step: Any) -> list[tuple[int, float]]:
    return [(token, found.logprob) for token, found in step.items()]


if __name__ == "__main__":
    serve(json.loads(sys.argv[1]))
