"""Random schedules of test_sibling_cores_against_a_model.py.

A schedule is a list of steps, each with a few numbers, which are interpreted modulo what there is:
so every part of a schedule is a schedule, and a failing one can be shortened. Most steps are
independent of each other; some are part of a race, a sequence that a fault is likely to be in.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import NamedTuple

from support.sibling_ports import FINGERPRINTS


class Step(NamedTuple):
    """kind: a name in WEIGHTS. daemon: its number. pause: at which access to shared memory it
    pauses; 0: it does not."""

    kind: str
    daemon: int
    first: int
    second: int
    pause: int = 0


# How often each kind of step occurs.
WEIGHTS = {
    "open": 2,
    "close": 0.5,
    "compute": 3,
    "store": 5,
    "store computed": 2,
    "store part": 4,
    "store whole": 10,
    "copy": 12,
    "end": 20,
    "fail": 1,
    "cancel": 1,
    "begin commit": 3,
    "end commit": 3,
    "check": 3,
    "search": 10,
    "load": 12,
    "load whole": 6,
    "borrow": 8,
    "map": 2,
    "lose": 0.5,
    "uses": 1,
    "reset": 1,
    "sync": 3,
    "advance": 6,
    "stop": 1,
    "resume": 14,
    "kill": 0.3,
    "kill within": 0.7,
    "start": 4,
}
# The part of a schedule's steps that begin a race.
RACES = 0.04
# Steps that may be paused.
PAUSED = frozenset(
    {"open", "close", "store", "store computed", "end", "search", "load", "map"}
    | {"reset", "start", "end commit", "check", "advance"}
)


def random_schedule(seed: int, steps: int, daemons: int) -> list[Step]:
    random = Random(seed)
    begin = [Step("start", number, 0, 0) for number in range(daemons)]
    begin += [Step("open", number, each, 0) for number in range(daemons) for each in (0, 1)]
    begin += [
        Step(kind, number, other, 0)
        for number in range(daemons)
        for other in range(daemons - 1)
        for kind in ("borrow", "map")
    ]
    kinds = random.choices([*WEIGHTS], [*WEIGHTS.values()], k=steps)
    schedule = list[Step]()
    while len(schedule) < steps:
        kind, daemon = kinds[len(schedule)], random.randrange(daemons)
        if random.random() < RACES:
            other = (daemon + random.randrange(1, daemons)) % daemons
            schedule += _race(random, daemon, other)
            continue
        pause = random.randrange(1, 24) if kind in PAUSED and random.random() < 0.3 else 0
        schedule.append(_step(random, kind, daemon, pause=pause))
    return begin + schedule


def _step(random: Random, kind: str, daemon: int, first: int | None = None, pause: int = 0) -> Step:
    chosen = random.randrange(64) if first is None else first
    return Step(kind, daemon, chosen, random.randrange(64), pause)


def _race(random: Random, reader: int, owner: int) -> list[Step]:
    """One daemon searches or loads while another one changes its blocks."""
    race = random.choice(_RACES)
    return race(random, reader, owner, random.randrange(len(FINGERPRINTS)))


def _second_reset(random: Random, reader: int, owner: int, namespace: int) -> list[Step]:
    """Two resets in so short a time that the second one is not adopted yet."""
    reset = Step("reset", owner, namespace, 0)
    stored = Step("store whole", reader, namespace, 8 * random.randrange(8))
    return [reset, stored, reset, stored._replace(kind="load whole")]


def _completing_store(random: Random, reader: int, owner: int, namespace: int) -> list[Step]:
    """The owner is paused while it completes a store."""
    end = Step("end", owner, 0, 1)
    begun = [end, end, _step(random, "store", owner, namespace)]
    paused = end._replace(pause=random.randrange(1, 6))
    found = Step("search", reader, namespace, 0)
    load = _step(random, "load whole", reader, 4 + namespace)
    return [*begun, paused, found, load, Step("resume", owner, 0, 0)]


def _killed_start(random: Random, reader: int, owner: int, namespace: int) -> list[Step]:
    """The owner is killed at its start, and starts without one of its tables then."""
    kill = Step("kill", owner, 0, 0)
    start = Step("start", owner, 0, 0, random.randrange(4, 32))
    lost = Step("start", owner, 1, 1 + 4 * random.randrange(8))
    stores = [_step(random, "store whole", owner) for _ in range(3)]
    load = _load(random, reader, namespace)
    return [*load[:2], kill, start, kill, lost, *stores, load[2], *load]


def _missed_reset(random: Random, reader: int, owner: int, namespace: int) -> list[Step]:
    """The owner is killed, and restarted with its pool after a reset."""
    stored = [_step(random, "store whole", owner, namespace) for _ in range(2)]
    dies = [Step(name, owner, 0, 0) for name in ("begin commit", "end commit", "kill")]
    check, start = Step("check", owner, 0, 7), Step("start", owner, 0, 1)
    load = _step(random, "load whole", owner, namespace)
    return [*stored, *dies, Step("reset", reader, namespace, 0), start, check, check, load]


def _given_region(random: Random, reader: int, owner: int, namespace: int) -> list[Step]:
    """The region is given to another namespace, or gets another composition."""
    leave, other = Step("close", owner, namespace, 0), 1 - namespace
    given = [leave, leave._replace(first=other), Step("open", owner, other, 3)]
    changed = [Step("reset", owner, namespace, 0), leave, Step("open", owner, namespace, 8)]
    stores = [_step(random, "store whole", owner, other) for _ in range(4)]
    stores += [each._replace(first=namespace) for each in stores[:2]]
    load, back = _load(random, reader, namespace), _step(random, "open", owner, namespace)
    return [*load[:2], *random.choice([given, changed]), *stores, load[2], *load, back]


def _stored_in_part(random: Random, reader: int, owner: int, namespace: int) -> list[Step]:
    """A key is stored in part, in the block in which it was stored as a whole."""
    reset, wait = Step("reset", owner, namespace, 0), Step("advance", owner, 0, 5)
    whole = Step("store whole", owner, namespace, 3 * random.randrange(8))
    part = whole._replace(kind="store part", first=namespace + 2)
    load = _load(random, reader, namespace)
    return [reset, wait, whole, reset, wait, part, load[0]._replace(second=0), *load[1:]]


def _changed_block(random: Random, reader: int, owner: int, namespace: int) -> list[Step]:
    """The owner stores other keys, resets, or dies, while a search or a load is under way."""
    stores = "store whole", "store whole", "store part"
    changes = [
        _step(random, random.choice(stores), owner, namespace)
        for _ in range(random.randrange(1, 4))
    ]
    if (kind := random.randrange(7)) == 0:
        changes.insert(0, _step(random, "reset", owner, namespace))
    elif kind == 1:
        last = _step(random, random.choice(["kill within", "store", "end"]), owner)
        changes = [last, Step("kill", owner, 0, 0), _step(random, "start", owner), *changes]
    end = [Step("resume", reader, 0, 0), _step(random, "load whole", reader, namespace)]
    if random.random() < 0.5:
        search = _step(random, "search", reader, namespace, random.randrange(2, 12))
        return [search, *changes, *end]
    load = _load(random, reader, namespace)
    copied = [Step("copy", reader, 0, 0)] * random.randrange(3)
    return [*load[:2], *copied, *changes, load[2], *end]


def _load(random: Random, reader: int, namespace: int) -> list[Step]:
    """A search, and a load to be ended."""
    begun = [_step(random, each, reader, namespace) for each in ("search", "load")]
    return [*begun, Step("end", reader, 0, 1)]


_RACES = (
    *(_second_reset, _completing_store, _killed_start, _missed_reset, _given_region),
    *(_stored_in_part, _changed_block, _changed_block, _changed_block),
)


def shorten(schedule: Sequence[Step], fails: Callable[[Sequence[Step]], bool]) -> list[Step]:
    """A shorter schedule that fails, too."""
    left, size = list(schedule), max(1, len(schedule) // 2)
    while size:
        at = 0
        while at < len(left):
            shorter = left[:at] + left[at + size :]
            if fails(shorter):
                left = shorter
            else:
                at += size
        size //= 2
    return left
