"""SimuMax's calls: configure three files, estimate, read memory and cost, search."""

from __future__ import annotations

import json
from collections.abc import Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Any

from profiler.errors import InputError, shown
from profiler.files import write_text
from profiler.profile.profile import Profile
from profiler.units import GIB
from solver.formats.simumax.configs import ModelConfig, StrategyConfig, SystemConfig
from solver.report.output import csv_text, write_json
from solver.report.timeline import chrome_trace, step_timeline
from solver.simumax.missing import missing_shapes
from solver.simumax.pricing import Machine, Priced, limit_of, machine_of, price_one
from solver.simumax.results import Result, cost_result, mem_result, parameter_numbers, stage_peaks
from solver.simumax.search import (
    RECOMPUTE_TYPES,
    Space,
    collect,
    files_of,
    fitting_micro_batches,
    largest_micro_batch,
    search_space,
    summary,
)

_ROUNDS = 16  #: micro batches for each stage of SimuMax's search of the largest one
_Given = Mapping[str, Any] | str | Path | None


class PerfLLM:
    """One configuration and its estimate. ``strategy`` and ``model_config`` may be changed between two run_estimate()."""

    strategy: StrategyConfig
    model_config: ModelConfig
    system: Machine

    def __init__(self) -> None:
        self._priced: Priced | None = None
        self._configured = False

    def configure(
        self,
        strategy_config: StrategyConfig | _Given = None,
        model_config: ModelConfig | _Given = None,
        system_config: SystemConfig | Profile | _Given = None,
    ) -> None:
        """Take the three configurations: files, mappings of their fields, or configurations.

        system_config may also be the name of one of this program's profiles, such as h100_sxm, whose times were measured.
        Raises InputError for a file that cannot be read, and for a field that is unknown or not modelled.
        """
        self.strategy = StrategyConfig.of(strategy_config)
        self.model_config = ModelConfig.of(model_config)
        self.system = machine_of(system_config)
        self._priced, self._configured = None, True

    def run_estimate(self) -> None:
        """Estimate the strategy. Raises InputError where it cannot be run or is not modelled."""
        self._check_configured()
        self._priced = price_one(self.strategy, self.model_config, self.system)

    def analysis_mem(self) -> Result:
        """Return the memory in bytes; fields as in solver.simumax.results.mem_result."""
        return Result(mem_result(self._estimated()))

    def analysis_cost(self) -> Result:
        """Return the times in seconds; fields as in solver.simumax.results.cost_result."""
        return Result(cost_result(self._estimated()))

    @property
    def notes(self) -> tuple[str, ...]:
        """What a reader must know: where times are from, what is priced otherwise than the files may mean, what is not read."""
        priced = self._estimated()
        ignored = (*self.model_config.ignored, *priced.strategy.ignored)
        return (self.system.profile_text, *priced.notes, *(f"changes nothing here: {text}" for text in ignored))

    @property
    def miss_efficiency(self) -> dict[str, dict[str, float]]:
        """Shapes that the system file (or the profile) does not have, by op, with the seconds taken for them: a fit's."""
        return missing_shapes(self._estimated())

    def get_pp_stage_peak_mem(
        self,
        mem_result: Result,
        peak_mem_key: str = "peak_mem",
        toG: bool = False,  # noqa: N803
    ) -> dict[str, float]:
        """Return a figure of every stage in bytes, or in GiB with ``toG``."""
        if peak_mem_key not in ("peak_mem", "peak_mem_with_reserved"):
            raise InputError(f"peak_mem_key is {shown(peak_mem_key)}; it must be peak_mem or peak_mem_with_reserved")
        return {stage: value / (GIB if toG else 1) for stage, value in stage_peaks(mem_result, peak_mem_key).items()}

    def analysis(self, save_path: str | Path | None = None, console_log: bool = True) -> None:
        """Write the results and configurations as JSON files into the folder ``save_path``, and print a summary."""
        priced = self._estimated()
        if save_path is not None:
            self._save(priced, Path(save_path))
        if console_log:
            print(json.dumps(summary(priced, self.model_config, self.system), indent=2))

    def simulate(self, save_path: str | Path) -> Path:
        """Write one step as a trace of Chrome's viewer, ``tracing_logs.json`` in the folder ``save_path``; return its path."""
        priced, path = self._estimated(), Path(save_path) / "tracing_logs.json"
        write_json(path, chrome_trace(step_timeline(priced.solutions, priced.index)))
        return path

    def search_max_micro_batch_size(self, micro_batch_num: int | None = None) -> tuple[int, float]:
        """Return (the largest micro batch whose allocated memory fits, its bytes on the fullest stage); (0, 0.0) if none does.

        micro_batch_num: number of micro batches; None: 16 for each stage.
        """
        self._check_configured()
        count = self.strategy.pp_size * _ROUNDS if micro_batch_num is None else micro_batch_num
        best = largest_micro_batch(self.strategy.changed(micro_batch_num=count), self.model_config, self.system)
        return (best.strategy.micro_batch_size, best.allocated) if best else (0, 0.0)

    def search_max_micro_batch_size_fixed_gbs(
        self,
        pp_size: int,
        dp_size: int,
        global_batch_size: int,
        memory_utils: float = 1.0,
        gmi_error: float = 6,
        use_reserved_memory: bool = True,
        save_all: bool = True,
        verbose: bool = True,
    ) -> tuple[list[int], list[int], list[dict[str, float]], list[Result]]:
        """Return micro batch sizes, their numbers, GiB by stage and costs of what fits, the largest micro batch first.

        memory_utils: share of the memory that may be used, of which gmi_error GiB are kept free. save_all: all that fit, not
        only the largest. verbose: print how many fit. Raises InputError where pp_size or dp_size are not the strategy's.
        """
        self._check_configured()
        for name, given in (("pp_size", pp_size), ("dp_size", dp_size)):
            if given != getattr(self.strategy, name):
                raise InputError(f"{name} is {shown(given)}, but the strategy's is {getattr(self.strategy, name)}")
        if not 0 < memory_utils <= 1:
            raise InputError(f"memory_utils is {shown(memory_utils)}; it must be a share above 0 and at most 1")
        limit = limit_of(self.system, gmi_error) - (1 - memory_utils) * self.system.memory
        fitting = fitting_micro_batches(
            self.strategy, self.model_config, self.system, global_batch_size, limit, use_reserved_memory
        )
        _say(verbose, f"{len(fitting)} micro batch sizes fit")
        kept, key = fitting if save_all else fitting[:1], "peak_mem_with_reserved" if use_reserved_memory else "peak_mem"
        peaks = [self.get_pp_stage_peak_mem(Result(mem_result(one)), key, toG=True) for one in kept]
        sizes, counts = ([getattr(one.strategy, name) for one in kept] for name in ("micro_batch_size", "micro_batch_num"))
        return sizes, counts, peaks, [Result(cost_result(one)) for one in kept]

    def search_best_parallel_strategy(
        self,
        world_size: int,
        gmi_error: float,
        micro_batch_size: int,
        global_batch_size: int,
        all_search_result: MutableMapping[str, Any] | None = None,
        tp_search_list: Sequence[int] | None = None,
        ep_search_list: Sequence[int] | None = None,
        pp_search_list: Sequence[int] | None = None,
        use_etp: bool = False,
        recompute_search_type: Sequence[str] | str = RECOMPUTE_TYPES[:3],
        use_reserved_memory: bool = True,
        dump_path: str | Path | None = None,
        verbose: bool = True,
    ) -> dict[str, Any]:
        """Return the fastest strategy that fits, in the words of solver.simumax.search.summary; {} where none does.

        gmi_error: GiB of every accelerator that are kept free. all_search_result: is filled with a list of every column, of all
        that fit, the fastest first. dump_path: folder of two CSV files, and of the best strategy's results. Other arguments as
        in solver.simumax.search.Space; what they do not name is as the configured strategy states it.
        """
        self._check_configured()
        space = Space(
            world_size,
            micro_batch_size,
            global_batch_size,
            tp_search_list,
            ep_search_list,
            pp_search_list,
            use_etp,
            recompute_search_type,
        )
        found = search_space(space, self.strategy, self.model_config, self.system, gmi_error, use_reserved_memory)
        for reason, count in found.reasons.items():
            _say(verbose, f"{count} strategies rejected: {reason}")
        _say(verbose, f"{len(found.fitting)} strategies fit")
        wanted = found.fitting if all_search_result is not None or dump_path is not None else found.fitting[:1]
        rows = [summary(one, self.model_config, self.system) for one in wanted]
        collect(rows, all_search_result)
        if dump_path is not None and rows:
            best = found.fitting[0]
            for path, content in zip(
                files_of(dump_path, self.model_config, self.system, best.strategy), (rows[:1], rows), strict=True
            ):
                write_text(path, csv_text(content))
            self._save(best, Path(dump_path) / "best_strategy_costs")
        return rows[0] if rows else {}

    search_best_parallel_strategy_with_recompute = search_best_parallel_strategy  #: its name before release 1.2

    def _save(self, priced: Priced, folder: Path) -> None:
        numbers = parameter_numbers(priced.solutions.problem.model)
        machine = self.system.config.to_dict() if self.system.config else {"profile": self.system.profile.name}
        contents: dict[str, Mapping[str, Any]] = {
            "compute_result": cost_result(priced),
            "mem_result": mem_result(priced),
            "strategy_config": priced.strategy.to_dict(),
            "model_config": self.model_config.to_dict(),
            "system_config": machine,
            "base_info": {"all_param": numbers["all"], "act_param": numbers["activations"]},
        }
        for name, content in contents.items():
            write_json(folder / f"{name}.json", content)

    def _estimated(self) -> Priced:
        if self._priced is None:
            raise InputError("nothing is estimated yet; call configure() and run_estimate() first")
        return self._priced

    def _check_configured(self) -> None:
        if not self._configured:
            raise InputError("nothing is configured yet; call configure() first")


def _say(verbose: bool, text: str) -> None:
    if verbose:
        print(text)
