"""The shipped PTX: its kernels, and whether kernels.cu compiles to it."""

from __future__ import annotations

import re
import shutil
import subprocess
from importlib.resources import files
from pathlib import Path

import pytest

from kvferry.daemon.engine.cuda.staged import IDS, VECTORS

PACKAGE = files("kvferry.daemon.engine.cuda")
NVCC_VERSION = "V13.0.88"


def test_every_launched_kernel_is_in_the_ptx() -> None:
    entries = re.findall(r"\.entry (\w+)\(", PACKAGE.joinpath("kernels.ptx").read_text())
    kinds = [f"{kind}{v}" for kind in ("gather", "scatter") for v in VECTORS]
    names = [f"{kind}_{n}" for kind in (*kinds, "pack", "unpack") for n in IDS]
    assert sorted(entries) == sorted(names)


def test_the_ptx_is_compiled_from_the_source(tmp_path: Path) -> None:
    nvcc = shutil.which("nvcc")
    if nvcc is None or NVCC_VERSION not in subprocess.check_output([nvcc, "--version"], text=True):
        pytest.skip(f"nvcc {NVCC_VERSION} is not installed")
    compiled = tmp_path / "kernels.ptx"
    source = str(PACKAGE.joinpath("kernels.cu"))
    subprocess.run([nvcc, "-ptx", "-arch=compute_75", "-O3", "-o", compiled, source], check=True)
    assert instructions(compiled.read_text()) == instructions(
        PACKAGE.joinpath("kernels.ptx").read_text()
    )


def instructions(ptx: str) -> list[str]:
    """The instructions, without comments and without the version that nvcc wrote."""
    return [line for line in ptx.splitlines() if not line.startswith(("//", ".version"))]
