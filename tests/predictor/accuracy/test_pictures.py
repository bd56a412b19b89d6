"""Pictures of a small fp32 profile with one measurement per shape: all points, correct type, units and numbers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from predictor.accuracy import pictures_attention, pictures_comm, pictures_kernels, pictures_memory
from predictor.accuracy.crossval import formats
from predictor.accuracy.pictures_axes import flops_axis, new_figure, rate_unit, subtitle_of
from predictor.accuracy.pictures_scatter import band_over, draw_all_rows
from predictor.accuracy.score import Score
from predictor.estimate import Estimate
from predictor.fitted import fit_all
from predictor.kernels.memory_bound import MemoryBoundModel
from predictor.network.collective import CollectiveModel
from profiler.profile.profile import Device, Profile, Table

DEVICE = Device("some CPU", {"bf16": 2e11, "fp32": 1e11}, 1e10, 3e10, 1, 2, 4e9, 4e9)
KINDS = {f"kind_{i}": 10 for i in range(13)} | {"norm": 5}


def grid_gemms(rows: int, dtype: str) -> Table:
    m, n, k = (64 * (1 + np.arange(rows) % period) for period in (37, 31, 29))
    columns = {"m": m, "n": n, "k": k, "batch": 1, "layout": "TN", "dtype": dtype, "seconds": 2e-5 + 2.0 * m * n * k / 9e10}
    return Table.from_columns("linear", columns)


def grid_attention(rows: int) -> Table:
    seq, heads = 64 * 2 ** (np.arange(rows) % 4), 2 ** (np.arange(rows) % 5)
    seconds = 5e-5 + 2.0 * heads * seq * (seq + 1) * 128 / 5e10
    columns = {"batch": 1, "seq_q": seq, "seq_kv": seq, "heads": heads, "kv_heads": heads, "head_dim": 128, "causal": 1}
    return Table.from_columns("flash_attn", {**columns, "pass": "forward", "kernel": "k", "dtype": "fp32", "seconds": seconds})


def streams() -> Table:
    size = np.concatenate([2.0 ** (14 + np.arange(rows)) for rows in KINDS.values()])
    columns = {"kind": np.repeat(list(KINDS), list(KINDS.values())), "bytes": size.astype(np.int64)}
    return Table.from_columns("memory_bound", {**columns, "seconds": 4e-6 + size / 1.5e10, "dtype": "fp32"})


def messages(op: str) -> Table:
    size = 4.0 ** np.arange(5, 15)
    columns = {"intra": 2, "inter": 1, "bytes": size.astype(np.int64), "seconds": 1e-4 + size / 2e9, "dtype": "fp32"}
    return Table.from_columns(op, columns)


@pytest.fixture(scope="module")
def profile() -> Profile:
    tables = {
        "linear": grid_gemms(60, "fp32"),
        "flash_attn": grid_attention(20).where(np.arange(20) % 4 != 1),  # three lengths per head layout: no curve
        "memory_bound": streams(),
        "all_reduce": messages("all_reduce"),
    }
    return Profile("small", DEVICE, tables)


@pytest.fixture(scope="module")
def fits(profile: Profile) -> dict[str, Any]:
    return fit_all(profile)


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Collect the figures that are saved, by file name."""
    kept: dict[str, Any] = {}
    for module in (pictures_kernels, pictures_attention, pictures_memory):

        def save(figure: Any, path: Path, write: Any = module.save) -> Path:
            kept[path.name] = figure
            return write(figure, path)  # type: ignore[no-any-return]

        monkeypatch.setattr(module, "save", save)
    return kept


def test_a_small_fp32_profile_is_drawn(profile: Profile, fits: dict[str, Any], figures: dict[str, Any], tmp_path: Path) -> None:
    from PIL import Image

    paths = pictures_kernels.draw(profile, fits, tmp_path, [])
    assert [path.name for path in paths] == ["linear.jpg", "flash_attn.jpg", "memory_bound.jpg"]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(path.name for path in paths)  # no temporary files
    for path in paths:
        with Image.open(path) as picture:
            assert picture.format == "JPEG"
            assert picture.width >= 1200 and np.ptp(np.asarray(picture)) > 200
    linear, attention = figures["linear.jpg"], figures["flash_attn.jpg"]
    assert linear.get_suptitle() == "Matrix multiplication (fp32, forward) on some CPU"
    assert "16-bit" not in attention.get_suptitle() and "(fp32, forward; k)" in attention.get_suptitle()
    assert "only 15 measurements, too few to fit" in attention.get_suptitle()  # a fit needs thirty
    assert linear.axes[0].get_ylabel() == "achieved GFLOP/s"
    assert linear.axes[0].get_lines()[0].get_ydata()[0] == 100.0  # the peak of fp32, not of bf16
    assert len(linear.axes[1].collections[-1].get_offsets()) == 60
    assert "none, too few measurements" in linear.get_supxlabel()


def test_every_measurement_is_shown_measured_and_predicted() -> None:
    flops = np.geomspace(1e6, 1e10, 40)
    seconds = flops / 5e10
    found = Estimate(seconds * 1.25, np.full(40, 0.1), np.zeros(40, dtype=np.int8))
    figure = new_figure("", "", (8, 4))
    draw_all_rows(figure, "FLOPs", flops, seconds, found, 1e11)
    left, right = figure.axes
    measured, predicted = (points.get_offsets() for points in left.collections[-2:])
    assert np.asarray(measured) == pytest.approx(np.stack([flops, np.full(40, 50.0)], axis=1))
    assert np.asarray(predicted) == pytest.approx(np.stack([flops, np.full(40, 40.0)], axis=1))
    assert np.asarray(right.collections[-1].get_offsets())[:, 1] == pytest.approx(1.25)
    at, factor = band_over(flops, found.relative_std)
    assert (at[0], at[-1]) == (flops[0], flops[-1])
    assert factor == pytest.approx(np.exp(0.1645))


