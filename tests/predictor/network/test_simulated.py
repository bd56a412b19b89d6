"""Collectives on a topology: what is simulated, its shortcuts against the simulation, the calibration, and searches on it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from predictor.cost_model import CostModel
from predictor.estimate import Basis
from predictor.network.flows.calibrate import Row, as_reached, errors, measured_rows, network, read_calibration, simulated
from predictor.network.flows.collective import collective
from predictor.network.flows.simulate import simulate
from predictor.network.simulated import SIZES, SimulatedNetwork, cache_file
from predictor.network.topology.generate import generate
from predictor.network.topology.templates import make_options
from predictor.network.topology.types import Topology
from profiler.errors import InputError
from solver import load_problem
from solver.api import estimate
from solver.commands.console import main
from solver.formats.config_file import load_cluster
from solver.report.plan import trainings


def topology(name: str, gpus: int, **stated: object) -> Topology:
    return generate(make_options({"topology": name, "gpus": gpus, **stated})[0])


@pytest.fixture(scope="module")
def rails(h100_model: CostModel) -> SimulatedNetwork:
    return SimulatedNetwork(topology("Spectrum-X", 64), h100_model.network.measured_collectives, 64, 8, read_calibration())


def test_a_reduce_scatter_takes_as_long_as_an_all_gather(rails: SimulatedNetwork) -> None:
    """The shortcut: one simulation for two operations; an all_reduce is not exactly both."""
    for intra, servers in ((1, 8), (4, 4), (8, 8)):
        groups = rails.groups("all_gather", intra, servers)
        for size in (2.0**20, 2.0**27):
            gather, scatter, reduce = (
                simulate(rails.topology, collective(op, groups, size, pxn=intra > 1)).seconds
                for op in ("all_gather", "reduce_scatter", "all_reduce")
            )
            assert scatter == pytest.approx(gather, rel=1e-9) and reduce == pytest.approx(2 * gather, rel=0.06)


def test_sizes_that_were_not_simulated(rails: SimulatedNetwork) -> None:
    """Between what is bound by latency and by rates: within 15% of a simulation of the size itself."""
    reached = as_reached(rails.topology, rails.calibration)
    for intra, servers in ((1, 8), (2, 4), (8, 8)):
        groups = rails.groups("all_gather", intra, servers)
        for size in (2.0**18, 2.0**21, 2.0**26, 2.0**28, 2.0**32):
            exact = simulate(reached, collective("all_gather", groups, size, pxn=intra > 1), rails.calibration.latency).seconds
            assert float(rails.predict("all_gather", size, intra, servers).seconds) == pytest.approx(exact, rel=0.15)


def test_inside_a_server_the_profile_s_times_stay(rails: SimulatedNetwork, h100_model: CostModel) -> None:
    size = np.array([1e5, 1e7, 1e9])
    for op in ("all_reduce", "all2all"):
        mine, theirs = rails.predict(op, size, 8, 1), h100_model.network.measured_collectives.predict(op, size, 8, 1)
        assert np.array_equal(mine.seconds, theirs.seconds) and np.array_equal(mine.basis, theirs.basis)
    far = rails.predict("all_gather", size, [8, 4, 1], [8, 2, 4])
    assert (far.basis == Basis.SIMULATED).all() and (far.relative_std >= rails.calibration.relative_std).all()
    assert float(rails.predict("all_gather", 1e6, 1, 1).seconds) == 0.0


def test_laws(rails: SimulatedNetwork) -> None:
    sizes = np.geomspace(1e3, 1e10, 30)
    for op in ("all_reduce", "all_gather", "reduce_scatter", "all2all", "p2p", "broadcast"):
        assert (np.diff(rails.predict(op, sizes, 1, 2).seconds) >= 0).all(), op
    slow = SimulatedNetwork(topology("Spectrum-X", 64, bandwidth="100Gbps"), rails.inside, 64, 8, rails.calibration)
    ratio = slow.predict("all_gather", 1e9, 1, 8).seconds / rails.predict("all_gather", 1e9, 1, 8).seconds
    assert ratio == pytest.approx(4.0, rel=0.02)  # a quarter of the rate
    assert tuple(sorted(SIZES)) == SIZES


def test_the_calibration_reproduces_what_was_measured() -> None:
    """Three numbers for nccl-tests of H100 on ten nodes; the rows on two nodes were not fitted."""
    rows, found = list(measured_rows(per_group=2)), read_calibration()
    large = [row for row in rows if row.bytes >= 2**27]
    assert len(large) > 20 and {row.nodes for row in large} == {2, 10}
    assert np.sqrt(np.mean(errors(large, found) ** 2)) < 0.16
    assert 0.5 < found.network <= 1 and 0.5 < found.nvlink <= 1 and 1e-6 < found.latency < 2e-5
    row = Row("all_gather", 1, 10, 1e9, 1.0)
    by_hand = 9 * (found.latency + 1e8 / (50e9 * found.network))  # steps of a tenth, 66 bytes of 9,066 are headers
    assert simulated(row, as_reached(network(10), found), found.latency) == pytest.approx(by_hand, rel=0.01)


def test_what_is_too_large_to_simulate_has_the_law_of_measured_networks(
    rails: SimulatedNetwork, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object, **__: object) -> None:
        raise InputError("too many")

    monkeypatch.setattr("predictor.network.simulated.simulate", refused)
    cache = tmp_path / "c.json"
    network = SimulatedNetwork(rails.topology, rails.inside, 64, 8, rails.calibration, cache)
    found, law = network.predict("all_gather", 1e8, 2, 4, 50e9), rails.inside.predict("all_gather", 1e8, 2, 4, 50e9)
    assert found.seconds == law.seconds and found.relative_std >= 0.4 and found.basis == Basis.EXTRAPOLATED
    assert cache.exists() and network.predict("all_gather", 1e8, 2, 4, 50e9).seconds == law.seconds


def test_what_was_simulated_is_kept(rails: SimulatedNetwork, tmp_path: Path) -> None:
    told: list[str] = []
    cache = cache_file(tmp_path, rails.topology, rails.calibration)
    args = (rails.topology, rails.inside, 64, 8, rails.calibration, cache, told.append)
    first = SimulatedNetwork(*args).predict("all_gather", 1e7, 1, 4).seconds
    again = SimulatedNetwork(*args).predict("all_gather", 1e7, 1, 4).seconds
    assert first == again and told == ["simulating all_gather of 1 GPUs in each of 4 servers"]
    cache.write_text("damaged")
    assert SimulatedNetwork(*args).predict("all_gather", 1e7, 1, 4).seconds == first and len(told) == 2
    assert cache != cache_file(tmp_path, topology("DCN+", 64), rails.calibration)


def test_a_cluster_by_its_topology(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stated = load_cluster("NVL -gps 36 -g 144")
    assert (stated["nvlink_domain"], stated["inter_node_gbit_per_gpu"], stated["hardware"]) == (36, 400.0, "gb200")
    path = tmp_path / "net.topo"
    from predictor.network.topology.file_format import write_topology

    write_topology(topology("Spectrum-X", 32, bandwidth="200Gbps"), path)
    problem = load_problem("configs/models/llama3_8b.json", 16, cluster=path, framework="megatron-core")
    assert problem.cluster.network_bandwidth == 25e9 and isinstance(problem.cost.network.collectives, SimulatedNetwork)
    layout = problem.layout(tp=8, dp=2, num_micro_batches=16, zero_shard_size=2)
    plain = load_problem(
        "configs/models/llama3_8b.json", 16, cluster={"inter_node_gbit_per_gpu": 200}, framework="megatron-core"
    )
    times = [float(estimate(p, [layout]).times.seconds[0]) for p in (problem, plain)]
    assert times[0] == pytest.approx(times[1], rel=0.05)  # InfiniBand at half its rate, simulated and by the law
    with pytest.raises(InputError, match="128 GPUs do not fit on net.topo, of which a job like this uses 4 x 8"):
        load_problem("configs/models/llama3_8b.json", 128, cluster=path)
    words = ["predict", "--model_size", "llama3_8b", "--framework", "megatron-core", "--world_size", "16", "--cluster"]
    assert main([*words, str(path)]) == 0
    assert "network: simulated flow by flow on net.topo" in capsys.readouterr().out
    for wrong, message in (
        ("Spectrum-X -g 63", "63"),
        ("Spectrum-X -what 1", "unrecognized"),
        ("Spectrum-Y -g 8", "no cluster is"),
    ):
        assert main([*words, wrong]) == 2
        assert message in capsys.readouterr().err


@pytest.mark.parametrize(("stated", "gpus"), [("Spectrum-X -g 32", 8), ("Spectrum-X -g 32", 4), ("NVL -g 72", 36)])
def test_a_job_inside_one_server_or_domain_sends_nothing_over_the_topology(stated: str, gpus: int) -> None:
    """It takes as long as without the topology: a pipeline of one stage has no neighbour in another server."""
    given = {"framework": "megatron-core", "profile": "gb200" if "NVL" in stated else "h100_sxm"}
    on = load_problem("configs/models/llama3_8b.json", gpus, cluster=stated, **given)
    off = load_problem("configs/models/llama3_8b.json", gpus, **given)
    layout = on.layout(tp=2, dp=gpus // 2, num_micro_batches=8, zero_shard_size=gpus // 2)
    times = [float(estimate(problem, [layout]).times.seconds[0]) for problem in (on, off)]
    assert times[0] == times[1] > 0


def test_other_numbers_of_gpus_are_simulated_as_such() -> None:
    """A plan asks for many: each is the problem of that size, and what does not fit on the topology is left out."""
    problem = load_problem("configs/models/llama3_8b.json", 8, cluster="Spectrum-X -g 16", framework="megatron-core")
    larger = load_problem("configs/models/llama3_8b.json", 16, cluster="Spectrum-X -g 16", framework="megatron-core")
    other = problem.for_world(16)
    assert (other.run, other.cluster) == (larger.run, larger.cluster)
    theirs = larger.cost.network.collective("all_gather", 1e8, 1, 2).seconds  # over more nodes than the smaller job has
    assert other.cost.network.collective("all_gather", 1e8, 1, 2).seconds == theirs > 0
    found, none = trainings(problem.for_world, lambda _: 64, 1e9, [8, 16, 32])
    assert [one.world_size for one in found] == [8, 16] and [*none] == [32]
    with pytest.raises(InputError, match="32 GPUs do not fit on Spectrum-X_16g"):
        problem.for_world(32)
