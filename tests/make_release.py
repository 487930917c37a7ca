"""Build the checked-out commit as a release, in dist/.

    python tests/make_release.py

Builds sdist and wheel twice, from two clones, and compares the bytes. Adds an SBOM of what
`pip install 'kvferry[daemon,cli]'` brings, and checksums. Run by `make release`, in an environment
with the dependency group `release`. Raises SystemExit if the tree has changes that are not
committed, if the builds differ, or if CHANGELOG.md has no date for the version.
"""

from __future__ import annotations

import filecmp
import hashlib
import os
import re
import shutil
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).parents[1]
DIST = ROOT / "dist"
# Clones and builds. They stay there if the builds differ.
WORK = ROOT / ".release" / "work"
LOCK = ROOT / "deploy" / "containers" / "requirements.txt"


def main() -> None:
    check_committed(ROOT)
    for directory in (DIST, WORK):
        shutil.rmtree(directory, ignore_errors=True)
    first = build(ROOT, WORK / "first", umask=0o022)
    second = build(ROOT, WORK / "second", umask=0o077)
    check_equal(first, second)
    (wheel,) = first.glob("*.whl")
    version = wheel.name.split("-")[1]
    check_changelog((ROOT / "CHANGELOG.md").read_text(), version)
    files = [str(file) for file in first.iterdir()]
    _run(sys.executable, "-m", "twine", "check", "--strict", *files)
    write_sbom(first, version)
    write_checksums(first)
    first.rename(DIST)
    for file in sorted(DIST.iterdir()):
        print(file.relative_to(ROOT))
    if ".dev" in version:
        print(f"not for upload: no tag names this commit, so the version is {version}")


def check_committed(root: Path) -> None:
    """Raise SystemExit if a file of the work tree differs from the commit, or is not in it."""
    if changes := _read("git", "-C", str(root), "status", "--porcelain"):
        raise SystemExit(
            f"the work tree has changes that are not committed:\n{changes}\n"
            "commit, stash or remove them, and run make release again"
        )


def build(root: Path, directory: Path, umask: int) -> Path:
    """Build sdist and wheel from a new clone in `directory`. Returns the directory of both."""
    source, dist = directory / "source", directory / "dist"
    _run("git", "clone", "--quiet", str(root), str(source), umask=umask)
    seconds = _read("git", "-C", str(source), "log", "-1", "--format=%ct")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(dist), str(source)]
    _run(*command, umask=umask, SOURCE_DATE_EPOCH=seconds)
    return dist


def check_equal(first: Path, second: Path) -> None:
    """Raise SystemExit unless both directories have the same files with the same bytes."""
    names = sorted({file.name for each in (first, second) for file in each.iterdir()})
    _, differing, missing = filecmp.cmpfiles(first, second, names, shallow=False)
    if differing or missing:
        raise SystemExit(
            f"two builds of this commit differ in {', '.join(differing + missing)}; "
            f"compare the files in {first} and {second}, for instance with diffoscope"
        )


def check_changelog(text: str, version: str) -> None:
    """Raise SystemExit if the changelog has no date for a version that a tag names."""
    heading = rf"(?m)^## \[{re.escape(version)}\] - \d{{4}}-\d\d-\d\d$"
    if ".dev" not in version and not re.search(heading, text):
        raise SystemExit(
            f"CHANGELOG.md has no heading '## [{version}] - YYYY-MM-DD'; write the date of the "
            "release, commit it, and move the tag to that commit"
        )


def write_sbom(dist: Path, version: str) -> None:
    """Write a CycloneDX file of the wheel's dependencies, from an environment made for it."""
    environment, project = WORK / "environment", WORK / "pyproject.toml"
    venv.create(environment, with_pip=False)
    python = str(environment / "bin" / "python")
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet"]
    _run(*pip, "--require-hashes", "--requirement", str(LOCK))
    # Fails if the lock lacks a dependency.
    _run(*pip, "--no-index", "--find-links", str(dist), f"kvferry[daemon,cli]=={version}")
    project.write_text(with_version((ROOT / "pyproject.toml").read_text(), version))
    command = ["cyclonedx_py", "environment", "--output-reproducible", "--pyproject", str(project)]
    output = dist / f"kvferry-{version}.cdx.json"
    _run(sys.executable, "-m", *command, "--output-file", str(output), python)


def with_version(pyproject: str, version: str) -> str:
    """pyproject.toml for the SBOM's tool, which does not read versions that are dynamic."""
    return pyproject.replace('dynamic = ["version"]', f'version = "{version}"')


def write_checksums(dist: Path) -> None:
    """Write SHA256SUMS, as `sha256sum --check` reads it."""
    files = sorted(dist.iterdir())
    lines = [f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}\n" for file in files]
    (dist / "SHA256SUMS").write_text("".join(lines))


def _run(*command: str, umask: int = -1, **environment: str) -> None:
    subprocess.run(command, check=True, umask=umask, env={**os.environ, **environment})


def _read(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.rstrip()


if __name__ == "__main__":
    main()
