"""Results of a script that measures: rows on the screen and as lines of JSON, and what failed."""

from __future__ import annotations

import json
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from support.vllm_measure import Record, print_figures, spread


class JsonRows:
    """Appends rows to the file `path`. `failed` lists the checks that failed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.failed: list[str] = []

    def report(self, what: str, **row: Any) -> None:
        print_figures(what, **row)
        with self.path.open("a") as rows:
            rows.write(json.dumps({"what": what, **row}) + "\n")

    def check(self, what: str, fine: bool, **row: Any) -> None:
        self.report(what, fine=fine, **row)
        if not fine:
            self.failed.append(f"{what}: {row}")

    def summarize(self, what: str, rows: Sequence[Record]) -> dict[str, Record]:
        """Report and return the median and spread of each column."""
        figures = {column: spread([row[column] for row in rows]) for column in rows[0]}
        self.report(f"= {what}", **{column: it["median"] for column, it in figures.items()})
        ranges = {column: (it["least"], it["most"]) for column, it in figures.items()}
        self.report(f"= {what}: least and most", **ranges)
        return figures

    @contextmanager
    def guarded(self, what: str) -> Iterator[None]:
        """A figure that fails does not end the others."""
        try:
            yield
        except Exception as error:
            traceback.print_exc()
            self.check(what, False, error=repr(error)[:1500])
