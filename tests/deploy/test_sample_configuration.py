"""The commented sample configuration says what the daemon does."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec

from kvferry.daemon.config import Config, description, options

SAMPLE = Path(__file__).parents[2] / "deploy" / "kvferryd.toml"


def test_the_sample_changes_nothing() -> None:
    assert msgspec.convert(msgspec.toml.decode(SAMPLE.read_bytes()), Config) == Config()


def test_uncommented_it_is_every_default() -> None:
    text = re.sub(r"(?m)^# (\w+ = )", r"\1", SAMPLE.read_text())
    assert msgspec.convert(msgspec.toml.decode(text), Config) == Config()


def test_every_key_is_there_with_its_description() -> None:
    text = SAMPLE.read_text()
    prose = " ".join(re.sub(r"(?m)^# ", "", text).split())
    for key, hint, _ in options():
        assert re.search(rf"(?m)^# {key.split('.')[-1]} = ", text), key
        assert " ".join(description(hint).split()) in prose, key
