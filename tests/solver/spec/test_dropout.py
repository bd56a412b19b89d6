"""Dropout of runs that do not say: as their framework had it by default, but for models with gated MLPs."""

from __future__ import annotations

import pytest
from toy import TINY

from solver.spec.dropout import applies_dropout
from solver.spec.strategy import Strategy


@pytest.mark.parametrize(
    ("framework", "attention", "gated", "stated", "applied"),
    [
        ("megatron-deepspeed", "unfused", False, None, True),
        ("megatron-deepspeed", "flash", False, None, False),
        ("megatron-deepspeed", "unfused", True, None, False),
        ("megatron-deepspeed", "unfused", True, True, True),
        ("megatron-core", "flash", False, True, True),
        ("internevo", "unfused", False, None, False),
    ],
)
def test_dropout(framework: str, attention: str, gated: bool, stated: bool | None, applied: bool) -> None:
    run = Strategy(world_size=1, seq_len=64, framework=framework, attention=attention, dropout=stated)
    assert applies_dropout(TINY.replace(gated_mlp=gated), run) is applied
