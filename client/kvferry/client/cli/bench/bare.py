"""What a plain process has, to compare a daemon with: run as a script, imports next to nothing.

bare.py context ORDINAL             make the GPU's primary context, say so, wait for stdin
bare.py hostalloc ORDINAL BYTES     seconds that cuMemHostAlloc (cudaHostAlloc) of it takes
bare.py touch ORDINAL BYTES         the same for plain memory, every page touched once
"""

from __future__ import annotations

import mmap
import sys
import time

from kvferry.proto.libcuda import driver

POPULATE_WRITE = 23


def main(mode: str, ordinal: str, nbytes: str = "0") -> None:
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


if __name__ == "__main__":
    main(*sys.argv[1:])
