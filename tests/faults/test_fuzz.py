"""A flood of hostile bytes: the daemon answers, keeps its memory, and serves whoever is honest.

An engine works beside the attackers all the time, and finds what it stored. Its latency, alone and
under attack, is printed, and recorded in the long form.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvferry.client import LocalDaemon, OffloadClient
from kvferry.proto.codec import encode
from kvferry.proto.errors import Code, Refused
from kvferry.proto.fd_passing import FetchFd, SendFds
from kvferry.proto.memory import FdAllocation, Location
from kvferry.proto.messages import (
    PROTOCOL,
    AllocateKVCaches,
    Cancel,
    ClientMessage,
    Error,
    Hello,
    OpenNamespace,
    Pin,
    Registered,
    RegisterKVCaches,
    Reset,
    Submit,
    Subscribe,
    Touch,
    Unpin,
    Wait,
)
from kvferry.proto.specs import GPULoadStoreSpec, KeyLoadStoreSpec
from kvferry.proto.status import Fingerprint
from kvferry.testing.engine import until
from support.daemon_invariants import check_all_gone
from support.fuzz import USELESS, Attacker, Forge, fuzz_fd_socket, strange_descriptors
from support.process_usage import ProcessUsage
from support.raw_client import RawClient, load, one_tensor, store
from support.traffic_processes import TrafficProcesses
from support.traffic_statistics import TrafficOptions, TrafficStatistics, percentile

pytestmark = pytest.mark.timeout(1200)

MAX_GROWTH = 50 << 20
GOLDEN = json.loads((Path(__file__).parents[1] / "proto" / "golden.json").read_text())
KEYS = tuple(bytes([number]) * 36 for number in range(4))
SMALL: list[ClientMessage] = [
    Hello(PROTOCOL, PROTOCOL, "fuzz", "fuzz"),
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
    Reset(7),
    Submit(8, GPULoadStoreSpec([0, 1, 2, 3]), KeyLoadStoreSpec(KEYS)),
    Submit(9, KeyLoadStoreSpec(KEYS[:2]), GPULoadStoreSpec([4, 5])),
]
"""What fits into the pool of a test, and the tensor that attackers register."""
HONEST = [bytes.fromhex(GOLDEN[name]) for name in GOLDEN if name.startswith("client/")]
HONEST += [encode(message) for message in SMALL] * 2


def told_of(tally: TrafficStatistics) -> dict[float, float]:
    """Seconds that jobs took: half of them, 99 of 100, the longest of a sample."""
    return {share: percentile(tally.seconds, share) for share in (0.5, 0.99, 1.0)}


def attack(directory: Path, forge: Forge, messages: int, each: int) -> Counter[str]:
    """Attackers one after another, most of them in a session; what they were told."""
    told: Counter[str] = Counter()
    for number in range(0, messages, each):
        name = forge.random.choice((None, f"fuzz-{number % 7}", f"fuzz-{number % 50}"))
        attacker = Attacker(directory, forge, name)
        attacker.send(min(each, messages - number))
        attacker.close()
        told += attacker.told
    return told


@pytest.fixture
def beside(
    start_daemon: Callable[..., LocalDaemon],
    start_crew: Callable[[Path], TrafficProcesses],
    device: str,
    long: bool,
) -> Iterator[LocalDaemon]:
    """A daemon with an honest engine at work, which in the end has nothing to complain of.

    What its jobs take is printed: of a while without attackers, and of all the time.
    """
    daemon = start_daemon(log_level="warning")
    crew = start_crew(daemon.directory)
    options = TrafficOptions("honest", 1, device=device, depth=4, pause=0.002, patience=20)
    crew.start(options)
    until(lambda: crew.report().counts["opened"] > 0, 60)  # before attackers take all the room
    time.sleep(10 if long else 0.5)
    print("alone:", told_of(crew.report()))
    yield daemon
    before = crew.report().counts["compared"]
    until(lambda: crew.report().counts["compared"] > before + 100, 30)
    tally = crew.dismiss()
    print("beside:", told_of(tally))
    assert not tally.complaints, "\n".join(tally.complaints)
    assert daemon.process.poll() is None, daemon.log()
    trouble = "".join(daemon.log().partition("Traceback")[1:])
    assert not trouble, trouble[:4000]
    check_all_gone(daemon.directory)


def test_frames(beside: LocalDaemon, seed: int, long: bool) -> None:
    forge = Forge(seed, HONEST)
    attack(beside.directory, forge, 5_000, 500)
    before = ProcessUsage.of(beside.pid)
    told = attack(beside.directory, forge, 1_000_000 if long else 50_000, 1000)
    more = ProcessUsage.of(beside.pid).since(before)
    print(dict(told), more)
    assert more.private < MAX_GROWTH
    assert more.shared < MAX_GROWTH
    assert sum(told.values()) > 10_000


def test_identities(beside: LocalDaemon, seed: int, long: bool) -> None:
    """As many connections as a user may open at once (PER_USER.burst), with a frame or two each."""
    forge = Forge(seed, HONEST)
    attack(beside.directory, forge, 200, 2)
    ledgers, before = ledgers_of(beside), ProcessUsage.of(beside.pid)
    attack(beside.directory, forge, 3_500 if long else 2_000, 2)
    more = ProcessUsage.of(beside.pid).since(before)
    print(more)
    assert more.private < MAX_GROWTH
    assert more.descriptors - (ledgers_of(beside) - ledgers) < 20


def ledgers_of(daemon: LocalDaemon) -> int:
    """Descriptors of ledgers: two for each region, as long as there is one."""
    with OffloadClient(daemon.directory, engine="onlooker") as onlooker:
        return 2 * (len(onlooker.status().engines) + len(onlooker.namespaces()))


def test_descriptor_socket(beside: LocalDaemon, seed: int, long: bool) -> None:
    """Junk in packets, descriptors of every wrong kind, as a stranger and in an open session."""
    forge = Forge(seed, HONEST)
    with RawClient(beside.directory, "fuzz") as raw:
        packets = [encode(SendFds(raw.session)), encode(FetchFd(raw.session, 1))]
        fuzz_fd_socket(beside.directory, forge, packets, 200)
        before = ProcessUsage.of(beside.pid)
        fuzz_fd_socket(beside.directory, forge, packets, 10_000 if long else 1_000)
    more = ProcessUsage.of(beside.pid).since(before)
    print(more)
    assert more.private < MAX_GROWTH


def test_strange_descriptors_in_use(beside: LocalDaemon) -> None:
    """What was deposited is named as a tensor or timeline: refused, each time."""
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
