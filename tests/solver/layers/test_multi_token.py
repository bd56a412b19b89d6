"""The projection of a module of multi-token prediction over a tensor group: by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from solver.layers.multi_token import last_program
from solver.layers.program import LINEAR, LINEARS, Op
from solver.spec.cluster import cluster_of
from solver.spec.layer_kinds import PLAIN
from tests.toy import DEVICE, TINY, layer_keys, toy_layout

T, H = 32, 64  #: tokens and hidden size
MODEL = TINY.replace(num_nextn_predict_layers=1)


def program(mode: str, tp: int, **run: Any) -> Any:
    return last_program(
        layer_keys(mode, tp), MODEL, toy_layout(8, T, framework="megatron-core", **run), cluster_of(DEVICE), PLAIN
    )


def sizes(ops: list[Op]) -> list[tuple[float, ...]]:
    return [tuple(float(np.ravel(op.dims[name])[0]) for name in ("m", "n", "k")) for op in ops]


@pytest.mark.parametrize(("mode", "tp"), [("mtp", 1), ("mtp", 2), ("msp", 2)])
def test_the_projection_is_split_by_columns(mode: str, tp: int) -> None:
    # Megatron-Core's eh_proj: 2 h to h, of all tokens, a part of the columns on each rank
    found = program(mode, tp, precision="bf16")
    gemms = [op for op in found.ops if op.name == "nextn.projection" and op.kind == LINEAR]
    width = H / tp
    assert sizes(gemms) == [(T, width, 2 * H), (T, 2 * H, width), (width, 2 * H, T)]
    own = next(weight for weight in found.weights if weight.name == "nextn.projection")
    assert own.group == LINEARS and float(np.ravel(own.elements)[0]) == 2 * H * H / tp


def test_the_module_looks_tokens_up_and_makes_the_gradient_of_the_whole_table() -> None:
    found = {op.label: op for op in program("mtp", 1, precision="bf16").ops}
    assert float(np.ravel(found["nextn.lookup.forward"].dims["bytes"])[0]) == T * H * 2 * 2
    table = float(np.ravel(found["nextn.table.input_grad"].dims["bytes"])[0])
    rows = MODEL.padded_vocab(1)
    assert table == rows * H * (2 + 2 + 2 * 2)  # zeroed; read and added to a buffer of bf16


def test_what_the_projection_exchanges() -> None:
    def sent(mode: str, tp: int) -> dict[str, float]:
        ops = [op for op in program(mode, tp, precision="bf16").ops if op.name.startswith("nextn.projection.")]
        return {
            f"{op.label.removeprefix('nextn.projection.')} {op.kind}": float(np.ravel(op.dims["bytes"])[0])
            for op in ops
            if np.any(op.count) and op.stream == "tp"
        }

    whole = T * H * 2
    assert sent("mtp", 1) == {}
    assert sent("mtp", 2) == {"all_reduce.input_grad all_reduce": 2 * whole, "output.forward all_gather": whole}
    assert sent("msp", 2) == {
        "all_gather.forward all_gather": 2 * whole,
        "reduce_scatter.input_grad reduce_scatter": 2 * whole,
        "regather.input_grad all_gather": 2 * whole,
        "output.forward all_gather": whole,
        "output.input_grad all_gather": whole,
    }
