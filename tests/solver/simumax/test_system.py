"""A system file as a profile: listed and flat efficiencies, memory, and networks by SimuMax's own formula."""

from __future__ import annotations

import copy
import json
from typing import Any

import numpy as np
import pytest

from predictor.cost_model import CostModel
from predictor.fitted import cost_model
from profiler.errors import InputError
from solver.simumax import SystemConfig
from solver.simumax.listed import with_listed
from solver.simumax.networks import link_bandwidth
from solver.simumax.shapes import Op, op_rows
from solver.simumax.system import OPS, profile_of

GIB = 2.0**30
#: The network's law is scaled to the file's formula at two nodes, and follows it there between the sizes that scale it.
AT_TWO_NODES = 0.05
FIT = 0.05  #: of flat efficiencies: a fit of shapes that all have the same

with open("tests/data/simumax/a100_pcie.json", encoding="utf-8") as _file:
    A100 = json.load(_file)
LINK = {"scale": 1, "offset": -1}
NETWORK = {
    "processor_usage": 0.0,
    "bandwidth": {"efficient_factor": 0.8, "gbps": 300, "latency_us": 10, "fixed_latency": 2},
    "op": {
        "all_reduce": {"scale": 2, "offset": -1, "efficient_factor": 0.5, "latency_us": 4, "fixed_latency_us": 7},
        "all_gather": LINK,
        "reduce_scatter": {**LINK, "fixed_latency_us_by_comm_num": {"4": 30}},
        "all2all": LINK,
        "p2p": {"scale": 1, "offset": 0},
    },
}
#: Without a list of shapes, and with links of its own inside a node.
PLAIN: dict[str, Any] = {
    "sys_name": "plain",
    "num_per_node": 8,
    "accelerator": {
        "backend": "cuda",
        "mem_gbs": 80,
        "mode": "roofline",
        "op": {"default": {"tflops": 300, "efficient_factor": 0.6}},
        "bandwidth": {
            "default": {"efficient_factor": 0.9, "gbps": 1500, "latency_us": 20},
            "ce_fusion": {"efficient_factor": 0.3, "gbps": 1500, "latency_us": 30},
        },
    },
    "networks": {"high_intra_node": NETWORK, "inter_node": NETWORK},
}


def cost_of(plain: dict[str, Any]) -> CostModel:
    profile = profile_of(SystemConfig(**plain))
    return with_listed(cost_model(profile), profile)


@pytest.fixture(scope="module")
def a100() -> CostModel:
    return cost_of(A100)


@pytest.fixture(scope="module")
def plain() -> CostModel:
    return cost_of(PLAIN)


def changed(path: str, value: Any, base: dict[str, Any] = A100) -> dict[str, Any]:
    """Return a copy with ``value`` at the dotted path; None removes it."""
    copied = copy.deepcopy(base)
    *parents, last = path.split("/")
    place = copied
    for name in parents:
        place = place[name]
    if value is None:
        del place[last]
    else:
        place[last] = value
    return copied


def test_a_listed_gemm_takes_its_flops_over_its_efficiency(a100: CostModel) -> None:
    def seconds(m: int, k: int, n: int, efficiency: float) -> float:
        return 2.0 * m * n * k / (312e12 * efficiency)

    assert float(a100.kernels.linear(4096, 6144, 4096).seconds) == pytest.approx(seconds(4096, 4096, 6144, 0.7168), rel=1e-12)
    gradient = a100.kernels.linear(4096, 4096, 28672, layout=1)
    assert float(gradient.seconds) == pytest.approx(seconds(4096, 28672, 4096, 0.7357), rel=1e-12)
    weight = a100.kernels.linear(28672, 4096, 4096, layout=2, accumulate=True)
    assert float(weight.seconds) == pytest.approx(seconds(28672, 4096, 4096, 0.7124), rel=1e-12)


def test_listed_attention_and_experts(a100: CostModel) -> None:
    square = 2.0 * 4096**2 * 32 * 256
    found = a100.kernels.flash_attn(1, 4096, 4096, 32, 8, 128, 128, backward=np.array([False, True])).seconds
    assert found == pytest.approx(square * np.array([1, 2.5]) / (312e12 * np.array([1.132, 0.9764])), rel=1e-12)
    flops = 2.0 * 20 * 1232 * 3072 * 5120
    found = a100.kernels.grouped_linear(20, 1232, 3072, 5120, passes=np.arange(3), accumulate=np.arange(3) == 2).seconds
    assert found == pytest.approx(flops / (312e12 * np.array([0.7074, 0.7039, 0.6036])), rel=1e-12)


