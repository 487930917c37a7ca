"""Declarations of the numbers in the status: how each is exported and printed.

A number is a field of a struct in status.py whose type is annotated with `counter` or `gauge`:

    evictions: Annotated[int, counter("Keys evicted from the tier.", text="{} evicted")] = 0

JSON has all fields. The metrics (daemon/observability/metrics.py), `kvferry status` and
`kvferry top` (client/cli) are made from these declarations. A number that follows from other fields
is a property whose return type is annotated: it is exported, but not sent and not printed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from math import nan
from typing import Any, Literal, get_type_hints


@dataclass(frozen=True, slots=True)
class Number:
    """A number of the status, as its readers get it. See `declare`."""

    kind: Literal["counter", "gauge"]
    help: str
    metric: str
    labels: tuple[tuple[str, str], ...]
    keys: tuple[str, ...]
    from_start: tuple[str, ...]
    if_none: float
    text: str
    top: bool
    failure: bool

    @property
    def unit(self) -> str:
        """The end of the metric's name: "bytes", "seconds", or something that is no unit."""
        return self.metric.rpartition("_")[2]


def declare(
    kind: Literal["counter", "gauge"],
    sentence: str,
    /,
    metric: str = "{field}",
    *,
    keys: tuple[str, ...] = (),
    from_start: tuple[str, ...] = (),
    if_none: float = nan,
    text: str = "{} {field}",
    top: bool = False,
    failure: bool = False,
    **labels: str,
) -> Number:
    """The declaration of a number.

    sentence: the help of the metric. metric: its name, without the prefix "kvferry_" and that of
        the struct. It ends with its unit, if it has one.
    labels: tell the fields of a struct that have the same metric apart.
    keys: the labels of the keys, if the number is a dict. from_start: keys that are exported as 0
        if they are missing. if_none: exported for None.
    text: printed if the number is not zero. Empty: the commands print it in a form of its own.
    top: whether `kvferry top` prints it, too. failure: printed as a failure, also by `kvferry top`.
    """
    top, every = top or failure, tuple(labels.items())
    return Number(kind, sentence, metric, every, keys, from_start, if_none, text, top, failure)


counter, gauge = partial(declare, "counter"), partial(declare, "gauge")


@dataclass(frozen=True, slots=True)
class MetricLabel:
    """Declares that a field or property is a label of all metrics of its struct."""

    name: str


@cache
def declared_numbers(struct: type) -> dict[str, Number]:
    """The numbers of a struct by field, with full names and all defaults."""
    prefix = getattr(struct, "metrics_prefix", "")
    numbers = dict[str, Number]()
    for field, number in _annotations(struct):
        if isinstance(number, Number):
            metric = f"kvferry_{prefix}{number.metric.replace('{field}', field)}"
            text = number.text.replace("{field}", field.replace("_", " "))
            if isinstance(getattr(struct, field), property):
                text = ""
            numbers[field] = replace(number, metric=metric, text=text)
    return numbers


@cache
def declared_labels(struct: type) -> dict[str, str]:
    """The labels of a struct's metrics, and the field with the value of each."""
    return {
        each.name: field for field, each in _annotations(struct) if isinstance(each, MetricLabel)
    }


def _annotations(struct: type) -> Iterator[tuple[str, Any]]:
    """The annotations of all fields and properties, by name."""
    hints = get_type_hints(struct, include_extras=True)
    for name in dir(struct):
        if isinstance(found := getattr(struct, name), property):
            hints[name] = get_type_hints(found.fget, include_extras=True).get("return")
    for name, hint in hints.items():
        for annotation in getattr(hint, "__metadata__", ()):
            yield name, annotation
