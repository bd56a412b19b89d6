"""SimuMax's results under its names, as numbers in SI units where SimuMax has texts: seconds, bytes, FLOP, tokens per second.

Source of the names: MooreThreads/SimuMax, README.md and its analysis functions of release 1.2.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from solver.formats.simumax.configs import StrategyConfig
from solver.report.explain import explain
from solver.simumax.pricing import Priced
from solver.simumax.stages import StageBytes, breakdown, stage_memory
from solver.spec.layer_kinds import layer_kinds
from solver.spec.model import ModelSpec
from solver.spec.model_size import expert_parameters, flops_per_token, parameters

STAGES = ("first_stage", "middle_stage", "last_stage")
_SUMMED = ("fwd_compute_time", "recompute_time", "bwd_compute_time", "intra_exposed_time", "inter_exposed_time")
#: Flash attention computes the scores again in its backward pass: 7 products of matrices for the 6 of a model's FLOPs.
_FLASH_PRODUCTS = 7 / 6
_STATES = ("weight_bytes", "grad_bytes", "state_bytes")


@dataclass(frozen=True)
class Result:
    """A result by SimuMax's names, in ``data``; as a text it is JSON."""

    data: Mapping[str, Any]

    def __getitem__(self, name: str) -> Any:
        return self.data[name]

    def __str__(self) -> str:
        return json.dumps(self.data, indent=2)


def cost_result(priced: Priced) -> dict[str, Any]:
    """Return the cost of a step. Times are seconds of a step, those of ``chunk_time`` of one micro batch."""
    solutions, index, strategy = priced.solutions, priced.index, priced.strategy
    stages, m = breakdown(solutions, index), strategy.micro_batch_num
    first, last = stages[0], stages[-1]
    straggling = first["straggler_time"]
    flops = per_token_flops(solutions.problem.model, strategy.seq_len)
    # utilisation is of the 16-bit peak, whatever the precision
    rate, peak = float(solutions.tgs[index]), solutions.problem.cost.device.half_peak
    tokens = strategy.seq_len * strategy.global_batch_size
    comm = {
        "dp_comm_time": {"dp_comm_exposed_time": first["dp_exposed_time"]},
        "intra_comm_time": _time("intra_exposed_time", first, m),
        "inter_comm_time": _time("inter_exposed_time", first, m),
    }
    return {
        "comm_result": comm,
        "compute_details": {name: first[name] for name in ("fwd_compute_time", "recompute_time", "bwd_compute_time")}
        | {
            "optim_time": {"optim_exposed_time": first["optim_time"]},
            "model_flops": flops["run"] * tokens / strategy.world_size,
        },
        "breakdown_result": first,
        **({"breakdown_result_last_stage": last} if len(stages) > 1 else {}),
        "chunk_time": _chunk_time(first, m),
        "all_chunk_times": {f"{name}_chunk": _chunk(stages[at], m) for name, at in _stage_numbers(len(stages)).items()},
        "all_tokens_per_iter": tokens,
        "duration_time_per_iter": priced.seconds,
        **({"duration_time_interval": list(explain(solutions, index).interval)} if priced.measured else {}),
        "straggle_ratio": priced.seconds / (priced.seconds - straggling),
        "throughput_per_accelerator": rate,
        "throughput per GPU (TFLOP/s/GPU)": rate * flops["with_attn"] / 1e12,
        "mfu": rate * flops["run"] / peak,
        "mfu_6nd_with_attn": rate * flops["with_attn"] / peak,
        "mfu_6nd": rate * flops["without_attn"] / peak,
        "flops_info": {
            "theory_flops": flops["with_attn"] * tokens / strategy.world_size,
            "model_flops": flops["run"] * tokens / strategy.world_size,
        },
        "param_numel_info": parameter_numbers(solutions.problem.model),
    }


def mem_result(priced: Priced) -> dict[str, Any]:
    """Return the memory of the only stage, or of the first, the fullest middle and the last one by name; bytes.

    Of every stage: peak_mem = model_mem + workspaces + cached_micro_batch_num * fwd_activation_cache_per_micro_batch +
    peak_activation_mem_in_1F1B, and the larger of fwd_peak_allocated_mem and bwd_peak_allocated_mem.
    """
    stages = stage_memory(priced.solutions, priced.index)
    fullest = max(range(1, len(stages) - 1), key=lambda at: stages[at].allocated, default=0)
    found = {
        name: _stage_result(stages[fullest if name == STAGES[1] else at], priced, fullest if name == STAGES[1] else at)
        for name, at in _stage_numbers(len(stages)).items()
    }
    return found if len(stages) > 1 else found[STAGES[0]]


