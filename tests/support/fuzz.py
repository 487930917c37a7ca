"""Hostile frames, made from those of honest clients.

`HostileFrames` generates random bytes, and golden frames with flipped bits, cut, joined, or with
changed fields; headers with a wrong length; nested arrays. An `Attacker` sends them to a daemon,
with or without a session, and receives the replies. A seed determines everything.
"""

from __future__ import annotations

import fcntl
import os
import random
import socket
import struct
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
from msgspec.msgpack import Ext

from kvferry.proto.messages import Error, Hello, StatusReport, StatusRequest
from kvferry.proto.protocol import format_protocol
from support.raw_client import RawClient
from support.time_limits import TIMEOUT

# Values at which off-by-one errors are likely.
INTEGERS = (-1, 0, 1, 2, 7, 255, 256, 1 << 16, (1 << 31) - 1, 1 << 32, 1 << 48, 1 << 62, 1 << 63)
LENGTHS = (0, 1, 16, 255, 65536, (1 << 31) - 1, (1 << 32) - 1)
HEADERS: tuple[tuple[int, str], ...] = (
    (0xDD, ">I"),  # array32
    (0xDF, ">I"),  # map32
    (0xDB, ">I"),  # str32
    (0xC6, ">I"),  # bin32
    (0xC9, ">IB"),  # ext32, with its type
    (0xDC, ">H"),  # array16
)


class HostileFrames:
    """Generates frames. golden: frames of honest clients; those that are no msgpack are changed
    byte by byte only."""

    def __init__(self, seed: int, golden: Sequence[bytes]) -> None:
        self.random = random.Random(seed)
        self._golden = golden
        self._trees = list[Any]()
        for frame in golden:
            with suppress(ValueError, RecursionError):
                self._trees.append(msgspec.msgpack.decode(frame))
        self._generators: tuple[Callable[[], bytes], ...] = (
            self._random_bytes,
            self._flip_bits,
            self._flip_bits,
            self._join,
            self._truncate,
            self._change_fields,
            self._change_fields,
            self._change_fields,
            self._change_fields,
            self._nest_arrays,
            self._insert_header,
            self._golden_frame,
        )

    def frame(self) -> bytes:
        return self.random.choice(self._generators)()

    def message(self) -> list[bytes]:
        """The frames of one message: mostly one, rarely more."""
        if self.random.random() > 0.02:
            return [self.frame()]
        return [self.frame() for _ in range(self.random.choice((2, 3, 50)))]

    def _golden_frame(self) -> bytes:
        return self.random.choice(self._golden)

    def _random_bytes(self) -> bytes:
        return self.random.randbytes(self.random.choice((0, 1, 2, 9, 40, 400)))

    def _flip_bits(self) -> bytes:
        frame = bytearray(self._golden_frame() or b"\0")
        for _ in range(self.random.choice((1, 1, 2, 8))):
            frame[self.random.randrange(len(frame))] ^= 1 << self.random.randrange(8)
        return bytes(frame)

    def _join(self) -> bytes:
        one, two = self._golden_frame(), self._golden_frame()
        cut = self.random.randrange(len(one) + 1)
        return one[:cut] + two[self.random.randrange(len(two) + 1) :]

    def _truncate(self) -> bytes:
        frame = self._golden_frame()
        return frame[: self.random.randrange(len(frame) or 1)]

    def _nest_arrays(self) -> bytes:
        return b"\x91" * self.random.choice((10, 1000, 20_000)) + b"\x90"

    def _insert_header(self) -> bytes:
        """Replace some bytes by a header with a wrong length."""
        tag, form = self.random.choice(HEADERS)
        length = self.random.choice(LENGTHS) & ((1 << 8 * struct.calcsize(form[:2])) - 1)
        rest = (self.random.choice((4, 8, 255)),) if "B" in form else ()
        header = bytes([tag]) + struct.pack(form, length, *rest)
        frame = self._golden_frame()
        cut = self.random.randrange(len(frame) or 1)
        return frame[:cut] + header + frame[cut + self.random.randrange(8) :]

    def _change_fields(self) -> bytes:
        """A golden message with fields that are changed, removed or repeated."""
        tree = self.random.choice(self._trees or [None])
        for _ in range(self.random.choice((1, 1, 1, 2, 4))):
            tree = self._change_tree(tree)
        return msgspec.msgpack.encode(tree)

    def _change_tree(self, tree: Any) -> Any:
        if not isinstance(tree, list | dict) or not tree or self.random.random() < 0.1:
            return self._value()
        if isinstance(tree, dict):
            at = self.random.choice(list(tree))
            return {**tree, at: self._change_tree(tree[at])}
        tree = list(tree)
        at = self.random.randrange(len(tree))
        match self.random.randrange(8):
            case 0:
                del tree[at]
            case 1:
                tree.insert(at, tree[self.random.randrange(len(tree))])
            case 2:
                tree[at] = self._value()
            case _:
                tree[at] = self._change_tree(tree[at])
        return tree

    def _value(self) -> Any:
        r = self.random
        match r.randrange(10):
            case 0 | 1 | 2:
                return r.choice(INTEGERS)
            case 3:
                return r.choice(("", "cpu", "gpu", "keys", "x" * 257, "\x00\n", "é" * 60))
            case 4:
                return r.randbytes(r.choice((0, 1, 36, 64, 65, 5000)))
            case 5:
                return Ext(r.choice((4, 8, 4, 8, 3, 127)), r.randbytes(r.choice((0, 4, 7, 8, 800))))
            case 6:
                return r.choice((None, True, 0.5, float("nan"), float("inf")))
            case 7:
                return r.choice(self._trees or [None])
            case 8:
                return [r.choice(INTEGERS)] * r.choice((0, 300, 70_000))
            case _:
                return [self._value() for _ in range(r.choice((0, 1, 3)))]


