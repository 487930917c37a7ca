"""Bytes that no honest client sends, made from those that one does.

A `Forge` makes frames without end: noise, and golden frames with bits turned over, cut, joined to
others, or with fields put in the place of other fields; headers that promise more than there is,
arrays in arrays. An `Attacker` sends them to a daemon, as a stranger or in a session that began
well, and hears what is said to it. Everything follows from a seed.
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
from support.raw_client import RawClient

INTEGERS = (-1, 0, 1, 2, 7, 255, 256, 1 << 16, (1 << 31) - 1, 1 << 32, 1 << 48, 1 << 62, 1 << 63)
"""Where somebody may have miscounted."""
LENGTHS = (0, 1, 16, 255, 65536, (1 << 31) - 1, (1 << 32) - 1)
HEADERS: tuple[tuple[int, str], ...] = (
    (0xDD, ">I"),  # array32
    (0xDF, ">I"),  # map32
    (0xDB, ">I"),  # str32
    (0xC6, ">I"),  # bin32
    (0xC9, ">IB"),  # ext32, with its type
    (0xDC, ">H"),  # array16
)


class Forge:
    """Frames to order. golden: frames of honest clients to begin from."""

    def __init__(self, seed: int, golden: Sequence[bytes]) -> None:
        self.random = random.Random(seed)
        self._golden = golden
        self._trees = [msgspec.msgpack.decode(frame) for frame in golden]
        self._arts: tuple[Callable[[], bytes], ...] = (
            self._noise,
            self._flipped,
            self._flipped,
            self._spliced,
            self._cut,
            self._swapped,
            self._swapped,
            self._swapped,
            self._swapped,
            self._deep,
            self._lying,
            self._honest,
        )

    def frame(self) -> bytes:
        return self.random.choice(self._arts)()

    def frames(self) -> list[bytes]:
        """The frames of one message: one, and now and then none of its own or many."""
        if self.random.random() > 0.02:
            return [self.frame()]
        return [self.frame() for _ in range(self.random.choice((2, 3, 50)))]

    def _honest(self) -> bytes:
        return self.random.choice(self._golden)

    def _noise(self) -> bytes:
        return self.random.randbytes(self.random.choice((0, 1, 2, 9, 40, 400)))

    def _flipped(self) -> bytes:
        frame = bytearray(self._honest())
        for _ in range(self.random.choice((1, 1, 2, 8))):
            frame[self.random.randrange(len(frame))] ^= 1 << self.random.randrange(8)
        return bytes(frame)

    def _spliced(self) -> bytes:
        one, two = self._honest(), self._honest()
        cut = self.random.randrange(len(one) + 1)
        return one[:cut] + two[self.random.randrange(len(two) + 1) :]

    def _cut(self) -> bytes:
        frame = self._honest()
        return frame[: self.random.randrange(len(frame))]

    def _deep(self) -> bytes:
        return b"\x91" * self.random.choice((10, 1000, 20_000)) + b"\x90"

    def _lying(self) -> bytes:
        """A header that promises more, or less, than there is, in the place of some bytes."""
        tag, form = self.random.choice(HEADERS)
        length = self.random.choice(LENGTHS) & ((1 << 8 * struct.calcsize(form[:2])) - 1)
        rest = (self.random.choice((4, 8, 255)),) if "B" in form else ()
        header = bytes([tag]) + struct.pack(form, length, *rest)
        frame = self._honest()
        cut = self.random.randrange(len(frame))
        return frame[:cut] + header + frame[cut + self.random.randrange(8) :]

    def _swapped(self) -> bytes:
        """A golden message with some of its fields changed, left out, or doubled."""
        tree = self.random.choice(self._trees)
        for _ in range(self.random.choice((1, 1, 1, 2, 4))):
            tree = self._changed(tree)
        return msgspec.msgpack.encode(tree)

    def _changed(self, tree: Any) -> Any:
        if not isinstance(tree, list) or not tree or self.random.random() < 0.1:
            return self._value()
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
                tree[at] = self._changed(tree[at])
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
                return msgspec.msgpack.decode(self._honest())
            case 8:
                return [r.choice(INTEGERS)] * r.choice((0, 300, 70_000))
            case _:
                return [self._value() for _ in range(r.choice((0, 1, 3)))]


class Attacker:
    """A DEALER without manners. `told`: the codes of errors it got, counted.

    name: of the engine in its session; None for one that has not said Hello.
    """

    BATCH = 250

    def __init__(self, directory: Path, forge: Forge, name: str | None) -> None:
        self._directory, self._forge, self._name = directory, forge, name
        self.told: Counter[str] = Counter()
        self._raw = RawClient(directory, name, timeout=60)
        if name is not None and forge.random.random() < 0.5:
            self._raw.register()

    def send(self, messages: int) -> None:
        """Send so many, and hear what is said to them: a daemon that goes silent is found out."""
        for start in range(0, messages, self.BATCH):
            for _ in range(min(self.BATCH, messages - start)):
                self._raw.send(*self._forge.frames())
            self._hear()

    def close(self) -> None:
        """Close the socket, mostly without a word."""
        self._raw.drop()

    def _hear(self) -> None:
        """Take in all that there is to hear; TimeoutError where the daemon says nothing more.

        One of two requests is answered for certain, in a session or out of one.
        """
        number = self._forge.random.getrandbits(40) + 2
        self._raw.send(StatusRequest(number))
        self._raw.send(Hello(number, number, "fuzz", "fuzz"))
        while True:
            answer = self._raw.recv(object)
            if isinstance(answer, StatusReport) and answer.request_id == number:
                return
            if isinstance(answer, Error):
                self.told[answer.error.code] += 1
                if answer.error.value == f"{number} to {number}":
                    return


# The descriptor socket


USELESS = {"directory", "path", "pipe, to read", "pipe, to write", "read only", "deleted", "socket"}
"""Of the strange descriptors those that cannot even be deposited."""


@contextmanager
def strange_descriptors() -> Iterator[dict[str, int]]:
    """Descriptors that are no shared memory, or not such as one may trust, by name."""
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


def fuzz_fd_socket(directory: Path, forge: Forge, packets: Sequence[bytes], visits: int) -> None:
    """Visit the descriptor socket with junk, and with what is not asked for.

    packets: honest requests, some of an open session.
    """
    random, path = forge.random, str(directory / "fds.sock")
    with strange_descriptors() as strange:
        for _ in range(visits):
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as visitor:
                visitor.settimeout(10)
                visitor.connect(path)
                packet = random.choice(packets) if random.random() < 0.5 else forge.frame()
                several = random.choices([*strange.values()], k=random.choice((0, 1, 3, 250, 253)))
                with suppress(OSError):  # too long for a packet, or it hung up on us
                    socket.send_fds(visitor, [packet[:60_000]], several)
                    if packet and random.random() < 0.5:
                        visitor.recv(4096)
