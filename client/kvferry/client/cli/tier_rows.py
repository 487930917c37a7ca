"""The rows of `kvferry status` and `kvferry top` that show tiers below the host pool."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.text import Text

from kvferry.client.cli.units import numbers, printable, rows, short_duration, size
from kvferry.proto.status import SiblingStatus, TierStatus

# How each state is shown, and its style.
STATES = {
    "on": ("on", "green"),
    "starting": ("starting", "yellow"),
    "probing": ("trying again", "yellow"),
    "off": ("off", "bold red"),
}


def tier_lines(tiers: Sequence[TierStatus], width: int) -> Iterator[Text]:
    """Rows of `kvferry status`: the usage and the numbers of each tier."""
    for tier in tiers:
        head = _state(tier)
        if tier.read_only:
            head.append(Text(f"read-only: {printable(tier.read_only)}", "red"))
        yield from rows(printable(tier.name), head, width)
        parts: list[Text | str] = [f"{_hits(tier)} hits"] if tier.hits + tier.misses else []
        mean = f" (mean {short_duration(tier.promotion_seconds)})" if tier.promotion_seconds else ""
        parts.append(f"read {size(tier.read_bytes)} in {tier.promoted:,} keys{mean}")
        parts.append(f"written {size(tier.written_bytes)} in {tier.written:,}")
        yield from rows("", [*parts, *numbers(tier)], width, "dim")
        if tier.failure:
            yield from rows("", [printable(tier.failure)], width, "red")


def tier_row(tier: TierStatus) -> Text:
    """For `top`: one line."""
    name = f"{printable(tier.name)[:8]:<9}", "dim"
    text = Text.assemble(name, Text(" · ").join(_state(tier)))
    if tier.hits + tier.misses:
        text.append(f" · hits {_hits(tier)}")
    if tier.read_only:
        text.append(" · read-only", "red")
    for number in numbers(tier, top=True):
        text.append(" · ").append(number)
    return text


def sibling_lines(siblings: Sequence[SiblingStatus], width: int) -> Iterator[Text]:
    """Rows of `kvferry status`: each sibling, and why its blocks are not used."""
    for sibling in siblings:
        state = Text(printable(sibling.state), "green" if sibling.is_on else "yellow")
        yield from rows("sibling", [printable(sibling.directory), state], width)
        mapped = f"{size(sibling.mapped_bytes)} mapped" if sibling.mapped_bytes else "not mapped"
        loaded = f"loaded {size(sibling.loaded_bytes)} in {sibling.loaded:,} blocks"
        yield from rows("", [f"{sibling.keys:,} keys", mapped, loaded], width, "dim")


def sibling_row(siblings: Sequence[SiblingStatus]) -> Text:
    """For `top`: one line for all siblings."""
    used = sum(sibling.is_on for sibling in siblings)
    loaded = size(sum(sibling.loaded_bytes for sibling in siblings))
    style = "green" if used == len(siblings) else "yellow"
    parts = Text(f"{used} of {len(siblings)} on", style), f"loaded {loaded}"
    return Text.assemble(("siblings ", "dim"), parts[0], " · ", parts[1])


def _state(tier: TierStatus) -> list[Text]:
    """Whether the tier is used, and its usage. A client of a store that others use counts none."""
    parts = [Text(*STATES.get(tier.state, (tier.state, "")))]
    if tier.capacity_bytes or tier.used_bytes or tier.keys:
        bound = f"of {size(tier.capacity_bytes)}" if tier.capacity_bytes else "used"
        parts.append(Text(f"{size(tier.used_bytes)} {bound}"))
    return parts


def _hits(tier: TierStatus) -> str:
    return f"{tier.hits / (tier.hits + tier.misses):.0%}"
