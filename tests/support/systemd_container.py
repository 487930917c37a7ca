"""Debian in a container, booted by its own systemd, to test unit files.

`Foundation` keeps a minimal Debian and the wheels of the daemon between runs. A `SystemdContainer`
boots a copy of it, without network, and does not change the file system of the host. Needs root,
debootstrap and systemd-nspawn.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType

from support.time_limits import TIMEOUT

# It has systemd 257, whose descriptor store can survive a stop.
SUITE = "trixie"
# Mooncake needs the libraries.
PACKAGES = "systemd,systemd-sysv,dbus,python3,python3-venv,libcurl4t64,libibverbs1,libnuma1"
# Directory with the wheels, in the root.
WHEELS = "wheels"
# Runs before commands that install. The umask is the one of root on a hardened machine.
OFFLINE = f"export PIP_NO_INDEX=1 PIP_FIND_LINKS=/{WHEELS} PIP_NO_COMPILE=1\numask 077\n"
TOOLS = ("systemd-nspawn", "nsenter", "chroot")
BOOT_SECONDS = 2 * TIMEOUT
# Mount point of the host's file system, whose torch a container with a GPU uses.
HOST = "/host"
# Libraries of NVIDIA's driver that a process without torch may load, by their sonames.
DRIVER = re.compile(r"lib(cuda|nvidia-(ml|ptxjitcompiler|nvvm|gpucomp))\.so\.1$")
DRIVER_PLACE = "/usr/local/lib/nvidia"
# Makes the container's processes, devices and sockets visible below HOST, for programs in HOST.
GPU_SETUP = f"""
echo {DRIVER_PLACE} > /etc/ld.so.conf.d/nvidia.conf
ldconfig
mount --rbind /proc {HOST}/proc
mount --rbind /dev {HOST}/dev
mount -t tmpfs -o mode=755 run {HOST}/run
mkdir -p {HOST}/run/kvferry /run/kvferry
mount --bind /run/kvferry {HOST}/run/kvferry
"""
ENVIRON = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin", "LANG": "C.UTF-8"}


def missing(cache: Path) -> str:
    """Why this machine cannot run a container; empty if it can. cache: of the Foundation."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "a container is booted by root only"
    tools = TOOLS if _root(cache).is_dir() else ("debootstrap", *TOOLS)
    absent = [tool for tool in tools if shutil.which(tool) is None]
    return f"not installed: {', '.join(absent)}" if absent else ""


def _root(cache: Path) -> Path:
    return cache / f"{SUITE}-{PACKAGES.replace(',', '-')}"


class Foundation:
    """A minimal Debian in `cache`, created if it is missing, with the wheels of `requirements`."""

    def __init__(self, cache: Path, requirements: Sequence[str], constraints: Path) -> None:
        self.root = _root(cache)
        with _locked(cache):
            if not self.root.is_dir():
                unfinished = cache / "unfinished"
                shutil.rmtree(unfinished, ignore_errors=True)
                _debootstrap(unfinished)
                unfinished.rename(self.root)
            self.wheels = cache / WHEELS
            self._download(requirements, constraints)

    def copy(self) -> Path:
        """Create the root of one container."""
        root = Path(tempfile.mkdtemp(prefix="kvferry-machine-", dir=self.root.parent))
        _run_command("cp", "-a", "--reflink=auto", f"{self.root}/.", str(root))
        shutil.copytree(self.wheels, root / WHEELS)
        return root

    def _download(self, requirements: Sequence[str], constraints: Path) -> None:
        """Download wheels for the container's Python. pip keeps those that exist."""
        script = "import sys; print('%d.%d' % sys.version_info[:2])"
        python = _run_command("chroot", str(self.root), "/usr/bin/python3", "-c", script).strip()
        machine = platform.machine()
        tags = [f"manylinux{tag}_{machine}" for tag in ("_2_28", "_2_17", "2014")]
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--only-binary=:all:"]
        command += ["--dest", str(self.wheels), "--constraint", str(constraints)]
        command += ["--python-version", python, *(f"--platform={tag}" for tag in tags)]
        _run_command(*command, *requirements)


