"""Values and names as the command line gives them."""

from __future__ import annotations

from typing import Any

import pytest

from profiler.errors import InputError
from solver.options.axes import parse_constant_axes, parse_value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("8", 8),
        ("-1", -1),
        ("0.5", 0.5),
        (".5", 0.5),
        ("5e-1", 0.5),
        ("1.", 1.0),
        ("true", True),
        ("ring", "ring"),
        ("--5", "--5"),
        ("1e9999", "1e9999"),
        ("٣", "٣"),
        ("9" * 20, "9" * 20),
        ("nan", "nan"),
        ("", ""),
    ],
)
def test_a_value_is_a_number_or_stays_a_text(text: str, value: Any) -> None:
    assert parse_value(text) == value and type(parse_value(text)) is type(value)


def test_a_varied_setting_is_named_once() -> None:
    assert parse_constant_axes("recompute_modules=mlp/moe_act,cp_comm") == {
        "recompute_modules": ("mlp", "moe_act"),
        "cp_comm": (),
    }
    with pytest.raises(InputError, match="recompute_modules is given twice; give its values once, separated by /"):
        parse_constant_axes("recompute_modules=mlp,recompute_modules=moe_act")
