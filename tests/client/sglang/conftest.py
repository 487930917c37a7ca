"""SGLang's own cache, where SGLang is installed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from kvferry.client import LocalDaemon
from kvferry.client.sglang import loads

if TYPE_CHECKING:
    from support.sglang_tree import TreeServer

PAGE_SIZE = 4


@pytest.fixture(scope="session")
def server_args(tmp_path_factory: pytest.TempPathFactory) -> Any:
    if find_spec("sglang") is None:
        pytest.skip("SGLang is not installed")
    from support.sglang_tree import publish_server_args

    return publish_server_args(tmp_path_factory.mktemp("model"), PAGE_SIZE)


@pytest.fixture
def daemon() -> Iterator[LocalDaemon]:
    with LocalDaemon(pool_bytes=16 << 20) as daemon:
        yield daemon


@pytest.fixture
def start_server(
    server_args: Any, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., TreeServer]]:
    """Start a server's cache; closed at the end of the test. Small loads have sections, too."""
    monkeypatch.setattr(loads, "MIN_SECTIONED", 0)
    from support.sglang_tree import TreeServer

    with ExitStack() as servers:

        def start(directory: Path, **options: Any) -> TreeServer:
            server = TreeServer(server_args, directory, **options)
            servers.callback(server.close)
            return server

        yield start