class SystemdContainer:
    """Boots `root`, and removes it at the end. Raises RuntimeError with the log if boot fails.

    gpu: give it the GPUs of this machine, their driver, and this machine's file system at HOST.
    """

    def __init__(self, root: Path, *, gpu: bool = False) -> None:
        self.root = root
        self._log = tempfile.TemporaryFile()  # noqa: SIM115
        command = ["systemd-nspawn", "--quiet", f"--directory={root}", "--boot", "--console=pipe"]
        command += ["--register=no", "--keep-unit", "--private-network"]
        command += gpu_options() if gpu else []
        self._nspawn = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=self._log, stderr=self._log
        )
        self._leader: int | None = None
        try:
            self._boot()
            if gpu:
                self.script(GPU_SETUP)
        except BaseException:
            self.close()
            raise

    def run(
        self,
        *command: str,
        check: bool = True,
        timeout: float = 2 * TIMEOUT,
        directory: str = "/root",
    ) -> str:
        """Run a command in the container as root. Returns its output.

        Raises AssertionError if `check` and the command fails.
        """
        enter = ["nsenter", f"--target={self._leader}", "--all", "--root", "--wd"]
        shell = ["/bin/sh", "-c", f'cd {directory} && exec "$@"', "sh"]
        done = subprocess.run(
            [*enter, *shell, *command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout,
            env=ENVIRON,
        )
        assert done.returncode == 0 or not check, f"{command}: {done.stdout}"
        return done.stdout.strip()

    def script(self, text: str, timeout: float = 5 * TIMEOUT, directory: str = "/root") -> str:
        """Run lines of shell, up to the first that fails. Returns their output."""
        return self.run("/bin/sh", "-euc", text, timeout=timeout, directory=directory)

    def write(self, path: str, text: str) -> None:
        """Create a file in the container."""
        target = self.root / path.lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)

    def close(self) -> None:
        """Kill all processes in the container, as a power cut does, and remove the root."""
        if self._leader is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._leader, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._nspawn.wait(5)
        self._nspawn.kill()
        self._nspawn.wait()
        self._log.close()
        shutil.rmtree(self.root, ignore_errors=True)

    def __enter__(self) -> SystemdContainer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _boot(self) -> None:
        """Wait until systemd has started its units."""
        deadline = time.monotonic() + BOOT_SECONDS
        while time.monotonic() < deadline and self._nspawn.poll() is None:
            for pid in _children(self._nspawn.pid):
                self._leader = pid
                state = self.run("systemctl", "is-system-running", check=False)
                if state in ("running", "degraded"):
                    return
            time.sleep(0.1)
        self._log.seek(0)
        raise RuntimeError(
            self._log.read().decode(errors="replace").strip() or "the container did not boot"
        )


def sections(page: Path) -> dict[str, str]:
    """The first block of commands of each section, by the section's title."""
    return dict(re.findall(r"(?ms)^## ([^\n]+)$(?:(?!^## ).)*?^```sh\n(.*?)^```", page.read_text()))


def gpu_options() -> list[str]:
    """Options of systemd-nspawn for GPU devices, the driver, and setting device permissions."""
    listed = subprocess.run(["ldconfig", "-p"], capture_output=True, text=True, check=True).stdout
    places = dict(re.findall(r"(?m)^\s*(\S+) \(.*x86-64.*\) => (.*)$", listed)[::-1])
    options = [
        f"--bind-ro={Path(place).resolve()}:{DRIVER_PLACE}/{name}"
        for name, place in places.items()
        if DRIVER.match(name)
    ]
    nodes = [node for node in Path("/dev").glob("nvidia*") if node.is_char_device()]
    options += [f"--bind={node}" for node in nodes]
    options += ["--rlimit=RLIMIT_MEMLOCK=infinity"]  # root may not be able to raise it inside
    options += [f"--bind-ro=/:{HOST}", "--capability=all", "--system-call-filter=bpf"]
    return options


def _children(pid: int) -> list[int]:
    listing = Path(f"/proc/{pid}/task/{pid}/children")
    return [int(child) for child in listing.read_text().split()]


@contextlib.contextmanager
def _locked(cache: Path) -> Iterator[None]:
    """Only one process at a time may write to the cache."""
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _debootstrap(root: Path) -> None:
    mirror = _run_command(
        "apt-get", "indextargets", "--format", "$(REPO_URI)", "Origin: Debian"
    ).split()
    _run_command(
        "debootstrap", "--variant=minbase", f"--include={PACKAGES}", SUITE, str(root), *mirror[:1]
    )


def _run_command(*command: str) -> str:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command[:3])}: {done.stdout[-2000:]}")
    return done.stdout
