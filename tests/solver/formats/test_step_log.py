"""What was measured of a job, read from logs of trainers and of nccl-tests and from JSON."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest

from profiler.errors import InputError
from profiler.units import GIB
from solver.formats.logs.step_log import Batch, read_observation, step_seconds
from solver.spec.strategy import Strategy

NCCL = """# nThread 1 nGpus 1 minBytes 33554432 maxBytes 67108864 step: 2(factor) warmup iters: 5 iters: 20 validation: 1
# Collective test starting: all_reduce_perf
# Using devices
#  Rank  0 Group  0 Pid  100 on node-a device  0 [0x1b] NVIDIA H100 80GB HBM3
#  Rank  1 Group  0 Pid  101 on node-a device  1 [0x43] NVIDIA H100 80GB HBM3
    33554432       8388608     float     sum      -1    200.0   167.8   167.8      0    201.0   166.9   166.9      0
    67108864      16777216     float     sum      -1    400.0   167.8   167.8      0    401.0   167.4   167.4      0
# Out of bounds values : 0 OK
"""


#: A micro batch of one sequence of 4,096 tokens.
ONE = Strategy(world_size=1, seq_len=4096)
BATCH = Batch(tokens_per_gpu=16384, sequences=64)


def written(folder: Path, text: str, name: str = "all_reduce.log") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("line", "seconds"),
    [
        (" iteration 7/ 100 | elapsed time per iteration (ms): 512.5 | loss 2.1", 0.5125),
        (" iteration 7/ 100 | elapsed time per iteration (s): 105.22 | loss 2.1", 105.22),
        ("... | time_per_iteration_ms: 1.25K | tokens_per_sec: 2.1M", 1.25),
        ("Training epoch 0, iteration 3/99 | train_step_timing in s: 9.81", 9.81),
        ("[titan] step: 10  loss:  7.9  \x1b[34mtps: 5,000  tflops: 289.66\x1b[39m", 16384 / 5000),
        ("INFO tgs (tokens/gpu/second)=4096.0 loss=2.9", 4.0),
        ("steps: 10 loss: 2.3412 iter time (s): 1.755 samples/sec: 18.234", 1.755),
        (
            "[Rank 0] epoch=0/micro_step=80/global_step=10, RunningAvgSamplesPerSec=24.9, CurrSamplesPerSec=25.6, "
            "MemAllocated=9.84GB, MaxMemAllocated=45.51GB",
            2.5,
        ),
    ],
)
def test_lines_of_trainers(line: str, seconds: float) -> None:
    assert step_seconds(line, BATCH)[0] == pytest.approx([seconds])


def test_warm_up_is_left_out_where_enough_steps_follow(tmp_path: Path) -> None:
    def log(count: int) -> str:
        return "\n".join(f"elapsed time per iteration (ms): {1000 + i}" for i in range(count))

    assert step_seconds(log(10), BATCH)[0].tolist() == pytest.approx([1.005, 1.006, 1.007, 1.008, 1.009])
    assert step_seconds(log(9), BATCH)[0].tolist() == pytest.approx([1 + i / 1000 for i in range(1, 9)])  # without the first
    assert step_seconds(log(1), BATCH)[0].tolist() == [1.0]
    assert [read_observation(written(tmp_path, log(count)), ONE, "h100_sxm").warm_up for count in (9, 10)] == [True, False]


def test_steps_of_a_batch_that_grows_are_left_out() -> None:
    def line(number: int, batch: int, milliseconds: int) -> str:
        return f" iteration {number}/ 100 | elapsed time per iteration (ms): {milliseconds} | global batch size: {batch} |\n"

    small, large = "".join(line(i, 4, 900) for i in range(28)), "".join(line(28 + i, 8, 3000) for i in range(12))
    assert set(step_seconds(small + large, Batch(1.0, 8))[0]) == {3.0}


def test_the_last_of_several_jobs_in_a_log_counts(tmp_path: Path) -> None:
    start = "------------------------ arguments ------------------------\n"
    first, second = ("elapsed time per iteration (ms): " + f"{ms}\n" for ms in (1000, 2000))
    text = start + 20 * first + start + 12 * second
    assert set(read_observation(written(tmp_path, text), ONE, "h100_sxm").steps) == {2.0}


def test_a_trainer_state(tmp_path: Path) -> None:
    state = '{"epoch": 1.0, "log_history": [{"loss": 2.0}, {"train_steps_per_second": 0.25}]}'
    assert read_observation(written(tmp_path, state), ONE, "h100_sxm").steps.tolist() == [4.0]
    with pytest.raises(InputError, match="no entry of log_history has train_steps_per_second"):
        read_observation(written(tmp_path, '{"log_history": [{"loss": 2.0}]}'), ONE, "h100_sxm")


def test_a_job_that_ended_out_of_memory_is_named_so(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="it ended out of memory before it printed a step"):
        read_observation(written(tmp_path, "torch.OutOfMemoryError: CUDA out of memory."), ONE, "h100_sxm")


def test_json(tmp_path: Path) -> None:
    text = '{"step_s": [1, 2.5], "peak_memory_gib": 60, "memory_kind": "device", "all_reduce_busbw_gb_s": 35}'
    found = read_observation(written(tmp_path, text), ONE, "h100_sxm")
    assert found.steps.tolist() == [1.0, 2.5] and found.peak_memory == 60 * GIB and found.memory_kind == "device"
    assert found.busbw == 35e9 and found.busbw_in_node is None


def test_a_rate_stands_for_the_steps_that_it_makes(tmp_path: Path) -> None:
    tokens = ONE.tokens / ONE.world_size
    found = read_observation(written(tmp_path, f'{{"tgs": [{tokens}, {tokens / 2}]}}'), ONE, "h100_sxm")
    assert found.steps.tolist() == [1.0, 2.0]
    with pytest.raises(InputError, match="step_s and tgs both say how long a step takes"):
        read_observation(written(tmp_path, '{"tgs": 1000, "step_s": 1}'), ONE, "h100_sxm")
    with pytest.raises(InputError, match="tgs is 0"):
        read_observation(written(tmp_path, '{"tgs": 0}'), ONE, "h100_sxm")


def test_torchtitan_prints_reserved_memory(tmp_path: Path) -> None:
    lines = "".join(f"step: {i}  memory: {gib}GiB(70%)  tps: 4,096\n" for i, gib in enumerate((55.5, 56.72, 56.7)))
    found = read_observation(written(tmp_path, lines), ONE, "h100_sxm")
    assert (
        found.peak_memory == pytest.approx(56.72 * GIB) and found.memory_kind == "reserved" and found.steps.tolist() == [1] * 2
    )


@pytest.mark.parametrize(
    ("lines", "bytes_"),
    [
        (
            "[Rank 0] (after 10 iterations) memory (MB) | allocated: 9.5 | max allocated: 40960.5 | reserved: 1.0"
            "\n [Rank 8] (after 10 iterations) memory (MB) | allocated: 9.5 | max allocated: 30000.0 | reserved: 1.0\n"
            "elapsed time per iteration (ms): 512.5",
            40960.5 * 2**20,
        ),
        (
            "CurrSamplesPerSec=25.6, MemAllocated=9.84GB, MaxMemAllocated=45.5GB\n"
            "CurrSamplesPerSec=25.6, MemAllocated=9.84GB, MaxMemAllocated=45.25GB",
            45.5 * GIB,
        ),
    ],
)
def test_the_most_memory_of_any_rank(lines: str, bytes_: float, tmp_path: Path) -> None:
    found = read_observation(written(tmp_path, lines), ONE, "h100_sxm")
    assert (found.peak_memory, found.memory_kind) == (pytest.approx(bytes_), "allocated") and len(found.steps) in (1, 2)


def test_a_peak_that_is_no_number_is_none(tmp_path: Path) -> None:
    lines = "max allocated: ... \nelapsed time per iteration (ms): 512.5\n"
    assert read_observation(written(tmp_path, lines), ONE, "h100_sxm").peak_memory is None


def test_tables_of_nccl_tests(tmp_path: Path) -> None:
    (found,) = read_observation(written(tmp_path, NCCL), ONE, "h100_sxm").collectives
    assert (found.op, found.intra, found.inter) == ("all_reduce", 2, 1)
    np.testing.assert_allclose([found.size, found.seconds], [[2.0**25, 2.0**26], [200e-6, 400e-6]])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nothing of use\n", "no step times and no table of nccl-tests"),
        ("{'loss': 2.1, 'learning_rate': 1e-05}\n{'loss': 2.0}\n", "no step times and no table of nccl-tests"),
        ('{"step": 1}', "unknown key 'step'; known keys are step_s"),
        ("{}", "it is empty"),
        ('{"step_s": -1}', "step_s is -1; it must be a positive number"),
        ('{"memory_kind": "vram"}', "memory_kind is 'vram'; it must be one of allocated, reserved, device"),
        ("{step_s: 1}", "is no JSON object"),
        ("elapsed time per iteration (ms): 1e400", "of a step step_s is inf; it must be a"),
        ("elapsed time per iteration (ms): 1e-300", "of a step step_s is 1.0000000000000001e-303"),
    ],
)
def test_what_cannot_be_read(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        read_observation(written(tmp_path, text), ONE, "h100_sxm")


def test_a_progress_bar_is_read_by_its_clock() -> None:
    """Lightning's rate is an average since the epoch began: 60 s of warm-up in the first 5 steps, then 2 s a step."""

    def bar(step: int) -> str:
        elapsed = 12 * min(step, 5) + 2 * max(step - 5, 0)
        rate = f"{step / max(elapsed, 1):.2f}it/s, v_num=0"
        return f"\rEpoch 0: 10%|#| {step}/500 [{elapsed // 60:02d}:{elapsed % 60:02d}<15:00, {rate}]"

    text = "".join(bar(step) for step in range(0, 101, 5))
    assert step_seconds(text, BATCH)[0].tolist() == pytest.approx([2.0] * 9)
    hours = "8/9 [1:00:10<00:07, 7.50s/it]\r9/9 [1:00:40<00:00, 7.50s/it]"
    assert step_seconds(hours, BATCH)[0].tolist() == [30.0]
    assert len(step_seconds(bar(1) + bar(2), BATCH)[0]) == 0


