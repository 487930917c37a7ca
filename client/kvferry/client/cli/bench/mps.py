"""CUDA MPS for the processes started meanwhile, by a control daemon of our own.

This process made its context before, and stays outside; what it starts inherits the environment.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator

from kvferry.proto.errors import Code, Refused

CONTROL = "nvidia-cuda-mps-control"
PLACES = ("CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY")


@contextlib.contextmanager
def mps() -> Iterator[None]:
    """Raises Refused (NO_DEVICE) where MPS is not installed or does not start."""
    if shutil.which(CONTROL) is None:
        raise Refused(
            Code.NO_DEVICE, f"{CONTROL} is not installed; leave --mps out, or install it", CONTROL
        )
    before = {name: os.environ.get(name) for name in PLACES}
    with tempfile.TemporaryDirectory(prefix="kvferry-mps-") as directory:
        os.environ.update(dict.fromkeys(PLACES, directory))
        try:
            _control("-d")
            try:
                yield
            finally:
                _control(says="quit -t 10\n")
        finally:
            for name, value in before.items():
                os.environ.pop(name)
                if value is not None:
                    os.environ[name] = value


def _control(*arguments: str, says: str = "") -> None:
    try:
        subprocess.run(
            [CONTROL, *arguments],
            input=says,
            check=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            text=True,
            timeout=30,
        )
    except (OSError, subprocess.SubprocessError) as error:
        message = f"{CONTROL} failed ({error}); leave --mps out, or start it by hand to see why"
        raise Refused(Code.NO_DEVICE, message, CONTROL) from error
