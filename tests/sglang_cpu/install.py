"""Create a virtual environment with one version of SGLang, on a machine without a GPU.

    python tests/sglang_cpu/install.py 0.5.23 .sglang/0.5.23 .sglang/packages

The environment has SGLang's wheel, the packages of `packages.txt` (in a directory of their own),
everything of the environment that runs this script, and stubs of two packages that SGLang imports
and its cache does not use. Run by the Makefile. Raises CalledProcessError if a download fails.
"""

from __future__ import annotations

import shutil
import site
import sys
import tempfile
import venv
import zipfile
from pathlib import Path

from vllm_upstream.install import download

# Any function of the module is None.
ANY_NAME = """def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return None
"""
MODES = "NEAREST NEAREST_EXACT BILINEAR BICUBIC BOX HAMMING LANCZOS"
STUBS = {
    "IPython/__init__.py": "",
    "IPython/display.py": "HTML = display = None\n",
    "torchvision/__init__.py": "__version__ = '0.0'\n",
    "torchvision/io.py": ANY_NAME,
    "torchvision/transforms/__init__.py": (
        f"from enum import Enum\n\nInterpolationMode = Enum('InterpolationMode', {MODES!r})\n"
    ),
    "torchvision/transforms/functional.py": ANY_NAME,
    "torchvision/transforms/v2/__init__.py": "",
    "torchvision/transforms/v2/functional.py": ANY_NAME,
}


def main() -> None:
    version, target, packages = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    shutil.rmtree(target, ignore_errors=True)
    venv.create(target, with_pip=False)
    installed = next(target.glob("lib/python3*/site-packages"))
    with tempfile.TemporaryDirectory() as directory:
        wheel = download(f"sglang=={version}", Path(directory))
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(installed)
    for name, text in STUBS.items():
        path = installed / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    paths = [str(packages.resolve()), *site.getsitepackages()]
    lines = [f"import site; site.addsitedir({path!r})" for path in paths]
    (installed / "kvferry-development.pth").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