def bar(done: int, total: int, elapsed: float, label: str = "") -> str:
    minutes, seconds = divmod(int(elapsed), 60)
    return f"\r{label} {100 * done // total:3d}%|##  | {done}/{total} [{minutes:02d}:{seconds:02d}<10:00, 1.00s/it]"


def test_other_bars_than_that_of_the_training_are_no_steps() -> None:
    """As transformers prints them: shards at 10 s, steps at 4 s, evaluations of 125 batches at 0.5 s after every 50 steps."""
    loading = "".join(bar(shard, 30, 10.0 * shard, "Loading checkpoint shards:") for shard in range(31))
    text, clock = loading, 0.0
    for first in range(0, 200, 50):
        for step in range(first, first + 51, 10):
            text += bar(step, 200, clock + 4.0 * (step - first))
        text += "".join(bar(batch, 125, 0.5 * batch) for batch in range(0, 126, 25))
        clock += 4.0 * 50
    assert step_seconds(text, BATCH)[0].tolist() == pytest.approx([4.0] * len(step_seconds(text, BATCH)[0]))
    assert len(step_seconds(text, BATCH)[0]) >= 10
    assert len(step_seconds(loading, BATCH)[0]) == 0


def test_long_lines_are_read_in_no_time() -> None:
    """A JSON file of one line holds no bar: a label is no reason to search all that stands before each step."""
    start = time.perf_counter()
    for text in ("x" * 2_000_000, '{"ts": 1/2, "name": "a b"} ' * 80_000, "1/" * 1_000_000, "9" * 2_000_000):
        assert len(step_seconds(text, BATCH)[0]) == 0
    assert time.perf_counter() - start < 10.0


