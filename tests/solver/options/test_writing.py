"""What is said of the files that a layout is written to, and what a search around one keeps of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from solver.commands.console import main

SCRIPT = """torchrun --nproc-per-node 8 pretrain_gpt.py --num-layers 4 --hidden-size 1024 --num-attention-heads 16 \\
  --seq-length 1024 --max-position-embeddings 1024 --micro-batch-size 1 --global-batch-size 8 --bf16 --vocab-size 32000 \\
  --tensor-model-parallel-size 2 --swiglu --disable-bias-linear --untie-embeddings-and-output-weights {more}
"""


@pytest.mark.parametrize("more", ["--weight-decay 0.1 --clip-grad 1.0", ""])
def test_settings_that_a_written_file_lacks_are_named(tmp_path: Path, more: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Megatron's own weight decay is 0.01: who launches the file must add what the prediction does not need."""
    script = tmp_path / "mine.sh"
    script.write_text(SCRIPT.format(more=more))
    options = ["--config", str(script), "--search", "micro_batch_size", "--export", str(tmp_path / "out.sh"), "--no-timing"]
    assert main(["search", *options]) == 0
    said = capsys.readouterr().out.replace("\n", " ")
    line = "not carried over from mine.sh, which trains otherwise without them: --clip-grad, --weight-decay"
    assert (line in said) == bool(more) and "--weight-decay" not in (tmp_path / "out.sh").read_text()


def test_the_ranks_that_states_are_sharded_over_follow_the_sizes_that_are_searched(tmp_path: Path) -> None:
    """--use-distributed-optimizer names no number of ranks: with another tp others share a rank's parameters."""
    script, out = tmp_path / "mine.sh", tmp_path / "out.json"
    script.write_text(SCRIPT.format(more="--use-distributed-optimizer"))
    for options, tp in ((["--search", "tp"], 1), (["--fix", "tp=4", "--search", "cp"], 4)):
        assert main(["search", "--config", str(script), *options, "--no-timing", "--json", str(out), "--top", "1000"]) == 0
        found = [one["layout"] for one in json.loads(out.read_text())["best"]]
        assert {one["zero"] for one in found} == {1} and tp in {one["tp"] for one in found}
        assert all(one["zero_shard_size"] <= one["dp"] * one["cp"] for one in found)
