"""SimuMax's searches: sizes of groups and recomputation, the micro batch, each over all candidates at once."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

from profiler.errors import InputError, shown
from solver.formats.simumax.configs import ModelConfig, StrategyConfig
from solver.formats.simumax.model import model_of
from solver.formats.simumax.recompute import SEARCHED, SWITCHES
from solver.simumax.pricing import Machine, Priced, Rejected, limit_of, price
from solver.simumax.results import cost_result, mem_result, parallelism, stage_peaks
from solver.spec.bounds import WHOLE_NUMBERS

RECOMPUTE_TYPES = ("no_recompute", "full_block", "selective_recompute", "layer_only")
_USUAL_SIZES = (1, 2, 4, 8)
_OFF: Mapping[str, Any] = {
    **dict.fromkeys(SWITCHES, False),
    "megatron_recompute": False,
    "megatron_recompute_modules": None,
}


@dataclass(frozen=True)
class Space:
    """What a search varies: lists of sizes (None: those that SimuMax takes), and types of recomputation.

    use_etp: tensor parallelism splits experts as well. Raises InputError for a list that holds no sizes, or an unknown type.
    """

    world_size: int
    micro_batch_size: int
    global_batch_size: int
    tp_search_list: Sequence[int] | None = None
    ep_search_list: Sequence[int] | None = None
    pp_search_list: Sequence[int] | None = None
    use_etp: bool = False
    recompute_search_type: Sequence[str] | str = field(default=RECOMPUTE_TYPES[:3])

    def __post_init__(self) -> None:
        for name in ("world_size", "micro_batch_size", "global_batch_size"):
            _check_size(name, getattr(self, name))
        for name in ("tp_search_list", "ep_search_list", "pp_search_list"):
            given = getattr(self, name)
            if given is not None and (isinstance(given, str) or not isinstance(given, Iterable) or not list(given)):
                raise InputError(f"{name} is {shown(given)}; it must be a list of sizes, or None")
            for size in given or ():
                _check_size(name, size)
        for name in self.recompute_types:
            if name not in RECOMPUTE_TYPES:
                raise InputError(f"recompute_search_type {shown(name)} is not known; known are {', '.join(RECOMPUTE_TYPES)}")

    @property
    def recompute_types(self) -> tuple[str, ...]:
        given = self.recompute_search_type
        return (given,) if isinstance(given, str) else tuple(given)

    def candidates(self, strategy: StrategyConfig, model: ModelConfig) -> Iterator[StrategyConfig]:
        """Yield every strategy of the space; everything else is as ``strategy`` states it.

        Layers that pp does not divide leave the last stage the rest of equal stages, as in SimuMax.
        """
        experts, layers = model.has_experts, model.layer_num
        tps = self.tp_search_list or ((1,) if experts else _USUAL_SIZES)
        eps = self.ep_search_list or (_USUAL_SIZES if experts else (1,))
        pps = self.pp_search_list or range(1, min(layers, self.world_size) + 1)
        for tp, ep, pp in product(tps, eps, pps):
            each = -(-layers // pp)
            rest = layers - each * (pp - 1)
            if self.world_size % (tp * pp * strategy.cp_size) or rest < 1:
                continue
            dp = self.world_size // (tp * pp * strategy.cp_size)
            if self.global_batch_size % (dp * self.micro_batch_size):
                continue
            sizes = {
                "world_size": self.world_size,
                "tp_size": tp,
                "ep_size": ep,
                "pp_size": pp,
                "etp_size": tp if self.use_etp else 1,
                "micro_batch_size": self.micro_batch_size,
                "micro_batch_num": self.global_batch_size // (dp * self.micro_batch_size),
                "num_layers_in_first_pipeline_stage": None,
                "num_layers_in_last_pipeline_stage": rest if rest < each else None,
            }
            for recompute in self._recompute(each):
                yield strategy.changed(**sizes, **recompute)

    def _recompute(self, layers: int) -> Iterator[dict[str, Any]]:
        """Yield the fields of recomputation; layers: of the fullest stage."""
        for name in self.recompute_types:
            if name == "no_recompute":
                yield {**_OFF, "recompute_granularity": None, "recompute_layer_num": 0}
            elif name == "full_block":
                for count in range(1, layers + 1):
                    yield {
                        **_OFF,
                        "enable_recompute": True,
                        "recompute_granularity": name,
                        "recompute_layer_num": count,
                    }
            elif name == "layer_only":
                for count in range(layers + 1):
                    yield {"recompute_layer_num": count}
            else:
                for switches in SEARCHED:
                    yield {
                        **_OFF,
                        **dict(zip(SWITCHES, switches, strict=True)),
                        "enable_recompute": True,
                        "recompute_granularity": name,
                        "recompute_layer_num": layers,
                    }


@dataclass(frozen=True)
class Found:
    """The result of a search. fitting: layouts that fit, the fastest first. reasons: why others were rejected -> how many."""

    fitting: tuple[Priced, ...]
    reasons: Mapping[str, int]


def search_space(
    space: Space, strategy: StrategyConfig, model: ModelConfig, machine: Machine, gmi_error: float, use_reserved_memory: bool
) -> Found:
    """Price every candidate and keep those that fit in the memory that ``gmi_error`` GiB leave.

    use_reserved_memory: whether what the allocator reserves must fit, or only what is allocated. Raises InputError where no
    sizes divide.
    """
    limit = limit_of(machine, gmi_error)
    model_of(model)  # what cannot be a model is told before its layers are counted
    candidates = list(space.candidates(strategy, model))
    if not candidates:
        raise InputError(
            f"no sizes of the lists divide world_size {space.world_size} and global_batch_size {space.global_batch_size} with "
            f"micro_batch_size {space.micro_batch_size}"
        )
    fitting, reasons = [], dict[str, int]()
    for one in price(candidates, model, machine):
        reason = (
            one.reason if isinstance(one, Rejected) else "" if _bytes(one, use_reserved_memory) <= limit else "does not fit"
        )
        if isinstance(one, Priced) and not reason:
            fitting.append(one)
        else:
            reasons[reason] = reasons.get(reason, 0) + 1
    return Found(tuple(sorted(fitting, key=lambda one: one.seconds)), reasons)


def micro_batch_candidates(strategy: StrategyConfig, global_batch_size: int) -> list[StrategyConfig]:
    """Return the strategies of a global batch with every micro batch that divides it, the largest first.

    There are at least as many micro batches as stages.
    """
    _check_size("global_batch_size", global_batch_size)
    dp, found = strategy.dp_size, []
    for size in range(min(global_batch_size // dp, WHOLE_NUMBERS["micro_batch_size"][1]), 0, -1):
        count, rest = divmod(global_batch_size, size * dp)
        if not rest and count >= strategy.pp_size:
            found.append(strategy.changed(micro_batch_size=size, micro_batch_num=count))
    return found


def fitting_micro_batches(
    strategy: StrategyConfig,
    model: ModelConfig,
    machine: Machine,
    global_batch_size: int,
    limit: float,
    use_reserved_memory: bool,
) -> list[Priced]:
    """Return what fits in ``limit`` bytes of the candidates of a global batch, the largest micro batch first."""
    found = price(micro_batch_candidates(strategy, global_batch_size), model, machine)
    return [one for one in found if isinstance(one, Priced) and _bytes(one, use_reserved_memory) <= limit]


def largest_micro_batch(strategy: StrategyConfig, model: ModelConfig, machine: Machine) -> Priced | None:
    """Return the strategy with the largest micro batch whose allocated bytes fit; None where not even one sequence does."""
    low, high, best = 1, WHOLE_NUMBERS["micro_batch_size"][1], None
    while low <= high:
        size = (low + high) // 2
        (one,) = price([strategy.changed(micro_batch_size=size)], model, machine)
        if isinstance(one, Rejected):
            raise InputError(one.reason)
        if one.allocated <= machine.memory:
            low, best = size + 1, one
        else:
            high = size - 1
    return best


def summary(priced: Priced, model: ModelConfig, machine: Machine) -> dict[str, Any]:
    """Return a found strategy in SimuMax's words; mfu is mfu_6nd_with_attn, iter_time seconds, memory bytes by stage."""
    cost, memory, strategy = cost_result(priced), mem_result(priced), priced.strategy
    return {
        "model_name": model.model_name,
        "param_num": cost["param_numel_info"]["all"],
        "system": machine.profile.name,
        "parallelism": f"{'fp8' if strategy.fp8 else strategy.dtype}.dense{model.dense_layers}.{parallelism(strategy)}",
        "recompute_status": recompute_status(strategy),
        "mfu": cost["mfu_6nd_with_attn"],
        "TFLOPS": cost["throughput per GPU (TFLOP/s/GPU)"],
        "TGS_per_gpu": cost["throughput_per_accelerator"],
        "iter_time": cost["duration_time_per_iter"],
        "straggle_ratio": cost["straggle_ratio"],
        "activations_ratio": cost["param_numel_info"]["activations_ratio"],
        "peak_mem": stage_peaks(memory, "peak_mem"),
        "peak_mem_with_reserved": stage_peaks(memory, "peak_mem_with_reserved"),
    }