def test_a_line_in_another_encoding_hides_no_step(tmp_path: Path) -> None:
    path = tmp_path / "job.log"
    path.write_bytes(("elapsed time per iteration (ms): 512.5\n" * 20).encode() + "Größe\n".encode("latin-1"))
    assert read_observation(path, ONE, "h100_sxm").steps.tolist() == [0.5125] * 15


def test_lines_of_validation_are_no_steps(tmp_path: Path) -> None:
    lines = [
        f"[titan] step: {i}  loss: 7.9  memory: 45.12GiB(57.05%)  tps: 4,096\n[titan] validate step: {i}  loss: 8.0  "
        f"memory: 47.00GiB(59.40%)  tps: 18,000"
        for i in range(1, 21)
    ]
    found = read_observation(written(tmp_path, "\n".join(lines)), ONE, "h100_sxm")
    assert found.steps.tolist() == [1.0] * 15 and found.peak_memory == 45.12 * GIB


STEPS = "elapsed time per iteration (ms): 512.5\n"


@pytest.mark.parametrize(
    "said",
    [
        "  world_size ........................... 16\n  global_batch_size ............... 64\n",
        "global_batch_size: 64 ",
        "local batch size 2, global batch size 64, gradient accumulation steps 1, sequence length 4096, total",
        "NVIDIA H100 80GB HBM3",
        " iteration 9/ 500000 | global batch size:    32 |\n iteration 10/ 500000 | global batch size:    64 |",
        "Building 1-D device mesh with ['dp_shard'], [16]",
        "Building device mesh with parallelism: pp=1, dp_replicate=2, dp_shard=8, cp=1, tp=1, ep=1, etp=1",
        "per_device_train_batch_size=4, train_batch_size: 4",
        "global_batch_size: 1.02K",
        "my_world_size: 7",
        "NVIDIA driver 550",
        "GPU: NVIDIA Z999",
    ],
)
def test_a_log_of_this_run_is_read(said: str, tmp_path: Path) -> None:
    run = Strategy(world_size=16, dp=16, seq_len=4096, micro_batch_size=2, num_micro_batches=2)
    assert len(read_observation(written(tmp_path, said + STEPS), run, "h100_sxm").steps) == 1
    assert len(read_observation(written(tmp_path, said + STEPS), run, "h100_96gb_500w").steps) == 1


