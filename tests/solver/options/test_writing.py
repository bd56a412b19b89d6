"""What is said of the files that a layout is written to."""

from __future__ import annotations

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
