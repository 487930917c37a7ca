"""Hostile bytes: the daemon replies, does not grow, and serves honest clients.

An honest engine stores and loads beside the attackers, and compares what it loads. The tests print
its latency, alone and under attack.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fuzz.codec import golden
from kvferry.client import LocalDaemon, OffloadClient
from kvferry.proto.codec import encode
from kvferry.proto.errors import Code, Refused
from kvferry.proto.fd_passing import FetchFd, SendFds
from kvferry.proto.fingerprint import Fingerprint
from kvferry.proto.hints import Release, Retain
from kvferry.proto.memory import FdAllocation, Location
from kvferry.proto.messages import (
    AllocateKVCaches,
    Cancel,
    ClientMessage,
    Error,
    OpenNamespace,
    Pin,
    Registered,
    RegisterKVCaches,
    Reset,
    Spare,
    Submit,
    Subscribe,
    Touch,
    Unpin,
    Wait,
)
from kvferry.proto.protocol import make_hello
from kvferry.proto.specs import GPULoadStoreSpec, KeyLoadStoreSpec
from kvferry.testing.engine import until
from support.daemon_invariants import check_released
from support.fuzz import USELESS, Attacker, HostileFrames, fuzz_fd_socket, strange_descriptors
from support.process_usage import ProcessUsage
from support.raw_client import RawClient, load, one_tensor, store
from support.time_limits import PROMPTLY
from support.traffic_processes import TrafficProcesses
from support.traffic_statistics import TrafficOptions, TrafficStatistics, percentile

pytestmark = pytest.mark.timeout(1200)

# The daemon queues 16 MiB of messages that it has not handled, and large ones fragment its heap.
MAX_GROWTH = 64 << 20
KEYS = tuple(bytes([number]) * 36 for number in range(4))
# Messages that fit the pool of a test and the tensor that attackers register.
SMALL: list[ClientMessage] = [
    make_hello("fuzz", "fuzz"),
    store(1, [0, 1, 2], [3, 4, 5]),
    load(2, [3, 4, 5], [5, 6, 7]),
    load(3, [0], [0], wait_for=9),
    Cancel((1, 2, 3)),
    Wait(4, (1, 2, 3)),
    AllocateKVCaches(5, one_tensor(), 4096),
    OpenNamespace(6, Fingerprint("fuzz", 512), 1 << 16),
    Subscribe(),
    Pin(KEYS),
    Unpin(KEYS[:2]),
    Touch(KEYS),
    Spare(KEYS),
    Retain(10, KEYS, 0.5, "fuzz"),
    Release(KEYS[2:], "fuzz"),
    Reset(7),
    Submit(8, GPULoadStoreSpec([0, 1, 2, 3]), KeyLoadStoreSpec(KEYS)),
    Submit(9, KeyLoadStoreSpec(KEYS[:2]), GPULoadStoreSpec([4, 5])),
]
HONEST = [data for name, data in golden().items() if name.startswith("client/")]
HONEST += [encode(message) for message in SMALL] * 2


def latencies_of(statistics: TrafficStatistics) -> dict[float, float]:
    """Seconds from submission to result, by percentile of a sample."""
    return {share: percentile(statistics.latencies, share) for share in (0.5, 0.99, 1.0)}


def attack(directory: Path, frames: HostileFrames, messages: int, each: int) -> Counter[str]:
    """Run attackers one after another, most of them in a session. Counts the error codes."""
    codes: Counter[str] = Counter()
    for number in range(0, messages, each):
        name = frames.random.choice((None, f"fuzz-{number % 7}", f"fuzz-{number % 50}"))
        attacker = Attacker(directory, frames, name)
        attacker.send(min(each, messages - number))
        attacker.close()
        codes += attacker.codes
    return codes


@pytest.fixture
def beside(
    start_daemon: Callable[..., LocalDaemon],
    start_traffic: Callable[[Path], TrafficProcesses],
    device: str,
    long: bool,
) -> Iterator[LocalDaemon]:
    """A daemon with an honest engine, which must not have recorded an error at the end.

    Prints the latency of its jobs: before the attack, and of the whole time.
    """
    daemon = start_daemon(log_level="warning")
    traffic = start_traffic(daemon.directory)
    options = TrafficOptions(
        "honest", 1, device=device, depth=4, step_pause=0.002, job_timeout=PROMPTLY
    )
    traffic.start(options)
    until(lambda: traffic.report().counts["opened"] > 0)  # before attackers use up the pool
    time.sleep(10 if long else 0.5)
    print("alone:", latencies_of(traffic.report()))
    yield daemon
    before = traffic.report().counts["compared"]
    until(lambda: traffic.report().counts["compared"] > before + 100)
    statistics = traffic.stop()
    print("beside:", latencies_of(statistics))
    assert not statistics.errors, "\n".join(statistics.errors)
    assert daemon.process.poll() is None, daemon.log()
    traceback = "".join(daemon.log().partition("Traceback")[1:])
    assert not traceback, traceback[:4000]
    check_released(daemon.directory)


def test_frames(beside: LocalDaemon, seed: int, long: bool) -> None:
    frames = HostileFrames(seed, HONEST)
    attack(beside.directory, frames, 5_000, 500)
    before = ProcessUsage.of(beside.pid)
    codes = attack(beside.directory, frames, 1_000_000 if long else 50_000, 1000)
    more = ProcessUsage.of(beside.pid).since(before)
    print(dict(codes), more)
    assert more.private < MAX_GROWTH
    assert more.shared < MAX_GROWTH
    assert sum(codes.values()) > 10_000


def test_identities(beside: LocalDaemon, seed: int, long: bool) -> None:
    """As many connections as a user may open at once (PER_USER.burst), with two frames each."""
    frames = HostileFrames(seed, HONEST)
    attack(beside.directory, frames, 200, 2)
    tables, before = count_table_fds(beside), ProcessUsage.of(beside.pid)
    attack(beside.directory, frames, 3_500 if long else 2_000, 2)
    more = ProcessUsage.of(beside.pid).since(before)
    print(more)
    assert more.private < MAX_GROWTH
    assert more.descriptors - (count_table_fds(beside) - tables) < 20


def count_table_fds(daemon: LocalDaemon) -> int:
    """Descriptors of block tables: two per region and namespace."""
    with OffloadClient(daemon.directory, engine="observer") as observer:
        return 2 * (len(observer.status().engines) + len(observer.namespaces()))


def test_descriptor_socket(beside: LocalDaemon, seed: int, long: bool) -> None:
    """Random packets, and descriptors of every wrong kind, with and without a session."""
    frames = HostileFrames(seed, HONEST)
    with RawClient(beside.directory, "fuzz") as raw:
        packets = [encode(SendFds(raw.session)), encode(FetchFd(raw.session, 1))]
        fuzz_fd_socket(beside.directory, frames, packets, 200)
        before = ProcessUsage.of(beside.pid)
        fuzz_fd_socket(beside.directory, frames, packets, 10_000 if long else 1_000)
    more = ProcessUsage.of(beside.pid).since(before)
    print(more)
    assert more.private < MAX_GROWTH


def test_strange_descriptors_in_use(beside: LocalDaemon) -> None:
    """Registrations whose tensor or timeline is a wrong descriptor are refused."""
    with strange_descriptors() as strange:
        for name, descriptor in strange.items():
            with RawClient(beside.directory, "fuzz") as raw:
                if name in USELESS:
                    with pytest.raises(Refused) as refused:
                        raw.deposit(descriptor)
                    assert refused.value.code == Code.NOT_SHAREABLE, name
                    continue
                (memory, clock) = raw.deposit(descriptor, descriptor)
                allocations = (FdAllocation(memory, 512),)
                where = (Location(0, 0),)
                for timeline in (clock, None):
                    message = RegisterKVCaches(1, one_tensor(), allocations, where, 512, timeline)
                    raw.send(message)
                    answer = raw.recv(object)
                    good = timeline is None and name == "unsealed" and not raw.on_gpu
                    assert isinstance(answer, Registered if good else Error), (name, answer)
                    (memory,) = raw.deposit(descriptor)
                    allocations = (FdAllocation(memory, 512),)
