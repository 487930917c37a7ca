"""pyproject.toml, the Makefile, the workflows and the templates of GitHub agree."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[1]
GITHUB = ROOT / ".github"
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
REPOSITORY = PROJECT["project"]["urls"]["Source"]
LOWEST_PYTHON = PROJECT["project"]["requires-python"].removeprefix(">=")
FORMS = [path for path in sorted((GITHUB / "ISSUE_TEMPLATE").iterdir()) if path.stem != "config"]


def load(path: Path) -> dict[Any, Any]:
    loaded: dict[Any, Any] = yaml.safe_load(path.read_text())
    return loaded


def test_the_lowest_python_is_the_same_everywhere() -> None:
    classifiers = PROJECT["project"]["classifiers"]
    minors = re.findall(r"Python :: 3\.(\d+)", "\n".join(classifiers))
    assert f"3.{min(map(int, minors))}" == LOWEST_PYTHON
    assert PROJECT["tool"]["ruff"]["target-version"] == f"py{LOWEST_PYTHON.replace('.', '')}"


def test_the_makefile_installs_extras_and_groups_that_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    groups = set(re.findall(r"--group (\w+)", makefile))
    assert groups == PROJECT["dependency-groups"].keys()
    extras = {
        name for each in re.findall(r"'\.\[([a-z,]+)\]'", makefile) for name in each.split(",")
    }
    assert extras <= PROJECT["project"]["optional-dependencies"].keys()


def test_the_repository_has_one_address() -> None:
    pages = [*ROOT.glob("*.md"), ROOT / "pyproject.toml", *GITHUB.rglob("*.*")]
    address = re.compile(r"https://[\w.]+/[\w-]+/kvferry\b")
    found = {url for page in pages for url in address.findall(page.read_text())}
    assert found == {REPOSITORY}


def test_the_workflow_runs_ci_run_with_the_history_and_the_lowest_python() -> None:
    workflow = load(GITHUB / "workflows" / "ci.yml")
    assert workflow["permissions"] == {"contents": "read"}
    (job,) = workflow["jobs"].values()
    checkout, python, run = job["steps"]
    assert checkout["with"]["fetch-depth"] == 0
    assert python["with"]["python-version"] == LOWEST_PYTHON
    program = ROOT / run["run"].split()[-1]
    assert program == ROOT / ".ci" / "run"
    assert program.stat().st_mode & 0o100


def test_the_newest_vllm_is_tested_every_week() -> None:
    workflow = load(GITHUB / "workflows" / "vllm-newest.yml")
    assert workflow["permissions"] == {"contents": "read"}
    (entry,) = workflow[True]["schedule"]  # YAML reads the key "on" as true
    *_, day, month, weekday = entry["cron"].split()
    assert (day, month) == ("*", "*")
    assert weekday in "0123456"
    (job,) = workflow["jobs"].values()
    checkout, python, run = job["steps"]
    assert checkout["with"]["fetch-depth"] == 0
    assert python["with"]["python-version"] == LOWEST_PYTHON
    target = run["run"].removeprefix("make ")
    assert re.search(rf"(?m)^{target}:", (ROOT / "Makefile").read_text())


def test_actions_are_named_by_their_commit() -> None:
    for path in (GITHUB / "workflows").iterdir():
        uses = re.findall(r"(?m)^ *- uses: (.*)$", path.read_text())
        assert uses
        for each in uses:
            assert re.fullmatch(r"[\w/-]+@[0-9a-f]{40}  # v[\d.]+", each), each


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
def test_an_issue_form_has_what_github_requires(path: Path) -> None:
    form = load(path)
    assert form.keys() == {"name", "description", "labels", "body"}
    fields = [field["id"] for field in form["body"]]
    assert len(set(fields)) == len(fields)
    for field in form["body"]:
        assert field["type"] in {"textarea", "input"}
        assert field["attributes"]["label"]
    assert any(field.get("validations", {}).get("required") for field in form["body"])


def test_vulnerabilities_are_not_reported_as_issues() -> None:
    (contact,) = load(GITHUB / "ISSUE_TEMPLATE" / "config.yml")["contact_links"]
    assert contact["url"] == f"{REPOSITORY}/security/advisories/new"
    assert set(contact) == {"name", "url", "about"}
