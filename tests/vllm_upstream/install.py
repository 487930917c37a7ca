"""Create a virtual environment with one version of vLLM, on a machine without a GPU.

    python tests/vllm_upstream/install.py 0.33.0 .vllm/0.33.0 .vllm/packages
    python tests/vllm_upstream/install.py newest .vllm/newest .vllm/packages

The environment has vLLM's wheel without its compiled kernels, the packages of `packages.txt` (in a
directory of their own, which all versions share), and everything of the environment that runs this
script. vLLM's own tests of its offloading connector, from its source distribution, are in
`upstream`. "newest" is the newest release that pip finds; if the environment has it, nothing is
done. Run by the Makefile. Raises CalledProcessError if a download fails.
"""

from __future__ import annotations

import json
import os
import shutil
import site
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from pathlib import Path, PurePosixPath
from typing import Any

# pip needs these to read the metadata of vLLM's source distribution when it downloads it.
BUILD_PACKAGES = "setuptools-rust", "setuptools-scm", "semantic-version", "vcs-versioning"
# The offloading tests of vLLM, their helpers and their parent packages. Not vLLM's conftest.py,
# which imports all of vLLM.
UPSTREAM_TESTS = (
    "tests/__init__.py",
    "tests/v1/__init__.py",
    "tests/v1/kv_connector/__init__.py",
    "tests/v1/kv_connector/unit/__init__.py",
    "tests/v1/kv_connector/unit/utils.py",
    "tests/v1/kv_connector/unit/offloading_connector/*",
    "tests/v1/kv_offload/__init__.py",
    "tests/v1/kv_offload/conftest.py",
    "tests/v1/kv_offload/*.py",
    "tests/v1/kv_offload/cpu/*",
)
# Lists the directories of packages that the environment uses. Written last.
PATHS = "kvferry-development.pth"


def main() -> None:
    version, target, packages = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    if version == "newest":
        version = newest_version()
        print(f"vLLM {version} is the newest release")
        if is_installed(version, target):
            return
    shutil.rmtree(target, ignore_errors=True)
    venv.create(target, with_pip=False)
    installed = next(target.glob("lib/python3*/site-packages"))
    with tempfile.TemporaryDirectory() as name:
        extract_wheel(download(f"vllm=={version}", Path(name) / "wheel"), installed)
        extract_tests(download_source(version, Path(name) / "source"), target / "upstream")
    paths = [str(packages.resolve()), *site.getsitepackages()]
    lines = [f"import site; site.addsitedir({path!r})" for path in paths]
    (installed / PATHS).write_text("\n".join(lines) + "\n")


def newest_version() -> str:
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    options = ["--dry-run", "--ignore-installed", "--no-deps", "--report", "-"]
    done = subprocess.run([*command, *options, "vllm"], check=True, stdout=subprocess.PIPE)
    (found,) = json.loads(done.stdout)["install"]
    return str(found["metadata"]["version"])


def is_installed(version: str, target: Path) -> bool:
    """Whether an environment is complete and has this version."""
    return any(
        (packages / PATHS).exists() and (packages / f"vllm-{version}.dist-info").exists()
        for packages in target.glob("lib/python3*/site-packages")
    )


def download(requirement: str, directory: Path, *options: str, **environment: str) -> Path:
    """Download the wheel, or the file that the options select. Returns its path."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", *options]
    subprocess.run(
        [*command, "--dest", str(directory), requirement],
        check=True,
        env={**os.environ, **environment},
    )
    (file,) = directory.iterdir()
    return file


def download_source(version: str, directory: Path) -> Path:
    """Download the source distribution. pip runs its setup.py for the metadata, without a build."""
    build = directory / "build"
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target"]
    subprocess.run([*install, str(build), *BUILD_PACKAGES], check=True)
    return download(
        f"vllm=={version}",
        directory / "download",
        "--no-binary=vllm",
        "--no-build-isolation",
        PYTHONPATH=str(build),
        VLLM_TARGET_DEVICE="empty",
        VLLM_VERSION_OVERRIDE=version,
    )


def extract_wheel(wheel: Path, directory: Path) -> None:
    """Extract all but compiled kernels and programs, which are 95% of the wheel and need a GPU."""
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if PurePosixPath(name).suffix != ".so"]
        archive.extractall(directory, [name for name in names if not name.endswith("/vllm-rs")])


def extract_tests(source: Path, directory: Path) -> None:
    # Python before 3.11.4 has no filters.
    filtered: dict[str, Any] = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
    with tarfile.open(source) as archive:
        for member in archive:
            path = PurePosixPath(*PurePosixPath(member.name).parts[1:])
            if member.isfile() and any(path.match(pattern) for pattern in UPSTREAM_TESTS):
                member.name = str(path)
                archive.extract(member, directory, **filtered)


if __name__ == "__main__":
    main()
