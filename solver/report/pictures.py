"""Plots of a search."""

from __future__ import annotations

from pathlib import Path

from profiler.files import replacing
from profiler.profile.profile import GIB
from solver.report.terminal import describe
from solver.search.search import SearchResult


def draw_pareto(result: SearchResult, path: Path) -> None:
    """Plot tokens/GPU/s against memory of every Pareto-optimal layout, and label up to four of them."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    front, problem = result.pareto, result.problem
    memory, tgs = front.memory.device / GIB, front.tgs
    figure, axes = plt.subplots(figsize=(9, 5.5), layout="constrained")
    axes.step(memory, tgs, where="post", color="tab:blue", alpha=0.5)
    axes.plot(memory, tgs, "o", color="tab:blue", ms=4, label=f"{len(front)} Pareto-optimal layouts")
    axes.axvline(problem.cluster.memory_bytes / GIB, color="tab:red", ls="--", label="memory of one GPU")
    named = sorted({0, len(front) // 3, 2 * len(front) // 3, len(front) - 1})
    for index in named:
        right = memory[index] > memory.max() / 2
        axes.annotate(
            describe(front, index), (memory[index], tgs[index]), xytext=(-6 if right else 6, -10), fontsize=7,
            textcoords="offset points", ha="right" if right else "left", va="top",
        )  # fmt: skip
    axes.set_xlabel("peak memory of one GPU [GiB]")
    axes.set_ylabel("tokens / GPU / s")
    axes.set_ylim(0, tgs.max() * 1.08)
    axes.set_title(
        f"{problem.model.name} on {problem.run.world_size} x {problem.cost.device.name}\n"
        f"the fastest of {result.feasible:,} feasible layouts for any memory",
        fontsize=11,
    )
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    with replacing(path) as file:
        figure.savefig(file, format=path.suffix[1:].lower(), dpi=130)
    plt.close(figure)
