"""The manifests and the Containerfile agree with Kubernetes, with each other, and with kvferryd."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from kvferry.daemon import config_reader
from kvferry.proto.sizes import parse_bytes

DEPLOY = Path(__file__).parents[2] / "deploy"
CONTAINERS = DEPLOY / "containers"
MANIFESTS = [*yaml.safe_load_all((CONTAINERS / "kubernetes.yml").read_text())]
PODS = {
    each["metadata"]["name"]: each["spec"]["template"]["spec"]
    for each in MANIFESTS
    if "template" in each.get("spec", {})
}
# https://kubernetes.io/docs/concepts/security/pod-security-standards, level baseline
BASELINE_CAPABILITIES = {"CHOWN", "DAC_OVERRIDE", "FOWNER", "SETGID", "SETUID", "KILL"}
USER = "64240"


def containers(pod: dict[str, Any]) -> list[dict[str, Any]]:
    return [*pod.get("initContainers", ()), *pod["containers"]]


@pytest.mark.parametrize("manifest", MANIFESTS, ids=lambda each: str(each["kind"]))
def test_a_manifest_fits_the_schemas_of_kubernetes(manifest: dict[str, Any]) -> None:
    if manifest["kind"] == "PodMonitor":  # of the Prometheus operator
        assert manifest["apiVersion"] == "monitoring.coreos.com/v1"
        return
    for version in ("1.30", "1.35"):
        kubernetes_validate.validate(manifest, version, strict=True)


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
    pod = PODS["kvferryd"]
    (container,) = pod["containers"]
    config = config_reader.read([*entry_point(), *container["args"]])
    assert config.access.group == USER
    (port,) = container["ports"]
    assert config.metrics.listen == f"0.0.0.0:{port['containerPort']}"
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["httpGet"] == {"path": "/health", "port": port["name"]}


def test_user_and_group_are_the_same_everywhere() -> None:
    daemon, engine = PODS["kvferryd"], PODS["vllm"]
    text = (CONTAINERS / "Containerfile").read_text()
    assert f"\nUSER {USER}:{USER}\n" in text
    context = daemon["securityContext"]
    assert str(context["runAsUser"]) == str(context["runAsGroup"]) == USER
    assert USER in [str(group) for group in engine["securityContext"]["supplementalGroups"]]
    unit = (CONTAINERS / "kvferryd@.container").read_text()
    assert f"-o {USER} -g {USER} /run/kvferry" in unit
    assert f"--group-add {USER}" in (DEPLOY / "containers.md").read_text()


def test_the_engine_uses_the_connector() -> None:
    (container,) = PODS["vllm"]["containers"]
    (option,) = [each for each in container["args"] if "kv-transfer-config" in each]
    config = json.loads(option.partition("=")[2])
    assert config["kv_connector_module_path"] == "kvferry.client.vllm"
    assert config["kv_connector"] == "KVFerryConnector"
    extra = config["kv_connector_extra_config"]
    assert extra.keys() == {"cpu_bytes_to_use"}
    (daemon,) = PODS["kvferryd"]["containers"]
    pool = config_reader.read(daemon["args"]).pool.size
    assert parse_bytes(extra["cpu_bytes_to_use"]) <= parse_bytes(pool)


def entry_point() -> list[str]:
    """The arguments that the image gives to kvferryd."""
    (line,) = re.findall(r"(?m)^ENTRYPOINT (.*)$", (CONTAINERS / "Containerfile").read_text())
    program, *arguments = json.loads(line)
    assert program == "kvferryd"
    return list(arguments)
