"""Random requests to servers that share a namespace. Needs SGLang."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence

from support.sglang_tree import TreeServer

# Tokens after which a prompt is replaced by a new one.
LONGEST = 120


def run_random_requests(
    servers: Sequence[TreeServer],
    draw: random.Random,
    pages: int,
    *,
    unit: int = 1,
    leaving: bool = False,
    seconds: float = float("inf"),
) -> int:
    """Run requests until the servers have loaded so many pages; returns how many they have.

    A prompt is continued, branches, or is repeated; now and then a device loses all, or a server is
    flushed. unit: multiplies the lengths of prompts. leaving: whether some clients leave before
    their request is computed. seconds: after which it ends.
    """

    def tokens(least: int, most: int) -> list[int]:
        count = draw.randrange(least * unit, most * unit)
        return [draw.randrange(1000) for _ in range(count)]

    deadline = time.monotonic() + seconds
    prompts = [tokens(8, 100) for _ in range(40)]
    loaded = 0
    while loaded < pages and time.monotonic() < deadline:
        server = draw.choice(servers)
        number, event = draw.randrange(len(prompts)), draw.random()
        prompt = prompts[number]
        if event < 0.3:
            prompt = prompts[number] = [*prompt, *tokens(4, 16)]
        elif event < 0.5:
            prompt = [*prompt[: draw.randrange(4 * unit, len(prompt))], *tokens(4, 16)]
        if len(prompts[number]) > LONGEST * unit:
            prompts[number] = tokens(8, 100)
        leaves = leaving and draw.random() < 0.05
        loaded += server.run(prompt, abort=leaves) // server.page_size
        event = draw.random()
        if event < 0.1:
            server.evict_all()
        elif event < 0.102:
            server.flush()
    return loaded
