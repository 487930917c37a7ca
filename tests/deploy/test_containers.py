"""The manifests and the Containerfile agree with Kubernetes, with each other, and with kvferryd."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from kvferry.daemon import config_reader
from kvferry.proto.sizes import parse_bytes

DEPLOY = Path(__file__).parents[2] / "deploy"
CONTAINERS = DEPLOY / "containers"
PAGE = (DEPLOY / "containers.md").read_text()
# The placeholders of the manifests, as the page's commands replace them.
PLACEHOLDERS = {"REGISTRY": "registry.example.com/team", "GPU_INDEX": "0"}


def manifests(path: Path) -> list[dict[str, Any]]:
    text = path.read_text().partition("\napiVersion")[2]
    for name, value in PLACEHOLDERS.items():
        text = text.replace(name, value)
    return [*yaml.safe_load_all("apiVersion" + text)]


MANIFESTS = [each for path in sorted(CONTAINERS.glob("*.yml")) for each in manifests(path)]
PODS = {
    each["metadata"]["name"]: each["spec"]["template"]["spec"]
    for each in MANIFESTS
    if "template" in each.get("spec", {})
}
# https://kubernetes.io/docs/concepts/security/pod-security-standards, level baseline
BASELINE_CAPABILITIES = {"CHOWN", "DAC_OVERRIDE", "FOWNER", "SETGID", "SETUID", "KILL"}
USER = "64240"
UNIT = "kvferryd@.container"


def containers(pod: dict[str, Any]) -> list[dict[str, Any]]:
    return [*pod.get("initContainers", ()), *pod["containers"]]


@pytest.mark.parametrize("manifest", MANIFESTS, ids=lambda each: str(each["kind"]))
def test_a_manifest_fits_the_schemas_of_kubernetes(manifest: dict[str, Any]) -> None:
    if manifest["kind"] == "PodMonitor":  # of the Prometheus operator
        assert manifest["apiVersion"] == "monitoring.coreos.com/v1"
        return
    for release in ("1.30", "1.35"):
        kubernetes_validate.validate(manifest, release, strict=True)


@pytest.mark.parametrize("name", PODS)
def test_the_only_exception_from_baseline_is_the_runtime_directory(name: str) -> None:
    pod = PODS[name]
    assert not {"hostPID", "hostIPC", "hostNetwork"} & pod.keys()
    mounted = [volume["hostPath"]["path"] for volume in pod["volumes"] if "hostPath" in volume]
    assert mounted == ["/run/kvferry"]
    for container in containers(pod):
        security = container["securityContext"]
        assert security["allowPrivilegeEscalation"] is False
        assert security["capabilities"]["drop"] == ["ALL"]
        assert set(security["capabilities"].get("add", ())) <= BASELINE_CAPABILITIES
        assert not any("hostPort" in port for port in container.get("ports", ()))


def test_the_daemon_accepts_its_arguments_and_its_port_is_probed() -> None:
    pod = PODS["kvferryd-0"]
    (container,) = pod["containers"]
    config = config_reader.read([*entry_point(), *container["args"]])
    assert config.access.group == USER
    (port,) = container["ports"]
    assert config.device == PLACEHOLDERS["GPU_INDEX"]
    assert config.metrics.listen == f":{port['containerPort']}"
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["httpGet"] == {"path": "/health", "port": port["name"]}


def test_user_and_group_are_the_same_everywhere() -> None:
    daemon, engine = PODS["kvferryd-0"], PODS["vllm"]
    text = (CONTAINERS / "Containerfile").read_text()
    assert f"\nUSER {USER}:{USER}\n" in text
    context = daemon["securityContext"]
    assert str(context["runAsUser"]) == str(context["runAsGroup"]) == USER
    assert USER in [str(group) for group in engine["securityContext"]["supplementalGroups"]]
    unit = (CONTAINERS / UNIT).read_text()
    assert f"-o {USER} -g {USER} /run/kvferry" in unit
    assert f"--group-add {USER}" in PAGE


def test_the_engine_uses_the_connector() -> None:
    (container,) = PODS["vllm"]["containers"]
    (option,) = [each for each in container["args"] if "kv-transfer-config" in each]
    config = json.loads(option.partition("=")[2])
    assert config["kv_connector_module_path"] == "kvferry.client.vllm"
    assert config["kv_connector"] == "KVFerryConnector"
    extra = config["kv_connector_extra_config"]
    assert extra.keys() == {"cpu_bytes_to_use"}
    (daemon,) = PODS["kvferryd-0"]["containers"]
    pool = config_reader.read(daemon["args"]).pool.size
    assert parse_bytes(extra["cpu_bytes_to_use"]) <= parse_bytes(pool)


def test_a_pod_selector_matches_only_the_pods_of_one_gpu() -> None:
    (daemon,) = (each for each in MANIFESTS if each["kind"] == "DaemonSet")
    labels = daemon["spec"]["template"]["metadata"]["labels"]
    assert daemon["spec"]["selector"]["matchLabels"] == labels
    assert labels["gpu"] == PLACEHOLDERS["GPU_INDEX"]
    (monitor,) = (each for each in MANIFESTS if each["kind"] == "PodMonitor")
    assert monitor["spec"]["selector"]["matchLabels"].items() <= labels.items()


def test_every_image_that_is_used_is_built_by_a_command_of_the_page() -> None:
    version = newest_version()
    builds = re.findall(r"podman build -t (\S+) (?:--build-arg VERSION=(\S+) )?-f (\S+) \.", PAGE)
    for _, argument, file in builds:
        has_argument = "\nARG VERSION" in (DEPLOY.parent / file).read_text()
        assert argument == (version if has_argument else ""), file
    built = {name.replace("$REGISTRY", PLACEHOLDERS["REGISTRY"]) for name, *_ in builds}
    assert re.findall(r"podman push (\S+)", PAGE) == [f"$REGISTRY/kvferry:{version}"]
    used = {each["image"] for pod in PODS.values() for each in containers(pod)}
    used |= set(re.findall(r"(?m)^Image=localhost/(.*)$", (CONTAINERS / UNIT).read_text()))
    used |= set(
        re.findall(r"(?m)^ARG KVFERRY=(.*)$", (CONTAINERS / "Containerfile.vllm").read_text())
    )
    assert {image for image in used if "kvferry" in image} <= built
    assert all(name.endswith(f":{version}") for name in built)


def test_the_commands_of_the_page_use_files_that_exist() -> None:
    for file in re.findall(r"deploy/containers/[\w.-]+", PAGE):
        assert (DEPLOY.parent / file).exists(), file


def test_the_page_starts_vllm_with_the_connector() -> None:
    (command,) = re.findall(
        r"(?s)podman run [^\n]*--name vllm .*?--kv-transfer-config '(.*?)'", PAGE
    )
    (option,) = [each for each in PODS["vllm"]["containers"][0]["args"] if "kv-transfer" in each]
    assert json.loads(command) == json.loads(option.partition("=")[2])


def test_the_base_image_has_a_digest() -> None:
    text = (CONTAINERS / "Containerfile").read_text()
    assert re.findall(r"(?m)^FROM (\S+)", text) == ["${BASE}", "${BASE}"]
    assert re.search(r"(?m)^ARG BASE=docker\.io/library/python:\S+@sha256:[0-9a-f]{64}$", text)


@pytest.mark.parametrize(
    ("lock", "of"),
    [
        ("requirements.txt", lambda project: project["project"]["dependencies"]),
        ("requirements.txt", lambda project: extras(project)["daemon"]),
        ("requirements.txt", lambda project: extras(project)["cli"]),
        ("requirements-build.txt", lambda project: project["build-system"]["requires"]),
    ],
    ids=["dependencies", "daemon", "cli", "build"],
)
def test_a_lock_has_hashes_and_the_versions_of_constraints_txt(
    lock: str, of: Callable[[dict[str, Any]], list[str]]
) -> None:
    root = DEPLOY.parent
    locked = dict(re.findall(r"(?m)^(\S+)==(\S+) \\\n    --hash=sha256:", lock_text(lock)))
    assert locked.keys() == set(re.findall(r"(?m)^(\w\S*)==", lock_text(lock)))
    required = of(tomllib.loads((root / "pyproject.toml").read_text()))
    assert required
    assert {name.partition(">=")[0] for name in required} <= locked.keys(), "run make lock"
    tested = (root / "constraints.txt").read_text().lower().replace("_", "-")
    for name, version in re.findall(r"(?m)^(\S+)==(\S+)$", tested):
        assert locked.get(name, version) == version, f"{name}: run make lock"


def extras(project: dict[str, Any]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = project["project"]["optional-dependencies"]
    return found


def lock_text(name: str) -> str:
    return (CONTAINERS / name).read_text()


def newest_version() -> str:
    """The version of the first heading of the changelog, which may have no date yet."""
    (version, *_) = re.findall(r"(?m)^## \[(.*)\] - ", (DEPLOY.parent / "CHANGELOG.md").read_text())
    return str(version)


def entry_point() -> list[str]:
    """The arguments that the image gives to kvferryd."""
    (line,) = re.findall(r"(?m)^ENTRYPOINT (.*)$", (CONTAINERS / "Containerfile").read_text())
    program, *arguments = json.loads(line)
    assert program == "kvferryd"
    return list(arguments)
