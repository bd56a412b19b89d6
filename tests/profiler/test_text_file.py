"""JSON of a file that a user named."""

from __future__ import annotations

from pathlib import Path

import pytest

from profiler.errors import InputError
from profiler.text_file import json_object


def test_a_key_that_stands_twice_is_refused() -> None:
    assert json_object('{"tp": 2, "model": {"tp": 4}}', Path("layout.json")) == {"tp": 2, "model": {"tp": 4}}
    with pytest.raises(InputError, match="^layout.json: key 'tp' stands twice in one object$"):
        json_object('{"model": {"tp": 2, "tp": 4}}', Path("layout.json"))
