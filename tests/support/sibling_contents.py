"""What each block may contain: the model of test_sibling_cores_against_a_model.py.

A block has a number in each half, which stands for its bytes. The model knows of each number the
namespace, the composition, the key and the epoch under which its tokens were computed.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from kvferry.daemon.persistence.epoch_page import EpochPage


class Origin(NamedTuple):
    """What an engine computed. number: of the computation, so that no two are equal."""

    namespace: str
    composition: int
    key: bytes
    epoch: int
    number: int


class WrongBytes(AssertionError):
    """A load that is done returned other bytes than it may."""


class Submission:
    """Of a load: the epochs that its namespace had from just before its submission to the end of
    that."""

    def __init__(self, namespace: str, composition: int, epochs: set[int]) -> None:
        self.namespace, self.composition, self.epochs = namespace, composition, set(epochs)


class SiblingContents:
    """directory: of the page of epochs."""

    def __init__(self, directory: Path, namespaces: tuple[str, ...]) -> None:
        self._page, self._changes = EpochPage(directory), -1
        # The epochs that each namespace may have: one, unless a reset was begun and not ended.
        self._epochs: dict[str, set[int]] = {name: set() for name in namespaces}
        self._origins: list[Origin] = []
        # Loads that are being submitted.
        self._submitting: set[Submission] = set()
        self.look()

    def look(self) -> None:
        """The page may have changed."""
        changes = self._page.changes
        for name, epochs in self._epochs.items():
            if changes != self._changes:
                epochs.clear()
            epochs.add(self._page.current(name))
        self._changes = changes
        for each in self._submitting:
            each.epochs |= self._epochs[each.namespace]

    def compute(self, namespace: str, composition: int, key: bytes, epoch: int) -> int:
        """The number that stands for what an engine computes now."""
        origin = Origin(namespace, composition, key, epoch, len(self._origins))
        self._origins.append(origin)
        return len(self._origins)

    def begin_load(self, namespace: str, composition: int) -> Submission:
        self.look()
        submission = Submission(namespace, composition, self._epochs[namespace])
        self._submitting.add(submission)
        return submission

    def end_submission(self, submission: Submission) -> None:
        self.look()
        self._submitting.discard(submission)

    def check(self, submission: Submission, key: bytes, numbers: list[int]) -> None:
        """Raise WrongBytes unless a load may return these numbers, of the parts of one block."""
        origins = {self._origins[number - 1] if number else None for number in numbers}
        if len(origins) != 1:
            raise WrongBytes(f"torn: key {key.hex()} is a mix of {origins}")
        (origin,) = origins
        if origin is None:
            raise WrongBytes(f"freed: key {key.hex()} has no bytes")
        wanted = submission.namespace, submission.composition, key
        if origin[:3] != wanted:
            raise WrongBytes(f"other: {wanted} was loaded, and {origin} returned")
        if origin.epoch not in submission.epochs:
            raise WrongBytes(f"old: {origin} was returned in epochs {submission.epochs}")

    def close(self) -> None:
        self._page.close()
