"""Fixtures: a StubEngine, a device worker with it, and a timeline."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from support.worker_fixture import StubEngine, TimelineFixture, WorkerFixture


@pytest.fixture
def stub() -> StubEngine:
    return StubEngine()


@pytest.fixture
def fixture(stub: StubEngine) -> Iterator[WorkerFixture]:
    fixture = WorkerFixture(stub)
    yield fixture
    fixture.close()


@pytest.fixture
def timeline() -> Iterator[TimelineFixture]:
    timeline = TimelineFixture()
    yield timeline
    os.close(timeline.descriptor)
    timeline.page.close()
