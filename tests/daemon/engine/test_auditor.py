"""The threads that sum host blocks up come and go together."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from kvferry.daemon.engine import auditor
from kvferry.daemon.engine.auditor import Auditor


def test_it_closes_at_once_however_late_its_threads_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    """A daemon may be stopped as soon as it has started."""

    def late(*_: object) -> None:
        if threading.current_thread().name.endswith("_1"):
            time.sleep(0.05)

    monkeypatch.setattr(auditor, "_be_nice", late)
    pool = np.zeros(4096, dtype=np.uint8)
    both = Auditor(pool.ctypes.data, pool.nbytes, 2)
    closing = threading.Thread(target=both.close, daemon=True)
    closing.start()
    closing.join(20)
    assert not closing.is_alive()
