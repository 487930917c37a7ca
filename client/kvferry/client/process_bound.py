"""Objects that belong to the process which created them, such as clients."""

from __future__ import annotations

from typing import NoReturn, SupportsIndex


class ProcessBound:
    """Base class: pickling or copying raises TypeError, as pickle's callers expect.

    INSTEAD: what to do, for the error.
    """

    INSTEAD: str

    def __reduce_ex__(self, protocol: SupportsIndex, /) -> NoReturn:
        name = type(self).__name__
        raise TypeError(
            f"{name} cannot be pickled or copied: it belongs to one process; {self.INSTEAD}"
        )