def test_unlisted_shapes_lie_between_listed_ones(a100: CostModel) -> None:
    """SimuMax would take the flat 0.75 for them, above every listed efficiency."""
    m = np.array([3072, 6144, 8192])
    efficiency = 2.0 * m * 6144 * 4096 / 312e12 / a100.kernels.linear(m, 6144, 4096).seconds
    assert ((efficiency > 0.6) & (efficiency < 0.75)).all()


def test_flat_efficiencies(plain: CostModel) -> None:
    sizes = np.array([2048, 3000, 8192])
    for layout, adds in ((0, False), (1, False), (2, True)):
        found = plain.kernels.linear(4096, sizes, 4096, layout=layout, accumulate=adds).seconds
        assert found == pytest.approx(2.0 * 4096 * sizes * 4096 / (300e12 * 0.6), rel=FIT)
    for backward, factor in ((False, 1.0), (True, 2.5)):
        found = plain.kernels.flash_attn(1, sizes, sizes, 32, 32, 128, 128, backward=backward).seconds
        assert found == pytest.approx(factor * 2.0 * sizes**2 * 32 * 256 / (300e12 * 0.6), rel=3 * FIT)


def test_memory(plain: CostModel, a100: CostModel) -> None:
    assert plain.device.memory_bytes == 80 * GIB
    assert plain.device.memory_bandwidth == 1500 * GIB
    rate = 1500 * GIB * 0.9
    assert float(plain.kernels.memory_bound("norm", 1e9).seconds) == pytest.approx(20e-6 + 1e9 / rate, rel=1e-9)
    assert float(plain.kernels.memory_bound("residual", 1e9).seconds) == pytest.approx(3e-6 + 1e9 / rate, rel=1e-9)
    assert float(plain.kernels.memory_bound("cross_entropy", 1e9).seconds) == pytest.approx(
        30e-6 + 1e9 / (1500 * GIB * 0.3), rel=1e-9
    )
    assert float(a100.kernels.memory_bound("permute", 1e9).seconds) == pytest.approx(
        160e-6 + 1e9 / (1600 * GIB * 0.1879), rel=1e-9
    )
    assert plain.device.peak_flops == {"bf16": 300e12}
    assert cost_of(changed("accelerator/op/fp8_matmul", {"tflops": 600, "efficient_factor": 0.5})).device.peak_flops == {
        "bf16": 312e12,
        "fp8": 600e12,
    }


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("size", [1e5, 3e7, 1e9])
def test_collectives_inside_a_node(plain: CostModel, ranks: int, size: float) -> None:
    rate, share = 300 * GIB * 0.8, (ranks - 1) / ranks
    expected = {
        "all_reduce": size * 2 * share / (300 * GIB * 0.5) + 4e-6 * 2 * (ranks - 1) + 7e-6,
        "all_gather": size * share / rate + 10e-6 * (ranks - 1) + 2e-6,
        "reduce_scatter": size * share / rate + 10e-6 * (ranks - 1) + (30e-6 if ranks == 4 else 2e-6),
        "all2all": size * share / rate + 10e-6 * (ranks - 1) + 2e-6,
    }
    for op, seconds in expected.items():
        assert float(plain.network.collective(op, size, ranks, 1).seconds) == pytest.approx(seconds, rel=0.01), op
    assert float(plain.network.collective("p2p", size, 2, 1).seconds) == pytest.approx(size / rate + 12e-6, rel=0.01)


def test_nodes_of_another_size_count_the_latency_once() -> None:
    cost = cost_of({**PLAIN, "num_per_node": 4})
    seconds = 1e9 * 0.75 / (300 * GIB * 0.8) + 12e-6
    assert float(cost.network.collective("all_gather", 1e9, 4, 1).seconds) == pytest.approx(seconds, rel=0.01)
    assert cost.device.gpus_per_node == 4


