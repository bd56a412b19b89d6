"""The global batch that a search takes: whole sequences, and rounded so that the GPUs divide it."""

from __future__ import annotations

import pytest

from profiler.errors import InputError
from solver.options.batch import odd_factor, rounded_batch, uneven_worlds

BATCH, SEQ = 4_194_304, 4096  # 1,024 sequences


@pytest.mark.parametrize(
    ("gpus", "sequences"),
    [
        (128, 1024),
        (2048, 1024),
        (96, 1056),  # 11 x 96 is nearer than 10 x 96
        (600, 900),  # half of them, since 1,200 are more than an eighth too many
        (1920, 960),  # half of the GPUs
        (2000, 1000),
        (8000, 1000),  # an eighth
        (1031, 1031),
        (1237, 1024),  # an odd number of GPUs far beyond the batch
    ],
)
def test_rounded_to_what_the_gpus_divide(gpus: int, sequences: int) -> None:
    found, said = rounded_batch(BATCH, SEQ, True, gpus)
    assert found == sequences and bool(said) == (sequences != 1024)


def test_a_stated_batch_is_whole_sequences() -> None:
    assert rounded_batch(BATCH, SEQ, False, 600) == (1024, "")
    with pytest.raises(InputError, match="is not a whole number of sequences of 4096 tokens; try 4194304, or --round_batch"):
        rounded_batch(BATCH + 1, SEQ, False, 600)


def test_what_no_data_parallel_ranks_can_divide_is_said() -> None:
    assert [odd_factor(gpus) for gpus in (1, 96, 128, 600, 1000)] == [1, 3, 1, 75, 125]
    said = uneven_worlds(lambda _: 1024, [64, 96, 1000], False)
    assert said.startswith("on 96, 1,000 GPUs the batch does not divide") and said.endswith("--round_batch rounds the batch")
    assert "--round_batch" not in uneven_worlds(lambda _: 1024, [8248], True), "it was rounded, and is less than 1,031"
    assert uneven_worlds(lambda gpus: gpus, [64, 96, 1000], False) == ""
