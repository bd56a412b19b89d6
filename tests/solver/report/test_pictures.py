"""Pictures of a search: what they draw, read back from the figure."""

from __future__ import annotations

from typing import Any

import numpy as np
from toy import make_problem, toy_cost

from solver.report.pictures import scaling_figure, stages_figure
from solver.search.search import SearchResult, search
from solver.spec.model import ModelSpec
from solver.step.per_stage import memory_of_stages

MODEL = ModelSpec(
    name="small",
    hidden_size=512,
    intermediate_size=1536,
    num_hidden_layers=8,
    num_attention_heads=16,
    num_key_value_heads=4,
    head_dim=32,
    vocab_size=1000,
)


def result(world: int, **fixed: Any) -> SearchResult:
    return search(make_problem(MODEL, world, toy_cost(), 512), 32, top=1, fixed=fixed)


def test_bars_of_stages_add_up_to_the_step_and_to_the_memory() -> None:
    found = result(16, pp=4).best
    times, memory = stages_figure(found).axes
    step, device = found.times.seconds[0], memory_of_stages(found, 0).device / 2**30
    tops = [np.zeros(4), np.zeros(4)]
    for panel, axes in enumerate((times, memory)):
        for bar in axes.patches:
            stage = round(bar.get_x() + bar.get_width() / 2) - 1
            tops[panel][stage] = max(tops[panel][stage], bar.get_y() + bar.get_height())
    np.testing.assert_allclose(tops[0], step, rtol=0.01)  # parts below 0.2% are not drawn
    np.testing.assert_allclose(tops[1], device, rtol=0.01)
    assert times.get_ylabel() == "time of a step [s]" and memory.get_ylabel() == "peak memory per GPU [GiB]"


def test_a_part_has_one_colour_in_the_pictures_of_all_layouts() -> None:
    """One layout waits for tensor-parallel communication, the other recomputes: what both have is drawn alike."""
    colours: list[dict[str, Any]] = []
    for fixed in ({"tp": 2, "recompute": "none"}, {"tp": 1, "recompute": "full"}):
        for axes in stages_figure(result(8, pp=4, **fixed).best).axes:
            handles, names = axes.get_legend_handles_labels()
            bars = [
                (name, bars[0].get_facecolor()) for name, bars in zip(names, handles, strict=True) if name != "memory per GPU"
            ]
            colours.append(dict(bars))
    (tensor, memory), (recomputed, smaller) = colours[:2], colours[2:]
    assert tensor.keys() != recomputed.keys()
    greys = {name for shown in colours for name, (red, green, blue, _) in shown.items() if red == green == blue}
    assert greys == {"pipeline bubble"}
    for one, other in ((tensor, recomputed), (memory, smaller)):
        both = one.keys() & other.keys()
        assert len(both) >= 2 and {name: one[name] for name in both} == {name: other[name] for name in both}


def test_the_scaling_curve_goes_through_the_best_layouts() -> None:
    results = [result(world) for world in (8, 16, 32)]
    axes = scaling_figure(results).axes[0]
    line = axes.lines[0]
    assert list(line.get_xdata()) == [8, 16, 32]
    np.testing.assert_allclose(line.get_ydata(), [float(found.best.tgs[0]) for found in results])
    assert len(axes.texts) == 3
