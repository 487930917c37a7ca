"""SiblingHost: some daemons of one host, in one process, which take the steps of a schedule.

A step of a daemon may be paused at any access to shared memory. Then the others take their steps;
later the daemon goes on, or is killed where it is.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from unittest.mock import patch

from kvferry.daemon.persistence.epoch_page import EpochPage
from support.pausable_steps import PausableStep
from support.shared_accesses import WRITE, observed_accesses
from support.sibling_contents import SiblingContents
from support.sibling_cores import SiblingCore
from support.sibling_device import Computed, Copy
from support.sibling_ports import FINGERPRINTS, KEYS, LAYOUTS, QUOTAS, KeptDescriptors
from support.sibling_schedules import Step


class DaemonSlot:
    """A daemon, or the place of one that does not run."""

    def __init__(self) -> None:
        self.kept = KeptDescriptors()
        self.core: SiblingCore | None = None
        # A step that is paused.
        self.paused: PausableStep | None = None
        # Steps for which it is stopped.
        self.stopped = 0
        # What its engines have computed and not stored.
        self.computed = deque[Computed](maxlen=4)


class SiblingHost:
    """daemons: their number. counts: of what happened. checks: whether to check the integrity of
    caches, too."""

    def __init__(self, directory: Path, daemons: int, *, checks: bool = True) -> None:
        self._directory, self._checks = directory, checks
        self.slots = [DaemonSlot() for _ in range(daemons)]
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

    def _begin(self, slot: DaemonSlot, function: Callable[[], None], pause: int) -> None:
        if not pause:
            function()
            return
        slot.paused = PausableStep(function)
        self._resume(slot, pause)

    def _resume(self, slot: DaemonSlot, accesses: int) -> None:
        paused = slot.paused
        assert paused is not None
        paused.resume(accesses)
        if paused.ended:
            slot.paused = None
        else:
            self.counts["pauses"] += 1

    def _kill(self, slot: DaemonSlot) -> None:
        """Kill a daemon where it is."""
        if slot.paused is not None:
            slot.paused.kill()
            slot.paused = None
            self.counts["kills within"] += 1
        self._bury(slot)

    def _kill_within(self, slot: DaemonSlot, step: Step) -> None:
        """Begin a step that changes something, and kill the daemon before one of its accesses."""
        kinds = "store", "end", "reset", "end commit", "open", "advance"
        inner = step._replace(kind=kinds[step.second % len(kinds)])
        assert slot.core is not None
        self._begin(slot, partial(self._act, slot, slot.core, inner), 1 + step.first % 24)
        if slot.paused is not None:
            self._kill(slot)

    def _bury(self, slot: DaemonSlot) -> None:
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

    def _start(self, slot: DaemonSlot, how: int, which: int) -> None:
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

    def _act(self, slot: DaemonSlot, core: SiblingCore, step: Step) -> None:
        first, second = step.first, step.second
        namespace = first % len(FINGERPRINTS)
        core.advance(0.01 * (second % 8))
        match step.kind:
            case "open":
                quota = QUOTAS[second % len(QUOTAS)] if second < 32 else QUOTAS[0]
                core.open(namespace, quota, LAYOUTS[second % 7 == 1])
            case "close":
                core.close(namespace)
            case "load" | "load whole":
                copy = core.submit_load(namespace, second, first)
                if copy is not None and step.kind == "load whole":
                    self._finish(core, copy)
            case "search":
                core.search(namespace, KEYS[second % 4 :])
            case "reset":
                core.reset(namespace, ["", "", "a", "b"][second % 4])
            case "borrow" | "lose" | "uses":
                self._meet(core, step)
            case "copy" | "end" | "fail" | "cancel":
                copies = [
                    each for each in core.device.copies.values() if core.device.may_copy(each)
                ]
                if copies:
                    self._move(core, copies[first % len(copies)], step)
            case "compute" | "store" | "store whole" | "store computed" | "store part":
                self._store_some(slot, core, step)
            case _:
                self._keep(core, step)

    def _keep(self, core: SiblingCore, step: Step) -> None:
        """What a daemon does by itself."""
        match step.kind:
            case "sync":
                core.end_sync()
            case "advance":
                core.advance(0.05 * (step.second % 6))
            case "begin commit":
                core.checksums.begin_commit()
            case "end commit":
                core.checksums.end_commit()
            case "check":
                core.check_blocks(1 + step.second % 8)
            case "map":
                core.map_lent()

    def _store_some(self, slot: DaemonSlot, core: SiblingCore, step: Step) -> None:
        """Compute blocks, store them, or both."""
        if step.kind == "store computed":
            slot.computed.rotate(step.second)
        else:
            self._compute(slot, core, step.first % len(FINGERPRINTS), step.second)
        part = step.second % 2 if step.kind == "store part" else None
        whole = step.kind == "store whole" or (part is not None and step.first % 8 > 1)
        if step.kind != "compute":
            self._store(slot, core, part, whole=whole)

    def _compute(self, slot: DaemonSlot, core: SiblingCore, namespace: int, which: int) -> None:
        keys = [KEYS[(which + at) % len(KEYS)] for at in range(1 + which % 3)]
        if (made := core.compute(namespace, keys)) is not None:
            slot.computed.append(made)

    def _store(
        self, slot: DaemonSlot, core: SiblingCore, part: int | None = None, *, whole: bool = False
    ) -> None:
        if slot.computed:
            copy = core.submit_store(slot.computed.pop(), part)
            if copy is not None and whole:
                self._finish(core, copy)

    def _finish(self, core: SiblingCore, copy: Copy) -> None:
        for _ in copy.pieces:
            core.device.copy_piece(copy)
        core.end_copy(copy)

    def _move(self, core: SiblingCore, copy: Copy, step: Step) -> None:
        if step.kind == "copy":
            core.device.copy_piece(copy)
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
