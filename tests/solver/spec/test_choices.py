"""Words and numbers that a field may have."""

from __future__ import annotations

import pytest

from profiler.errors import InputError
from solver.spec.strategy import Strategy


@pytest.mark.parametrize("field", ["zero", "flash_generation"])
def test_true_is_no_number(field: str) -> None:
    with pytest.raises(InputError, match=f"{field} is True; it must be one of"):
        Strategy(world_size=1, seq_len=1024, dp=1, **{field: True})
