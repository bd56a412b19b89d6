"""Norms that Megatron does not recompute, as its arguments state them."""

from __future__ import annotations

from typing import Any

import pytest

from solver.formats.megatron.given import without_ignored

LISTS = ["core_attn layernorm", "[core_attn layernorm]", ["core_attn", "layernorm"]]


@pytest.mark.parametrize("modules", LISTS)
@pytest.mark.parametrize(("more", "kept"), [({}, False), ({"num-experts": None}, False), ({"num-experts": 8}, True)])
def test_norms_that_are_parts_of_linears_are_not_recomputed(modules: Any, more: dict[str, Any], kept: bool) -> None:
    said: list[str] = []
    flags = without_ignored({"recompute-granularity": "selective", "recompute-modules": modules, **more}, said)
    assert ("layernorm" in str(flags["recompute-modules"])) == kept
    assert "core_attn" in str(flags["recompute-modules"])
    assert any("layernorm" in line for line in said) != kept
