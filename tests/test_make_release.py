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
COMMITTER = (
    "-c",
    "user.name=a",
    "-c",
    "user.email=a@example.com",
    "-c",
    "commit.gpgsign=0",
    "-c",
    "tag.gpgsign=0",
)
COMMIT = r"\+g[0-9a-f]{7,}"


def git(directory: Path, *arguments: str) -> None:
    command = ["git", "-C", str(directory), *COMMITTER, *arguments]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def commit(directory: Path) -> None:
    git(directory, "commit", "--quiet", "--allow-empty", "--message", "a change")


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
    commit(unpacked)
    return unpacked


def version(directory: Path) -> str:
    return ProjectMetadata(str(directory), PluginManager()).version


def archive(directory: Path) -> Path:
    git(directory, "archive", "--output=../archive.tar", "--prefix=archive/", "HEAD")
    subprocess.run(["tar", "-xf", "archive.tar"], cwd=directory.parent, check=True)
    return directory.parent / "archive"


def test_a_checkout_of_a_tag_has_its_version(checkout: Path) -> None:
    git(checkout, "tag", "v0.1.0")
    assert version(checkout) == "0.1.0"


def test_a_later_checkout_names_its_commit(checkout: Path) -> None:
    git(checkout, "tag", "v0.1.0")
    commit(checkout)
    assert re.fullmatch(rf"0\.1\.1\.dev1{COMMIT}", version(checkout))


def test_a_checkout_without_tag_is_older_than_the_first_release(checkout: Path) -> None:
    assert re.fullmatch(rf"0\.1\.dev1{COMMIT}", version(checkout))


def test_a_shallow_clone_names_its_commit(checkout: Path, tmp_path: Path) -> None:
    git(checkout, "tag", "v0.1.0")
    commit(checkout)
    clone = tmp_path / "clone"
    git(tmp_path, "clone", "--quiet", "--depth=1", f"file://{checkout}", str(clone))
    with pytest.warns(UserWarning, match="is shallow"):
        assert re.fullmatch(rf"0\.1\.dev1{COMMIT}", version(clone))


def test_an_archive_of_a_tag_has_its_version(checkout: Path) -> None:
    git(checkout, "tag", "v0.1.0")
    assert version(archive(checkout)) == "0.1.0"


def test_an_sdist_keeps_its_version(unpacked: Path) -> None:
    (unpacked / ".git_archival.txt").unlink()
    (unpacked / "PKG-INFO").write_text("Metadata-Version: 2.4\nName: kvferry\nVersion: 0.1.0\n")
    assert version(unpacked) == "0.1.0"


@pytest.mark.filterwarnings("ignore:.*git archiv")
def test_files_without_git_can_be_installed(unpacked: Path) -> None:
    assert version(unpacked) == "0.0"


def test_a_clean_tree_can_be_released(checkout: Path) -> None:
    make_release.check_committed(checkout)


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


def test_equal_builds_pass(builds: tuple[Path, Path]) -> None:
    make_release.check_equal(*builds)


def test_builds_with_other_bytes_are_refused(builds: tuple[Path, Path]) -> None:
    (builds[1] / "kvferry.whl").write_bytes(b"WHEEL")
    with pytest.raises(SystemExit, match=r"differ in kvferry\.whl; compare the files in .*/first"):
        make_release.check_equal(*builds)


@pytest.mark.parametrize("index", [0, 1])
def test_builds_with_other_names_are_refused(builds: tuple[Path, Path], index: int) -> None:
    (builds[index] / "kvferry.tar.gz").touch()
    with pytest.raises(SystemExit, match=r"differ in kvferry\.tar\.gz; "):
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
