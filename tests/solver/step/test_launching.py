"""Host and device beside each other: by hand, and the limits that hold for every pass."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from solver.step.launching import pass_seconds


def seconds(device: list[float], host: list[float], waits: list[bool]) -> float:
    columns = (np.array(values)[:, None] for values in (device, host, waits))
    return float(pass_seconds(*columns)[0])


def test_without_waits_the_slower_of_both() -> None:
    assert seconds([3.0, 1.0], [1.0, 1.0], [False, False]) == 4.0
    assert seconds([3.0, 1.0], [4.0, 2.0], [False, False]) == 6.0


def test_a_wait_by_hand() -> None:
    """Ops of 3 and 2, launches of 1 each; the host knows the first one's result before it launches the second.

    In the steady state the first op of a pass is launched while the second of the pass before runs, so that only the second
    launch keeps the device waiting: 3 + 1 + 2. With a first launch of 4, two of which the device cannot cover: 8.
    """
    assert seconds([3.0, 2.0], [1.0, 1.0], [False, True]) == 6.0
    assert seconds([3.0, 2.0], [4.0, 1.0], [False, True]) == 8.0


def test_every_launch_after_a_wait_of_its_own_adds_up() -> None:
    assert seconds([3.0, 2.0, 1.0], [0.5, 0.5, 0.5], [True, True, True]) == 7.5


@given(st.lists(st.tuples(st.floats(0, 5), st.floats(0, 5), st.booleans()), min_size=1, max_size=12))
def test_between_the_slower_of_both_and_their_sum(ops: list[tuple[float, float, bool]]) -> None:
    device, host, waits = (list(column) for column in zip(*ops, strict=True))
    found = seconds(device, host, waits)
    assert max(sum(device), sum(host)) - 1e-9 <= found <= sum(device) + sum(host) + 1e-9
    assert seconds(device, host, [False] * len(ops)) - 1e-9 <= found
