"""Fuzzes targets one after the other, with atheris: `make fuzz`.

New inputs and findings are kept in .fuzz, so the next run continues from there. `--keep` puts
the inputs with new coverage into the corpus of the repository. `--run FILE` repeats one input.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

from fuzz.targets import CORPUS, TARGETS

WORK = Path(".fuzz")
# Seconds and MiB for one input, and bytes of one.
TIMEOUT, MEMORY_MB, MAX_BYTES = 20, 2048, 8192
# Seconds of one process: traced comparisons take memory, with atheris 3.0 up to 10 MiB per second.
SLICE = 120


def main() -> int:
    parser = argparse.ArgumentParser(prog="fuzz", description=__doc__)
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=", ".join(TARGETS))
    parser.add_argument("--seconds", type=int, default=1800, help="for each target")
    parser.add_argument("--keep", action="store_true", help="put new inputs into the corpus")
    parser.add_argument("--run", type=Path, metavar="FILE", help="repeat one input of a target")
    arguments = parser.parse_args()
    names = arguments.targets or list(TARGETS)
    if unknown := set(names) - TARGETS.keys():
        parser.error(f"unknown target {min(unknown)!r}; use one of {', '.join(TARGETS)}")
    if arguments.run is not None:
        with TARGETS[names[0]].open() as run:
            run(arguments.run.read_bytes())
        return 0
    for name in names:
        write_seeds(name)
        if arguments.keep:
            keep_inputs(name)
        else:
            print(f"== {name}: {arguments.seconds} s", flush=True)
            for begun in range(0, arguments.seconds, SLICE):
                fuzz(name, f"-max_total_time={min(SLICE, arguments.seconds - begun)}")
    found = sorted(path for name in names for path in (WORK / name / "findings").iterdir())
    print(f"{len(found)} files in {WORK}/*/findings", *found, sep="\n")
    return 1 if found else 0


def write_seeds(name: str) -> None:
    """Write the seeds of a target, and create its folders."""
    for folder in (
        *(WORK / name / each for each in ("corpus", "findings", "seeds")),
        CORPUS / name,
    ):
        folder.mkdir(parents=True, exist_ok=True)
    for number, seed in enumerate(TARGETS[name].seeds()):
        (WORK / name / "seeds" / f"{number:02}").write_bytes(seed)


def fuzz(name: str, *options: str, folders: tuple[Path, ...] = ()) -> None:
    """Run libFuzzer. It writes new inputs into the first folder, and its progress to stderr."""
    findings = WORK / name / "findings"
    folders = folders or (WORK / name / "corpus", WORK / name / "seeds", CORPUS / name)
    limits = f"-timeout={TIMEOUT}", f"-rss_limit_mb={MEMORY_MB}", f"-max_len={MAX_BYTES}"
    command = [sys.executable, "-m", "fuzz.fuzzer", name, str(findings), *options, *limits]
    command += [f"-artifact_prefix={findings}/", *map(str, folders)]
    subprocess.run(command, check=False, env={**os.environ, "PYTHONHASHSEED": "0"})


def keep_inputs(name: str) -> None:
    """Replace the corpus by few inputs that, with the seeds, have all of the known coverage.

    Files named finding-* stay: they broke an invariant.
    """
    merged, seeds = WORK / name / "merged", WORK / name / "seeds"
    shutil.rmtree(merged, ignore_errors=True)
    shutil.copytree(seeds, merged)
    # Without counters: how often a branch is taken would need hundreds of inputs.
    options = "-merge=1", "-use_counters=0"
    fuzz(name, *options, folders=(merged, CORPUS / name, WORK / name / "corpus"))
    for path in (CORPUS / name).glob("input-*"):
        path.unlink()
    for path in merged.glob("?" * 40):  # named by their SHA-1
        shutil.copy(path, CORPUS / name / f"input-{path.name[:12]}")


if __name__ == "__main__":
    sys.exit(main())
