"""What a plain process has, to compare a daemon with: run as a script, imports next to nothing.

bare.py context ORDINAL             make the GPU's primary context, say so, wait for stdin
bare.py hostalloc ORDINAL BYTES     seconds that cuMemHostAlloc (cudaHostAlloc) of it takes
bare.py touch ORDINAL BYTES         the same for plain memory, every page touched once
bare.py copier ORDINAL BYTES FD HANDS
    the least that a daemon can be: woken by a byte from the socket FD, it copies so much from
    pinned memory to the device, waits for that without a pause, and answers. HANDS 2: it wakes a
    second thread, which copies. ORDINAL -1: from memory to memory
"""

from __future__ import annotations

import ctypes
import mmap
import socket
import sys
import threading
import time
from collections.abc import Callable

from kvferry.cuda.driver import driver

POPULATE_WRITE = 23


def main(mode: str, ordinal: str, nbytes: str = "0", *copier: str) -> None:
    if mode == "copier":
        serve_copies(int(ordinal), int(nbytes), *map(int, copier))
        return
    if mode != "touch":
        driver().retain_context(int(ordinal))
    if mode == "context":
        print("up", flush=True)
        sys.stdin.read()
        return
    begin = time.perf_counter()
    if mode == "touch":
        memory = mmap.mmap(-1, int(nbytes))
        memory.madvise(POPULATE_WRITE)
        print(time.perf_counter() - begin)
    else:
        address = driver().allocate_host(int(nbytes))
        print(time.perf_counter() - begin, flush=True)
        driver().call("cuMemFreeHost", address)


def serve_copies(ordinal: int, nbytes: int, descriptor: int, hands: int) -> None:
    there = socket.socket(fileno=descriptor)
    copy = copy_in_memory(nbytes) if ordinal < 0 else copy_to_device(ordinal, nbytes)
    if hands == 1:
        while there.recv(1):
            copy()
            there.send(b"!")
        return
    bell = threading.Lock()
    bell.acquire()

    def second() -> None:
        second_copy = copy_in_memory(nbytes) if ordinal < 0 else copy_to_device(ordinal, nbytes)
        while True:
            bell.acquire()
            second_copy()
            there.send(b"!")

    threading.Thread(target=second, daemon=True).start()
    while there.recv(1):
        bell.release()


def copy_to_device(ordinal: int, nbytes: int) -> Callable[[], None]:
    cuda = driver()
    cuda.retain_context(ordinal)
    host, device = cuda.allocate_host(nbytes), cuda.allocate(nbytes)
    stream = cuda.create_stream(urgent=True)

    def copy() -> None:
        cuda.call("cuMemcpyAsync", device, host, nbytes, stream)
        end = cuda.record(stream)
        while not cuda.reached(end):
            pass

    return copy


def copy_in_memory(nbytes: int) -> Callable[[], None]:
    here, there = ctypes.create_string_buffer(nbytes), ctypes.create_string_buffer(nbytes)

    def copy() -> None:
        ctypes.memmove(here, there, nbytes)

    return copy


if __name__ == "__main__":
    main(*sys.argv[1:])
