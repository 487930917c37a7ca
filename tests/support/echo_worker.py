"""A worker process of the daemon that does what its requests say.

Arguments: "slow": it never gets ready. "stay": it does not end when the daemon disconnects.
Requests: "hold": replied to after the next request. "hang": never. "exit": it ends with a notice.
Others are repeated.
"""

from __future__ import annotations

import os
import time

from kvferry.daemon.daemon_connection import NOTICE, READY, connect_to_daemon


def main() -> None:
    daemon, arguments = connect_to_daemon(0)
    while "slow" in arguments:
        time.sleep(1)
    daemon.send(READY, b"ready")
    held = list[int]()
    while (request := daemon.receive()) is not None:
        number, payload = request
        match payload:
            case b"hold":
                held.append(number)
            case b"hang":
                pass
            case b"exit":
                daemon.send(NOTICE, b"exits")
                os._exit(3)
            case _:
                daemon.send(number, payload)
                while held:
                    daemon.send(held.pop(), b"held")
    while "stay" in arguments:
        time.sleep(1)
    os._exit(0)


if __name__ == "__main__":
    main()
