"""The file of epochs: a damaged one is refused or repaired, and an epoch never returns."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from fuzz.case import Change, Run, apply_changes, case_decoder, no_log, pick
from kvferry.daemon.persistence.epoch_page import NAME, NBYTES, EpochPage, is_plausible
from kvferry.proto.errors import Refused

NAMES = "0123456789abcdef", "fedcba9876543210", "third"
MAX_CALLS = 64


class EpochCall(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """A daemon resets a namespace (0), adopts an epoch (1), publishes it (2), or restarts (3)."""

    kind: int
    namespace: int = 0
    epoch: int = 0
    label: str = ""


class EpochCase(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """nbytes: of the file; None: as it must be."""

    changes: tuple[Change, ...] = ()
    calls: tuple[EpochCall, ...] = ()
    nbytes: int | None = None


decode_case = case_decoder(EpochCase)


def seeds() -> list[bytes]:
    calls = (
        EpochCall(0, 0),
        EpochCall(0, 0, 0, "weights"),
        EpochCall(1, 1, 1 << 40),
        EpochCall(2, 0),
        EpochCall(3),
    )
    word = (1 << 62).to_bytes(8, "little")
    cases = [
        EpochCase((), calls),
        EpochCase((Change(0, b"other"),), calls),
        EpochCase((Change(32, (9).to_bytes(8, "little")), Change(4096 + 8, word)), calls),
        EpochCase((Change(32, b"\xff" * 8), Change(40, word)), calls),
        EpochCase((Change(24, b"\xff" * 8),), calls),
        EpochCase((), calls, 100),
        EpochCase((Change(0, b"\0" * 8),), (EpochCall(0, 2), EpochCall(3), EpochCall(0, 2))),
    ]
    return [msgspec.msgpack.encode(case) for case in cases]


class EpochFile:
    """A directory with a file of epochs. valid: its undamaged bytes."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        page = EpochPage(directory)
        for name in NAMES[:2]:
            page.draw(name, "label")
        page.close()
        self._valid = (directory / NAME).read_bytes()

    def check_page(self, data: bytes) -> None:
        case = decode_case(data)
        damaged = apply_changes(bytearray(self._valid), case.changes)
        if case.nbytes is not None:
            damaged = damaged[: case.nbytes % (2 * NBYTES)].ljust(case.nbytes % (2 * NBYTES), b"\0")
        (self._directory / NAME).write_bytes(damaged)
        page = self._open()
        try:
            for call in case.calls[:MAX_CALLS] if page else ():
                assert page is not None
                if call.kind % 4 == 3:
                    page.close()
                    page = self._open()
                    assert page is not None, "a repaired file cannot be opened again"
                else:
                    _check_call(page, call)
        finally:
            if page is not None:
                page.close()

    def _open(self) -> EpochPage | None:
        try:
            page = EpochPage(self._directory)
        except Refused:
            return None
        assert all(is_plausible(page.current(name)) for name in NAMES)
        return page


def _check_call(page: EpochPage, call: EpochCall) -> None:
    name = pick(NAMES, call.namespace)
    before, changes, epoch = page.current(name), page.changes, call.epoch % (1 << 64)
    match call.kind % 4:
        case 0:
            drawn = page.draw(name, call.label[:64], epoch)
            assert page.current(name) == drawn
            assert is_plausible(drawn)
            assert drawn >= before
            if drawn > before:
                assert page.is_unpublished(name) or page.changes != changes
                assert drawn > epoch
        case 1:
            page.raise_to(name, epoch)
            assert page.current(name) == (epoch if is_plausible(epoch) else before) or (
                page.current(name) == before >= epoch
            )
        case _:
            page.mark_published(name, epoch)
            page.mark_published(name, before)
            assert not page.is_unpublished(name) or before == 0
    assert page.find_problem() is None


@contextmanager
def open_page() -> Iterator[Run]:
    with tempfile.TemporaryDirectory() as directory, no_log():
        yield EpochFile(Path(directory)).check_page