def stage_peaks(result: Result | Mapping[str, Any], name: str = "peak_mem") -> dict[str, float]:
    """Return a figure of every stage of a memory result."""
    data = result.data if isinstance(result, Result) else result
    return {STAGES[0]: data[name]} if name in data else {stage: found[name] for stage, found in data.items()}


def per_token_flops(model: ModelSpec, seq_len: int) -> dict[str, float]:
    """Return FLOPs per token, forward and backward.

    without_attn: 6 for each parameter of the linears that a token passes through. with_attn: also those of the whole square of
    attention scores, the standard of SimuMax. run: of the causal half as flash attention computes it.
    """
    causal, whole = flops_per_token(model, seq_len), flops_per_token(model, seq_len, whole_square=True)
    scores = whole - causal  # of the causal half
    return {"without_attn": causal - scores, "with_attn": whole, "run": causal - scores + _FLASH_PRODUCTS * scores}


def parameter_numbers(model: ModelSpec) -> dict[str, float]:
    """Return numbers of parameters: of all, of experts, of the rest, and of those that one token passes through."""
    every, active, kinds = parameters(model), parameters(model, active=True), layer_kinds(model)
    layers = sum(int(count) for count, kind in zip(kinds.counts, kinds.kinds, strict=True) if kind.experts)
    experts = layers * model.num_experts * expert_parameters(model) if layers else 0
    found = {"dense": every - experts, "moe": experts, "all": every, "activations": active}
    return found | {"activations_ratio": active / every}


def parallelism(strategy: StrategyConfig) -> str:
    """Return sizes in SimuMax's short form."""
    s = strategy
    sequence = f"sp{s.tp_size}." if s.enable_sequence_parallel else ""
    return (
        f"seq{s.seq_len}.mbs{s.micro_batch_size}.mbc{s.micro_batch_num}.gbs{s.global_batch_size} tp{s.tp_size}.{sequence}"
        f"cp{s.cp_size}.ep{s.ep_size}.pp{s.pp_size}.dp{s.dp_size}.etp{s.etp_size}.edp{s.edp_size}, world_size:{s.world_size}"
    )


def _stage_numbers(stages: int) -> dict[str, int]:
    numbers = {STAGES[0]: 0, STAGES[1]: 1, STAGES[2]: stages - 1}
    return {name: at for name, at in numbers.items() if (name != STAGES[1] or stages > 2) and (name != STAGES[2] or stages > 1)}


def _time(name: str, stage: Mapping[str, float], m: int) -> dict[str, float]:
    return {f"{name}_per_batch": stage[name] / m, name: stage[name]}


def _chunk_time(stage: Mapping[str, float], m: int) -> float:
    return sum(stage[name] for name in _SUMMED) / m


def _chunk(stage: Mapping[str, float], m: int) -> dict[str, float]:
    return {
        "chunk_time": _chunk_time(stage, m),
        "dp_and_optim_time": stage["dp_exposed_time"] + stage["optim_time"],
        "bubble_time": stage["bubble_time"],
        "straggler_time": stage["straggler_time"],
    }


def _stage_result(stage: StageBytes, priced: Priced, number: int) -> dict[str, Any]:
    strategy, parts = priced.strategy, stage.parts
    factor = strategy.mem_factor if strategy.stated.get("mem_factor") else stage.allocated / stage.reserved
    cached = max(stage.in_flight - 1.0, 0.0)
    where = "head and loss" if parts["loss"] > parts["backward_buffers"] else "a layer's backward pass"
    return {
        "micro_batch_num": strategy.micro_batch_num,
        "micro_batch_size": strategy.micro_batch_size,
        "cached_micro_batch_num": cached,
        "parallel_config": {"parallelism": parallelism(strategy), "fp8": strategy.fp8},
        "model_mem": stage.model,
        "model_mem_detail": {
            "dense": _detail(stage.dense),
            "moe": _detail(stage.experts),
            "te_dummy_wgrad": {"all_mem": stage.dummy},
        },
        "workspaces": parts["workspaces"],
        "fwd_activation_cache_per_micro_batch": stage.cache,
        "peak_activation_mem_in_1F1B": stage.allocated - stage.model - parts["workspaces"] - cached * stage.cache,
        "fwd_peak_allocated_mem": stage.allocated - parts["backward_buffers"],
        "bwd_peak_allocated_mem": stage.allocated,
        "peak_mem": stage.allocated,
        "peak_mem_with_reserved": stage.allocated / factor,
        "memory_reserved_ratio": factor,
        "peak_path": f"stage {number}: {where}",
    }


def _detail(states: Any) -> dict[str, Any]:
    detail = dict(zip(_STATES, states.tolist(), strict=True))
    return {"all_mem": sum(detail.values()), "detail": detail}
