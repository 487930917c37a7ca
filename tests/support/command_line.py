"""The `kvferry` command in this process."""

from __future__ import annotations

import pytest

from kvferry.client.cli import main


def kvferry(*arguments: object) -> int:
    """Run the command. Returns its exit status."""
    with pytest.raises(SystemExit) as ended:
        main([str(argument) for argument in arguments])
    return int(ended.value.code or 0)
