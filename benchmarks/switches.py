"""Write docs/switches.md: published effects of one switch beside what is predicted for it, and pipeline schedules compared.

usage: python benchmarks/switches.py
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from accuracy_tables import table

from profiler.files import write_text
from profiler.units import GB
from solver.api import estimate, load_problem
from solver.layers.program import FLASH_ATTN, FORWARD, GROUPED_LINEAR, LINEAR, MEMORY_BOUND, WEIGHT_GRAD, Op
from solver.schedule.critical_paths import v_shaped_in_flight
from solver.schedule.event_simulation import simulate
from solver.schedule.kinds import AUTOMATIC
from solver.spec.choices import V_SHAPED
from solver.step.solutions import Solutions

ROOT = Path(__file__).resolve().parents[1]
HOST = {"host_link_gb_s": 50, "host_memory_gb_s": 40}


@dataclass(frozen=True)
class Job:
    """A published job, as far as it is stated, and what is assumed of the rest. layout, constants: as in a config."""

    model: str
    world: int
    layout: Mapping[str, Any]
    constants: Mapping[str, Any] = field(default_factory=dict)
    profile: str = "h100_sxm"
    cluster: Mapping[str, Any] = field(default_factory=dict)

    def run(self, layout: Mapping[str, Any] | None = None, **constants: Any) -> Solutions:
        """Return the estimate with some choices changed."""
        fixed = {"seq_len": 4096, "framework": "megatron-bridge-26", **self.constants, **constants}
        config = ROOT / "configs" / "models" / f"{self.model}.json"
        problem = load_problem(config, self.world, profile=self.profile, cluster=dict(self.cluster) or None, **fixed)
        chosen = {**self.layout, **(layout or {})}
        ranks = chosen.get("tp", 1) * chosen.get("cp", 1) * chosen.get("pp", 1)
        chosen |= {
            "dp": self.world // ranks,
            "zero": 1,
            "zero_shard_size": self.world // chosen.get("tp", 1) // chosen.get("pp", 1),
        }
        batch = chosen.pop("batch")
        chosen["num_micro_batches"] = batch // (chosen["dp"] * chosen.get("micro_batch_size", 1))
        return estimate(problem, [problem.layout(**chosen)])


LLAMA = Job(
    "llama3_70b", 32, {"tp": 4, "pp": 4, "vpp": 5, "tp_mode": "msp", "batch": 32}, {"precision": "fp8", "tp_comm_overlap": True}
)
QWEN = Job("qwen3_30b_a3b", 16, {"ep": 8, "batch": 64}, {"precision": "bf16"})
#: As the recipe that overlaps the exchange has it (Megatron-Bridge's perf_recipes/qwen/h100), graphs as in the one before.
QWEN_HYBRID = Job(
    "qwen3_30b_a3b",
    16,
    {"ep": 16, "batch": 1024},
    {"precision": "bf16", "moe_dispatcher": "hybridep", "cuda_graphs": True, "cuda_graph_modules": "moe_router+moe_preprocess"},
)
QWEN_STATES = Job(
    "qwen3_30b_a3b", 16, {"tp": 2, "pp": 2, "ep": 4, "tp_mode": "msp", "batch": 16}, {"precision": "bf16"}, cluster=HOST
)
GPT_OSS = Job("gpt_oss_20b", 16, {"ep": 8, "batch": 16}, {"precision": "bf16"})
DEEPSEEK = Job("deepseek_v2_lite", 16, {"ep": 8, "batch": 64}, {"precision": "bf16"})


def seconds(found: Solutions) -> float:
    return float(found.times.seconds[0])


def gigabytes(found: Solutions) -> float:
    return float(found.memory.allocated[0]) / GB


def ratio(base: Solutions, other: Solutions) -> str:
    return f"{seconds(other) / seconds(base) - 1:+.1%}, {gigabytes(other) - gigabytes(base):+.1f} GB"


def llama_rows() -> list[list[str]]:
    """Return rows of Llama 3 70B in three layouts."""
    published = {
        "tp4 pp4": ("704 TFLOP/s, 58.8 GB", {}),
        "tp4 pp8": ("668, 53.2", {"pp": 8}),
        "tp8 pp4": ("509, 50.2", {"tp": 8}),
    }
    rows = []
    for name, (text, layout) in published.items():
        found = LLAMA.run(layout)
        rows.append(
            [f"Llama 3 70B, {name}", text, f"{found.flops_per_second[0] / 1e12:.0f} TFLOP/s, {gigabytes(found):.1f} GB"]
        )
    return rows


def switch_rows() -> list[list[str]]:
    """Return rows of one switch each: what it is, as published, as predicted."""
    rows = llama_rows()
    for job, name, published in (
        (QWEN, "Qwen3-30B, CUDA graphs", "623 to 484 ms, -22%"),
        (GPT_OSS, "GPT-OSS-20B, CUDA graphs", "467-520 to 391-399 ms, -20%"),
    ):
        one = {"batch": 16}
        base = job.run(one)
        graphs = job.run(one, cuda_graphs=True, cuda_graph_modules="attn+moe_router+moe_preprocess")
        rows.append([name, published, f"{1e3 * seconds(base):.0f} to {1e3 * seconds(graphs):.0f} ms, {ratio(base, graphs)}"])
    alone, beside = (QWEN_HYBRID.run(moe_exchange_overlap=overlaps) for overlaps in (False, True))
    rows.append(["Qwen3-30B, exchange of tokens beside compute", "-15.1%", ratio(alone, beside)])
    for job, module, published in (
        (QWEN, "layernorm", "+3.1%, -1.0 GB"),
        (QWEN, "moe_act", "+2.0%"),
        (DEEPSEEK, "mla_up_proj", "+5.2%"),
    ):
        again = job.run({"recompute": "selective"}, recompute_modules=module)
        rows.append([f"{job.model}, recompute {module}", published, ratio(job.run(), again)])
    base = QWEN_STATES.run()
    for share, published in ((0.25, "1.9 times, -3.8 GB"), (1.0, "4.2 times, -15.3 GB")):
        away = QWEN_STATES.run(optimizer_offload_fraction=share)
        text = f"{seconds(away) / seconds(base):.1f} times, {gigabytes(away) - gigabytes(base):+.1f} GB"
        rows.append([f"Qwen3-30B tp2 pp2 ep4, {share:.0%} of the moments on the host", published, text])
    return rows


#: Speed over 1F1B and memory [GB] on 8 MI300X, Llama 2 7B, pp 8; the number of micro batches is not published.
MI300X = {"1f1b": (1.0, 16.3), "interleaved": (1.09, 21.4), "zb-v": (1.13, 18.1), "v-half": (1.08, 14.1), "v-min": (0.88, 11.9)}


def schedule_rows() -> list[list[str]]:
    """Return speeds over 1F1B by number of micro batches."""
    rows = [["published", *(f"{speed:.2f}" for speed, _ in MI300X.values())]]
    for m in (16, 24, 32, 48, 64):
        job = Job("llama2_7b", 8, {"pp": 8, "batch": m}, {"framework": "generic", "seq_len": 2048}, "mi300x")
        found = [seconds(job.run({"schedule": name, "vpp": 1 if name == "1f1b" else 2})) for name in MI300X]
        rows.append([f"predicted, {m} micro batches", *(f"{found[0] / one:.2f}" for one in found)])
    rows.append(["memory over 1F1B, published", *(f"{size / 16.3:.2f}" for _, size in MI300X.values())])
    job = Job("llama2_7b", 8, {"pp": 8, "batch": 32}, {"framework": "generic", "seq_len": 2048}, "mi300x")
    sizes = [gigabytes(job.run({"schedule": name, "vpp": 1 if name == "1f1b" else 2})) for name in MI300X]
    return [*rows, ["memory over 1F1B, predicted", *(f"{size / sizes[0]:.2f}" for size in sizes)]]


#: Milliseconds of the kernels of a traced pair of chunks, the forward pass of four layers beside the backward pass of four, by
#: what they do (deepseek-ai/profile-data 4496024, MIT; H800, EP 64, 4,096 tokens, fp8), and which ops of ours do that.
TRACE: Mapping[str, tuple[float, Callable[[Op], bool]]] = {
    "attention, forward": (4.9, lambda op: op.kind == FLASH_ATTN and op.phase == FORWARD),
    "attention, backward": (17.0, lambda op: op.kind == FLASH_ATTN and op.phase != FORWARD),
    "experts' GEMMs, forward and input gradient": (22.9, lambda op: op.kind == GROUPED_LINEAR and op.phase != WEIGHT_GRAD),
    "other fp8 GEMMs, forward and input gradient": (19.4, lambda op: op.kind == LINEAR and op.phase != WEIGHT_GRAD),
    "all weight gradients": (32.8, lambda op: op.kind in (LINEAR, GROUPED_LINEAR) and op.phase == WEIGHT_GRAD),
    "casts, transposes, norms, rotary embedding, activation, permutation": (32.5, lambda op: op.kind == MEMORY_BOUND),
}


def trace_rows() -> list[list[str]]:
    """Return rows of a traced pair of chunks: kernels by what they do, and the whole pair."""
    fp8 = {"precision": "fp8", "fp8_recipe": "blockwise", "framework": "generic", "moe_dispatcher": "deepep"}
    job = Job("deepseek_v3", 64, {"ep": 64, "batch": 4096}, fp8, "h800_sxm")
    found = job.run(moe_exchange_overlap=True, delay_wgrad_compute=True)
    key, part = int(found.terms.key[0]), found.table.layers[-1]
    each = 4e3 * (part.estimates.seconds * part.estimates.counts())[:, key]
    rows = []
    for name, (measured, belongs) in TRACE.items():
        ours = sum(float(ms) for op, ms in zip(part.estimates.ops, each, strict=True) if belongs(op))
        rows.append([name, f"{measured:.1f}", f"{ours:.1f}", f"{ours / measured - 1:+.0%}"])
    share = float(found.layouts.splits.num_micro_batches[0]) / (float(found.layouts.splits.num_micro_batches[0]) - 1)
    whole = 4e3 * (part.times.forward[:, key].sum() + part.times.backward[:, key].sum() - share * found.times.hidden[-1, 0])
    return [*rows, ["the pair, exchange of tokens beside compute", "129.0", f"{whole:.1f}", f"{whole / 129.0 - 1:+.0%}"]]


def bubble_rows() -> list[list[str]]:
    """Return bubble (share of the work) and micro batches in flight of each schedule, and how far the closed form is off."""
    rows = []
    for name in ("1f1b", "interleaved", "zb-h1", *AUTOMATIC, *V_SHAPED):
        vpp = 2 if name in (*V_SHAPED, "interleaved") else 1
        cells = []
        for pp, m in ((4, 16), (8, 32), (16, 32)):
            line = simulate(name, [vpp * 1.0] * pp, [vpp * 2.0] * pp, m, vpp, weight_grad=[vpp * 1.0] * pp)
            work = 3.0 * vpp * m
            cells.append(f"{line.makespan / work - 1:.1%} ({line.span.max() / work - 1:.1%})")
        held = simulate(name, [vpp * 1.0] * 8, [vpp * 2.0] * 8, 32, vpp, weight_grad=[vpp * 1.0] * 8).in_flight.max()
        rows.append([name, *cells, f"{v_shaped_in_flight(name, 8, 32).max() if name in V_SHAPED else held:.1f}"])
    return rows


Rows = Sequence[Sequence[str]]


def page(switches: Rows, trace: Rows, schedules: Rows, bubbles: Rows) -> str:
    """Return the page as Markdown."""
    return "\n".join(
        [
            "# Switches and schedules\n",
            "Written by `make switches`. Published effects of one switch beside what is predicted; nothing was fitted to them.",
            "Most are published without the whole job: what is assumed of it is in `benchmarks/switches.py`. Publications:",
            "NVIDIA's pages on Megatron-Bridge (H100, 16 GPUs; Llama 3 70B on 32, as its fine-tuning recipe); "
            "AMD's on Primus.\n",
            table(("switch", "published", "predicted"), switches, text=(0, 1, 2)),
            "Too small: what CUDA graphs of attention, router and dispatch preparation save (the host takes 40 "
            "us a launch, which",
            "is assumed, and handles each local expert's weights one by one), and recomputation of single modules. The host's",
            "bandwidths behind the last two rows are assumed, 50 GB/s of link and 40 GB/s of memory for each "
            "GPU; the bytes that",
            "they save are exact.\n",
            "## A traced step of DeepSeek-V3\n",
            "The forward pass of four layers beside the backward pass of four others, in milliseconds "
            "(DeepSeek's published trace,",
            "H800, 64 ranks of experts, 4,096 tokens). The exchange of tokens holds 20 of the 132 "
            "multiprocessors all the while,",
            "so that traced kernels are about 15% slower than alone; ours are alone, the whole pair is not. The "
            "weight gradients",
            "are no test: what those of blockwise fp8 cost is taken from this trace and from kernels of H100 and H800.\n",
            table(("kernels", "traced [ms]", "predicted [ms]", "error"), trace, text=(0,)),
            "## Schedules on 8 MI300X\n",
            "Llama 2 7B, pp 8, two chunks a stage but for 1F1B; sequences of 2,048 tokens are assumed, and the number of micro",
            "batches is not published: about 32 give these speeds.\n",
            table(("speed over 1F1B", *MI300X), schedules, text=(0,)),
            "## Bubbles and memory\n",
            "Event simulation with equal forward, input-gradient and weight-gradient passes: bubble over work "
            "(in brackets for the",
            "longest span of a stage, where stages do not wait for each other between steps), and the micro batches whose",
            "activations a stage of 8 holds. zb-v and dualpipev run the passes in the order of torch.distributed.pipelining",
            "(a test compares them); v-half and v-min repeat the building blocks of arXiv 2405.15362.\n",
            table(("schedule", "pp 4, 16 micro batches", "pp 8, 32", "pp 16, 32", "in flight, pp 8"), bubbles, text=(0,)),
        ]
    )


def main() -> int:
    write_text(ROOT / "docs" / "switches.md", page(switch_rows(), trace_rows(), schedule_rows(), bubble_rows()))
    print("wrote docs/switches.md")
    return 0


if __name__ == "__main__":
    sys.exit(main())
