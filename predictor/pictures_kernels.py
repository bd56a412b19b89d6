"""Pictures of the kernel laws: what was measured, the fitted curve through it, and how far it is to be trusted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from predictor.crossval import flash_attn_scores, linear_rows, linear_scores
from predictor.estimate import Estimate
from predictor.flash_attn import FlashAttnLaw, is_serving, main_rows, shape_of
from predictor.linear import LinearLaw
from predictor.score import Score
from profiler.profile import Profile, Table

_COLOURS = ("#0b3c5d", "#d1495b", "#2e8b57", "#b8860b", "#6a4c93")
_MARKS = ("o", "s", "^", "D", "v")
_BAND = 1.645  # half width of a 90% interval in standard deviations
_TOKENS = 16384  # tokens per call of published attention benchmarks


def draw(profile: Profile, laws: Mapping[str, Any], out_dir: Path, scores: Sequence[Score] | None = None) -> list[Path]:
    """Write linear.jpg and flash_attn.jpg to ``out_dir``; a law without measured rows has no picture.

    laws: holds the fitted ``linears`` and ``attention``. scores: held-out errors to name; measured here if not given.
    """
    out_dir.mkdir(parents=True, exist_ok=True)
    written = []
    rows = linear_rows(profile)
    if len(rows):
        known = linear_scores(profile) if scores is None else [s for s in scores if s.op == "linear"]
        written.append(_draw_linear(profile, laws["linears"], rows, known, out_dir / "linear.jpg"))
    rows = main_rows(profile.table("flash_attn"))
    if len(rows):
        known = flash_attn_scores(profile) if scores is None else [s for s in scores if s.op == "flash_attn"]
        written.append(_draw_attention(profile, laws["attention"], rows, known, out_dir / "flash_attn.jpg"))
    return written


def _draw_linear(profile: Profile, law: LinearLaw, rows: Table, scores: Sequence[Score], path: Path) -> Path:
    figure, (rate, time) = _axes(f"Matrix multiplication (16-bit, forward) on {profile.device.name}", scores)
    for i, (n, k) in enumerate(_weights(rows)):
        chosen = rows.where((rows["n"] == n) & (rows["k"] == k))
        m = _sizes_between(chosen["m"])
        per_row = 2.0 * n * k
        found = law.predict(m, n, k)
        style = {"color": _COLOURS[i], "marker": _MARKS[i]}
        _rate_curve(rate, per_row * m, found, style, f"n {n}, k {k}")
        _rate_points(rate, per_row * chosen["m"], chosen["seconds"], style)
        _time_curve(time, per_row * m, found, style)
        time.plot(per_row * chosen["m"], chosen["seconds"] * 1e6, ls="", ms=3.5, mew=0, **style)
    _label(rate, time, "FLOPs of one product (2 m n k)", profile.device.peak_flops["bf16"])
    return _save(figure, path)


def _draw_attention(profile: Profile, law: FlashAttnLaw, rows: Table, scores: Sequence[Score], path: Path) -> Path:
    serving = bool(is_serving(rows["source"]).mean() > 0.5)
    figure, (rate, training) = _axes(f"Fused attention (16-bit) on {profile.device.name}", scores)
    for i, chosen in enumerate(_head_series(rows)):
        heads, kv_heads, dim, v_dim = (int(chosen[c][0]) for c in ("heads", "kv_heads", "head_dim", "v_head_dim"))
        seq = _sizes_between(chosen["seq_q"])
        found = law.predict(1, seq, seq, heads, kv_heads, dim, v_dim or dim, True, serving=serving)
        style = {"color": _COLOURS[i], "marker": _MARKS[i]}
        flops = _causal_flops(1, seq, heads, dim, v_dim or dim)
        _rate_curve(rate, flops, found, style, f"{heads} head{'s' * (heads > 1)}, {kv_heads} KV, dim {dim}")
        _rate_points(rate, shape_of(chosen).flops, chosen["seconds"], style)
    rate.set(xscale="log", xlabel="useful FLOPs of one call (causal, batch 1)", ylabel="achieved TFLOP/s")
    rate.set_title(f"as measured: {rows['kernel'][0].replace('_', ' ')}", fontsize=10)
    _draw_training(training, law, profile.table("flash_attn"), serving)
    for axis in (rate, training):
        axis.set_ylim(bottom=0)
        axis.grid(True, which="major", alpha=0.25)
        axis.legend(fontsize=8, frameon=False, loc="upper left")
        axis.set_ylim(top=axis.get_ylim()[1] * 1.25)
    return _save(figure, path)


def _draw_training(axis: Any, law: FlashAttnLaw, table: Table, serving: bool) -> None:
    """A training call of 16k tokens, 16 heads of 128, causal, over the sequence length; published kernels as marks."""
    seq = _sizes_between(np.geomspace(512, _TOKENS, 6))
    batch = _TOKENS / seq
    for i, backward in enumerate((False, True)):
        found = law.predict(batch, seq, seq, 16, 16, 128, 128, True, backward)
        flops = _causal_flops(batch, seq, 16, 128, 128) * (2.5 if backward else 1.0)
        _rate_curve(axis, seq, found, {"color": _COLOURS[i]}, "backward" if backward else "forward", flops)
    same = (table["causal"] == 1) & (table["head_dim"] == 128) & (table["heads"] == 16)
    same &= (table["pass"] == "forward") & (table["batch"] * table["seq_q"] == _TOKENS)
    other = table.where(same & ~is_serving(table["source"]))
    for i, kernel in enumerate(np.unique(other["kernel"])):
        mine = other.where(other["kernel"] == kernel)
        rate = shape_of(mine).flops / mine["seconds"] / 1e12
        axis.plot(mine["seq_q"], rate, ls="", marker=_MARKS[i], mfc="none", color="black", label=f"published: {kernel}")
    axis.set(xscale="log", xlabel="sequence length (tokens; 16,384 tokens, 16 heads of 128)", ylabel="achieved TFLOP/s")
    axis.set_xticks(ticks := [512, 1024, 2048, 4096, 8192, 16384], [f"{t:,}" for t in ticks])
    axis.minorticks_off()
    axis.set_title("training" + (": without the serving cache copy" if serving else ""), fontsize=10)


def _weights(rows: Table) -> list[tuple[int, int]]:
    """Up to five weight shapes with many measured m, spread from small to large."""
    pairs, counts = np.unique(np.stack([rows["n"], rows["k"]]), axis=1, return_counts=True)
    often = pairs[:, counts >= min(12, counts.max())]
    shaped = often[:, np.abs(np.log(often[0] / often[1])) < 1.5]  # near square: neither thin nor flat
    often = shaped if shaped.shape[1] >= len(_COLOURS) else often
    order = np.argsort(often[0].astype(float) * often[1], kind="stable")
    picked = order[np.unique((np.linspace(0.1, 0.95, len(_COLOURS)) * (len(order) - 1)).astype(int))]
    return [(int(often[0, i]), int(often[1, i])) for i in picked]


def _head_series(rows: Table) -> list[Table]:
    """Up to five head layouts of batch 1 with many measured lengths, spread from few to many heads."""
    single = rows.where(rows["batch"] == rows["batch"].min())
    columns = np.stack([single["heads"], single["kv_heads"], single["head_dim"]])
    layouts, at, counts = np.unique(columns, axis=1, return_inverse=True, return_counts=True)
    often = np.flatnonzero((counts >= min(6, counts.max())) & (layouts[2] == np.median(single["head_dim"])))
    picked = often[np.unique(np.linspace(0, len(often) - 1, len(_COLOURS)).astype(int))] if len(often) else []
    return [single.where(at.ravel() == i) for i in picked]


def _sizes_between(measured: np.ndarray) -> np.ndarray:
    """Sizes to draw a curve through: multiples of 64, and an octave to each side where few sizes were measured."""
    wide = 2.0 if len(np.unique(measured)) < 4 else 1.0
    sizes = np.geomspace(measured.min() / wide, measured.max() * wide, 160)
    return np.unique(np.maximum(np.round(sizes / 64), 1).astype(np.int64) * 64)


def _causal_flops(batch: Any, seq: Any, heads: int, dim: int, v_dim: int) -> np.ndarray:
    return np.asarray(2.0 * batch * heads * seq * (seq + 1) / 2 * (dim + v_dim))


def _axes(title: str, scores: Sequence[Score]) -> tuple[Any, Any]:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(12.5, 5.4), layout="constrained")
    figure.suptitle(title, fontsize=12)
    parts = [f"{s.split} {s.mape:.1%} ({s.naive_mape:.1%})" for s in scores[:3]]
    if parts:
        said = f"mean error on held-out {scores[0].regime} rows (in brackets by FLOPs alone): " + ", ".join(parts)
        figure.supxlabel(said, fontsize=9, color="#444444")
    return figure, axes


def _rate_curve(
    axis: Any, x: np.ndarray, found: Estimate, style: Mapping[str, str], label: str, flops: np.ndarray | None = None
) -> None:
    work = x if flops is None else flops
    rate, width = work / found.seconds / 1e12, np.exp(_BAND * found.relative_std)
    axis.plot(x, rate, color=style["color"], lw=1.4, label=label)
    axis.fill_between(x, rate / width, rate * width, color=style["color"], alpha=0.15, lw=0)


def _rate_points(axis: Any, flops: np.ndarray, seconds: np.ndarray, style: Mapping[str, str]) -> None:
    axis.plot(flops, flops / seconds / 1e12, ls="", ms=4, mew=0, **style)


def _time_curve(axis: Any, flops: np.ndarray, found: Estimate, style: Mapping[str, str]) -> None:
    micros, width, colour = found.seconds * 1e6, np.exp(_BAND * found.relative_std), style["color"]
    axis.plot(flops, micros, color=colour, lw=1.4)
    axis.fill_between(flops, micros / width, micros * width, color=colour, alpha=0.15, lw=0)


def _label(rate: Any, time: Any, x: str, peak: float) -> None:
    rate.axhline(peak / 1e12, color="grey", lw=1, ls="--")
    across = rate.get_yaxis_transform()
    rate.text(0.99, peak / 1e12, "datasheet peak ", color="grey", ha="right", va="bottom", transform=across)
    rate.set(xscale="log", xlabel=x, ylabel="achieved TFLOP/s", ylim=(0, peak / 1e12 * 1.1))
    said = "dots: measured; line: fit; band: 90% interval"
    rate.legend(fontsize=8, frameon=False, title=said, title_fontsize=8, loc="lower right", alignment="left")
    time.set(xscale="log", yscale="log", xlabel=x, ylabel="time (microseconds)")
    for axis in (rate, time):
        axis.grid(True, which="major", alpha=0.25)


def _save(figure: Any, path: Path) -> Path:
    from matplotlib import pyplot

    figure.savefig(path, dpi=130)
    pyplot.close(figure)
    return path
