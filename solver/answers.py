"""Three lines for scripts and notebooks: ask for the best layout, look at the answer, take it along.

>>> from solver import best_layout
>>> answer = best_layout("configs/7B_internlm2.py", world_size=128, global_batch_tokens=4_194_304)
>>> answer.tgs, answer.fits, answer.layout.tp
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console, RenderableType

from profiler.errors import InputError
from profiler.profile.profile import Profile
from profiler.units import GIB
from solver.api import chosen_profile, described_cluster, load_problem
from solver.formats.config_file import RunConfig
from solver.formats.export import write_export
from solver.options.arguments import check_report
from solver.report.breakdown import breakdown
from solver.report.decision import Decision, decision_of_search
from solver.report.describe import describe
from solver.report.explain import Explanation, explain
from solver.report.html import write_report
from solver.report.memory_timeline import memory_through_step
from solver.report.output import search_dict, solution_dict
from solver.report.picture_timeline import timeline_figure
from solver.report.pictures import memory_figure, pareto_figure, stages_figure
from solver.report.terminal import solutions_table, verdict_text
from solver.report.timeline import step_timeline
from solver.search.best_layout import to_launch
from solver.search.laid_out import search_with_strings
from solver.search.search import SearchResult
from solver.spec.strategy import Strategy
from solver.step.memory import FITS
from solver.step.solutions import Solutions

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame


@dataclass(frozen=True)
class Answer:
    """The result of a search: the best layout, its speed and memory (seconds, bytes), methods to explain, draw and export.

    It prints itself as a report in a terminal and in a notebook.
    """

    result: SearchResult
    profile_text: str  #: what the profile is

    @property
    def best(self) -> Solutions:
        """The best layouts with their times and memory, the fastest first."""
        return self.result.best

    @property
    def layout(self) -> Strategy:
        """The best layout."""
        return self.best.layouts.strategy(0, self.best.problem.run)

    @property
    def tgs(self) -> float:
        """Tokens per GPU and second."""
        return float(self.best.tgs[0])

    @property
    def seconds(self) -> float:
        """Seconds of a step."""
        return float(self.best.times.seconds[0])

    @property
    def interval(self) -> tuple[float, float]:
        """90% prediction interval of a step [s]."""
        return self.why().interval

    @property
    def memory_bytes(self) -> float:
        """Peak memory of a GPU, runtime included."""
        return float(self.best.memory.device[0])

    @property
    def fits(self) -> bool:
        """Whether the upper bound of the memory fits too."""
        return self.best.verdict(0) == FITS

    def why(self, index: int = 0) -> Explanation:
        """Return the step of the ``index``-th best layout line by line."""
        return explain(self.best, index)

    def decision(self) -> Decision:
        """Return the rivals of the best layout, what is one step away, and what each number decides."""
        return decision_of_search(self.result)

    def to_dict(self) -> dict[str, Any]:
        """Return every number, as --json writes them (docs/json.md)."""
        return search_dict(self.result, self.profile_text)

    def to_frame(self) -> DataFrame:
        """Return the best layouts as a pandas table, a row each. Raises InputError where pandas is missing."""
        try:
            from pandas import DataFrame
        except ImportError:
            raise InputError("to_frame() needs pandas: pip install 'foretrain[import]'; or use to_dict()") from None
        rows = [solution_dict(self.best, i) for i in range(len(self.best))]
        plain = ("step_s", "tgs", "mfu", "peak_memory_bytes", "memory_bound_bytes", "verdict")
        return DataFrame([row["layout"] | {name: row[name] for name in plain} for row in rows])

    def plot(self) -> Figure:
        """Return a picture of speed against memory."""
        return pareto_figure(self.result)

    def plot_stages(self) -> Figure:
        """Return a picture of time and memory of every pipeline stage of the best layout."""
        return stages_figure(self.best)

    def plot_step(self) -> Figure:
        """Return a picture of one step of the best layout, pass by pass."""
        return timeline_figure(step_timeline(self.best, 0))

    def plot_memory(self) -> Figure:
        """Return a picture of the memory of every stage through one step of the best layout."""
        return memory_figure(*memory_through_step(self.best), self.best.problem.cluster.memory_bytes)

    def export(self, path: str | Path) -> list[Path]:
        """Write the files that launch the best layout, or one that is sure to fit where that one may not and takes as long.

        As foretrain search --export does (docs/formats.md); returns their paths. Raises InputError where its framework has no
        such file, or cannot run the layout.
        """
        launched = to_launch(self.result)
        problem = launched.problem
        return write_export(Path(path), problem.model, launched.layouts.strategy(0, problem.run), problem.cluster.gpus_per_node)

    def report(self, path: str | Path) -> None:
        """Write one page a colleague can read. Raises InputError where its name does not end in .html."""
        check_report(Path(path))
        command, launched = "solver.best_layout(...).report(...)", to_launch(self.result)
        write_report(Path(path), self.decision(), self.profile_text, "", command, self.result, launched)

    def __repr__(self) -> str:
        verdict = f"{self.memory_bytes / GIB:.1f} GiB, {self.best.verdict(0)}"
        return f"<Answer: {self.tgs:,.0f} tokens per GPU and second, {verdict}: {describe(self.best, 0)}>"

    def __rich_console__(self, *_: Any) -> Iterator[RenderableType]:
        yield verdict_text(self.best)
        yield solutions_table("Best layouts", [(self.best, i) for i in range(len(self.best))])
        yield breakdown(self.best, 0)

    def _repr_html_(self) -> str:
        text = io.StringIO()
        Console(file=text, width=150, highlight=False, color_system=None).print(self)
        return f'<pre style="line-height:1.1">{escape(text.getvalue())}</pre>'


def best_layout(
    model: str | Path | RunConfig,
    world_size: int,
    *,
    profile: str | Profile | None = None,
    as_device: str | None = None,
    cluster: str | Path | Mapping[str, Any] | None = None,
    global_batch_tokens: int | None = None,
    global_batch_sequences: int | None = None,
    top: int = 10,
    fixed: Mapping[str, Any] | None = None,
    jobs: int = 1,
    **options: Any,
) -> Answer:
    """Return the best layouts of a model on ``world_size`` GPUs.

    model: a file as of --config, or a name as of --model_size. fixed: axes that do not vary. options: as of
    solver.load_problem (seq_len, framework, precision, ...). Raises InputError as the command line says it.
    """
    described = described_cluster(cluster)
    found, profile_text = chosen_profile(profile, described, as_device)
    problem = load_problem(model, world_size, profile=found, cluster=described, **options)
    tokens = global_batch_tokens
    _, result = search_with_strings(problem, global_batch_sequences, top, fixed=fixed, jobs=jobs, global_batch_tokens=tokens)
    return Answer(result, profile_text)