def test_curves_where_shapes_repeat(profile: Profile) -> None:
    m = 64 * np.arange(1, 9)
    columns = {"m": np.tile(m, 2), "n": np.repeat([512, 1024], 8), "k": 512, "seconds": 1e-3, "dtype": "fp32"}
    assert pictures_kernels.weight_shapes(Table.from_columns("linear", columns)) == [(512, 512), (1024, 512)]
    fewer = Table.from_columns("linear", {**columns, "m": np.tile(np.minimum(m, 5 * 64), 2)})  # only five different m
    assert pictures_kernels.weight_shapes(fewer) == []
    assert pictures_kernels.weight_shapes(profile.table("linear")) == []
    assert pictures_attention.head_series(profile.table("flash_attn")) == []
    (series,) = pictures_attention.head_series(grid_attention(20).where(np.arange(20) % 5 == 2))
    assert sorted(series["seq_q"]) == [64, 128, 256, 512] and set(series["heads"]) == {4}


def test_memory_bound_panels_state_launch_and_rate(
    profile: Profile, fits: dict[str, Any], figures: dict[str, Any], tmp_path: Path
) -> None:
    fit, rows = fits["memory"], profile.table("memory_bound")
    score = Score("memory_bound", "all kinds", "five folds", 130, 0.123, 0.3, 0.0, 0.9, 0.4)
    pictures_memory.draw_memory_bound(fit, rows, "some CPU", [score], tmp_path / "memory_bound.jpg")
    figure = figures["memory_bound.jpg"]
    titles = [axes.get_title() for axes in figure.axes]
    assert len(titles) == 12 and titles[0] == "kind 0\n4 µs + bytes / 15 GB/s"
    assert all("kind" in title for title in titles)  # the kinds with most measurements
    assert "(fp32) on some CPU" in figure.get_suptitle() and "five folds 12.3% (40.0%)" in figure.get_suptitle()
    assert "2 kinds" in figure.get_supxlabel()
    assert len(figure.axes[0].collections[-1].get_offsets()) == 10


def test_a_kind_with_too_few_measurements_is_marked() -> None:
    fit = MemoryBoundModel.fit(streams(), DEVICE)
    title = "norm: 5 measurements, too few to fit\nassumed 3 µs + bytes / 15.6 GB/s"
    assert pictures_memory.panel_title(fit, "norm", 5) == title


def test_collectives_beyond_the_measured_sizes_are_dashed(profile: Profile, fits: dict[str, Any]) -> None:
    def drawn(table: Table, fit: CollectiveModel, inter: int) -> Any:
        figure = new_figure("", "", (11, 4.4))
        pictures_comm._draw_group(figure, Profile("p", DEVICE, {"all_reduce": table}), fit, "all_reduce", 2, inter)
        return figure

    fit = fits["collectives"]
    figure = drawn(profile.table("all_reduce"), fit, 1)
    solid, dashed = figure.axes[0].get_lines()
    sizes, shown = np.asarray(solid.get_xdata()), np.isfinite(solid.get_ydata())
    assert (sizes[shown].min(), sizes[shown].max()) == (2.0**10, 4.0**14)  # the measured sizes
    assert sizes[np.isfinite(dashed.get_ydata())].min() == 4.0**14
    assert (solid.get_label(), dashed.get_label()) == ("fit", "fit, extrapolated")
    assert "2 ranks in one node" in figure.get_suptitle() and "GPU" not in figure.get_suptitle()
    over = messages("all_reduce")
    figure = drawn(Table({**over.columns, "inter": np.full(len(over), 2)}), fit, 2)
    assert figure.axes[0].get_lines()[0].get_label() == "usual efficiency: too few measurements to fit"


def test_high_bandwidth_is_written_in_full() -> None:
    size = np.geomspace(2**16, 2**32, 20)
    columns = {"kind": "norm", "bytes": size.astype(np.int64), "seconds": 2e-6 + size / 1.9874e12}
    fit = MemoryBoundModel.fit(Table.from_columns("memory_bound", columns), replace(DEVICE, memory_bandwidth=3e12))
    assert pictures_memory.panel_title(fit, "norm", 20) == "norm\n2 µs + bytes / 1,990 GB/s"


def test_an_axis_of_flops_shows_two_powers_of_ten() -> None:
    figure = new_figure("", "", (4, 4))
    axes = figure.subplots()
    axes.plot([2e10, 7e10], [1, 2])
    flops_axis(axes, "FLOPs")
    assert axes.get_xlim() == pytest.approx((1e10, 1e11))
    assert formats(Table({"dtype": np.array(["fp8", "bf16", "fp16"])})) == "bf16, fp16 and fp8"


def test_units_and_captions() -> None:
    assert rate_unit(9.9e14) == ("TFLOP/s", 1e12) and rate_unit(1e11) == ("GFLOP/s", 1e9)
    errors = SimpleNamespace(mape=0.018, naive_mape=0.057)
    scores: Any = [SimpleNamespace(regime=r, split=s, **vars(errors)) for r, s in (("a", "x"), ("a", "y"), ("b", "x"))]
    assert subtitle_of(scores, "FLOPs", "but").endswith("only): a: x 1.8% (5.7%), y 1.8% (5.7%)\nb: x 1.8% (5.7%)\nbut")
