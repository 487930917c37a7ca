"""The commented sample configuration has the options, defaults and descriptions of the daemon."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec

from kvferry.daemon.config import Config, description, options

SAMPLE = Path(__file__).parents[2] / "deploy" / "kvferryd.toml"


def test_the_sample_changes_nothing() -> None:
    assert msgspec.convert(msgspec.toml.decode(SAMPLE.read_bytes()), Config) == Config()


def test_the_uncommented_sample_has_every_default() -> None:
    text = re.sub(r"(?m)^# (\w+ = )", r"\1", SAMPLE.read_text())
    assert msgspec.convert(msgspec.toml.decode(text), Config) == Config()


def test_the_comment_above_every_key_is_its_description() -> None:
    descriptions = dict[str, str]()
    section, comment = "", list[str]()
    for line in SAMPLE.read_text().splitlines():
        if key := re.match(r"# (\w+) = ", line):
            descriptions[section + key[1]] = " ".join(comment)
            comment = []
        elif line.startswith("# "):
            comment.append(line[2:])
        else:
            section = f"{line[1:-1]}." if line else section
            comment = []
    assert descriptions == {key: description(hint) for key, hint, _ in options()}
