"""The image of deploy/containers/Containerfile, built from a minimal Debian, and its daemon."""

from __future__ import annotations

import errno
import json
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from support.seccomp_profile import PROFILE, probe
from support.systemd_container import WHEELS, Foundation, missing
from support.time_limits import TIMEOUT

from .conftest import CHECKOUT, cache_directory

pytestmark = [pytest.mark.systemd, pytest.mark.timeout(900)]
PIP = f"[global]\nno-index = true\nfind-links = /{WHEELS}\n"


class Builder:
    """Buildah with a storage of its own."""

    def __init__(self, directory: Path) -> None:
        storage = ("--storage-driver", "vfs", "--root", f"{directory}/storage")
        self._command = ("buildah", *storage, "--runroot", f"{directory}/run")

    def run(self, *arguments: str, check: bool = True) -> str:
        """Run a command of buildah. Returns its output."""
        done = subprocess.run(
            [*self._command, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert done.returncode == 0 or not check, f"{arguments}: {done.stdout[-3000:]}"
        return done.stdout.strip()

    def config(self, image: str) -> dict[str, Any]:
        """The configuration of an image's process."""
        found: dict[str, Any] = json.loads(self.run("inspect", "--type=image", image))
        inside: dict[str, Any] = found["OCIv1"]["config"]
        return inside

    def start(self, container: str, *command: str) -> subprocess.Popen[bytes]:
        """Run a command in a container, as the user of its image."""
        return subprocess.Popen(
            [*self._command, "run", "--isolation", "chroot", container, "--", *command]
        )


@contextmanager
def builder() -> Iterator[Builder]:
    directory = Path(tempfile.mkdtemp(prefix="kvferry-image-"))
    try:
        yield Builder(directory)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def test_the_image_serves_and_reports_its_health() -> None:
    if reason := missing(cache_directory()):
        pytest.skip(reason)
    if shutil.which("buildah") is None:
        pytest.skip("not installed: buildah")
    locks = sorted((CHECKOUT / "deploy" / "containers").glob("requirements*.txt"))
    requirements = [f"--requirement={path}" for path in locks]
    foundation = Foundation(cache_directory(), requirements, CHECKOUT / "constraints.txt")
    with builder() as images, tempfile.NamedTemporaryFile("w", suffix=".conf") as pip:
        pip.write(PIP)
        pip.flush()
        base = images.run("from", "scratch")
        images.run("add", "--quiet", base, str(foundation.root), "/")
        images.run("commit", "--quiet", "--rm", base, "base")
        images.run(
            *("bud", "--isolation", "chroot", "--build-arg", "BASE=localhost/base"),
            *("--build-arg", "VERSION=1.2.3"),
            *("--volume", f"{foundation.wheels}:/{WHEELS}:ro"),
            *("--volume", f"{pip.name}:/etc/pip.conf:ro", "--tag", "kvferry:1.2.3"),
            *("--file", "deploy/containers/Containerfile", str(CHECKOUT)),
        )
        check_engine_image(images)
        confined = f"--security-opt=seccomp={PROFILE}"
        container = images.run("from", confined, "localhost/kvferry:1.2.3")
        refused = images.run(
            "run", "--isolation", "chroot", container, "--", "python3", "-c", probe()
        )
        assert set(json.loads(refused).values()) == {errno.EPERM}
        config = images.config("kvferry:1.2.3")
        assert config["User"] == "64240:64240"
        command = [*config["Entrypoint"], "--device", "cpu", "--pool-size", "1MiB"]
        with images.start(container, *command) as daemon:
            try:
                healthy = ["run", "--isolation", "chroot", container, "--"]
                healthy += ["kvferry", "status", "--check"]
                deadline = time.monotonic() + TIMEOUT
                while ": healthy" not in (found := images.run(*healthy, check=False)):
                    assert time.monotonic() < deadline, found
                    time.sleep(0.5)
            finally:
                daemon.terminate()


def check_engine_image(images: Builder) -> None:
    """Build the image of an engine, from one that has the client's dependencies; import it."""
    images.run(
        *("bud", "--build-arg", "BASE=localhost/kvferry:1.2.3"),
        *("--build-arg", "KVFERRY=localhost/kvferry:1.2.3", "--tag", "kvferry-vllm:1.2.3"),
        *("--file", "deploy/containers/Containerfile.vllm", str(CHECKOUT)),
    )
    assert images.config("kvferry-vllm:1.2.3")["Entrypoint"] == ["vllm", "serve"]
    container = images.run("from", "localhost/kvferry-vllm:1.2.3")
    python = ["python3", "-c", "import kvferry.client as client; print(client.__file__)"]
    found = images.run("run", "--isolation", "chroot", container, "--", *python)
    assert found == "/opt/kvferry/client/kvferry/client/__init__.py"
    version = ["python3", "-m", "kvferry.client.cli", "--version"]
    assert "kvferry 1.2.3" in images.run("run", "--isolation", "chroot", container, "--", *version)
