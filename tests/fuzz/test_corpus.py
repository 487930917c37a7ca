"""The short form of fuzzing: the corpus of each target, and mutations of it. Needs no atheris."""

from __future__ import annotations

import zlib

import pytest

from fuzz.case import NotACaseError
from fuzz.targets import TARGETS, corpus
from support.fuzz import HostileFrames


@pytest.mark.parametrize("name", TARGETS)
def test_every_input_of_the_corpus_holds(name: str) -> None:
    with TARGETS[name].open() as run:
        for data in corpus(name):
            run(data)


@pytest.mark.parametrize("name", TARGETS)
def test_mutations_of_the_corpus_hold(name: str) -> None:
    target, cases = TARGETS[name], 0
    frames = HostileFrames(zlib.crc32(name.encode()), corpus(name))
    with target.open() as run:
        for _ in range(target.mutations):
            data = frames.frame()
            try:
                run(data)
            except NotACaseError:
                continue
            except Exception as error:
                error.add_note(f"python -m fuzz {name} --run FILE, with {data.hex()}")
                raise
            cases += 1
    assert cases > target.mutations // 5  # the mutations still are cases