def recompute_status(strategy: StrategyConfig) -> str:
    """Return in words what is recomputed."""
    if not strategy.enable_recompute or strategy.recompute_granularity is None or not strategy.recompute_layer_num:
        return "No Recompute"
    text = f"{strategy.recompute_granularity}, recompute_layer_num={strategy.recompute_layer_num}"
    if strategy.recompute_granularity != "selective_recompute":
        return text
    if strategy.megatron_recompute:
        return f"{text}, modules={'+'.join(strategy.megatron_recompute_modules)}"
    return f"{text}, {', '.join(f'{name}={getattr(strategy, name)}' for name in SWITCHES)}"


def collect(rows: Sequence[Mapping[str, Any]], into: MutableMapping[str, Any] | None) -> None:
    """Add rows to ``all_search_result``, which holds a list of every column."""
    if into is not None:
        for row in rows:
            for name, value in row.items():
                into.setdefault(name, []).append(value)


def files_of(folder: str | Path, model: ModelConfig, machine: Machine, best: StrategyConfig) -> tuple[Path, Path]:
    """Return the files of the best strategy and of all that fit, by SimuMax's names."""
    names = re.sub(r"[^\w.+-]", "_", f"{model.model_name}_{machine.profile.name}")  # a name may hold what a path may not
    stem = f"{names}_seqlen{best.seq_len}_worldsize{best.world_size}_gbs{best.global_batch_size}"
    return Path(folder) / f"{stem}_best_strategy.csv", Path(folder) / f"{stem}_all_search_strategies.csv"


def _bytes(priced: Priced, reserved: bool) -> float:
    return priced.reserved if reserved else priced.allocated


def _check_size(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 1 << 40:
        raise InputError(f"{name} is {shown(value)}; it must be a whole number of at least 1")
