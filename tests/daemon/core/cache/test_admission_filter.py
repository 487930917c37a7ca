"""Offers are counted, for a bounded number of keys."""

from __future__ import annotations

import pytest

from kvferry.daemon.core.cache.admission_filter import AdmissionFilter


def wanted(offers: AdmissionFilter, letters: str) -> str:
    return b"".join(offers.count_offers([letter.encode() for letter in letters])).decode()


def test_keys_are_wanted_from_the_nth_offer_on() -> None:
    offers = AdmissionFilter(3, 100)
    assert [wanted(offers, letters) for letters in ("ab", "ac", "abc", "bca", "c")] == [
        "",
        "",
        "a",
        "bca",
        "c",
    ]


def test_without_a_threshold_nothing_is_remembered() -> None:
    offers = AdmissionFilter(1, 100)
    assert wanted(offers, "ba") == "ba"
    assert len(offers) == 0


def test_who_was_offered_longest_ago_is_forgotten() -> None:
    offers = AdmissionFilter(2, 3)
    for letters in ("a", "b", "c", "d"):
        wanted(offers, letters)
    assert len(offers) == 3
    assert wanted(offers, "b") == "b"  # and is the newest now
    assert wanted(offers, "a") == ""  # c was the oldest
    assert wanted(offers, "c") == ""  # and d then
    assert wanted(offers, "ba") == "ba"


def test_of_an_offer_that_is_too_long_the_head_is_remembered() -> None:
    offers = AdmissionFilter(2, 3)
    wanted(offers, "abcde")
    assert len(offers) == 3
    assert wanted(offers, "abc") == "abc"


def test_all_can_be_forgotten() -> None:
    offers = AdmissionFilter(2, 3)
    wanted(offers, "ab")
    assert len(offers.take_index()) == 2
    assert (len(offers), wanted(offers, "ab")) == (0, "")


@pytest.mark.parametrize("threshold", [0, -1])
def test_a_threshold_is_one_or_more(threshold: int) -> None:
    with pytest.raises(ValueError, match=f"store_threshold is {threshold}"):
        AdmissionFilter(threshold, 3)
