"""A machine for tests: Debian in a container root of its own, booted by its own systemd.

What a unit file says can only be tried by systemd. `Foundation` keeps a bare Debian and the wheels
that the daemon needs, between runs; a `Machine` is a copy of it that runs, without network, and
never over the root of the machine that tests run on. Needs root, debootstrap and systemd-nspawn.
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

SUITE = "trixie"
"""Has systemd 257: one whose descriptor store can outlive a stop."""
PACKAGES = "systemd,systemd-sysv,dbus,python3,python3-venv,libcurl4t64,libibverbs1,libnuma1"
"""The libraries are those that Mooncake needs."""
WHEELS = "wheels"
"""Directory with the wheels, in the root."""
# In front of the commands that install. A umask as root has it on a machine that was made safe.
OFFLINE = f"export PIP_NO_INDEX=1 PIP_FIND_LINKS=/{WHEELS} PIP_NO_COMPILE=1\numask 077\n"
TOOLS = ("systemd-nspawn", "nsenter", "chroot")
BOOT_SECONDS = 90.0
HOST = "/host"
"""Where a machine with a GPU has the file system of the one around it: that one's torch."""
DRIVER = re.compile(r"lib(cuda|nvidia-(ml|ptxjitcompiler|nvvm|gpucomp))\.so\.1$")
"""What of NVIDIA's driver a process without torch may open, by the names of the loader."""
DRIVER_PLACE = "/usr/local/lib/nvidia"
GPU_SETUP = f"""
echo {DRIVER_PLACE} > /etc/ld.so.conf.d/nvidia.conf
ldconfig
mount --rbind /proc {HOST}/proc
mount --rbind /dev {HOST}/dev
mount -t tmpfs -o mode=755 run {HOST}/run
mkdir -p {HOST}/run/kvferry /run/kvferry
mount --bind /run/kvferry {HOST}/run/kvferry
"""
"""The machine's own processes, devices and sockets, for who goes to live in HOST."""
ENVIRON = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin", "LANG": "C.UTF-8"}


def missing(cache: Path) -> str:
    """Why there can be no machine here; empty where there can. cache: a Foundation's."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "a container is booted by root only"
    tools = TOOLS if _root(cache).is_dir() else ("debootstrap", *TOOLS)
    absent = [tool for tool in tools if shutil.which(tool) is None]
    return f"not installed: {', '.join(absent)}" if absent else ""


def _root(cache: Path) -> Path:
    return cache / f"{SUITE}-{PACKAGES.replace(',', '-')}"


class Foundation:
    """A bare Debian in `cache`, made where it is not there, with the wheels of `requirements`."""

    def __init__(self, cache: Path, requirements: Sequence[str], constraints: Path) -> None:
        self.root = _root(cache)
        with _alone(cache):
            if not self.root.is_dir():
                half = cache / "half-made"
                shutil.rmtree(half, ignore_errors=True)
                _debootstrap(half)
                half.rename(self.root)
            self.wheels = cache / WHEELS
            self._download(requirements, constraints)

    def copy(self) -> Path:
        """A root for one machine."""
        root = Path(tempfile.mkdtemp(prefix="kvferry-machine-", dir=self.root.parent))
        _do("cp", "-a", "--reflink=auto", f"{self.root}/.", str(root))
        shutil.copytree(self.wheels, root / WHEELS)
        return root

    def _download(self, requirements: Sequence[str], constraints: Path) -> None:
        """Wheels for the Python inside: pip says nothing where they are there already."""
        script = "import sys; print('%d.%d' % sys.version_info[:2])"
        python = _do("chroot", str(self.root), "/usr/bin/python3", "-c", script).strip()
        machine = platform.machine()
        tags = [f"manylinux{tag}_{machine}" for tag in ("_2_28", "_2_17", "2014")]
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--only-binary=:all:"]
        command += ["--dest", str(self.wheels), "--constraint", str(constraints)]
        command += ["--python-version", python, *(f"--platform={tag}" for tag in tags)]
        _do(*command, *requirements)


class SystemdContainer:
    """Boots `root`, which goes when it does. Raises RuntimeError with its log where it does not.

    gpu: with the GPUs of this machine and their driver, and its file system at HOST.
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
        self, *command: str, check: bool = True, timeout: float = 120.0, directory: str = "/root"
    ) -> str:
        """What a command prints, that runs inside as root; raises AssertionError where it fails."""
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

    def script(self, text: str, timeout: float = 300.0, directory: str = "/root") -> str:
        """What lines of shell print; the first that fails ends them."""
        return self.run("/bin/sh", "-euc", text, timeout=timeout, directory=directory)

    def write(self, path: str, text: str) -> None:
        """Make a file inside."""
        target = self.root / path.lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)

    def close(self) -> None:
        """End everything inside, as if its power went, and remove the root."""
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
        """Wait until systemd has started what it starts."""
        deadline = time.monotonic() + BOOT_SECONDS
        while time.monotonic() < deadline and self._nspawn.poll() is None:
            for pid in _children(self._nspawn.pid):
                self._leader = pid
                state = self.run("systemctl", "is-system-running", check=False)
                if state in ("running", "degraded"):
                    return
            time.sleep(0.1)
        self._log.seek(0)
        raise RuntimeError(self._log.read().decode(errors="replace").strip() or "it did not boot")


def sections(page: Path) -> dict[str, str]:
    """By the title of its section, the first block of commands in it."""
    return dict(re.findall(r"(?ms)^## ([^\n]+)$(?:(?!^## ).)*?^```sh\n(.*?)^```", page.read_text()))


def gpu_options() -> list[str]:
    """systemd-nspawn's, for devices, driver and the right to say who may open which device."""
    listed = subprocess.run(["ldconfig", "-p"], capture_output=True, text=True, check=True).stdout
    places = dict(re.findall(r"(?m)^\s*(\S+) \(.*x86-64.*\) => (.*)$", listed)[::-1])
    options = [
        f"--bind-ro={Path(place).resolve()}:{DRIVER_PLACE}/{name}"
        for name, place in places.items()
        if DRIVER.match(name)
    ]
    nodes = [node for node in Path("/dev").glob("nvidia*") if node.is_char_device()]
    options += [f"--bind={node}" for node in nodes]
    options += ["--rlimit=RLIMIT_MEMLOCK=infinity"]  # where root may not raise it in there
    options += [f"--bind-ro=/:{HOST}", "--capability=all", "--system-call-filter=bpf"]
    return options


def _children(pid: int) -> list[int]:
    listing = Path(f"/proc/{pid}/task/{pid}/children")
    return [int(child) for child in listing.read_text().split()]


@contextlib.contextmanager
def _alone(cache: Path) -> Iterator[None]:
    """One at a time makes what is kept there."""
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _debootstrap(root: Path) -> None:
    mirror = _do("apt-get", "indextargets", "--format", "$(REPO_URI)", "Origin: Debian").split()
    _do("debootstrap", "--variant=minbase", f"--include={PACKAGES}", SUITE, str(root), *mirror[:1])


def _do(*command: str) -> str:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command[:3])}: {done.stdout[-2000:]}")
    return done.stdout
