"""SiblingHost: some daemons of one host, and the steps of test_sibling_cores_against_a_model.py.

A schedule is a list of steps, each with a few numbers, which are interpreted modulo what there is:
so every part of a schedule is a schedule, and a failing one can be shortened.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, NamedTuple
from unittest.mock import patch

from kvferry.daemon.persistence.epoch_page import EpochPage
from support.pausable_steps import Killed, PausableStep
from support.shared_accesses import WRITE, observed_accesses
from support.sibling_contents import SiblingContents
from support.sibling_cores import (
    FINGERPRINTS,
    KEYS,
    LAYOUTS,
    QUOTAS,
    Copy,
    KeptFds,
    SiblingCore,
)


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
PAUSED = frozenset(
    ["open", "close", "store", "store computed", "end", "search", "load", "map", "reset"]
    + ["start", "end commit", "check", "advance"]
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


def _step(
    random: Random, kind: str, daemon: int, first: int | None = None, pause: int = 0
) -> Step:
    chosen = random.randrange(64) if first is None else first
    return Step(kind, daemon, chosen, random.randrange(64), pause)


def _race(random: Random, reader: int, owner: int) -> list[Step]:
    """One daemon searches or loads while another one stores, resets, or dies and starts again."""
    namespace = random.randrange(len(FINGERPRINTS))
    kind = random.randrange(8)
    if kind == 0:  # two resets in so short a time that the second one is not adopted yet
        reset = Step("reset", owner, namespace, 0)
        stored = Step("store whole", reader, namespace, 8 * random.randrange(8))
        return [reset, stored, reset, stored._replace(kind="load whole")]
    if kind == 1:  # the other one is paused while it completes a store
        end = Step("end", owner, 0, 1)
        begun = [end, end, _step(random, "store", owner, namespace)]
        ended = end._replace(pause=random.randrange(1, 6))
        found = [Step("search", reader, namespace, 0)]
        found.append(_step(random, "load whole", reader, 4 + namespace))
        return [*begun, ended, *found, Step("resume", owner, 0, 0)]
    if kind == 3:  # the other one misses a reset
        stored = [_step(random, "store whole", owner, namespace) for _ in range(2)]
        names = "begin commit", "end commit", "kill"
        dies = [Step(name, owner, 0, 0) for name in names]
        check = Step("check", owner, 0, 7)
        loads = [check, check, _step(random, "load whole", owner, namespace)]
        reset = Step("reset", reader, namespace, 0)
        return [*stored, *dies, reset, Step("start", owner, 0, 1), *loads]
    if kind == 4:  # the region is given to another namespace, or has another composition
        found = [_step(random, each, reader, namespace) for each in ("search", "load")]
        ended, left = Step("end", reader, 0, 1), Step("close", owner, namespace, 0)
        other = 1 - namespace
        given = [left, left._replace(first=other), Step("open", owner, other, 3)]
        changed = [Step("reset", owner, namespace, 0), left, Step("open", owner, namespace, 8)]
        stores = [_step(random, "store whole", owner, other) for _ in range(4)]
        stores += [each._replace(first=namespace) for each in stores[:2]]
        which, again = random.choice([given, changed]), _step(random, "open", owner, namespace)
        return [*found, *which, *stores, ended, *found, ended, again]
    if kind == 2:  # the other one is killed at its start, and loses a table
        started = Step("start", owner, 0, 0, random.randrange(4, 32))
        lost = Step("start", owner, 1, 1 + 4 * random.randrange(8))
        stores = [_step(random, "store whole", owner) for _ in range(3)]
        kill, load = Step("kill", owner, 0, 0), _step(random, "load", reader, namespace)
        ended = Step("end", reader, 0, 1)
        begun = _step(random, "search", reader, namespace), load
        return [*begun, kill, started, kill, lost, *stores, ended, *begun, ended]
    stores = "store whole", "store whole", "store part"
    changes = [
        _step(random, random.choice(stores), owner, namespace)
        for _ in range(random.randrange(1, 4))
    ]
    restart = [Step("kill", owner, 0, 0), _step(random, "start", owner), *changes]
    restart.insert(0, _step(random, random.choice(["kill within", "store", "end"]), owner))
    changes = random.choice(
        [*[changes] * 5, [_step(random, "reset", owner, namespace), *changes], restart]
    )
    end = [Step("resume", reader, 0, 0), _step(random, "load whole", reader, namespace)]
    if random.random() < 0.5:
        pause = random.randrange(2, 12)
        return [_step(random, "search", reader, namespace, pause), *changes, *end]
    found = _step(random, "search", reader, namespace), _step(random, "load", reader, namespace)
    copied = [Step("copy", reader, 0, 0)] * random.randrange(3)
    return [*found, *copied, *changes, Step("end", reader, 0, 1), *end]


class Slot:
    """A daemon, or the place of one that does not run."""

    def __init__(self) -> None:
        self.kept = KeptFds()
        self.core: SiblingCore | None = None
        # A step that is paused.
        self.paused: PausableStep | None = None
        # Steps for which it is stopped.
        self.stopped = 0
        # Blocks that its engines have computed and not stored: namespace, epoch, numbers.
        self.computed = deque[tuple[int, int, dict[bytes, int]]](maxlen=4)


class SiblingHost:
    """daemons: their number. counts: of what happened. checks: whether to check the integrity of
    caches, too."""

    def __init__(self, directory: Path, daemons: int, *, checks: bool = True) -> None:
        self._directory, self._checks = directory, checks
        self.slots = [Slot() for _ in range(daemons)]
        self.counts = Counter[str]()
        names = tuple(each.name for each in FINGERPRINTS)
        self.contents = SiblingContents(directory, names)
        # The daemon whose step runs on the main thread, and at which access it is killed.
        self._accesses = 0
        # The paused step that holds the lock of the page.
        self._lock_holder: PausableStep | None = None

    @contextmanager
    def running(self) -> Iterator[None]:
        """Observe accesses, and end all daemons at the end."""
        locked = EpochPage._locked

        @contextmanager
        def locked_in_turn(page: EpochPage) -> Iterator[None]:
            me = self._current_step()
            while (holder := self._lock_holder) is not None and holder is not me:
                if me is None:
                    holder.resume()
                else:
                    me.pause()
            self._lock_holder = me
            try:
                with locked(page):
                    yield
            finally:
                self._lock_holder = None

        with (
            observed_accesses(self._before_access, self._look),
            patch.object(EpochPage, "_locked", locked_in_turn),
        ):
            try:
                yield
            finally:
                self._close()

    def run(self, schedule: Sequence[Step]) -> None:
        for number, step in enumerate(schedule):
            self.take(step)
            if self._checks and number % 8 == 0:
                self.check_integrity()
        for slot in self.slots:
            if slot.paused is not None:
                self._resume(slot, 0)
        if self._checks:
            self.check_integrity()

    def take(self, step: Step) -> None:
        """Take a step, if it is possible now."""
        slot = self.slots[step.daemon % len(self.slots)]
        self.counts["steps"] += 1
        for each in self.slots:
            each.stopped = max(0, each.stopped - 1)
        if step.kind == "kill":
            self._kill(slot)
        elif slot.stopped:
            return
        elif slot.paused is not None:
            if step.kind == "resume" or step.first % 4 == 0:
                self._resume(slot, step.second % 16)
        elif step.kind == "stop":
            slot.stopped = step.first % 24
        elif step.kind == "start":
            if slot.core is None:
                self._begin(slot, partial(self._start, slot, step.first, step.second), step.pause)
        elif slot.core is None:
            if step.first % 4 == 0:
                self._begin(slot, partial(self._start, slot, step.second, step.first), 0)
        else:
            if step.kind == "kill within":
                self._kill_within(slot, step)
            else:
                self._begin(slot, partial(self._act, slot, slot.core, step), step.pause)

    def check_integrity(self) -> None:
        for slot in self.slots:
            if slot.core is not None and slot.paused is None:
                slot.core.check_integrity()

    # Running steps

    def _begin(self, slot: Slot, function: Callable[[], None], pause: int) -> None:
        if not pause:
            function()
            return
        slot.paused = PausableStep(function)
        self._resume(slot, pause)

    def _resume(self, slot: Slot, accesses: int) -> None:
        paused = slot.paused
        assert paused is not None
        paused.resume(accesses)
        if paused.ended:
            slot.paused = None
        else:
            self.counts["pauses"] += 1

    def _kill(self, slot: Slot) -> None:
        """Kill a daemon where it is."""
        if slot.paused is not None:
            slot.paused.kill()
            slot.paused = None
            self.counts["kills within"] += 1
        self._bury(slot)

    def _kill_within(self, slot: Slot, step: Step) -> None:
        """Begin a step that changes something, and kill the daemon before one of its accesses."""
        kinds = "store", "end", "reset", "end commit", "open", "advance"
        inner = step._replace(kind=kinds[step.second % len(kinds)])
        assert slot.core is not None
        self._begin(slot, partial(self._act, slot, slot.core, inner), 1 + step.first % 24)
        if slot.paused is not None:
            self._kill(slot)

    def _bury(self, slot: Slot) -> None:
        if slot.core is not None:
            slot.core.die()
            slot.core = None
            slot.stopped = 0
            self.counts["deaths"] += 1

    def _current_step(self) -> PausableStep | None:
        steps = (slot.paused for slot in self.slots)
        return next((each for each in steps if each is not None and each.is_current), None)

    def _before_access(self, kind: str) -> None:
        self.counts[kind] += kind == WRITE
        if (step := self._current_step()) is not None:
            step.note_access()

    def _look(self) -> None:
        self.contents.look()

    def _close(self) -> None:
        for slot in self.slots:
            if slot.paused is not None:
                slot.paused.kill()
                slot.paused = None
            self._bury(slot)
            slot.kept.clear()
        self.contents.close()

    # Steps

    def _start(self, slot: Slot, how: int, which: int) -> None:
        """Start a daemon: with the kept pool, without one of its tables, or without the pool."""
        tables = sorted(name for name in slot.kept.fds if name.startswith("block-table"))
        if how % 4 == 1 and tables:
            slot.kept.remove_fd(tables[which % len(tables)])
            self.counts["tables lost"] += 1
        if how % 16 == 2:
            slot.kept.clear()
        keeps = how % 16 != 3
        self.counts["starts with a pool"] += keeps and bool(slot.kept.fds)
        damaged = which if how % 8 > 4 else None
        core = SiblingCore(
            slot.kept, self._directory, self.contents, self.counts, keeps=keeps, damaged=damaged
        )
        slot.core = core
        if which % 4:
            for number in range(len(FINGERPRINTS)):
                core.open(number, QUOTAS[0], LAYOUTS[0])

    def _act(self, slot: Slot, core: SiblingCore, step: Step) -> None:
        first, second = step.first, step.second
        namespace = first % len(FINGERPRINTS)
        core.advance(0.01 * (second % 8))
        match step.kind:
            case "open":
                quota = QUOTAS[second % len(QUOTAS)] if second < 32 else QUOTAS[0]
                core.open(namespace, quota, LAYOUTS[second % 7 == 1])
            case "close":
                core.close(namespace)
            case "compute":
                self._compute(slot, core, namespace, second)
            case "store" | "store whole":
                self._compute(slot, core, namespace, second)
                self._store(slot, core, whole=step.kind == "store whole")
            case "store computed":
                slot.computed.rotate(second)
                self._store(slot, core)
            case "store part":
                self._compute(slot, core, namespace, second)
                self._store(slot, core, second % 2, whole=first % 8 > 1)
            case "load" | "load whole":
                copy = core.submit_load(namespace, second, 1 + first // 2 % 3)
                if copy is not None and step.kind == "load whole":
                    self._finish(core, copy)
            case "search":
                core.search(namespace, KEYS[second % 4 :])
            case "reset":
                core.reset(namespace, ["", "", "a", "b"][second % 4])
            case "sync":
                core.end_sync()
            case "advance":
                core.advance(0.05 * (second % 6))
            case "begin commit":
                core.begin_commit()
            case "end commit":
                core.end_commit()
            case "check":
                core.check_blocks(1 + second % 8)
            case "borrow" | "lose" | "uses":
                self._meet(core, step)
            case "map":
                core.map_lent()
            case "copy" | "end" | "fail" | "cancel":
                copies = [each for each in core.copies.values() if core.may_copy(each)]
                if copies:
                    self._move(core, copies[first % len(copies)], step)

    def _compute(self, slot: Slot, core: SiblingCore, namespace: int, which: int) -> None:
        keys = [KEYS[(which + at) % len(KEYS)] for at in range(1 + which % 3)]
        if (made := core.compute(namespace, keys)) is not None:
            slot.computed.append((namespace, *made))

    def _store(
        self, slot: Slot, core: SiblingCore, part: int | None = None, *, whole: bool = False
    ) -> None:
        if slot.computed:
            copy = core.submit_store(*slot.computed.pop(), part)
            if copy is not None and whole:
                self._finish(core, copy)

    def _finish(self, core: SiblingCore, copy: Copy) -> None:
        for _ in copy.pieces:
            core.copy_piece(copy)
        core.end_copy(copy)

    def _move(self, core: SiblingCore, copy: Copy, step: Step) -> None:
        if step.kind == "copy":
            core.copy_piece(copy)
        elif step.kind == "cancel":
            core.cancel(copy)
        elif step.kind == "end" and step.second % 4:
            self._finish(core, copy)
        else:
            core.end_copy(copy, fails=step.kind == "fail")

    def _meet(self, core: SiblingCore, step: Step) -> None:
        """Meet another daemon, if it runs and is not stopped."""
        number = (step.daemon + 1 + step.first % (len(self.slots) - 1)) % len(self.slots)
        other = self.slots[number]
        name = f"daemon{number}"
        if step.kind == "lose":
            core.windows.close(name, *core.windows.namespaces_of(name))
            return
        if other.core is None or other.stopped or other.paused is not None:
            return
        if step.kind == "borrow":
            core.borrow(other.core, name)
            if step.second % 4:
                core.map_lent()
            return
        for uses in core.windows.take_uses(name):
            other.core.send("sibling", uses)


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
