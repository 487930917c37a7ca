"""How host blocks are composed."""

from __future__ import annotations

from kvferry.daemon.core.composition import Composition

COMPOSITION = Composition(((4096, 512), (8192,)), 3)


def test_the_digest_names_stores_that_are_on_disk_already() -> None:
    assert COMPOSITION.digest == "cb1046baaccbb9e5"


def test_other_pages_or_another_factor_have_another_digest() -> None:
    others = COMPOSITION, COMPOSITION._replace(factor=2), Composition(((4096, 512, 8192),), 3)
    assert len({each.digest for each in others}) == 3


def test_a_description_is_short() -> None:
    assert COMPOSITION.describe() == "3 GPU blocks of pages [4096, 512], [8192]"
    assert len(Composition(((64,) * 1000,) * 1000, 1).describe()) < 200
