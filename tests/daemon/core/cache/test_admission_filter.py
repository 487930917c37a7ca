"""The admission filter counts offers for a bounded number of keys."""

from __future__ import annotations

from kvferry.daemon.core.cache.admission_filter import AdmissionFilter


def admitted(offers: AdmissionFilter, letters: str) -> str:
    """Offer keys. Returns those that are admitted."""
    return b"".join(offers.count_offers([letter.encode() for letter in letters])).decode()


def test_keys_are_admitted_from_the_nth_offer_on() -> None:
    offers = AdmissionFilter(3, 100)
    assert [admitted(offers, letters) for letters in ("ab", "ac", "abc", "bca", "c")] == [
        "",
        "",
        "a",
        "bca",
        "c",
    ]


def test_a_threshold_of_one_stores_no_counts() -> None:
    offers = AdmissionFilter(1, 100)
    assert admitted(offers, "ba") == "ba"
    assert len(offers) == 0


def test_the_least_recently_offered_key_is_dropped() -> None:
    offers = AdmissionFilter(2, 3)
    for letters in ("a", "b", "c", "d"):
        admitted(offers, letters)
    assert len(offers) == 3
    assert admitted(offers, "b") == "b"  # b is the newest key then
    assert admitted(offers, "a") == ""  # it replaces c, the oldest
    assert admitted(offers, "c") == ""  # it replaces d
    assert admitted(offers, "ba") == "ba"


def test_the_head_of_a_too_long_offer_is_counted() -> None:
    offers = AdmissionFilter(2, 3)
    admitted(offers, "abcde")
    assert len(offers) == 3
    assert admitted(offers, "abc") == "abc"


def test_taking_the_index_clears_the_counts() -> None:
    offers = AdmissionFilter(2, 3)
    admitted(offers, "ab")
    assert len(offers.take_index()) == 2
    assert (len(offers), admitted(offers, "ab")) == (0, "")
