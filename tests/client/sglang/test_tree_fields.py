"""An installed SGLang is supported, and support/sglang_fields.py has its fields."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from kvferry.client.doctor import CheckContext, Verdict, environment
from kvferry.client.sglang.fingerprint import ENVIRONMENT, FIELDS, MODELS, PATHS, UNVERSIONED_FIELDS
from kvferry.client.sglang.supported import EXCLUDED, SINGLE
from support.sglang_fields import BY_NAME, OUTSIDE

pytestmark = pytest.mark.filterwarnings("ignore")  # SGLang's own


def inside() -> list[str]:
    return [*[name for fields in FIELDS.values() for name in fields], *PATHS, *UNVERSIONED_FIELDS]


def outside() -> list[str]:
    return [name for names in OUTSIDE.values() for name in names.split()]


def test_each_field_is_listed_once() -> None:
    listed = [*inside(), *BY_NAME, *outside()]
    assert sorted(listed) == sorted(set(listed))
    assert {fields[0] for fields in MODELS.values()} <= BY_NAME
    assert {*EXCLUDED, *SINGLE} <= {*listed}


def test_the_table_has_all_fields_of_sglangs_options() -> None:
    """Does a new field change the bytes of KV? Read what SGLang does with it."""
    module = pytest.importorskip("sglang.srt.server_args")
    real = {*module.ServerArgs.__struct_fields__}
    listed = {*inside(), *BY_NAME, *outside()}
    assert (real - listed, listed - real) == (set(), set())


def test_sglang_reads_each_variable_of_the_fingerprint() -> None:
    module = pytest.importorskip("sglang.srt.environ")
    assert [name for name in ENVIRONMENT if not hasattr(module.envs, name)] == []


@pytest.mark.skipif(find_spec("sglang") is None, reason="SGLang is not installed")
def test_an_installed_sglang_is_supported() -> None:
    (finding,) = environment.sglang(CheckContext(None, 1.0))
    assert finding.verdict is Verdict.OK, finding
