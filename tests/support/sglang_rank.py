"""One of the two ranks of a server, in a process of its own, with a daemon of its own.

    python -m support.sglang_rank RANK KIND DIRECTORY

DIRECTORY: where the ranks meet. Prints, as JSON, the tokens that it has loaded while both daemons
have the prompt and when that of rank 1 is gone, and how many buffers of pages were wrong. Needs
SGLang, and no GPU.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from kvferry.client import LocalDaemon
from support.eventually import wait_until
from support.sglang_tree import TreeServer, publish_server_args

PROMPT = list(range(40))


def main() -> None:
    rank, kind, directory = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{directory}/ranks", rank=rank, world_size=2
    )
    group = torch.distributed.new_group([0, 1])
    model = directory / f"model{rank}"
    model.mkdir()
    with LocalDaemon(pool_bytes=16 << 20) as daemon:
        server = TreeServer(
            publish_server_args(model, 4),
            daemon.directory,
            kind=kind,
            group=group,
            connected=False,
            kvferry_salt="both ranks",
        )
        client = server.linker._session.client
        assert client is not None
        client.wait_connected()
        # Both do the same from here on: SGLang compares their results at each step.
        torch.distributed.barrier(group)
        server.run(PROMPT)
        server.evict_all()
        wait_until(lambda: server.match(PROMPT).host_hit_length)
        loaded = [server.run(PROMPT)]
        if rank == 1:
            daemon.kill()
            wait_until(lambda: client.get_finished() or client.gone)
        torch.distributed.barrier(group)
        server.evict_all()
        loaded.append(server.run(PROMPT))
        print(json.dumps([loaded, server.wrong, server.failed]))
        torch.distributed.barrier(group)


if __name__ == "__main__":
    main()
