"""A mutant of the product: one small change that a user would feel, and the tests that find it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class SourceMutant:
    """name: the behaviour that it breaks. path: of the changed file. old: a text that occurs in it
    exactly once. new: what replaces it. tests: paths or ids of pytest. All paths begin at the root
    of the repository."""

    name: str
    path: str
    old: str
    new: str
    tests: tuple[str, ...]

    def find_problem(self, root: Path) -> str | None:
        """Why it can no longer be applied; None if it can."""
        try:
            found = (root / self.path).read_text().count(self.old)
        except OSError:
            return f"{self.path} does not exist"
        if found != 1:
            return f"{self.path} has its old text {found} times, not once"
        if missing := [
            test for test in self.tests if not (root / test.partition("::")[0]).exists()
        ]:
            return f"{missing[0]} does not exist"
        return None

    def mutated(self, source: str) -> str:
        """The text of its file with the change."""
        return source.replace(self.old, self.new)
