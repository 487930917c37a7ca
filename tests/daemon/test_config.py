"""The configuration: file and flags, their precedence, and refused values."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvferry.daemon.config import Config, description, options
from kvferry.daemon.config_reader import flag_of, read
from kvferry.daemon.engine.cuda.cuda_engine import MIN_STAGING
from kvferry.proto.errors import Code, Refused
from kvferry.proto.sizes import parse_bytes
from kvferry.proto.version import kvferry_version


def read_refused(*arguments: str) -> Refused:
    with pytest.raises(Refused) as caught:
        read(arguments)
    assert caught.value.code == Code.BAD_CONFIG
    return caught.value


@pytest.fixture
def write(tmp_path: Path) -> Any:
    def write_file(text: str | bytes) -> str:
        path = tmp_path / "kvferryd.toml"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return f"--config={path}"

    return write_file


# Sources and precedence


def test_without_arguments_the_defaults_apply() -> None:
    assert read([]) == Config()


def test_flags_override_the_file(write: Any) -> None:
    file = write(
        'device = "0"\n[pool]\nsize = "64GiB"\nchunk = "2GiB"\ncheck_memory = false\n'
        '[limits]\nmax_stores = 7\n[access]\ngroup = "kv"\n'
        '[stop]\ndrain_seconds = 1\n[log]\nlevel = "debug"\n'
    )
    flags = ["--pool-size=1GiB", "--limits-max-stores=9", "--stop-drain-seconds=0.5"]
    for order in ([file, *flags, "--log-format=json"], ["--log-format=json", *flags, file]):
        config = read(order)
        assert (config.device, config.pool.size, config.pool.chunk) == ("0", "1GiB", "2GiB")
        assert (config.pool.check_memory, config.pool.keep) == (False, Config().pool.keep)
        assert (config.limits.max_stores, config.access.group) == (9, "kv")
        assert config.stop.drain_seconds == 0.5
        assert (config.log.level, config.log.format) == ("debug", "json")
    assert read([file]).stop.drain_seconds == 1.0
    assert not read(["--pool-check-memory=false"]).pool.check_memory


@pytest.mark.parametrize(
    ("own", "environment", "expected"),
    [
        ("/run/own", {"RUNTIME_DIRECTORY": "/run/a", "XDG_RUNTIME_DIR": "/run/b"}, "/run/own"),
        ("", {"RUNTIME_DIRECTORY": "/run/a:/run/c", "XDG_RUNTIME_DIR": "/run/b"}, "/run/a"),
        ("", {"XDG_RUNTIME_DIR": "/run/b"}, "/run/b/kvferry"),
        ("", {}, r"/tmp/kvferry-\d+"),
    ],
)
def test_the_runtime_directory_follows_from_the_environment(
    own: str, environment: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RUNTIME_DIRECTORY", "XDG_RUNTIME_DIR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert re.fullmatch(expected, str(Config(runtime_dir=own).directory))


def test_a_size_may_be_a_number(write: Any) -> None:
    file = write("[pool]\nsize = 6.8719476736e+10\n[tiers.disk]\npath = '/a'\nsize = 17179869184\n")
    config = read([file])
    assert parse_bytes(config.pool.size) == 64 << 30
    assert parse_bytes(config.tiers.disk.size) == 16 << 30


# Refused values


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("colour = 1", "colour"),
        ("[tool]\nsize = '1GiB'", "did you mean pool?"),
        ("[pool]\nsizes = '1GiB'", "did you mean pool.size?"),
        ("pool_size = '1GiB'", "did you mean pool.size?"),
        ("[tiers.dsk]\npath = '/a'", "did you mean tiers.disk?"),
        ("[tiers.disk]\npaths = '/a'", "did you mean tiers.disk.path?"),
        ("[pool]\nsize = -1048576", "pool.size"),
        ("[pool]\nsize = true", "pool.size"),
        ("[pool]\nsize = 'much'", "much"),
        ("[pool]\nchunk = '-1'", "-1"),
        ("[pool]\ncheck_memory = 'perhaps'", "check_memory"),
        ("[pool]\nkeep = 'no'", "true or false"),
        ("[limits]\nmax_stores = 0", "max_stores"),
        ("[limits]\nmax_stores = 1.5", "max_stores"),
        ("[limits]\nmax_stores = [1]", "max_stores"),
        ("[access]\ngroup = 7", "access.group"),
        ("[stop]\ndrain_seconds = -1", "drain_seconds"),
        ("[log]\nlevel = 'loud'", '"debug", "info", "warning" or "error"'),
        ("[reference]\nfail_every = -1", "fail_every"),
        ("[reference]\nstall = inf", "stall"),
        ("pool = '1GiB'", "pool"),
        ('[metrics]\nlisten = "a\\u0000b"', "metrics.listen = 'a\\x00b' contains a NUL"),
        ("[pool\n", "configuration"),
        ("device = 1\ndevice = 2", "configuration"),
        (b"device = '\xff'", "configuration"),
        ("[pool]\nsize = 64GiB", 'write text and sizes in quotes: size = "64GiB"'),
        ("[pool]\n\nsize = 64 GiB  # half", 'write text and sizes in quotes: size = "64 GiB"'),
        ("device = cpu", 'write text and sizes in quotes: device = "cpu"'),
        ("[pool]\nkeep = yes", "set keep to true or false"),
        ("[pool]\nsize = '1GiB", "correct it"),
        ("[pool]\nsize =", "correct it"),
    ],
)
def test_an_invalid_file_is_refused(write: Any, text: str | bytes, expected: str) -> None:
    message = str(read_refused(write(text)))
    assert expected in message
    assert ("did you mean" in message) == ("did you mean" in expected)


def fifo(directory: Path) -> Path:
    """A FIFO without a writer."""
    os.mkfifo(directory / "fifo")
    return directory / "fifo"


def large_file(directory: Path) -> Path:
    (directory / "large_file").write_text("# more\n" * 200_000)
    return directory / "large_file"


def nested_file(directory: Path) -> Path:
    (directory / "nested_file").write_text("device = " + "[" * 100_000)
    return directory / "nested_file"


def socket_file(directory: Path) -> Path:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(directory / "sock"))
    return directory / "sock"


BAD_FILES: dict[str, tuple[Callable[[Path], Path], str]] = {
    "a directory": (lambda directory: directory, "Is a directory"),
    "a FIFO": (fifo, "not a regular file"),
    "a socket": (socket_file, "No such device or address"),
    "a device": (lambda _: Path("/dev/zero"), "not a regular file"),
    "too large": (large_file, "more than 1048576 bytes"),
    "nested": (nested_file, "nested too deeply"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_a_configuration_that_is_no_readable_file_is_refused(short_path: Path, name: str) -> None:
    make_file, reason = BAD_FILES[name]
    path = make_file(short_path)
    message = str(read_refused(f"--config={path}"))
    assert reason in message
    assert str(path) in message


def test_a_path_that_is_not_utf8_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Arguments and the environment have bytes; ZeroMQ and the workers' arguments have UTF-8."""
    path = os.fsdecode(b"/run/\xff")
    for flag, key in (("--runtime-dir", "runtime_dir"), ("--tiers-disk-path", "tiers.disk.path")):
        message = str(read_refused(f"{flag}={path}", "--tiers-disk-size=1GiB"))
        assert message.startswith(f"[bad_config] {key} = '/run/\\udcff' is not UTF-8")
    monkeypatch.setenv("RUNTIME_DIRECTORY", path)
    assert "runtime_dir = '/run/\\udcff' is not UTF-8" in str(read_refused())