@pytest.mark.parametrize("ranks", [3, 5, 6, 7])
def test_nodes_between_two_pcie_networks_take_the_smaller(ranks: int) -> None:
    named = "intra_node_pcie_2x" if ranks < 4 else "intra_node_pcie_4x"
    link = SystemConfig(**{**A100, "num_per_node": ranks})
    assert link_bandwidth(link) == A100["networks"][named]["bandwidth"]["gbps"] * 2**30


def test_networks_of_pcie_by_ranks_and_crowded_groups(a100: CostModel) -> None:
    for ranks, efficiency, latency in ((2, 0.6866, 24.84e-6), (4, 0.6915, 8.93e-6), (8, 0.4497, 4.83e-6)):
        seconds = 1e9 * (ranks - 1) / ranks / (30 * GIB * efficiency) + latency * (ranks - 1)
        assert float(a100.network.collective("all_gather", 1e9, ranks, 1).seconds) == pytest.approx(seconds, rel=0.01)
    # ranks apart share the links of the node with other groups: as dp_fixed_bw says, or else as the widest network
    found = float(a100.network.collective("all_gather", 1e9, 4, 1, strided=1).seconds)
    assert found == pytest.approx(1e9 * 0.75 / (7.65 * GIB), rel=0.01)
    found = float(a100.network.collective("all_reduce", 1e9, 4, 1, strided=1).seconds)
    assert found == pytest.approx(1e9 * 2 * 0.75 / (30 * GIB * 0.4176), rel=0.01)
    whole = a100.network.collective("all_gather", 1e9, 8, 1, strided=np.array([0, 1])).seconds
    assert whole[0] == whole[1]


def test_a_mesh_has_the_links_to_the_others() -> None:
    cost = cost_of({**PLAIN, "FC8": True})
    seconds = 1e9 * 0.75 / (300 * GIB * 0.8 * 3 / 7) + 32e-6
    assert float(cost.network.collective("all_gather", 1e9, 4, 1).seconds) == pytest.approx(seconds, rel=0.01)


def test_between_two_nodes(plain: CostModel) -> None:
    """The file's bandwidth is of a whole node of 8: a rank alone has an eighth, half of an exchange stays in its node."""
    rate, size = 300 * GIB * 0.8, 64 * 2.0**20
    assert plain.network.bandwidth == 300 * GIB / 8
    expected = {
        "all_gather": size * 15 / 16 / rate + 10e-6 * 15 + 2e-6,
        "all_reduce": size * 2 * 15 / 16 / (300 * GIB * 0.5) + 4e-6 * 30 + 7e-6,
        "all2all": 4 * size * 15 / 16 / rate + 10e-6 * 15 + 2e-6,
    }
    for op, seconds in expected.items():
        assert float(plain.network.collective(op, size, 8, 2).seconds) == pytest.approx(seconds, rel=AT_TWO_NODES), op
    assert float(plain.network.collective("p2p", size, 1, 2).seconds) == pytest.approx(
        8 * size / rate + 12e-6, rel=AT_TWO_NODES
    )
    more = [float(plain.network.collective("all_reduce", 1e9, 8, nodes).seconds) for nodes in (2, 4, 16)]
    assert more == sorted(more)


def test_a_changed_file_is_another_profile() -> None:
    digests = {
        profile_of(SystemConfig(**plain)).digest
        for plain in (
            A100,
            changed("accelerator/mem_gbs", 40),
            changed("accelerator/op/default/tflops", 310),
            changed("networks/inter_node/bandwidth/gbps", 50),
        )
    }
    assert len(digests) == 4
    assert profile_of(SystemConfig(**copy.deepcopy(A100))).digest in digests


