"""Generations of namespaces in a tier that several daemons share: see tiers/__init__.py.

The daemon keeps them in a file. After a restart it compares them, and drops the namespaces that
others have dropped meanwhile. It writes the file about a second after a change, when it has dropped
the namespace itself. If it ends before that, the next daemon reads the old number, and drops the
namespace again.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import structlog

from kvferry.daemon.tiers.durable_files import write_file
from kvferry.daemon.tiers.own_files import read_file

NOT_KNOWN = -1
# Namespaces that are kept, those that were noted last: more than a daemon can have at a time.
MAX_KEPT = 4096
# Their file is shorter.
MAX_FILE_BYTES = MAX_KEPT << 10

log = structlog.get_logger()


class Generations:
    """Each namespace's generation, as far as known.

    path: the file; None: nothing is kept. drops: those of this daemon, and those by which a known
    number has changed.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self.drops = 0
        self._of: dict[str, int] = _read(path)
        self._unsaved = False

    def is_noted(self, name: str) -> bool:
        """Whether `note` was called for a namespace, in this daemon or in an earlier one."""
        return name in self._of

    def get(self, name: str) -> int:
        return self._of.get(name, NOT_KNOWN)

    def note(self, name: str, generation: int) -> bool:
        """Note what the tier has answered. Returns whether another number was known before."""
        known = self._of.pop(name, NOT_KNOWN)
        self._of[name] = known if generation == NOT_KNOWN else generation
        if len(self._of) > MAX_KEPT:
            del self._of[next(iter(self._of))]
        if generation in (NOT_KNOWN, known):
            return False
        self._unsaved = True
        self.drops += known != NOT_KNOWN
        return known != NOT_KNOWN

    def take_unsaved(self) -> dict[str, int]:
        """What `save` must write; empty if nothing has changed since."""
        if not self._unsaved:
            return {}
        self._unsaved = False
        return {name: each for name, each in self._of.items() if each != NOT_KNOWN}

    def save(self, generations: dict[str, int]) -> None:
        """Write the file. Blocks; any thread."""
        if self._path is None:
            return
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_file(self._path, msgspec.json.encode(generations))
        except OSError as error:
            log.warning("generations not saved", path=str(self._path), reason=str(error))


def _read(path: Path | None) -> dict[str, int]:
    if path is None:
        return {}
    try:
        return msgspec.json.decode(read_file(path, MAX_FILE_BYTES), type=dict[str, int])
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        log.warning("generations not read", path=str(path), reason=str(error))
        return {}
