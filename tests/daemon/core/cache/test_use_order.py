"""The order of use, compared with a list. The segments are so small that they are merged."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvferry.daemon.core.cache.use_order import UseOrder

SIZE, SEGMENT = 12, 4
NUMBERS = st.lists(st.integers(0, SIZE - 1), unique=True, max_size=SIZE)


@given(st.lists(st.tuples(st.booleans(), NUMBERS), max_size=80))
def test_the_order_is_that_of_a_list(steps: list[tuple[bool, list[int]]]) -> None:
    order, model = UseOrder(SIZE, SEGMENT), list[int]()
    for used, numbers in steps:
        present = [number for number in numbers if number in model]
        if used:
            order.append(np.array(numbers, np.int64))
        else:
            order.remove(np.array(present, np.int64))
        model = [number for number in model if number not in numbers] + (numbers if used else [])
        assert order.numbers().tolist() == model
        assert len(order) == len(model)
        order.check_integrity()


def test_the_log_stays_below_three_times_the_size() -> None:
    size, segment = 4096, 64
    order, rng = UseOrder(size, segment), np.random.default_rng(0)
    order.append(np.arange(size))
    longest = 0
    for _ in range(2000):
        order.append(np.unique(rng.integers(0, size // 8, 100)))
        longest = max(longest, order.log_entries)
    assert longest < 3 * size
    assert order.numbers()[: size - size // 8].tolist() == list(range(size // 8, size))