@pytest.mark.parametrize(
    ("said", "sentence"),
    [
        ("global_batch_size: 128", "its global batch size is 128, but that of the layout is 64; give the run's own layout"),
        ("local batch size 4, global batch size 64, sequence length 8192, total", "its sequence length is 8192, .* 4096"),
        ("  micro_batch_size ............ 1\n", "its micro batch size is 1, but that of the layout is 2"),
        ("using world size: 32, data-parallel size: 32", "its world size is 32, but that of the layout is 16"),
        ("[config.py:998:print]   train_batch_size ............. 128\n", "its global batch size is 128, .* 64"),
        ("  train_micro_batch_size_per_gpu  4\n", "its micro batch size is 4, but that of the layout is 2"),
        ("  zero_optimization_stage ...... 2\n", "its ZeRO stage is 2, but that of the layout is 1"),
        ("Building 2-D device mesh with ['dp_shard', 'tp'], [8, 4]\n", "its device mesh has 32 ranks, but the layout has 16"),
        (
            "Building device mesh with parallelism: pp=1, dp_replicate=1, dp_shard=8, cp=1, tp=2, ep=1, etp=1\n",
            "its device mesh has tp 2, but the layout has 1",
        ),
        ("  tensor_model_parallel_size ... 2\n", "its tensor-parallel size is 2, but that of the layout is 1"),
        (
            "[titan] CUDA capacity: NVIDIA A100-SXM4-80GB with 79.25GiB memory\n",
            "it ran on a100_sxm_80gb, but the profile is h100_sxm",
        ),
    ],
)
def test_the_log_of_another_run_is_refused(said: str, sentence: str, tmp_path: Path) -> None:
    run = Strategy(world_size=16, dp=16, seq_len=4096, micro_batch_size=2, num_micro_batches=2)
    with pytest.raises(InputError, match=sentence):
        read_observation(written(tmp_path, said + "\n" + STEPS), run, "h100_sxm")


@pytest.mark.parametrize(
    ("line", "bytes_", "kind"),
    [
        (" Memory usage: 1024.00MiB. Peak allocated 40000.00MiB. Peak reserved: 55102.00MiB", 55102.0 * 2**20, "reserved"),
        ("iteration: 5 / 100 | cuda_max_memory_reserved: 55.1G | ", 55.1 * GIB, "reserved"),
        ("max_memory_allocated: 42949672960", 40 * GIB, "allocated"),
    ],
)
def test_memory_of_nanotron_and_nemo(line: str, bytes_: float, kind: str, tmp_path: Path) -> None:
    found = read_observation(written(tmp_path, f"{line}\n{STEPS}"), ONE, "h100_sxm")
    assert (found.peak_memory, found.memory_kind) == (pytest.approx(bytes_), kind)


def test_the_average_at_the_end_of_a_run_is_read_where_nothing_else_is(tmp_path: Path) -> None:
    end = "{'train_runtime': 200.0, 'train_samples_per_second': 32.0, 'train_steps_per_second': 0.5, 'train_loss': 2.1}\n"
    assert step_seconds(end, BATCH)[0].tolist() == [2.0]
    assert step_seconds("elapsed time per iteration (ms): 1500\n" + end, BATCH)[0].tolist() == [1.5]


@pytest.mark.parametrize(
    ("lines", "tera"),
    [
        ("elapsed time per iteration (ms): 512.5 | throughput per GPU (TFLOP/s/GPU): 412.3 |\n" * 3, 412.3),
        ("step: 7  tps: 4,096  tflops: 1,367.10  mfu: 37.02%\n" * 3, 1367.1),
        ("elapsed time per iteration (ms): 512.5\n" * 3, None),
    ],
)
def test_flops_that_a_log_prints(lines: str, tera: float | None, tmp_path: Path) -> None:
    found = read_observation(written(tmp_path, lines), ONE, "h100_sxm").flops
    assert found == (pytest.approx(tera * 1e12) if tera else None)
