"""The PTX that is shipped is what kernels.cu says."""

from __future__ import annotations

import re
import shutil
import subprocess
from importlib.resources import files
from pathlib import Path

import pytest

from kvferry.daemon.engine.cuda.staged import IDS, VECTORS

HOME = files("kvferry.daemon.engine.cuda")
MADE_WITH = "V13.0.88"


def test_every_launched_kernel_is_in_the_ptx() -> None:
    entries = re.findall(r"\.entry (\w+)\(", HOME.joinpath("kernels.ptx").read_text())
    names = [f"{way}{v}_{n}" for way in ("gather", "scatter") for v in VECTORS for n in IDS]
    assert sorted(entries) == sorted(names)


def test_the_ptx_is_made_of_the_source(tmp_path: Path) -> None:
    nvcc = shutil.which("nvcc")
    if nvcc is None or MADE_WITH not in subprocess.check_output([nvcc, "--version"], text=True):
        pytest.skip(f"nvcc {MADE_WITH} is not here")
    made = tmp_path / "kernels.ptx"
    source = str(HOME.joinpath("kernels.cu"))
    subprocess.run([nvcc, "-ptx", "-arch=compute_75", "-O3", "-o", made, source], check=True)
    assert body(made.read_text()) == body(HOME.joinpath("kernels.ptx").read_text())


def body(ptx: str) -> list[str]:
    """The instructions, without comments and without the version that nvcc wrote."""
    return [line for line in ptx.splitlines() if not line.startswith(("//", ".version"))]