NO_DEVICE = 'is not a device; set "cpu", or the index ("0") or UUID ("GPU-...") of a GPU'


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--pool-size=much", "pool.size"),
        ("--pool-size=-1", "pool.size"),
        ("--pool-size=0", "pool.size = '0' is zero"),
        (f"--pool-size={'9' * 400}", "pool.size"),
        ("--pool-size=200TiB", "is more than 128 TiB"),
        ("--pool-chunk=", "pool.chunk"),
        ("--pool-chunk=0.1", "pool.chunk"),
        ("--pool-check-memory=perhaps", "check_memory"),
        ("--pool-keep=on", "true or false"),
        ("--limits-max-stores=0", "max_stores"),
        ("--limits-max-stores=many", "max_stores"),
        (f"--limits-max-stores={10**20}", "max_stores"),
        ("--stop-drain-seconds=-1", "drain_seconds"),
        ("--log-level=loud", '"debug", "info", "warning" or "error"'),
        ("--copy-mode=foo", '"auto", "direct" or "staged"'),
        ("--health-deadline-seconds=inf", "deadline_seconds"),
        ("--health-every-seconds=0", "every_seconds"),
        *((f"--device={name}", f"{name!r} {NO_DEVICE}") for name in ("gpu7", "cuda:0", "", "-1")),
        ("--tiers-disk-admit-after=0", "admit_after"),
        ("--tiers-disk-rate=fast", "tiers.disk.rate"),
        ("--tiers-disk-path=/a", "--tiers-disk-size"),
        ("--tiers-disk-size=1GiB", "--tiers-disk-path "),
        ("--tiers-disk-path=/a --tiers-disk-size=1MiB", "at least 16MiB"),
        ("--tiers-disk-path=/a --tiers-disk-size=big", "tiers.disk.size = 'big'"),
        ("--tiers-disk-key-file=/k", "is set without tiers.disk.path"),
        ("--tiers-mooncake-key-file=/k", "is set without tiers.mooncake.master"),
        ("--tiers-custom-module=a-b", "my_package.my_tier"),
        ("--tiers-custom-module=a --tiers-custom-options=n", "TOML"),
        ("--tiers-custom-options={n=1}", "name the module"),
        ("--tiers-mooncake-master=host", "10.0.0.1:50051"),
        ("--tiers-mooncake-master=:50051", "10.0.0.1:50051"),
        ("--tiers-mooncake-master=host:0", "10.0.0.1:50051"),
        ("--tiers-mooncake-protocol=ib", "tcp"),
        ("--tiers-mooncake-rate=fast", "tiers.mooncake.rate"),
        ("--config=/missing.toml", "/missing.toml"),
    ],
)
def test_an_invalid_flag_is_refused(flags: str, expected: str) -> None:
    assert expected in str(read_refused(*flags.split()))


