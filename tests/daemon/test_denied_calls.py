"""The daemon under a seccomp profile, or on a kernel, that denies system calls."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from kvferry.client import LocalDaemon, OffloadClient
from kvferry.client.doctor import Verdict, run_checks
from kvferry.daemon.app import log_denied_calls
from kvferry.proto.errors import Code, Refused
from kvferry.testing.engine import until
from support.denied_calls import call_with_denied, on_x86_64

pytestmark = on_x86_64


@pytest.mark.parametrize("call", ["memfd_create", "pidfd_open", "sched_setscheduler"])
def test_a_start_without_a_call_that_is_needed_is_refused(call: str) -> None:
    with pytest.raises(Refused, match=rf"system call {call} fails .*Linux 5\.3") as refused:
        call_with_denied({call: errno.ENOSYS}, LocalDaemon)
    assert refused.value.code == Code.BAD_CONFIG


@pytest.mark.parametrize("error", [errno.EPERM, errno.ENOSYS])
def test_the_daemon_serves_without_priorities(tmp_path: Path, error: int) -> None:
    denied = dict.fromkeys(("setpriority", "sched_setaffinity"), error)

    def start() -> LocalDaemon:
        return LocalDaemon(pool_bytes=1 << 20, tiers_disk_path=tmp_path, tiers_disk_size="16MiB")

    with (
        call_with_denied(denied, start) as daemon,
        OffloadClient(daemon.directory) as client,
    ):
        until(lambda: client.status().tiers[0].state == "on")
        assert run_checks(daemon.directory, 30.0)[-1].verdict is Verdict.OK
        assert client.status().tiers[0].deaths == 0
        assert daemon.log().count("system call denied") == 1
        assert "setpriority" in daemon.log()


@pytest.mark.parametrize(
    ("numa_node", "expected"),
    [(None, ["setpriority"]), (0, ["setpriority", "sched_setaffinity"])],
)
def test_denied_calls_are_logged_once(numa_node: int | None, expected: list[str]) -> None:
    with capture_logs() as records:
        call_with_denied(
            dict.fromkeys(("setpriority", "sched_setaffinity"), errno.EPERM),
            lambda: log_denied_calls(numa_node),
        )
    assert [record["call"] for record in records] == expected
