"""`kvferry size`: the hits of host memory of each size, for a trace."""

from __future__ import annotations

import gzip
import json
import random
import re
from collections import OrderedDict
from pathlib import Path
from typing import TypeAlias

import pytest

from kvferry.client import cli

Captured: TypeAlias = pytest.CaptureFixture[str]
BLOCK_TOKENS, TOKEN_BYTES = 512, 2 << 20


def run_size(*arguments: object) -> int | str | None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["size", *map(str, arguments)])
    return ended.value.code


def prompts(seed: int) -> list[list[int]]:
    """Conversations with a common beginning, which continue in any order."""
    rng, numbers = random.Random(seed), iter(range(3, 1 << 20))
    talks: list[list[int]] = [[0, 1, 2] for _ in range(30)]
    found = []
    for _ in range(400):
        talk = rng.choice(talks)
        talk += [next(numbers) for _ in range(rng.randrange(4))]
        found.append(list(talk))
    return found


def write(path: Path, trace: list[list[int]]) -> Path:
    lines = "".join(json.dumps({"timestamp": 0, "hash_ids": ids}) + "\n" for ids in trace)
    path.write_bytes(gzip.compress(lines.encode()) if path.suffix == ".gz" else lines.encode())
    return path


def exact_hits(trace: list[list[int]], blocks: int) -> int:
    kept, hits = OrderedDict[int, None](), 0
    for ids in trace:
        hits += sum(each in kept for each in ids)
        for each in reversed(ids):
            kept[each] = None
            kept.move_to_end(each)
        while len(kept) > blocks:
            kept.popitem(last=False)
    return hits


@pytest.mark.parametrize("name", ["trace.jsonl", "trace.jsonl.gz"])
def test_the_hits_are_those_of_caches_of_each_size(
    name: str, tmp_path: Path, capsys: Captured
) -> None:
    trace, counts = prompts(7), (1, 10, 50, 200, 1000)
    path = write(tmp_path / name, trace)
    block_bytes = BLOCK_TOKENS * TOKEN_BYTES
    sizes = ",".join(str(count * block_bytes) for count in counts)
    arguments = ["--trace", path, "--model-bytes-per-token", TOKEN_BYTES, "--sizes", sizes]
    assert run_size(*arguments, "--json") == 0
    results = json.loads(capsys.readouterr().out)
    assert [each["blocks"] for each in results] == [*counts]
    assert [each["tokens"] // BLOCK_TOKENS for each in results] == [
        exact_hits(trace, count) for count in counts
    ]


def test_sizes_are_doubled_while_they_bring_more(tmp_path: Path, capsys: Captured) -> None:
    path = write(tmp_path / "trace", [[*range(9)]] * 50 + [[*range(9, 14)], [*range(9)]])
    assert run_size("--trace", path, "--model-bytes-per-token", "2MiB") == 0
    first, _, *rows = capsys.readouterr().out.splitlines()
    assert first.startswith("52 prompts with 464 blocks, 14 different ones: at most 97.0%")
    memory = [" ".join(row.split()[:2]) for row in rows]
    assert memory == ["1 GiB", "2 GiB", "4 GiB", "8 GiB", "16 GiB"]


@pytest.mark.parametrize(
    ("contents", "error"),
    [
        (b"", "has no blocks"),
        (b'{"hash_ids": []}\n', "has no blocks"),
        (b'{"hash_ids": [1]}\n\n{"timestamp": 3}\n', "line 3 of .*hash_ids"),
        (b'{"hash_ids": ["a"]}\n', "line 1 of"),
        (b"\x00\xff\n", "line 1 of"),
    ],
)
def test_a_file_that_is_no_trace(
    contents: bytes, error: str, tmp_path: Path, capsys: Captured
) -> None:
    path = tmp_path / "trace"
    path.write_bytes(contents)
    assert run_size("--trace", path, "--model-bytes-per-token", "128KiB") == 1
    printed = capsys.readouterr().err
    assert printed.startswith("kvferry: [bad_config]")
    assert re.search(error, printed)


def test_a_damaged_archive(tmp_path: Path, capsys: Captured) -> None:
    path = write(tmp_path / "trace.gz", prompts(1))
    path.write_bytes(path.read_bytes()[:-20])
    assert run_size("--trace", path, "--model-bytes-per-token", "128KiB") == 1
    assert "is damaged" in capsys.readouterr().err
