"""SGLang's tree, pools and wrapper over a real daemon: every promised page is compared."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from kvferry.client import LocalDaemon, Refused
from support.eventually import wait_until

pytestmark = pytest.mark.filterwarnings("ignore")  # SGLang's own
StartServer = Callable[..., Any]
PROMPT = list(range(40))


def load(server: Any, tokens: list[int], **options: Any) -> int:
    """Run a request once the server's mirror shows what the daemon has; returns loaded tokens."""
    wait_until(lambda: server.match(tokens, **options).host_hit_length)
    loaded: int = server.run(tokens, **options)
    return loaded


@pytest.mark.parametrize(
    ("kind", "core"), [("mha", "python"), ("mha", "rust"), ("draft", "python"), ("swa", "rust")]
)
def test_what_the_device_has_lost_is_loaded(
    daemon: LocalDaemon, start_server: StartServer, kind: str, core: str
) -> None:
    server = start_server(daemon.directory, kind=kind, core=core)
    assert server.run(PROMPT) == 0
    server.evict_all()
    assert load(server, PROMPT) == 36  # SGLang computes the last token, and so its page
    # The device has this prefix; of a sliding window only that of the end.
    assert server.run([*PROMPT[:20], 7, 8, 9]) == (20 if kind == "swa" else 0)
    assert (server.compared, server.wrong, server.failed) == (9 + 5, 0, 0)


def test_a_server_finds_what_another_or_an_earlier_one_has_computed(
    daemon: LocalDaemon, start_server: StartServer
) -> None:
    first = start_server(daemon.directory)
    second = start_server(daemon.directory)
    first.run(PROMPT)
    first.drain()
    assert load(second, PROMPT) == 36
    first.close()
    third = start_server(daemon.directory, core="rust")
    assert third.run(PROMPT) == 36
    assert second.wrong == third.wrong == 0


def test_salts_of_requests_share_nothing(daemon: LocalDaemon, start_server: StartServer) -> None:
    server = start_server(daemon.directory)
    server.run(PROMPT, salt="one")
    server.evict_all()
    assert server.run(PROMPT) == server.run(PROMPT, salt="two") == 0
    server.evict_all()
    assert load(server, PROMPT, salt="one") == 36
    assert server.wrong == 0


def test_a_flush_empties_the_namespace_of_all_servers(
    daemon: LocalDaemon, start_server: StartServer
) -> None:
    server, other = start_server(daemon.directory), start_server(daemon.directory)
    server.run(PROMPT)
    server.flush()
    wait_until(lambda: other.match(PROMPT).host_hit_length == 0)
    assert server.run(PROMPT) == 0
    server.evict_all()
    assert load(server, PROMPT) == 36


def test_a_request_that_leaves_before_its_batch_frees_what_it_was_promised(
    daemon: LocalDaemon, start_server: StartServer
) -> None:
    server = start_server(daemon.directory)
    server.run(PROMPT)
    server.evict_all()
    free = server.allocator.available_size()
    wait_until(lambda: server.match(PROMPT).host_hit_length)
    server.linker._promises.end_all()
    assert server.run(PROMPT, abort=True) == 36
    assert server.allocator.available_size() == free
    assert server.linker._session.client is not None
    assert server.linker._session.client.namespace.pinned == 0
    assert server.run(PROMPT) == 36


def test_promised_pages_are_not_evicted_before_they_are_loaded(
    daemon: LocalDaemon, start_server: StartServer
) -> None:
    """Between the lookup and the load another server fills the namespace."""
    first = start_server(daemon.directory, cpu_bytes_to_use=64 * 768)
    other = start_server(daemon.directory)
    first.run(PROMPT)
    first.evict_all()
    wait_until(lambda: first.match(PROMPT).host_hit_length)
    first.linker._promises.end_all()
    promised = first.match(PROMPT)
    assert promised.host_hit_length == 36
    for number in range(8):
        other.run([number] * 40)
        other.drain()
    assert not first.linker._promises.claim("unknown")
    assert first.linker._promises.claim(promised.rid)
    first.linker._promises.done(promised.rid)
    other.run([9] * 40)
    other.drain()
    wait_until(lambda: first.match(PROMPT).host_hit_length == 0)  # no longer held


def test_the_indexer_of_dsa_is_loaded_with_the_prefix(
    daemon: LocalDaemon, start_server: StartServer
) -> None:
    server = start_server(daemon.directory, kind="dsa", core="rust", pages=16)
    prompt = [number % 1000 for number in range(300)]
    server.run(prompt)
    server.evict_all()
    assert load(server, prompt) == 256
    assert (server.wrong, server.failed) == (0, 0)


def test_the_fingerprint_has_sglangs_decisions(
    daemon: LocalDaemon, server_args: Any, start_server: StartServer
) -> None:
    """Not only what the user has set."""
    assert server_args.attention_backend is None
    fingerprint = start_server(daemon.directory).linker._session._identity.fingerprint
    assert "attention_backend=torch_native" in dict(fingerprint.extra)["attention"]


def test_a_layout_whose_rows_are_no_tokens_is_refused(
    daemon: LocalDaemon, start_server: StartServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_USE_HND_KVCACHE", "1")
    with pytest.raises(Refused, match="the layout hnd, which kvferry does not offload"):
        start_server(daemon.directory)


def test_a_pool_that_is_allocated_after_graphs_is_refused(server_args: Any) -> None:
    from kvferry.client.sglang.pools import read_pools
    from support.sglang_pools import make_pools

    pool = make_pools("mha", pages=4, page_size=4).pool
    pool.post_capture_active = True
    with pytest.raises(Refused, match="without SGLANG_ENABLE_POST_CAPTURE_KV_SIZING"):
        read_pools(pool, None, 4)


# Bytes of a page of four tokens, or of a token of a model with Mamba layers.
PAGE_BYTES = {"mha": 1536, "fp8": 768, "mla": 1152, "swa": 512, "mamba": 256}


@pytest.mark.parametrize("core", ["python", "rust"])
@pytest.mark.parametrize("kind", PAGE_BYTES)
def test_random_requests(
    daemon: LocalDaemon,
    start_server: StartServer,
    kind: str,
    core: str,
    request: pytest.FixtureRequest,
) -> None:
    """Two servers, whose devices hold a part of the prompts, and whose host memory holds most."""
    from support.sglang_requests import run_random_requests

    pages = 20_000 if request.config.getoption("--long") else 1_500
    blocks = 3_000 if kind == "mamba" else 600
    servers = [
        start_server(
            daemon.directory, kind=kind, core=core, cpu_bytes_to_use=blocks * PAGE_BYTES[kind]
        )
        for _ in range(2)
    ]
    draw = random.Random(f"{kind} {core}")
    run_random_requests(servers, draw, pages, leaving=kind in ("mha", "fp8", "mla"))
    assert [server.wrong for server in servers] == [server.failed for server in servers] == [0, 0]
