"""The linker reads what SGLang has decided, not only what the user has set."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvferry.client import LocalDaemon

pytestmark = pytest.mark.filterwarnings("ignore")  # SGLang's own


def test_the_fingerprint_has_sglangs_decisions(
    daemon: LocalDaemon, server_args: Any, start_server: Callable[..., Any]
) -> None:
    assert server_args.attention_backend is None
    fingerprint = start_server(daemon.directory).linker._session._identity.fingerprint
    assert "attention_backend=torch_native" in dict(fingerprint.extra)["attention"]
