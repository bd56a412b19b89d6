"""A measuring plan of `foretrain explain --measurements`: read as items to measure, and measured first."""

from __future__ import annotations

import csv
import shlex
from pathlib import Path

import pytest

from profiler.errors import InputError
from profiler.measure.wanted import read_wanted
from profiler.profile.item import Item, Limits
from solver.commands.console import main


def write(path: Path, *rows: tuple[str, str]) -> Path:
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([("kernel", "shape"), *rows])
    return path


def test_each_kind_of_row_is_the_item_that_the_harness_times(tmp_path: Path) -> None:
    wanted = read_wanted(
        write(
            tmp_path / "plan.csv",
            ("linear bf16", "m 28672, n 8192, k 1024, batch 1, layout 2, accumulate 1"),
            ("grouped_linear bf16", "groups 16, tokens_per_group 4096, n 1536, k 2048, passes 1"),
            (
                "flash_attn bf16",
                "batch 1, seq_q 1024, seq_kv 512, heads 32, kv_heads 4, head_dim 128, v_head_dim 128, backward 1",
            ),
            ("memory_bound gated_act bf16", "bytes 146800640"),
            ("all_reduce bf16", "bytes 1000, intra 8, inter 2, strided 1"),
            ("linear bf16", "m 28672, n 8192, k 1024, batch 1, layout 2, accumulate 1"),  # once is enough
        )
    )
    assert wanted.left_out == ()
    assert wanted.items == (
        Item.of(
            "linear",
            {
                "m": 28672,
                "n": 8192,
                "k": 1024,
                "batch": 1,
                "layout": "NT",
                "out_dtype": "fp32",
                "accumulate": 1,
                "dtype": "bf16",
            },
        ),
        Item.of(
            "grouped_linear",
            {"groups": 16, "tokens_per_group": 4096, "n": 1536, "k": 2048, "pass": "input_grad", "dtype": "bf16"},
        ),
        Item.of(
            "flash_attn",
            {
                "batch": 1,
                "seq_q": 1024,
                "seq_kv": 512,
                "heads": 32,
                "kv_heads": 4,
                "head_dim": 128,
                "v_head_dim": 128,
                "pass": "backward",
                "dtype": "bf16",
            },
        ),
        Item.of("memory_bound", {"kind": "gated_act", "bytes": 146800640, "dtype": "bf16"}),
        # 16 ranks share the buffer in whole elements of four bytes: 64-byte steps
        Item.of("all_reduce", {"intra": 8, "inter": 2, "bytes": 1024, "dtype": "bf16"}),
    )


@pytest.mark.parametrize(
    ("kernel", "shape", "why"),
    [
        ("linear mxfp8", "m 64, n 64, k 64", "only bf16, fp16, fp32 are measured"),
        ("linear bf16", "m 64, n 64, k 64, batch 8", "batches of matrices are not measured"),
        ("linear bf16", "m 64, n 64, k 64, parts 8", "no shape with parts is measured"),
        ("linear bf16", "m 64, n 64", "k is missing"),
        (
            "flash_attn bf16",
            "batch 1, seq_q 64, seq_kv 128, heads 1, kv_heads 1, head_dim 64, causal 1",
            "more keys than queries",
        ),
        ("flash_attn bf16", "batch 1, seq_q 64, seq_kv 64, heads 1, kv_heads 1, head_dim 192, v_head_dim 128", "differ"),
        ("memory_bound muon bf16", "bytes 4096", "muon is not measured"),
        ("dispatch deepep bf16", "tokens 4096", "dispatch is not measured"),
    ],
)
def test_what_the_harness_does_not_time_is_named(tmp_path: Path, kernel: str, shape: str, why: str) -> None:
    wanted = read_wanted(write(tmp_path / "plan.csv", (kernel, shape)))
    assert wanted.items == ()
    assert len(wanted.left_out) == 1
    assert why in wanted.left_out[0]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("kernel,seconds\nlinear bf16,1\n", "no column 'shape'"),
        ("kernel,shape\n", "0 rows"),
        ("kernel,shape\n,m 1\n", "line 2: kernel is empty"),
        ("kernel,shape\nlinear bf16,m sixty\n", "line 2: shape says 'm sixty'"),
        ("kernel,shape\nlinear bf16,m 1.5\n", "'m 1.5'"),
        ("kernel,shape\nlinear bf16,m -4\n", "'m -4'"),
        ("kernel,shape\nlinear bf16,m inf\n", "'m inf'"),
        ('kernel,shape\n"linear bf16,m 64\n', "not a CSV file"),
    ],
)
def test_a_file_that_is_no_plan_is_refused(tmp_path: Path, text: str, why: str) -> None:
    path = tmp_path / "plan.csv"
    path.write_text(text)
    with pytest.raises(InputError, match=r"plan\.csv") as refused:
        read_wanted(path)
    assert why in str(refused.value)


def test_a_call_is_allowed_by_its_operations_and_its_operands() -> None:
    def gemm(m: int) -> Item:
        return Item.of("linear", {"m": m, "n": 1000, "k": 1000})

    # 2 m 10^6 FLOP at 10^9 FLOP/s in 2 s; four bytes of each element of two operands and the output
    assert [Limits(1, 1, 1, 1, 1, 1e9, 2.0, 1e9).allows(gemm(m)) for m in (1000, 1001)] == [True, False]
    assert [Limits(1, 1, 1, 1, 1, 4.0 * 3e6, 1e9, 1e9).allows(gemm(m)) for m in (1000, 1001)] == [True, False]
    message = Limits(1, 1, 1, 1, 4096, 1e9, 1e9, 1e9)
    assert [message.allows(Item.of("broadcast", {"bytes": size})) for size in (4096, 4097)] == [True, False]


def test_the_plan_of_an_explanation_is_read_whole(tmp_path: Path) -> None:
    plan = tmp_path / "plan.csv"
    command = f"explain --model_size llama3_8b --framework megatron-core --world_size 16 --measurements {plan}"
    assert main(shlex.split(command)) == 0
    with plan.open() as file:
        rows = list(csv.DictReader(file))
    wanted = read_wanted(plan)
    assert len(rows) > 15
    assert len(wanted.items) + len(wanted.left_out) == len(rows)
    # Transformer Engine's backward kernel of norms is not torch's
    assert wanted.left_out
    assert all(reason.endswith("norm_grad is not measured") for reason in wanted.left_out)