@pytest.mark.parametrize("device", ["cpu", "CPU", "0", "12", "GPU-0f1e", "MIG-0f1e"])
def test_devices_are_cpu_indices_and_uuids(device: str) -> None:
    assert read([f"--device={device}"]).device == device


def test_a_flag_for_a_key_that_is_not_a_table_is_refused(write: Any) -> None:
    assert "is not a table [pool]" in str(read_refused(write("pool = 3"), "--pool-size=1GiB"))
    message = str(read_refused(write("[tiers]\ndisk = 3"), "--tiers-disk-path=/tmp/x"))
    assert "disk = 3 is not a table [disk] with path" in message


def test_a_disk_tier_is_read_from_file_and_flags(write: Any) -> None:
    file = write('[tiers.disk]\npath = "/a"\nsize = "1GiB"\nwrite = "off"\nadmit_after = 2\n')
    disk = read([file, "--tiers-disk-path=/b", "--tiers-disk-rate=100MiB"]).tiers.disk
    assert (disk.path, disk.size, disk.write) == ("/b", "1GiB", "off")
    assert (disk.admit_after, disk.rate) == (2, "100MiB")


def test_other_tiers_are_read_from_file_and_flags(write: Any) -> None:
    file = write(
        '[tiers.custom]\nmodule = "a.b"\noptions = { n = 1, words = ["x"] }\n'
        '[tiers.mooncake]\nmaster = "store:50051"\nwrite = "write_through"\n'
    )
    tiers = read(
        [file, "--tiers-mooncake-master=[::1]:50052", "--tiers-mooncake-protocol=rdma"]
    ).tiers
    assert (tiers.custom.module, tiers.custom.options) == ("a.b", {"n": 1, "words": ["x"]})
    assert (tiers.mooncake.master, tiers.mooncake.protocol) == ("[::1]:50052", "rdma")
    assert (tiers.mooncake.write, tiers.mooncake.admit_after) == ("write_through", 2)
    assert read([file, "--tiers-custom-options={ n = 2 }"]).tiers.custom.options == {"n": 2}


def test_a_wrong_choice_is_described_with_the_valid_ones() -> None:
    hints = {key: description(hint) for key, hint, _ in options()}
    assert '"auto", "direct" or "staged"' in hints["copy.mode"]
    assert '"text" or "json"' in hints["log.format"]


def test_the_help_states_the_minimum_of_staging() -> None:
    (message,) = (description(hint) for key, hint, _ in options() if key == "copy.staging")
    assert f"{MIN_STAGING >> 20}MiB" in message


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ["--pool-sizes=1"],
            "unknown argument --pool-sizes (did you mean --pool-size?); see kvferryd --help",
        ),
        (
            ["--tiers-dsk-path", "/a"],
            "unknown argument --tiers-dsk-path (did you mean --tiers-disk-path?); "
            "see kvferryd --help",
        ),
        (
            ["--pool-siz=1GiB"],
            "unknown argument --pool-siz (did you mean --pool-size?); see kvferryd --help",
        ),
        (
            ["--tiers-disk", "/a"],
            "unknown argument --tiers-disk (did you mean --tiers-disk-path?); see kvferryd --help",
        ),
        (["--colour"], "unknown argument --colour; see kvferryd --help"),
        (["/run"], "unknown argument /run; see kvferryd --help"),
        (["--pool-size"], "argument --pool-size: expected one argument"),
    ],
)
def test_wrong_flags_end_with_one_line_of_usage_and_the_error(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        read(flags)
    assert caught.value.code == 2
    usage, error = capsys.readouterr().err.splitlines()
    assert usage.startswith("usage: kvferryd [--config FILE]")
    assert error == f"kvferryd: error: {message}"


# Every option


@pytest.mark.parametrize(("key", "hint", "default"), list(options()))
def test_every_option_is_described_and_has_its_default(key: str, hint: Any, default: Any) -> None:
    assert len(description(hint)) > 10
    value: Any = Config()
    for part in key.split("."):
        value = getattr(value, part)
    assert value == default


def test_the_flag_of_a_key_is_the_key_with_hyphens() -> None:
    for key, _, _ in options():
        assert flag_of(key) == "--" + re.sub(r"[._]", "-", key)
    assert read(["--tiers-disk-path=/a", "--tiers-disk-size=1GiB"]).tiers.disk.path == "/a"


def test_the_help_lists_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        read(["--help"])
    shown = capsys.readouterr().out
    assert "--pool-keep true|false" in shown
    flags = {flag_of(key) for key, _, _ in options()}
    assert flags | {"--config", "--help", "--version"} == set(
        re.findall(r"--[a-z-]+(?= [A-Z]| true\|false|\s+show|\s+print)", shown)
    )


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        read(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"kvferryd {kvferry_version()}\n"