class Attacker:
    """A DEALER that sends hostile frames. codes: counts the error codes that it received.

    name: of the engine in its session; None: it has no session.
    """

    BATCH = 250

    def __init__(self, directory: Path, frames: HostileFrames, name: str | None) -> None:
        self._directory, self._frames, self._name = directory, frames, name
        self.codes: Counter[str] = Counter()
        self._raw = RawClient(directory, name, timeout=TIMEOUT)
        if name is not None and frames.random.random() < 0.5:
            self._raw.register()

    def send(self, messages: int) -> None:
        """Send messages, and receive the replies. Raises TimeoutError if the daemon is silent."""
        for start in range(0, messages, self.BATCH):
            for _ in range(min(self.BATCH, messages - start)):
                self._raw.send(*self._frames.message())
            self._receive_replies()

    def close(self) -> None:
        """Close the socket without Goodbye."""
        self._raw.drop()

    def _receive_replies(self) -> None:
        """Receive all replies so far. Raises TimeoutError if the daemon does not reply.

        Of the two requests, the daemon answers the first in a session, and the second without one.
        """
        number = self._frames.random.getrandbits(40) + 2
        self._raw.send(StatusRequest(number))
        self._raw.send(Hello(number, number, "fuzz", "fuzz"))
        while True:
            answer = self._raw.recv(object)
            if isinstance(answer, StatusReport) and answer.request_id == number:
                return
            if isinstance(answer, Error):
                self.codes[answer.error.code] += 1
                if answer.error.value == format_protocol(number):
                    return


# The descriptor socket


# Those of `strange_descriptors` that the daemon does not accept at all.
USELESS = {"directory", "path", "pipe, to read", "pipe, to write", "read only", "deleted", "socket"}


@contextmanager
def strange_descriptors() -> Iterator[dict[str, int]]:
    """By name: descriptors that are not shared memory, or that the daemon must not trust."""
    with ExitStack() as opened, tempfile.TemporaryFile() as deleted:

        def keep(descriptor: int) -> int:
            opened.callback(os.close, descriptor)
            return descriptor

        reader, writer = map(keep, os.pipe())
        here = opened.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        yield {
            "directory": keep(os.open("/", os.O_RDONLY)),
            "path": keep(os.open("/", os.O_PATH)),
            "pipe, to read": reader,
            "pipe, to write": writer,
            "null": keep(os.open("/dev/null", os.O_RDWR)),
            "zero": keep(os.open("/dev/zero", os.O_RDWR)),
            "read only": keep(os.open("/proc/self/status", os.O_RDONLY)),
            "deleted": deleted.fileno(),
            "socket": here.fileno(),
            "process": keep(os.pidfd_open(os.getpid())),
            "empty": keep(memfd(0)),
            "unsealed": keep(memfd(1 << 16)),
            "sealed, too small": keep(memfd(8, fcntl.F_SEAL_SHRINK)),
            "sealed against writing": keep(
                memfd(1 << 16, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_WRITE)
            ),
        }


def memfd(nbytes: int, seals: int = 0) -> int:
    descriptor = os.memfd_create("strange", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, nbytes)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    return descriptor


def fuzz_fd_socket(
    directory: Path, frames: HostileFrames, packets: Sequence[bytes], connections: int
) -> None:
    """Connect to the descriptor socket and send random packets and descriptors.

    packets: honest requests, some of an open session.
    """
    random, path = frames.random, str(directory / "fds.sock")
    with strange_descriptors() as strange:
        for _ in range(connections):
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as client:
                client.settimeout(TIMEOUT)
                client.connect(path)
                packet = random.choice(packets) if random.random() < 0.5 else frames.frame()
                several = random.choices([*strange.values()], k=random.choice((0, 1, 3, 250, 253)))
                with suppress(OSError):  # too long for a packet, or the daemon has disconnected
                    socket.send_fds(client, [packet[:60_000]], several)
                    if packet and random.random() < 0.5:
                        client.recv(4096)
