"""Fixture: a namespace with keys that are stored in part."""

from __future__ import annotations

import pytest

from support.namespaces_fixture import NamespacesFixture, stored_in_part


@pytest.fixture
def fixture_with_parts() -> NamespacesFixture:
    return stored_in_part()
