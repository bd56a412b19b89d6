"""The importer on small made-up files, and properties of the shipped profiles."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from profiler.errors import InputError
from profiler.profile.devices import DEVICES, device
from profiler.profile.profile import Profile
from profiler.profile.store import read_profile
from profiler.published.comm import LICENCES, repository
from profiler.published.command import RECIPES, import_all, main
from profiler.published.rows import Collection, Ledger, groups, merge_repeats, spaced, thinned
from profiler.published.tables import attention_flops, memory_bound
from profiler.published.training_kernels import training_kernels

SHIPPED = Path(__file__).resolve().parents[3] / "prof_data"


def _gemm(pd):
    shapes = [(m, n, k) for m in (256, 1024, 4096) for n in (512, 1024) for k in (512, 2048)]
    rows = [(m, n, k, "bf16", 2e6 * m * n * k / 500e12) for m, n, k in shapes]
    rows += [(4096, 4096, 4096, "bf16", 1.0), (4096, 4096, 4096, "fp8_block_trtllm", 300.0)]  # impossible time; unwanted type
    frame = pd.DataFrame(rows, columns=["m", "n", "k", "dtype", "us"])
    return frame.assign(us_min=frame.us * 0.9, us_max=frame.us * 1.1, n_src=2, source="aic:h100_sxm/gemm/x.parquet")


def _nccl(pd):
    columns = ["op", "gpus", "nodes", "gpus_per_node", "bytes", "us", "source", "bytes_is"]
    run = "xxrjun/nccl-tests-cluster:b/single-node/runs/{}/n1.log"
    rows = [
        ("all_gather", 8, 1, 8, 2**20, 30.0, run.format("a"), "per-rank OUTPUT (=n*shard)"),
        ("all_gather", 8, 1, 8, 2**20, 40.0, run.format("b"), "per-rank OUTPUT (=n*shard)"),
        ("all_gather", 8, 1, 8, 2**20, 80.0, run.format("c"), "per-rank OUTPUT (=n*shard)"),
        ("alltoall", 16, 2, 8, 2**20, 90.0, run.format("a"), "per-rank send buffer"),
        ("sendrecv", 2, 1, 2, 2**30, 1000.0, run.format("a"), "per-rank message"),  # a copy: 1 TB/s over NVLink
        ("all_reduce", 16, 2, 8, 2**20, 90.0, "github NVIDIA/nccl-tests#309 (x)", "per-rank buffer (in=out)"),
        ("all_reduce", 16, 2, 8, 2**20, 90.0, "argonne-lcf/alcf-nccl-tests:x", "per-rank buffer (in=out)"),
    ]
    return pd.DataFrame(rows, columns=columns).assign(dtype="half", env="default")


def _kernels(pd):
    columns = ["gpu", "model", "op", "tokens", "tp", "hidden", "heads", "kv_heads", "ffn", "us"]
    rows = [
        ("a100_sxm", "x", "input_layernorm", 4096, 2, 4096, 32, 32, 11008, 100.0),
        ("a100_sxm", "y", "post_attention_layernorm", 4096, 4, 4096, 32, 8, 14336, 110.0),
        ("a100_sxm", "x", "attn_rope", 4096, 2, 4096, 32, 32, 11008, 80.0),
        ("a100_sxm", "x", "mlp_act", 4096, 2, 4096, 32, 32, 11008, 140.0),
        ("a100_sxm", "x", "add", 4096, 2, 4096, 32, 32, 11008, 10.0),  # ten times the memory bandwidth
    ]
    return pd.DataFrame(rows, columns=columns).assign(source="microsoft/vidur:x")


def _network(pd):
    columns = ["network", "op", "nominal_gib_per_s", "efficiency", "size_scale", "size_offset", "latency_us"]
    rows = [
        ("intra_node_pcie_4x", "all_reduce", 30, 0.5, 2, -1, 10.0, 1),
        ("intra_node_pcie_8x", "all_gather", 30, 0.4, 1, -1, 5.0, 1),
        ("intra_node_pcie_8x", "p2p", 30, 0.4, 1, 0, 5.0, 1),
        ("inter_node", "all_reduce", 25, 0.6, 2, -1, 40.0, 0),
    ]
    frame = pd.DataFrame(rows, columns=[*columns, "op_value_given"]).assign(fixed_latency_us=3.0)
    return frame.assign(fixed_latency_us_by_n="{}", dp_fixed_bw_gib_per_s_by_n=["{}", '{"2": 4}', "{}", "{}"])


def _deepep(pd):
    rows = [
        ("h100_sxm", 1, 4096, 20, 500.0, 0.0, 1000.0, 0.0),
        ("h100_sxm", 2, 4096, 24, 800.0, 50.0, 2000.0, 100.0),
        ("h100_sxm", 1, 4096, 4, 2000.0, 0.0, 4000.0, 0.0),  # too few multiprocessors
        ("h100_sxm", 1, 32, 20, 50.0, 0.0, 60.0, 0.0),  # inference
        ("h100_sxm", 8, 4096, 20, 6000.0, 900.0, 4000.0, 8000.0),  # the congested network
        ("h100_sxm", 1, 8192, 20, 100.0, 0.0, 100.0, 0.0),  # faster than NVLink
        ("h200_sxm", 1, 4096, 20, 500.0, 0.0, 1000.0, 0.0),
    ]
    timed = ["dispatch_transmit_us", "dispatch_notify_us", "combine_transmit_us", "combine_notify_us"]
    frame = pd.DataFrame(rows, columns=["gpu", "node_num", "num_token", "dispatch_sms", *timed])
    frame = frame.assign(combine_sms=frame.dispatch_sms, hidden_size=7168, num_topk=8, num_experts=256, device="x")
    frame["source"] = "aic:h100_sxm/comm/x.parquet"
    frame.loc[frame.gpu == "h200_sxm", "source"] = "aic:h200_sxm/comm/sglang/0.5.6.post2/wideep_deepep_normal_perf.parquet"
    return frame


@pytest.fixture(scope="module")
def imported(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Profile]:
    pd = pytest.importorskip("pandas")
    pytest.importorskip("pyarrow")
    folder, output = tmp_path_factory.mktemp("collected"), tmp_path_factory.mktemp("profiles")
    _gemm(pd).to_parquet(folder / "h100_sxm_gemm.parquet")
    _nccl(pd).to_parquet(folder / "h100_sxm_nccl.parquet")
    _kernels(pd).to_parquet(folder / "membound_vidur.parquet")
    _deepep(pd).to_parquet(folder / "deepep_normal_dispatch_combine.parquet")
    _network(pd).to_csv(folder / "simumax_a100_pcie_network.csv", index=False)
    (output / "network_fits.json").write_text(json.dumps({"efficiency": 0.9}))
    import_all(folder, output, Console(file=io.StringIO()))
    assert "h100_sxm" in (output / "SOURCES.md").read_text()
    return {name: read_profile(output / f"{name}.pt") for name in RECIPES}


def test_gemms_keep_training_shapes_and_drop_impossible_times(imported: dict[str, Profile]) -> None:
    linear = imported["h100_sxm"].table("linear")
    assert (linear["m"] >= 1024).sum() == 8  # every training-like shape whose time is possible
    assert set(linear["dtype"]) == {"bf16"} and set(linear["layout"]) == {"TN"}
    rate = 2.0 * linear["m"] * linear["n"] * linear["k"] / linear["seconds"]
    assert np.allclose(rate, 500e12, rtol=1e-6)
    assert np.allclose(linear["spread"], 0.1, atol=1e-6) and set(linear["repeats"]) == {2}


def test_collectives_merge_runs_and_respect_licences_and_links(imported: dict[str, Profile]) -> None:
    profile = imported["h100_sxm"]
    gather = profile.table("all_gather")
    assert gather["seconds"] == pytest.approx(40e-6) and gather["repeats"].tolist() == [3]
    assert gather["spread"] == pytest.approx((80 - 30) / 2 / 40)
    assert gather["source"].tolist() == ["xxrjun/nccl-tests-cluster:b/single-node"]
    assert (gather["intra"].tolist(), gather["inter"].tolist(), gather["bytes"].tolist()) == ([8], [1], [2**20])
    assert len(profile.table("all2all")) == 1 and profile.table("all2all")["dtype"].tolist() == ["fp16"]
    assert len(profile.table("all_reduce")) == 0, "measurements without a licence"
    assert len(profile.table("p2p")) == 0, "faster than the links"


def test_memory_bound_bytes_are_those_of_an_ideal_kernel(imported: dict[str, Profile]) -> None:
    table = imported["a100_sxm_80gb"].table("memory_bound")
    moved = dict(zip(table["kind"].tolist(), table["bytes"].tolist(), strict=True))
    tokens, hidden, half = 4096, 4096, 2
    assert moved == {
        "row": half * tokens * 2 * hidden,  # a serving engine's norm
        "rope": half * tokens * 2 * (16 + 16) * 128,
        "gated_act": half * tokens * 3 * 11008 // 2,
    }
    norm = table.where(table["kind"] == "row")
    assert norm["seconds"] == pytest.approx(105e-6) and norm["repeats"].tolist() == [2]


def _archive(pd, folder: Path, prefix: str) -> None:
    """An archive of kernels of training steps: each operator at a size that its host launches in time, and at a small one."""
    shapes = {"mp": 4.0, "b": 8.0, "h": 16.0, "l": 4096.0, "dim": 4096.0}
    times = {
        "layernorm": (100, 300),
        "ScaledUpperTriangMaskedSoftmax": (2000, 3000),
        "fillmask": (4000, 9000),
        "softmax": (5000, 8000),
        "gelu": (700, 900),
        "res_add": (500, 500),
        "RoPE": (3000, 7000),
    }
    (folder / "more").mkdir(exist_ok=True)
    with tarfile.open(folder / "more" / "estimate_train_time.tar.gz", "w:gz") as archive:
        for name, (forward, backward) in times.items():
            row = {"F_dur(us)": float(forward), "B_dur(us)": float(backward)}
            text = pd.DataFrame([shapes | row, shapes | {"l": 16.0} | row]).to_csv(index=False).encode()
            entry = tarfile.TarInfo(f"estimate_train_time/{prefix}_{name}_fp16.csv")
            entry.size = len(text)
            archive.addfile(entry, io.BytesIO(text))


def test_kernels_of_training_steps_by_hand(tmp_path: Path) -> None:
    pd = pytest.importorskip("pandas")
    _archive(pd, tmp_path, "Perlmutter__operator__NVIDIAA100-SXM4-80GB")
    rows = training_kernels(Collection(tmp_path), "a100_sxm")
    found = {
        (kind, bytes_): seconds
        for kind, bytes_, seconds in zip(rows["kind"].tolist(), rows["bytes"].tolist(), rows["seconds"].tolist(), strict=True)
    }
    tokens, scores = 8 * 4096 * 4096, 8 * 16 * 4096 * 4096 // 4  # values of 16 bits; scores on one of four tensor ranks
    large = {
        ("norm", 2 * 2 * tokens): 100e-6,
        ("norm_grad_torch", 2 * 3 * tokens): 300e-6,
        ("softmax", 2 * 2 * scores): 2e-3,
        ("softmax_grad", 2 * 3 * scores): 3e-3,
        ("softmax_eager", 2 * 2 * scores): 9e-3,
        ("softmax_eager_grad", 2 * 3 * scores): 17e-3,  # mask and softmax
        ("act", 2 * 2 * 4 * tokens // 4): 700e-6,
        ("act_grad", 2 * 3 * 4 * tokens // 4): 900e-6,
        ("residual", 2 * 3 * tokens): 500e-6,
        ("rope_eager", 2 * 4 * tokens // 4): 3e-3,
        ("rope_eager_grad", 2 * 4 * tokens // 4): 7e-3,  # queries and keys
    }
    assert {key: found[key] for key in large} == {key: pytest.approx(seconds) for key, seconds in large.items()}
    small = {kind for kind, bytes_ in found if (kind, bytes_) not in large}
    assert small == {"norm", "norm_grad_torch", "softmax", "softmax_grad", "act", "act_grad", "residual"}, "no eager chains"
    assert set(rows["source"][rows["kind"] == "softmax_eager"].tolist()) == {
        "DebarghaG/estimate-train-time:Perlmutter__operator__NVIDIAA100-SXM4-80GB_fillmask+softmax"
    }


def test_kernels_of_a_part_with_other_memory_are_scaled(tmp_path: Path) -> None:
    pd = pytest.importorskip("pandas")
    _archive(pd, tmp_path, "Vista__operator__NVIDIAGH200120GB")
    rows = memory_bound(Collection(tmp_path), "", "gh200", device("h100_sxm"), Ledger())
    norm = rows["seconds"][(rows["kind"] == "norm") & (rows["bytes"] > 1e8)]
    assert norm == pytest.approx(100e-6 * 4000 / 3350, rel=1e-3)
    assert "norm_grad_torch" not in rows["kind"], "its times are those of the forward pass"
    assert all("GH200" in source and "1.194" in source for source in rows["source"].tolist())


def test_an_archive_without_an_expected_file_is_named(tmp_path: Path) -> None:
    pytest.importorskip("pandas")
    (tmp_path / "more").mkdir()
    with tarfile.open(tmp_path / "more" / "estimate_train_time.tar.gz", "w:gz"):
        pass
    with pytest.raises(InputError, match="holds no file estimate_train_time/Perlmutter"):
        training_kernels(Collection(tmp_path), "a100_sxm")


def test_smaller_a100_is_slower_by_its_memory(imported: dict[str, Profile]) -> None:
    large, small = (imported[f"a100_sxm_{gb}gb"].table("memory_bound") for gb in (80, 40))
    assert small["seconds"] / large["seconds"] == pytest.approx(2.039 / 1.555, rel=1e-5)
    assert all("80GB" in source for source in small["source"])


def test_constants_reproduce_the_published_formula(imported: dict[str, Profile]) -> None:
    fit = imported["a100_pcie_80gb"].meta["laws"]["intra_node"]
    assert set(fit) == {"all_reduce", "all_gather"}, "no template constants, no copies inside one GPU"
    reduce = fit["all_reduce"][4]
    size, ranks = 2**26, 4
    published = size * 2 * (ranks - 1) / ranks / (30 * 0.5 * 2**30) + 1e-6 * (10 * (ranks - 1) * 2 + 3)
    assert reduce["latency"] + reduce["traffic"] * size / reduce["bandwidth"] == pytest.approx(published)
    assert fit["all_gather"][2] == {"bandwidth_all_groups": 4 * 2**30}
    assert all(p.meta["laws"]["inter_node"] == {"efficiency": 0.9} for p in imported.values())


def test_dispatch_and_combine(imported: dict[str, Profile]) -> None:
    table = imported["h100_sxm"].table("expert_exchange")
    deepep = table.where(table["dispatcher"] == "deepep")
    shape = ("op", "row_bytes", "dtype", "inter", "sms", "seconds")
    assert sorted(zip(*(deepep[name].tolist() for name in shape), strict=True)) == [
        ("combine", 2 * 7168, "bf16", 1, 20, pytest.approx(1e-3)),
        ("combine", 2 * 7168, "bf16", 2, 24, pytest.approx(2.1e-3)),
        ("dispatch", 7168 + 4 * 56, "fp8", 1, 20, pytest.approx(500e-6)),  # one fp32 scale for 128 values
        ("dispatch", 7168 + 4 * 56, "fp8", 2, 24, pytest.approx(850e-6)),
    ]
    assert not len(imported["h200_sxm"].table("expert_exchange")), "the times of another GPU"
    hybrid = table.where((table["dispatcher"] == "hybridep") & (table["op"] == "combine") & (table["inter"] == 2))
    rows_to_nodes = 4096 * 2 * (1 - np.prod([(64 - i) / (128 - i) for i in range(8)]))  # 8 of 128 experts, 64 per node
    assert hybrid["seconds"] == pytest.approx([rows_to_nodes * 14336 / rate for rate in (52.00e9, 68.00e9, 62.95e9)], rel=1e-5)


def test_wrong_input_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pd = pytest.importorskip("pandas")
    assert main([str(tmp_path / "none")]) == 2
    assert main([str(tmp_path), "--output", str(tmp_path / "out")]) == 2, "nothing to import"
    pd.DataFrame({"m": [1]}).to_csv(tmp_path / "simumax_b200_gemm.csv")
    assert main([str(tmp_path), "--output", str(tmp_path / "out")]) == 2, "a column is missing"
    assert len(capsys.readouterr().err.strip().splitlines()) == 3
    assert not (tmp_path / "out").exists(), "nothing is half written"
    with pytest.raises(InputError, match="h100_sxm"):
        device("h100")


def test_thinning_is_even_and_independent_of_times() -> None:
    m, n = (a.ravel().astype(float) for a in np.meshgrid(np.arange(100), np.arange(100)))
    rows = {"m": m, "n": n, "seconds": np.ones(10_000)}
    keep = m >= 90
    mask = thinned(rows, keep, 0.2, ("m", "n"))
    other_times = thinned(rows | {"seconds": np.arange(10_000.0)}, keep, 0.2, ("m", "n"))
    assert mask[keep].all() and (mask == other_times).all()
    per_m = np.bincount(m[mask & ~keep].astype(int), minlength=90)
    assert per_m.min() >= 18 and per_m.max() <= 22  # a fifth of every hundred
    shuffled = np.random.default_rng(0).permutation(10_000)
    reordered = thinned({name: column[shuffled] for name, column in rows.items()}, keep[shuffled], 0.2, ("m", "n"))
    assert (reordered == mask[shuffled]).all(), "the order of the file does not matter"


def test_merging_and_spacing() -> None:
    rows = {"op": np.array(["b", "a", "b", "b"]), "size": np.array([1, 1, 1, 1]), "seconds": np.array([4.0, 7, 1, 2])}
    merged = merge_repeats(rows, ("op", "size"))
    assert merged["op"].tolist() == ["a", "b"] and merged["seconds"].tolist() == [7, 2]
    assert merged["repeats"].tolist() == [1, 3] and merged["spread"][1] == 0.75 and np.isnan(merged["spread"][0])
    assert groups(rows, ("op",)).tolist() == [1, 0, 1, 1]
    curve = {"op": np.repeat("x", 1000), "bytes": np.arange(1, 1001)}
    chosen = curve["bytes"][spaced(curve, ("op",), "bytes", 10)]
    assert len(chosen) == 10 and chosen[0] == 1 and chosen[-1] == 1000
    assert np.abs(np.diff(np.log(chosen))[5:] - np.log(1000) / 9).max() < 0.05


def test_attention_flops() -> None:
    shape = {"batch": 2, "heads": 8, "seq_q": 1024, "seq_kv": 1024, "head_dim": 128, "v_head_dim": 128, "causal": 0}
    rows = {name: np.full(3, value) for name, value in shape.items()}
    rows["pass"] = np.array(["forward", "backward", "forward_backward"])
    forward = 4.0 * 2 * 8 * 1024**2 * 128
    assert attention_flops(rows) == pytest.approx([forward, 2.5 * forward, 3.5 * forward])


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_shipped_profile(name: str) -> None:
    torch = pytest.importorskip("torch")
    profile = read_profile(SHIPPED / f"{name}.pt")
    plain = torch.load(SHIPPED / f"{name}.pt", weights_only=True)
    assert profile.device == DEVICES[name] and set(plain["tables"]) == set(profile.tables)
    for op, table in profile.tables.items():
        sources = {repository(str(s)) for s in np.unique(table["source"])}
        assert sources <= set(LICENCES), f"{op}: measurements that may not be shipped"
        assert all(table["dtype"]) and len(table)
    linear = profile.table("linear")
    peak = np.array([profile.device.peak_flops[d] for d in linear["dtype"]])
    flops = 2.0 * linear["batch"] * linear["m"] * linear["n"] * linear["k"]
    assert (flops <= 0.98 * peak * linear["seconds"]).all()
    assert profile.meta["sustained"]["short_loop"] is True and profile.meta["licences"]


def test_shipped_profiles_are_small_and_documented() -> None:
    assert sum((SHIPPED / f"{name}.pt").stat().st_size for name in RECIPES) < 10e6
    page = (SHIPPED / "SOURCES.md").read_text()
    assert all(name in page for name in (*RECIPES, *LICENCES, *LICENCES.values()))
