"""Properties of the kernel fits: finite, positive, growing with work, calibrated uncertainty, small held-out errors."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from predictor.accuracy.crossval import naive_seconds
from predictor.estimate import Basis, Estimate
from predictor.kernels.attn_physics import AttnMachine, AttnPhysics, AttnShape, attn_times
from predictor.kernels.attn_rows import shape_of
from predictor.kernels.flash_attn import FlashAttnModel, default_backward_ratio
from predictor.kernels.gemm_fit import own_forward_rows
from predictor.kernels.gemm_layout import GemmLayout
from predictor.kernels.gemm_physics import GemmMachine, GemmPhysics, gemm_times
from predictor.kernels.grouped_linear import GroupedLinearModel
from predictor.kernels.linear import LinearModel
from predictor.kernels.memory_bound import MemoryBoundModel
from predictor.kernels.sources import is_serving
from predictor.kernels.trees import Trees
from profiler.errors import InputError
from profiler.profile.profile import Device, Profile, Table
from profiler.profile.store import read_profile

PROFILE = Path(__file__).resolve().parents[3] / "prof_data" / "h100_sxm.pt"
SIZE = st.integers(1, 2**31)
DEVICE = Device("test", {"bf16": 1e15, "fp16": 1e15, "fp8": 2e15}, 80e9, 3e12, 132, 8, 4.5e11, 5e10)


def _thinned(table: Table, rows: int) -> Table:
    keep = np.zeros(len(table), dtype=bool)
    keep[np.random.default_rng(0).permutation(len(table))[:rows]] = True
    return table.where(keep)


@pytest.fixture(scope="module")
def profile() -> Profile:
    return read_profile(PROFILE)


@pytest.fixture(scope="module")
def linear_rows(profile: Profile) -> Table:
    table = profile.table("linear")
    return _thinned(own_forward_rows(table.where(table["dtype"] == "bf16")), 3000)


@pytest.fixture(scope="module")
def held_out(linear_rows: Table) -> np.ndarray:
    return np.random.default_rng(1).random(len(linear_rows)) < 0.2


@pytest.fixture(scope="module")
def linear(linear_rows: Table, held_out: np.ndarray, profile: Profile) -> LinearModel:
    return LinearModel.fit(linear_rows.where(~held_out), profile.device)


@pytest.fixture(scope="module")
def attention(profile: Profile) -> FlashAttnModel:
    table = profile.table("flash_attn")
    return FlashAttnModel.fit(_thinned(table, 3000), profile.device)


@given(st.lists(st.tuples(SIZE, SIZE, SIZE, SIZE), min_size=1, max_size=20))
@settings(max_examples=30, deadline=None)
def test_linear_is_positive_and_finite_everywhere(linear: LinearModel, shapes: list[tuple[int, int, int, int]]) -> None:
    m, n, k, batch = np.array(shapes).T
    for dtype in ("bf16", "fp8"):
        found = linear.predict(m, n, k, batch, layout=GemmLayout.NT, dtype=dtype, accumulate=True)
        assert np.isfinite(found.seconds).all() and (found.seconds > 0).all()
        assert np.isfinite(found.relative_std).all() and (found.relative_std > 0).all()


@given(st.lists(st.tuples(*[SIZE] * 7, st.booleans(), st.booleans()), min_size=1, max_size=20))
@settings(max_examples=30, deadline=None)
def test_attention_is_positive_and_finite_everywhere(attention: FlashAttnModel, shapes: list[tuple[int, ...]]) -> None:
    found = attention.predict(*np.array(shapes).T)
    assert np.isfinite(found.seconds).all() and (found.seconds > 0).all()
    assert np.isfinite(found.relative_std).all() and (found.relative_std > 0).all()


@given(st.tuples(SIZE, SIZE, SIZE), st.integers(0, 2), st.integers(1, 2**20))
@settings(max_examples=100, deadline=None)
def test_gemm_physics_never_decreases(shape: tuple[int, int, int], grown: int, by: int) -> None:
    machine, fit = GemmMachine(1e15, 3e12, 132, 2.0, 2.0), GemmPhysics()
    small = [np.array([float(s)]) for s in (*shape, 1)]
    large = [a + by if i == grown else a for i, a in enumerate(small)]
    tiles_more = [a * 256 if i == grown else a for i, a in enumerate(small)]  # a smaller increase may stay inside one tile
    before = gemm_times(fit, machine, *small).seconds
    assert gemm_times(fit, machine, *large).seconds >= before * (1 - 1e-12)
    assert gemm_times(fit, machine, *tiles_more).seconds > before


@given(
    st.tuples(*(st.integers(low, high) for low, high in ((1, 512), (1, 2**18), (0, 2**18), (1, 128), (1, 128)))),
    st.integers(0, 3),
    st.booleans(),
)
@settings(max_examples=100, deadline=None)
def test_attention_physics_never_decreases(shape: tuple[int, ...], grown: int, causal: bool) -> None:
    batch, seq, more, heads, group = shape
    machine, fit = AttnMachine(1e15, 3e12, 132), AttnPhysics()

    def seconds(batch: float, seq: float, more: float, heads: float) -> float:
        call = (batch, seq, seq + more, heads, max(heads // group, 1), 128, 128, causal)
        return float(attn_times(fit, machine, AttnShape._make(np.array([float(x)]) for x in call)).seconds[0])

    sizes = [batch, seq, more, heads]
    assert seconds(*(s + (i == grown) for i, s in enumerate(sizes))) >= seconds(*sizes) * (1 - 1e-9)


def test_doubling_a_gemm_takes_longer(linear: LinearModel) -> None:
    """The fitted time may dip at steps of tiles and kernels, which are real, but a large GEMM of twice the size takes longer.

    Below 50 microseconds idle multiprocessors take much of the doubled work without extra time.
    """
    rng = np.random.default_rng(2)
    m, n, k = (64 * rng.integers(8, 256, 3000) for _ in range(3))
    once = linear.predict(m, n, k).seconds
    for twice in ((2 * m, n, k), (m, 2 * n, k), (m, n, 2 * k)):
        seconds = linear.predict(*twice).seconds
        assert (seconds > 0.9 * once).all()
        assert (seconds > 1.5 * once)[once > 50e-6].all()


def test_doubling_attention_takes_longer(attention: FlashAttnModel) -> None:
    rng = np.random.default_rng(3)
    batch, seq, heads = rng.integers(1, 9, 3000), 256 * rng.integers(4, 64, 3000), 2 ** rng.integers(2, 7, 3000)
    for backward in (False, True):
        once = attention.predict(batch, seq, seq, heads, heads, 128, 128, True, backward).seconds
        long = attention.predict(batch, 2 * seq, 2 * seq, heads, heads, 128, 128, True, backward).seconds
        many = attention.predict(2 * batch, seq, seq, heads, heads, 128, 128, True, backward).seconds
        # the time of small calls is that of the loop over keys of one block
        assert (long > 1.3 * once).all() and (many > 0.9 * once).all()
        assert (many > 1.5 * once)[once > 400e-6].all()


def test_linear_beats_the_flops_baseline_on_held_out_data(
    linear: LinearModel, linear_rows: Table, held_out: np.ndarray
) -> None:
    large = (linear_rows["m"] >= 1024) & (linear_rows["n"] >= 512) & (linear_rows["k"] >= 512)
    queries = linear_rows.where(held_out & large)
    found = linear.predict(queries["m"], queries["n"], queries["k"])
    error = np.abs(found.seconds / queries["seconds"] - 1)
    flops = 2.0 * linear_rows["m"] * linear_rows["n"] * linear_rows["k"]
    seen = ~held_out & large
    naive = naive_seconds(flops[seen], linear_rows["seconds"][seen], flops[held_out & large])
    assert error.mean() < 0.03
    assert error.mean() < 0.6 * np.abs(naive / queries["seconds"] - 1).mean()
    inside = np.abs(np.log(found.seconds / queries["seconds"])) <= 1.645 * found.relative_std
    assert 0.85 <= inside.mean() <= 0.985


def test_attention_matches_published_training_kernels(profile: Profile, attention: FlashAttnModel) -> None:
    """The fit sees serving kernels only; without their copy to the KV cache it must agree with published FlashAttention 3."""
    table = profile.table("flash_attn")
    rows = table.where((table["kernel"] == "fa3") & (table["pass"] == "forward") & ~is_serving(table["source"]))
    ratio = rows["seconds"] / attention.predict(*shape_of(rows)).seconds
    assert len(rows) >= 30 and 0.9 < np.median(ratio) < 1.1


def test_serving_copy_is_separated_by_kv_heads() -> None:
    truth, machine = AttnPhysics(cache=1.2), AttnMachine(1e15, 3e12, 132)
    grid = np.meshgrid([1.0, 4.0, 16.0], [512.0, 2048.0, 8192.0], [8.0, 32.0, 64.0], [1.0, 8.0])
    batch, seq, heads, group = (axis.ravel() for axis in grid)
    ones = np.ones(len(batch))
    shape = AttnShape(batch, seq, seq, heads, heads / group, 128 * ones, 128 * ones, ones)
    times = attn_times(truth, machine, shape)
    columns = {name: column.astype(np.int64) for name, column in shape._asdict().items()}
    words = {"pass": "forward", "dtype": "bf16", "source": "ai-dynamo/serving", "kernel": "fa"}
    table = Table.from_columns("flash_attn", {**columns, **words, "seconds": times.seconds + times.cache})
    fit = FlashAttnModel.fit(table, DEVICE)
    training, serving = fit.predict(*shape), fit.predict(*shape, serving=True)
    assert np.abs(training.seconds / times.seconds - 1).max() < 0.1
    assert np.abs(serving.seconds / (times.seconds + times.cache) - 1).max() < 0.05
    assert (training.basis > Basis.MEASURED).all()  # serving calls do more: they are not in place of training ones


def test_backward_defaults_and_causal_area(attention: FlashAttnModel) -> None:
    def shape(seq: int, v_head_dim: int) -> AttnShape:
        head_dim = 128 if v_head_dim == 128 and seq else 192
        return AttnShape._make(np.array([float(x)]) for x in (1, seq, seq, 32, 8, head_dim, v_head_dim, 1))

    assert default_backward_ratio(shape(512, 128)) == 3.2 and default_backward_ratio(shape(8192, 128)) == 2.9
    assert default_backward_ratio(shape(8192, 64)) == 3.5
    assert shape(5, 128).keys_per_query == 3.0  # 1 + 2 + 3 + 4 + 5 = 15 pairs for 5 queries
    first, second, whole = attention.predict(1, [4096, 4096, 8192], [4096, 8192, 8192], 32, 8, 128, 128).seconds
    assert first < second < whole and 0.8 < (first + second) / whole < 1.3


@pytest.mark.parametrize(
    ("peaks", "link_kind", "slower"),
    [
        ({"fp8": 2e15}, "NVLink 4", 1 / 0.629),
        ({}, "NVLink 3", 1.0),
        ({"fp8": 2e15, "mxfp8": 2e15}, "NVLink 5", 1.0),
        ({"fp8": 2e15}, "xGMI", 1.0),
    ],
)
def test_tf32_gemms_with_transposed_operands_are_slow_on_hopper(
    profile: Profile, peaks: dict[str, float], link_kind: str, slower: float
) -> None:
    device = replace(DEVICE, peak_flops={"bf16": 1e15, "tf32": 5e14, **peaks}, link_kind=link_kind)
    fit = LinearModel.fit(profile.table("linear").where(np.zeros(len(profile.table("linear")), dtype=bool)), device)
    shape = (4096, 4096, 4096)
    for layout, prior in ((GemmLayout.NN, 1.005), (GemmLayout.NT, 1.03)):
        tf32, half = (
            fit.predict(*shape, layout=layout, dtype=dtype).seconds / fit.predict(*shape, dtype=dtype).seconds
            for dtype in ("tf32", "bf16")
        )
        assert half == pytest.approx(prior) and tf32 == pytest.approx(prior * slower)


@pytest.mark.parametrize("name", ["linear", "attention", "memory_bound", "grouped"])
def test_arrays_round_trip(name: str, linear: LinearModel, attention: FlashAttnModel, profile: Profile) -> None:
    rng = np.random.default_rng(4)
    a, b, c = (rng.integers(1, 20000, 200) for _ in range(3))
    memory = MemoryBoundModel.fit(profile.table("memory_bound"), profile.device)
    grouped = GroupedLinearModel.fit(profile.table("grouped_linear"), linear)
    cases: dict[str, tuple[Any, Callable[[Any], Estimate]]] = {
        "linear": (linear, lambda x: x.predict(a, b, c, layout=GemmLayout.NN)),
        "attention": (attention, lambda x: x.predict(1, a, a, 32, 8, 128, 128, True, b > 9000)),
        "memory_bound": (memory, lambda x: x.predict("norm", a * b)),
        "grouped": (grouped, lambda x: x.predict(8, a, b, c, passes=2)),
    }
    fit, predict = cases[name]
    arrays = fit.to_arrays()
    assert all(isinstance(array, np.ndarray) and array.dtype != object for array in arrays.values())
    for before, after in zip(predict(fit), predict(type(fit).from_arrays(arrays)), strict=True):
        assert np.array_equal(before, after)


@pytest.mark.parametrize("weighted", [False, True])
def test_trees_equal_scikit_learn(weighted: bool) -> None:
    """Also for values that were not learnt from; the first column has few distinct values, the others many."""
    from sklearn.ensemble import HistGradientBoostingRegressor

    random = np.random.default_rng(5)
    x, unseen = (np.column_stack([random.integers(0, 40, rows), random.normal(size=(rows, 5))]) for rows in (2000, 999))
    target, settings = np.sin(x[:, 0]) + x[:, 1] * x[:, 2], {"max_iter": 60, "max_depth": 8}
    weights = random.choice([1.0, 2.0], 2000) if weighted else None
    trees = Trees.fit(x, target, settings, weights).leaf_sets()
    model = HistGradientBoostingRegressor(early_stopping=False, random_state=0, **settings)
    model.fit(x, target, sample_weight=weights)
    assert np.abs(trees.predict(x) - model.predict(x)).max() < 1e-9
    assert np.abs(trees.predict(unseen) - model.predict(unseen)).max() < 1e-9


def test_basis_and_uncertainty_show_distance_to_data(linear: LinearModel, linear_rows: Table, held_out: np.ndarray) -> None:
    row = int(np.flatnonzero(~held_out & (linear_rows["m"] >= 1024))[0])
    measured = linear.predict(linear_rows["m"][row], linear_rows["n"][row], linear_rows["k"][row])
    assert measured.basis == Basis.MEASURED
    near, far, further = (linear.predict(m, 4096, 4096) for m in (4001, 2**21, 2**26))
    assert near.basis == Basis.INTERPOLATED and far.basis == Basis.EXTRAPOLATED
    assert near.relative_std < far.relative_std < further.relative_std
    assert linear.predict(4096, 4096, 4096, dtype="fp8").basis == Basis.ROOFLINE
    with pytest.raises(InputError, match="int3"):
        linear.predict(1, 1, 1, dtype="int3")


def test_scales_of_layouts_and_laboratories_are_separated() -> None:
    """Another laboratory is 1.3 times slower, and all weight gradients are 1.1 times slower: both factors must be recovered."""
    rng = np.random.default_rng(6)
    m, n, k = (64 * rng.integers(8, 128, 120) for _ in range(3))
    machine, sizes = GemmMachine(1e15, 3e12, 132, 2.0, 2.0), [a.astype(np.float64) for a in (m, n, k)]
    base = gemm_times(GemmPhysics(), machine, sizes[0], sizes[1], sizes[2], np.ones(120)).seconds
    own = np.arange(120) < 60
    layout = np.where(own | (np.arange(120) % 2 == 0), "TN", "NT")
    seconds = base * np.where(own, 1.0, 1.3) * np.where(layout == "NT", 1.1, 1.0)
    source = np.where(own, "here", "MooreThreads/SimuMax:x")
    columns = {"m": m, "n": n, "k": k, "batch": 1, "layout": layout, "accumulate": 0, "dtype": "bf16"}
    table = Table.from_columns("linear", {**columns, "seconds": seconds, "source": source})
    fit = LinearModel.fit(table, DEVICE)
    forward, weight = fit.predict(4096, 4096, 4096, layout=[GemmLayout.TN, GemmLayout.NT]).seconds
    assert 1.07 < weight / forward < 1.11
    scales = fit.lab_scale(Profile("test", DEVICE, {"linear": table}))
    assert list(scales) == ["MooreThreads/SimuMax:x"] and abs(scales["MooreThreads/SimuMax:x"][0] - 1.3) < 0.05


def test_grouped_gemms_respect_the_peak(linear: LinearModel) -> None:
    fit = GroupedLinearModel.fit(Table.from_columns("grouped_linear", {}), linear)
    passes = fit.predict(8, 2048, 4096, 2048, passes=[0, 1, 2]).seconds
    assert passes[0] < passes[2] and (passes > 2 * 8 * 2048 * 4096 * 2048 / 989e12).all()
    assert (fit.predict(16, 2048, 4096, 2048).seconds > 1.6 * passes[0]).all()


@given(st.lists(SIZE, min_size=2, max_size=50), st.sampled_from(["norm", "residual", "rope", "quantize", "adam"]))
@settings(max_examples=30, deadline=None)
def test_memory_bound_grows_and_never_exceeds_memory_bandwidth(profile: Profile, sizes: list[int], kind: str) -> None:
    fit = MemoryBoundModel.fit(_thinned(profile.table("memory_bound"), 300), profile.device)
    size = np.sort(np.array(sizes))
    found = fit.predict(kind, size)
    assert (np.diff(found.seconds) >= 0).all()
    assert (found.seconds > size / profile.device.memory_bandwidth).all()


def test_estimating_thousands_of_shapes_is_quick(linear: LinearModel, attention: FlashAttnModel) -> None:
    rng = np.random.default_rng(7)
    a, b, c = (rng.integers(1, 30000, 3000) for _ in range(3))
    calls: tuple[Callable[[], Estimate], ...] = (
        lambda: linear.predict(a, b, c),
        lambda: attention.predict(1, a, a, 32, 8, 128, 128),
    )
    for call in calls:
        spent = []
        for _ in range(3):
            start = time.perf_counter()
            call()
            spent.append(time.perf_counter() - start)
        assert min(spent) < 0.5  # about 0.08 s on an idle core
