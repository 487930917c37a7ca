"""Clients of an SGLangServer, and how far their answers are from each other."""

from __future__ import annotations

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from support.answers import TOP, answer_distance
from support.eventually import wait_until
from support.sglang_server import SGLangAnswer, SGLangServer
from support.time_limits import TIMEOUT

# Longer than an answer takes while all cores are busy.
ANSWER_SECONDS = 5 * TIMEOUT


def ask_all(server: SGLangServer, prompts: list[list[int]]) -> list[SGLangAnswer]:
    return [server.ask(prompt, 8, top=TOP) for prompt in prompts]


def distances(some: list[SGLangAnswer], others: list[SGLangAnswer]) -> list[float]:
    pairs = zip(some, others, strict=True)
    return [answer_distance(one.comparable, other.comparable) for one, other in pairs]


class Load:
    """Clients that ask for prompts at random, until `end`. answers: with the times of the request
    and of its end, and the number of the prompt."""

    def __init__(self, server: SGLangServer, prompts: list[list[int]], clients: int) -> None:
        self.answers: list[tuple[float, float, int, SGLangAnswer]] = []
        self._server, self._prompts = server, prompts
        self._ended = threading.Event()
        self._pool = ThreadPoolExecutor(clients)
        self._clients = [self._pool.submit(self._ask, seed) for seed in range(clients)]

    def _ask(self, seed: int) -> None:
        draw = random.Random(seed)
        while not self._ended.is_set():
            number, began = draw.randrange(len(self._prompts)), time.monotonic()
            answer = self._server.ask(self._prompts[number], 8, top=TOP)
            self.answers.append((began, time.monotonic(), number, answer))

    def wait(self, answers: int) -> None:
        """Wait for so many more answers. Raises TimeoutError if one takes too long."""
        for goal in range(len(self.answers) + 1, len(self.answers) + answers + 1):
            wait_until(partial(self._has, goal), ANSWER_SECONDS)

    def _has(self, goal: int) -> bool:
        return len(self.answers) >= goal or any(client.done() for client in self._clients)

    def end(self) -> None:
        self._ended.set()
        for client in self._clients:
            client.result()
        self._pool.shutdown()
