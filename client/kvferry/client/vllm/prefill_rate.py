"""The rate at which the engine computes prompts: from the step in which a request is first
scheduled to its first token.

The rate is that of a request beside all others, as its user sees it. Steps cannot be timed alone:
with asynchronous scheduling vLLM schedules a step before the one ahead of it has ended. Called in
the scheduler's thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median
from typing import Protocol

# Shorter prompts are bound by other things than computing them: they are computed at least as fast
# as they seem to be. Those below the least say nothing.
MIN_TOKENS, LEAST_TOKENS = 1024, 64
# Requests that the rate is the median of.
SAMPLES = 5


class Prompted(Protocol):
    """vLLM's Request."""

    request_id: str

    @property
    def num_prompt_tokens(self) -> int: ...

    @property
    def num_output_tokens(self) -> int: ...


@dataclass(frozen=True, slots=True)
class _Prefill:
    request: Prompted
    tokens: int
    begun: float


class PrefillRate:
    def __init__(self) -> None:
        # Prompts that are being computed, by request.
        self._prefills: dict[str, _Prefill] = {}
        # Tokens per second of the last ones, and the highest of shorter ones: used until there is
        # another, so that a slow tier is not waited for where all prompts are short.
        self._rates = deque[float](maxlen=SAMPLES)
        self._short_rate = 0.0

    def begin(self, request: Prompted, computed: int, now: float) -> None:
        """A request was scheduled for the first time, with so many of its tokens in a cache.

        now: time.monotonic() in seconds.
        """
        tokens = request.num_prompt_tokens - computed
        if tokens >= (LEAST_TOKENS if not self._rates else MIN_TOKENS):
            self._prefills[request.request_id] = _Prefill(request, tokens, now)

    def observe(self, now: float) -> None:
        """Look for first tokens; called in each step."""
        for prefill in tuple(self._prefills.values()):
            if prefill.request.num_output_tokens:
                self.end(prefill.request.request_id, now)

    def end(self, request_id: str, now: float) -> None:
        """A request has its first token, or has finished without one."""
        prefill = self._prefills.pop(request_id, None)
        if prefill is None or not prefill.request.num_output_tokens or now <= prefill.begun:
            return
        rate = prefill.tokens / (now - prefill.begun)
        if prefill.tokens >= MIN_TOKENS:
            self._rates.append(rate)
        else:
            self._short_rate = max(self._short_rate, rate)

    def forget(self, request_ids: Iterable[str]) -> None:
        """Requests were preempted: their time says nothing."""
        for request_id in request_ids:
            self._prefills.pop(request_id, None)

    def seconds(self, tokens: float) -> float:
        """The time to compute so many tokens; 0 if not known."""
        rate = median(self._rates) if self._rates else self._short_rate
        return tokens / rate if rate else 0.0
