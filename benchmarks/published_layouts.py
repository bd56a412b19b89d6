"""Write docs/published_layouts.md: layouts of large published runs, what is predicted for them, and the best that is found.

usage: python benchmarks/published_layouts.py
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from accuracy_tables import table

from profiler.files import write_text
from profiler.units import GIB
from solver.api import estimate, load_problem
from solver.report.describe import describe
from solver.report.explain import explain
from solver.report.words import PART_NAMES
from solver.search.search import search
from solver.spec.pipeline_layout import layout_text
from solver.step.solutions import Solutions

ROOT = Path(__file__).resolve().parents[1]
ENDS = {"account_for_embedding_in_pipeline_split": True, "account_for_loss_in_pipeline_split": True}
HEAD = ("run", "layout", "published", "predicted", "90% interval", "GiB", "largest parts of the step")


@dataclass(frozen=True)
class Run:
    """A published run. layout, constants: as in a config; published: TFLOP/s of model FLOPs per GPU, or tokens/s per GPU.
    theirs: constants that only its own layout has."""

    title: str
    model: str
    world: int
    sequences: int
    layout: Mapping[str, Any]
    published: str
    constants: Mapping[str, Any]
    theirs: Mapping[str, Any] = field(default_factory=dict)
    profile: str = "h100_sxm"

    def rows(self) -> list[list[str]]:
        """Return the run's own layout and the best one."""
        config, speed = ROOT / "configs" / "models" / f"{self.model}.json", "TFLOP" in self.published
        own = load_problem(config, self.world, profile=self.profile, **self.constants, **self.theirs)
        ranks = self.layout.get("tp", 1) * self.layout.get("cp", 1) * self.layout.get("pp", 1)
        dp = self.world // ranks
        replicas = dp * self.layout.get("cp", 1)
        stated = {**self.layout, "dp": dp, "zero": 1, "zero_shard_size": replicas, "num_micro_batches": self.sequences // dp}
        theirs = estimate(own, [own.layout(**stated)])
        best = search(load_problem(config, self.world, profile=self.profile, **self.constants), self.sequences, 1, jobs=2).best
        return [
            [self.title, f"theirs: {_cell(theirs)}", self.published, *_figures(theirs, speed)],
            ["", f"best: {_cell(best)}", "", *_figures(best, speed)],
        ]


def _cell(found: Solutions) -> str:
    """Return the layout for a cell of a table, whose bars part columns, and in which two asterisks mean emphasis."""
    return describe(found, 0).replace("|", "\\|").replace("*", "\\*")


def _figures(found: Solutions, in_flops: bool) -> list[str]:
    why, tokens = explain(found, 0), float(found.tokens[0]) / found.problem.run.world_size
    low, high = why.interval
    unit = float(found.flops_per_second[0]) / float(found.tgs[0]) / 1e12 if in_flops else 1.0
    parts = sorted(why.by_part().items(), key=lambda item: -item[1])[:3]
    bound = ", ".join(f"{PART_NAMES[name].removeprefix('exposed ')} {value / why.seconds:.0%}" for name, value in parts)
    return [
        f"{found.tgs[0] * unit:,.0f}",
        f"{tokens / high * unit:,.0f} to {tokens / low * unit:,.0f}",
        f"{found.memory.device[0] / GIB:.0f}",
        bound,
    ]


_LLAMA = {"framework": "megatron-core", "precision": "bf16", "cp_comm": "allgather"}
_DEEPSEEK = {
    "framework": "generic",
    "precision": "fp8",
    "fp8_recipe": "blockwise",
    "moe_dispatcher": "deepep",
    "seq_len": 4096,
    "moe_exchange_overlap": True,
    "optimizer_states": "bf16",
}
RUNS = (
    Run(
        "Llama 3 405B, 16,384 H100, 8k tokens",
        "llama3_405b",
        16384,
        2048,
        {"tp": 8, "tp_mode": "msp", "pp": 16, "vpp": 8, **ENDS},
        "400 TFLOP/s",
        {**_LLAMA, "seq_len": 8192},
    ),
    Run(
        "Llama 3 405B, 16,384 H100, 131k tokens",
        "llama3_405b",
        16384,
        128,
        {"tp": 8, "tp_mode": "msp", "cp": 16, "pp": 16, "vpp": 8, **ENDS},
        "380 TFLOP/s",
        {**_LLAMA, "seq_len": 131072},
    ),
    Run(
        "DeepSeek-V3, 2,048 H800",
        "deepseek_v3",
        2048,
        15360,
        {"pp": 8, "vpp": 2, "ep": 64, "schedule": "dualpipev", "recompute": "selective"},
        "1,543 tokens/s",
        _DEEPSEEK,
        {"pipeline_layout": layout_text([*[4] * 15, 1], 1), "recompute_modules": "layernorm+mla_up_proj+moe_act"},
        "h800_sxm",
    ),
    Run(
        "Qwen3-235B, 256 H100",
        "qwen3_235b_a22b",
        256,
        2048,
        {"tp": 2, "tp_mode": "msp", "pp": 8, "vpp": 4, "ep": 32, "recompute": "selective", **ENDS},
        "1,664 tokens/s",
        {
            "framework": "megatron-core",
            "precision": "bf16",
            "moe_dispatcher": "deepep",
            "seq_len": 4096,
            "recompute_modules": "layernorm+moe_act",
        },
    ),
)


def page(rows: list[list[str]]) -> str:
    """Return the page as Markdown."""
    return "\n".join(
        [
            "# Layouts of large published runs\n",
            "Written by `make switches`. Each run's own layout and the best that a search finds for the same batch; TFLOP/s of",
            "model FLOPs or tokens/s, of one GPU. Sources: Llama 3 (arXiv 2407.21783, table 4), DeepSeek-V3 (arXiv 2412.19437,",
            "180,000 GPU hours for 10^12 tokens), Megatron's model zoo (19.7 s a step). Not stated by them, and "
            "assumed: chunks of",
            "Llama's stages (8), and how DeepSeek's 61 layers are assigned to the 16 chunks of its pipeline. DualPipe with 16",
            "stages is dualpipev with 8 and twice the replicas: two ranks hold the same two chunks, one for each direction.\n",
            table(HEAD, rows, text=(0, 1, 2, 6)),
            "**Llama 3.** At 8k tokens the search trades half of each tensor group for context parallelism (groups of 8): less",
            "exposed communication and, with four times the micro batches, a smaller bubble. At 131k it",
            "agrees with theirs but for twice the context ranks, which fit in memory. Theirs is predicted not "
            "to fit: its engine",
            "frees tensors early and limits the micro batches in flight, neither of which is described.\n",
            "**DeepSeek-V3.** Theirs is predicted not to fit, which it did: of what it does to save",
            "memory (section 3.2.3 of its report) a part is described. The best layout found shards weights "
            "(ZeRO-3) instead of",
            "having a pipeline: most of the all-gathers hide under compute.\n",
            "**Qwen3-235B.** The best layout found has context parallelism instead of tensor",
            "parallelism, and more chunks per stage.\n",
        ]
    )


def main() -> int:
    write_text(ROOT / "docs" / "published_layouts.md", page([row for run in RUNS for row in run.rows()]))
    print("wrote docs/published_layouts.md")
    return 0


if __name__ == "__main__":
    sys.exit(main())
