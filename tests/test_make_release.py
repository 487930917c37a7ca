"""make_release.py refuses what is no release, and the version is that of the git tag."""

from __future__ import annotations

import re
import shutil
import subprocess
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
from hatchling.metadata.core import ProjectMetadata
from hatchling.plugin.manager import PluginManager

import make_release

ROOT = Path(__file__).parents[1]
PROJECT_FILES = ("pyproject.toml", "README.md", "LICENSE", ".gitattributes", ".git_archival.txt")
SETTINGS = "user.name=a", "user.email=a@example.com", "commit.gpgsign=0", "tag.gpgsign=0"


def git(directory: Path, *arguments: str) -> None:
    options = [each for setting in SETTINGS for each in ("-c", setting)]
    command = ["git", "-C", str(directory), *options, *arguments]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


@pytest.fixture
def unpacked(tmp_path: Path) -> Path:
    """The files that determine the version, without git."""
    directory = tmp_path / "kvferry"
    directory.mkdir()
    for name in PROJECT_FILES:
        shutil.copy(ROOT / name, directory)
    return directory


@pytest.fixture
def checkout(unpacked: Path) -> Path:
    git(unpacked, "init", "--quiet")
    git(unpacked, "add", "--all")
    git(unpacked, "commit", "--quiet", "--message", "a change")
    return unpacked


def version(directory: Path) -> str:
    return ProjectMetadata(str(directory), PluginManager()).version


def test_the_version_is_that_of_the_tag(checkout: Path) -> None:
    """Of a checkout and of an archive. A later checkout names its commit."""
    git(checkout, "tag", "v0.1.0")
    git(checkout, "archive", "--output=../archive.tar", "--prefix=archive/", "HEAD")
    subprocess.run(["tar", "-xf", "archive.tar"], cwd=checkout.parent, check=True)
    assert version(checkout) == version(checkout.parent / "archive") == "0.1.0"
    git(checkout, "commit", "--quiet", "--allow-empty", "--message", "a change")
    assert re.fullmatch(r"0\.1\.1\.dev1\+g[0-9a-f]{7,}", version(checkout))


@pytest.mark.filterwarnings("ignore:.*git archiv")
def test_files_without_git_can_be_installed(unpacked: Path) -> None:
    assert version(unpacked) == "0.0"


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (lambda tree: (tree / "README.md").write_text(""), " M README.md"),
        (lambda tree: (tree / "README.md").unlink(), " D README.md"),
        (lambda tree: (tree / "new.py").touch(), "?? new.py"),
    ],
    ids=["changed", "removed", "new"],
)
def test_a_tree_with_changes_is_refused(
    checkout: Path, change: Callable[[Path], object], line: str
) -> None:
    make_release.check_committed(checkout)
    change(checkout)
    with pytest.raises(SystemExit, match=f"not committed:\n{re.escape(line)}\ncommit, stash"):
        make_release.check_committed(checkout)


@pytest.fixture
def builds(tmp_path: Path) -> tuple[Path, Path]:
    """Two directories with equal files."""
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "kvferry.whl").write_bytes(b"wheel")
    return tmp_path / "first", tmp_path / "second"


@pytest.mark.parametrize(
    ("build", "name"), [(0, "kvferry.tar.gz"), (1, "kvferry.tar.gz"), (1, "kvferry.whl")]
)
def test_builds_that_differ_are_refused(builds: tuple[Path, Path], build: int, name: str) -> None:
    make_release.check_equal(*builds)
    (builds[build] / name).write_bytes(b"other")
    with pytest.raises(SystemExit, match=f"differ in {name}; compare the files in .*/first"):
        make_release.check_equal(*builds)


@pytest.mark.parametrize(
    ("text", "number"),
    [("## [0.1.0] - 2026-12-01\n", "0.1.0"), ("## [0.1.0] - Unreleased\n", "0.1.dev3+g1234567")],
)
def test_a_changelog_of_the_version_passes(text: str, number: str) -> None:
    make_release.check_changelog(f"# Changelog\n\n{text}", number)


@pytest.mark.parametrize("text", ["## [0.1.0] - Unreleased\n", "## [0.1.1] - 2026-12-01\n"])
def test_a_tag_without_a_date_in_the_changelog_is_refused(text: str) -> None:
    with pytest.raises(SystemExit, match=r"no heading '## \[0\.1\.0\] - YYYY-MM-DD'; write"):
        make_release.check_changelog(f"# Changelog\n\n{text}", "0.1.0")


def test_the_sbom_gets_the_version() -> None:
    text = make_release.with_version((ROOT / "pyproject.toml").read_text(), "0.1.0")
    project = tomllib.loads(text)["project"]
    assert project["version"] == "0.1.0"
    assert "dynamic" not in project


def test_sha256sum_accepts_the_checksums(builds: tuple[Path, Path]) -> None:
    make_release.write_checksums(builds[0])
    command = ["sha256sum", "--check", "--strict", "SHA256SUMS"]
    output = subprocess.run(command, cwd=builds[0], check=True, capture_output=True, text=True)
    assert output.stdout == "kvferry.whl: OK\n"
