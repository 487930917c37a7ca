"""Simple models of the eviction policies: lists, searched from the cold end."""

from __future__ import annotations

from collections.abc import Callable


class PlainLRU:
    def __init__(self, capacity: int) -> None:
        # Least recent first.
        self.keys: list[bytes] = []

    def order(self) -> list[bytes]:
        return self.keys

    def admit(
        self, keys: list[bytes], free: int, may_evict: Callable[[bytes], bool]
    ) -> list[bytes]:
        victims = [key for key in self.keys if may_evict(key)][: max(0, len(keys) - free)]
        self.keys = [key for key in self.keys if key not in victims] + keys[::-1]
        return victims

    def touch(self, keys: list[bytes], pending: set[bytes]) -> None:
        for key in reversed(keys):
            if key in self.keys:
                self.keys.remove(key)
                self.keys.append(key)

    def forget(self, key: bytes) -> None:
        self.keys.remove(key)


class PlainARC:
    """Names as in the paper: T1 and T2 are in the cache, B1 and B2 are ghosts."""

    def __init__(self, capacity: int) -> None:
        self.c, self.p = capacity, 0.0
        self.t1, self.t2, self.b1, self.b2 = (list[bytes]() for _ in range(4))

    def order(self) -> list[bytes]:
        return self.t1 + self.t2

    def admit(
        self, keys: list[bytes], free: int, may_evict: Callable[[bytes], bool]
    ) -> list[bytes]:
        victims = []
        for number, key in enumerate(reversed(keys)):
            in_b1, in_b2 = key in self.b1, key in self.b2
            self.learn(key)
            if number >= free:
                victims.append(self.replace(in_b2, lambda k: may_evict(k) and k not in keys))
            (self.t2 if in_b1 or in_b2 else self.t1).append(key)
        for ghosts in (self.b1, self.b2):
            del ghosts[: -self.c]
        return victims

    def learn(self, key: bytes) -> None:
        if key in self.b1:
            self.p = min(self.c, self.p + max(len(self.b2) / len(self.b1), 1))
            self.b1.remove(key)
        if key in self.b2:
            self.p = max(0, self.p - max(len(self.b1) / len(self.b2), 1))
            self.b2.remove(key)

    def replace(self, in_b2: bool, may_evict: Callable[[bytes], bool] = lambda key: True) -> bytes:
        first, other = (self.t1, self.b1), (self.t2, self.b2)
        if not (self.t1 and (len(self.t1) > self.p or (in_b2 and len(self.t1) == self.p))):
            first, other = other, first
        for keys, ghosts in (first, other):
            for key in keys:
                if may_evict(key):
                    keys.remove(key)
                    ghosts.append(key)
                    return key
        raise AssertionError("no key may be evicted")

    def touch(self, keys: list[bytes], pending: set[bytes]) -> None:
        for key in reversed(keys):
            queue = self.t1 if key in self.t1 else self.t2
            if key in queue:
                queue.remove(key)
                (self.t1 if queue is self.t1 and key in pending else self.t2).append(key)

    def forget(self, key: bytes) -> None:
        (self.t1 if key in self.t1 else self.t2).remove(key)


class PlainS3FIFO:
    """Two queues, oldest key first, and the number of uses of each key."""

    def __init__(self, capacity: int) -> None:
        self.c, self.bound = capacity, max(1, capacity // 2)
        self.small, self.main, self.ghosts = (list[bytes]() for _ in range(3))
        self.uses: dict[bytes, int] = {}

    def order(self) -> list[bytes]:
        return self.small + self.main

    def admit(
        self, keys: list[bytes], free: int, may_evict: Callable[[bytes], bool]
    ) -> list[bytes]:
        victims = []
        returning = [key for key in keys if key in self.ghosts]
        self.ghosts = [key for key in self.ghosts if key not in returning]
        to_small, to_main = list[bytes](), list[bytes]()
        for number, key in enumerate(reversed(keys)):
            if number >= free:
                victims.append(self.evict(may_evict, len(to_small), len(to_main)))
            (to_main if key in returning else to_small).append(key)
        self.small += to_small
        self.main += to_main
        self.uses |= dict.fromkeys(keys, 0)
        del self.ghosts[: -self.c]
        return victims

    def evict(self, may_evict: Callable[[bytes], bool], more_small: int, more_main: int) -> bytes:
        while True:
            queues = [self.main, self.small]
            if len(self.small) + more_small >= self.bound or not len(self.main) + more_main:
                queues.reverse()
            key, queue = next((k, queue) for queue in queues for k in queue if may_evict(k))
            queue.remove(key)
            if not self.uses[key]:
                if queue is self.small:
                    self.ghosts.append(key)
                return key
            self.uses[key] = 0 if queue is self.small else self.uses[key] - 1
            self.main.append(key)

    def touch(self, keys: list[bytes], pending: set[bytes]) -> None:
        for key in {*self.order()} & set(keys) - pending:
            self.uses[key] = min(3, self.uses[key] + 1)

    def forget(self, key: bytes) -> None:
        (self.small if key in self.small else self.main).remove(key)


PLAIN: dict[str, Callable[[int], PlainLRU | PlainARC | PlainS3FIFO]] = {
    "lru": PlainLRU,
    "arc": PlainARC,
    "s3fifo": PlainS3FIFO,
}
