"""Traces of torch.profiler: what kernels do by their names, which step they belong to, and what is refused."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from profiler.errors import InputError
from solver.formats.logs.profiler_trace import ATTENTION, COPY, GEMM, MEMORY, OPTIMIZER, is_trace, kind_of, read_trace
from solver.formats.logs.statements import check_statements
from solver.spec.strategy import Strategy

Event = dict[str, Any]


def kernel(name: str, start: float, end: float, stream: int = 7, device: int = 0, cat: str = "kernel") -> Event:
    """Return an event as Kineto writes it; times in milliseconds."""
    args = {"External id": 12, "device": device, "stream": stream, "correlation": 3}
    return {
        "ph": "X",
        "cat": cat,
        "name": name,
        "pid": device,
        "tid": stream,
        "ts": 1e3 * start,
        "dur": 1e3 * (end - start),
        "args": args,
    }


def step(number: int, start: float, end: float, cat: str = "gpu_user_annotation") -> Event:
    return {
        "ph": "X",
        "cat": cat,
        "name": f"ProfilerStep#{number}",
        "pid": 0,
        "tid": 1,
        "ts": 1e3 * start,
        "dur": 1e3 * (end - start),
    }


def write(path: Path, *events: Event) -> Path:
    text = json.dumps({"schemaVersion": 1, "deviceProperties": [{"id": 0}], "traceEvents": list(events)})
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("nvjet_hsh_256x128_64x4_1x2_h_bz_coopA_TNT", GEMM),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_nn_n_tilesize128x128x64_cublas", GEMM),
        ("void cutlass::device_kernel<dpsk::grouped_gemm::cuda::fp8_ptp128c::GemmKernel>(int)", GEMM),
        ("Cijk_Ailk_Bljk_BBS_BH_Bias_HA_S_SAV_MT256x256x64", GEMM),
        ("void cutlass::device_kernel<flash::FlashAttnBwd<flash::CollectiveMainloopBwd<2>>>", ATTENTION),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_9_128x128x128", ATTENTION),
        ("void cudnn::fusion::compute_dot_do_o_specialized<true, __nv_bfloat16, 128>", ATTENTION),
        ("void at::native::(anonymous namespace)::multi_tensor_apply_kernel<AdamFunctor<float>>", OPTIMIZER),
        ("void transformer_engine::normalization::rmsnorm_fwd_tuned_kernel<Kernel_traits>", MEMORY),
        ("triton_poi_fused_add_mul_silu_0", MEMORY),
        ("void at::native::elementwise_kernel<128, 4, direct_copy_kernel_cuda(TensorIteratorBase&)::{lambda()#3}>", MEMORY),
        ("void lamb_cuda_kernel<float, __nv_bfloat16>(float*, float const*)", OPTIMIZER),
        ("void cuda::per_token_cast_to_fp8_with_channels<__nv_bfloat16, 128>", MEMORY),
        ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "all_reduce"),
        ("ncclDevKernel_ReduceScatter_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "reduce_scatter"),
        ("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "all_gather"),
        ("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", "send, receive, all_to_all"),
        ("ncclDevKernel_Generic_4(ncclDevKernelArgsStorage<4096ul>)", "other collectives"),
        ("void dpsk::ep::internode::dispatch<false, 8, true, 8>(int4*)", "exchange of tokens"),
        ("void deep_ep::intranode::combine<__nv_bfloat16, 8, 768>(int4*)", "exchange of tokens"),
    ],
)
def test_kernels_by_their_names(name: str, kind: str) -> None:
    assert kind_of(name) == kind


def test_copies_are_told_by_their_category() -> None:
    assert kind_of("Memcpy DtoD (Device -> Device)", "gpu_memcpy") == COPY


@pytest.mark.parametrize("name", ["a.json", "a.json.gz"])
def test_steps_go_from_mark_to_mark(name: str, tmp_path: Path) -> None:
    path = write(
        tmp_path / name,
        step(3, 0, 90),
        step(4, 100, 190),
        step(5, 210, 300),
        kernel("gemm", 5, 50),
        kernel("gemm", 95, 105),
        kernel("gemm", 150, 160),
        kernel("gemm", 250, 260),
        {"ph": "i", "name": "a mark", "ts": 1},
        step(4, 40, 60, "user_annotation"),
    )
    trace = read_trace(path)
    assert is_trace(path)
    assert trace.steps == pytest.approx([0.1, 0.11]) and trace.step.tolist() == [0, 0, 1]
    assert trace.start == pytest.approx([0.005, 0.095, 0.15]) and trace.said == "2 steps of device 0, as marked on the device"


def test_without_marks_of_the_device_those_of_the_host_count(tmp_path: Path) -> None:
    marks = [step(number, 100 * number, 100 * number + 90, "user_annotation") for number in (1, 2, 3)]
    trace = read_trace(write(tmp_path / "a.json", *marks, kernel("gemm", 120, 130), kernel("gemm", 220, 230)))
    assert trace.said.endswith("as marked on the host") and np.allclose(trace.steps, 0.1)
    alone = read_trace(write(tmp_path / "b.json", kernel("gemm", 10, 30), kernel("gemm", 40, 50)))
    assert alone.said.endswith("taken as one") and alone.steps == pytest.approx([0.04])


def test_the_device_with_most_kernels_is_read(tmp_path: Path) -> None:
    events = [kernel("gemm", 0, 1, device=1), kernel("gemm", 1, 2, device=1), kernel("gemm", 0, 9, device=0)]
    trace = read_trace(write(tmp_path / "a.json", *events))
    assert len(trace.names) == 2 and trace.said.startswith("1 step of device 1 (of 2)")


def test_what_a_trace_says_of_its_machine(tmp_path: Path) -> None:
    plain = {"deviceProperties": [{"name": "NVIDIA A100-SXM4-80GB"}] * 8, "distributedInfo": {"rank": 0, "world_size": 128}}
    (tmp_path / "a.json").write_text(json.dumps(plain | {"traceEvents": [kernel("gemm", 10, 30)]}))
    trace = read_trace(tmp_path / "a.json")
    assert trace.states == "NVIDIA A100-SXM4-80GB\nworld_size=128"
    run = Strategy(world_size=64, dp=64, seq_len=4096)
    with pytest.raises(InputError, match="its world size is 128, but that of the layout is 64"):
        check_statements(trace.states, Path("a.json"), run, "a100_sxm_80gb")
    with pytest.raises(InputError, match="it ran on a100_sxm_80gb, but the profile is h100_sxm"):
        check_statements(trace.states, Path("a.json"), run.replace(world_size=128, dp=128), "h100_sxm")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"traceEvents": [', "is no trace of torch.profiler"),
        ('{"traceEvents": 4}', "it has no traceEvents"),
        ('{"traceEvents": []}', "holds no kernels of a device: trace with ProfilerActivity.CUDA"),
        ('{"traceEvents": [{"ph": "X", "cat": "kernel", "name": "gemm", "ts": 1}]}', "an event without a name or its times"),
        ('{"traceEvents": [{"ph": "X", "cat": "kernel", "name": "g", "ts": 1, "dur": -4}]}', "negative, beyond all clocks"),
        ('{"traceEvents": [{"ph": "X", "cat": "kernel", "name": "g", "ts": 1e300, "dur": 4}]}', "beyond all clocks"),
        ('{"traceEvents": ' + "[" * 100_000, "is no trace of torch.profiler"),
        (
            '{"traceEvents": [{"ph": "X", "cat": "kernel", "name": "g", "ts": 1e9, "dur": 4}, '
            '{"ph": "X", "name": "ProfilerStep#1", "ts": 1, "dur": 2}, {"ph": "X", "name": "ProfilerStep#2", '
            '"ts": 5, "dur": 2}]}',
            "no kernel lies within a ProfilerStep",
        ),
    ],
)
def test_what_is_no_trace_is_refused(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(text)
    with pytest.raises(InputError, match=message):
        read_trace(path)


def test_other_files_are_no_traces(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"step_s": 1.5}')
    (tmp_path / "b.json.gz").write_text("no gzip")
    damaged = bytearray(gzip.compress(b'{"traceEvents": []}' * 99))
    damaged[12] ^= 0xFF
    (tmp_path / "c.json.gz").write_bytes(damaged)
    assert not any(is_trace(tmp_path / name) for name in ("a.json", "b.json.gz", "c.json.gz", "missing.json"))
    with pytest.raises(InputError, match="is no trace"):
        read_trace(tmp_path / "c.json.gz")
