"""Labels of resets, on a page of epochs."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

from kvferry.daemon.persistence.epoch_page import EpochPage


def test_a_label_does_not_name_a_later_reset_of_another_host(tmp_path: Path) -> None:
    """This host resets for weights 1, another one for weights 2, and this one for 1 again."""
    with closing(EpochPage(tmp_path)) as page:
        first = page.draw("name", "weights 1")
        assert page.draw("name", "weights 1") == first
        page.raise_to("name", first + (1 << 10))
        assert page.draw("name", "weights 1") > first + (1 << 10)