@pytest.mark.parametrize("model", ["llama3_8b", "deepseek_small"])
def test_missing_shapes_are_named_as_a_file_lists_them(configured: Any, model: str) -> None:
    """Listed with the efficiencies that the fit takes for them, they change nothing but that none is missing."""
    perf = configured(model, "a100_pcie", tp_size=1, ep_size=4 if model == "deepseek_small" else 1)
    perf.run_estimate()
    missing, seconds = perf.miss_efficiency, perf.analysis_cost()["duration_time_per_iter"]
    assert set(missing) == {"matmul", "sdp_fwd", "sdp_bwd", "group_matmul"} if model == "deepseek_small" else {"matmul"}
    whole = copy.deepcopy(A100)
    for name, shapes in missing.items():
        kind, dtype = OPS[name]
        for shape, taken in shapes.items():
            (row,) = op_rows(Op(name, 312e12, 1.0, {shape: 1.0}), kind, dtype, "x")
            whole["accelerator"]["op"][name]["accurate_efficient_factor"][shape] = row["seconds"] / taken
    perf.configure(perf.strategy, perf.model_config, whole)
    perf.run_estimate()
    assert perf.miss_efficiency == {}
    assert perf.analysis_cost()["duration_time_per_iter"] == pytest.approx(seconds, rel=1e-9)


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        ("accelerator/mode", "only_compute", "mode is 'only_compute', which is not modelled"),
        ("accelerator/mem_gbs", 0, "mem_gbs is 0; it must be a positive number of GiB"),
        ("accelerator/memory", 80, "accelerator.memory is not known"),
        ("accelerator/op", {}, "accelerator.op is a dict; it must be an object"),
        ("accelerator/op/matmull", {}, r"op.matmull is not known \(did you mean 'matmul'"),
        ("accelerator/op/matmul/tflops", -1, "op.matmul.tflops is -1"),
        ("accelerator/op/matmul/speed", 1, "op.matmul.speed is not known"),
        ("accelerator/op/matmul/accurate_efficient_factor", {"big": 0.5}, "op matmul: 'big' is no shape"),
        ("accelerator/op/matmul/accurate_efficient_factor", {"m=8, k=8": 0.5}, "lacks n; it has b, m, k"),
        ("accelerator/op/matmul/accurate_efficient_factor", {"m=8, k=8, n=8, layout=TT": 0.5}, "layout 'TT'"),
        ("accelerator/op/matmul/accurate_efficient_factor", {"m=8, k=8, n=8": 0}, "efficiency of m=8, k=8, n=8 is 0"),
        ("accelerator/bandwidth/default", None, "bandwidth.default is None"),
        ("accelerator/bandwidth/default/gbps", 0, "gbps and efficient_factor must be positive"),
        ("accelerator/bandwidth/default/fixed", 0, "bandwidth.default.fixed is not known"),
        ("accelerator/bandwidth/permute", {}, "bandwidth.permute is not known"),
        ("networks/inter_node", None, "has no network inter_node"),
        ("networks/middle_node", {}, "network 'middle_node' is not known"),
        ("networks/inter_node/op/all_reduce", None, "inter_node lacks op all_reduce"),
        ("networks/inter_node/op/broadcasts", {}, "op 'broadcasts' is not known"),
        ("networks/inter_node/op/p2p/offset", 3, "offset is 3; it must be between -1 and 0"),
        ("networks/inter_node/op/p2p/scale", 0, "scale is 0; it must be a positive number"),
        ("accelerator/bandwidth/default/latency_us", ..., "default.latency_us is null; it must be a number"),
        ("networks/inter_node/op/p2p/scales", 1, "p2p.scales is not known"),
        ("networks/inter_node/bandwidth/gbps", "25", "gbps is '25'; it must be a number"),
        ("networks/inter_node/overlap", 1, "inter_node.overlap is not known"),
        ("networks/intra_with_pcie", 1, "intra_with_pcie is 1; it must be true or false"),
    ],
)
def test_refused_by_name(path: str, value: Any, said: str) -> None:
    config = changed(path, value)
    if value is ...:
        config["accelerator"]["bandwidth"]["default"]["latency_us"] = None
    with pytest.raises(InputError, match=said):
        profile_of(SystemConfig(**config))


def test_older_files_have_one_class_of_kernels() -> None:
    classes = {"default": {"efficient_factor": 0.7, "gbps": 2039, "latency_us": 40}}
    new, old = (profile_of(SystemConfig(**changed("accelerator/bandwidth", given))) for given in (classes, classes["default"]))
    assert old.digest == new.digest
    assert old.device.memory_bandwidth == 2039 * GIB


def test_what_changes_nothing() -> None:
    base = profile_of(SystemConfig(**A100)).digest
    for path, value in (
        ("accelerator/backend", "musa"),
        ("networks/inter_node/processor_usage", 0.3),
        ("_notes", "a remark"),
        ("networks/low_intra_node", NETWORK),
        ("accelerator/_source", "measured"),
    ):
        assert profile_of(SystemConfig(**changed(path, value))).digest == base, path
    with pytest.raises(InputError, match="system field 'racks' is not known"):
        SystemConfig(**{**A100, "racks": 2})
