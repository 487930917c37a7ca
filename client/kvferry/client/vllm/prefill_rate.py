"""How fast the engine computes prompts, measured from the outside.

The time from one step to the next is that of the first one's forward pass, if the engine is busy.
Called in the scheduler's thread.
"""

from __future__ import annotations

# Steps with fewer tokens are bound by other things than computing them.
MIN_TOKENS = 512
# Seconds; between two steps with more, the engine was idle.
MAX_STEP = 5.0
# Weight of the newest step.
WEIGHT = 0.2


class PrefillRate:
    def __init__(self) -> None:
        # Tokens per second; 0 if not known.
        self._rate = 0.0
        self._tokens, self._begun = 0, 0.0

    def step_scheduled(self, tokens: int, now: float) -> None:
        """now: time.monotonic() in seconds."""
        before, elapsed = self._tokens, now - self._begun
        self._tokens, self._begun = tokens, now
        if before >= MIN_TOKENS and 0 < elapsed < MAX_STEP:
            rate = before / elapsed
            self._rate += (WEIGHT if self._rate else 1.0) * (rate - self._rate)

    def seconds(self, tokens: float) -> float:
        """How long computing so many tokens takes; 0 if not known."""
        return tokens / self._rate if self._rate else 0.0
