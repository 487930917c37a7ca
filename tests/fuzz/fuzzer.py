"""One target in libFuzzer, by atheris. Started by `python -m fuzz`, as a process of its own.

    python -m fuzz.fuzzer TARGET FINDINGS [libFuzzer's options and folders]

An input that breaks an invariant is saved in FINDINGS with its traceback, once per place, and the
run goes on. One that takes too long or too much memory ends it; libFuzzer saves that one.
"""

from __future__ import annotations

import gc
import hashlib
import random
import sys
import traceback
from itertools import count
from pathlib import Path

import atheris

# Before anything imports the product. msgspec is in C, and has no coverage.
with atheris.instrument_imports(include=["kvferry"]):
    from fuzz.targets import TARGETS

from fuzz.case import NotACaseError, Run
from support.fuzz import HostileFrames

# Runs after which garbage is collected. Large arrays are in few objects, so Python does it late.
COLLECT_EVERY = 200


class Findings:
    """Saves an input and a traceback for each place where an invariant broke."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def save(self, data: bytes, error: BaseException) -> None:
        frames = traceback.extract_tb(error.__traceback__)[-3:]
        place = f"{type(error).__name__} {[(each.filename, each.lineno) for each in frames]}"
        path = self._folder / hashlib.sha256(place.encode()).hexdigest()[:16]
        if not path.exists():
            path.write_bytes(data)
            text = "".join(traceback.format_exception(error))
            path.with_suffix(".txt").write_text(text)
            print(f"FINDING {path}\n{text}", file=sys.stderr, flush=True)


def main() -> None:
    name, folder, *options = sys.argv[1:]
    findings, target = Findings(Path(folder)), TARGETS[name]
    seeds = list(target.seeds())
    with target.open() as run:
        gc.freeze()  # what is there now is never garbage
        runs = count(1)

        def run_one(data: bytes) -> int:
            if next(runs) % COLLECT_EVERY == 0:
                gc.collect()
            return _run_one(run, findings, data)

        atheris.Setup(
            [f"{sys.executable} -m fuzz.fuzzer {name} {folder}", *options],
            run_one,
            custom_mutator=lambda data, most, seed: _mutate(seeds, data, most, seed),
        )
        atheris.Fuzz()


def _run_one(run: Run, findings: Findings, data: bytes) -> int:
    try:
        run(data)
    except NotACaseError:
        return -1  # not for the corpus
    except Exception as error:
        findings.save(data, error)
    return 0


def _mutate(seeds: list[bytes], data: bytes, most: int, seed: int) -> bytes:
    """Change fields of the case, or bytes as libFuzzer does."""
    source = random.Random(seed)
    if source.random() < 0.3:
        mutated: bytes = atheris.Mutate(data, most)
        return mutated
    frames = HostileFrames(seed, [data, data, data, source.choice(seeds)])
    return frames.frame()[:most]


if __name__ == "__main__":
    main()
