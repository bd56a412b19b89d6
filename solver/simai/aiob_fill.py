"""Filling the compute columns of a workload from a kernel-time file: as AICB does it, and from what each kernel costs.

AICB gives every GEMM of a block the time of the whole block, lets backward take as long as forward in each of its two parts,
and charges the embedding with a number left over from another layer. Ours charges each kernel once: forward what was timed;
the input gradient of a GEMM as much again, and of flash attention 2.5 times (its backward recomputes the scores: 5 products
instead of 2, Dao 2023, arXiv 2307.08691 section 3.1); the weight gradient of GEMMs as much as forward.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from solver.simai.aiob import LATENT_ROWS, PARAM_TIME, KernelTimes, compute_cache
from solver.simai.workload_csv import COMPUTATION, CsvWorkload, Item
from solver.simai.workload_text import Row, TextWorkload

FLASH_BACKWARD = 2.5
_CORE = ("atten_flash", "atten_core_qk", "atten_core_softmax", "atten_core_contex")
#: Kernels of the rows and items of a block: GEMMs (with a weight gradient), flash attention or its parts, all others.
_ATTENTION_COLUMN = (("atten_qkv",), _CORE, ("layernorm",))
_ATTENTION_ROW = (("atten_linear",), (), ())
_MLP_COLUMN = (("mlp_linear_1",), (), ("layernorm2", "mlp_gelu"))
_MLP_ROW = (("mlp_linear_2",), (), ())
_HEAD = (("logit_time",), (), ("layernorm_post",))
_BLOCKS: Mapping[str, tuple[tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]], ...]] = {
    "attention_column": (_ATTENTION_COLUMN,),
    "attention_row": (_ATTENTION_ROW,),
    "attention_layer": (_ATTENTION_COLUMN, _ATTENTION_ROW),
    "mlp_column": (_MLP_COLUMN,),
    "mlp_row": (_MLP_ROW,),
    "mlp_layer": (_MLP_COLUMN, _MLP_ROW),
    "mlp_moelayer": (_MLP_COLUMN, _MLP_ROW),
    "final_column": (_HEAD,),
    "embedding_layer": (((), (), ("Emb",)),),
}


@dataclass(frozen=True)
class Block:
    """Nanoseconds of a block in its three passes."""

    forward: int
    input_grad: int
    weight_grad: int


def block_times(times: KernelTimes, name: str) -> Block | None:
    """Return what the kernels of a row cost; None for a row of no known kernels."""
    if name not in _BLOCKS:
        return None

    def ns(kernels: tuple[str, ...]) -> float:
        return sum(times.average(kernel) for kernel in kernels) * 1000.0

    parts = [(ns(gemms), ns(core), ns(others)) for gemms, core, others in _BLOCKS[name]]
    forward = sum(sum(part) for part in parts)
    backward = sum(gemms + FLASH_BACKWARD * core + others for gemms, core, others in parts)
    return Block(round(forward), round(backward), round(sum(part[0] for part in parts)))


def fill_text(workload: TextWorkload, times: KernelTimes) -> TextWorkload:
    """Return the workload with our compute columns in the rows of known kernels; other rows stay as they are.

    Of rows of one name that follow each other (several messages of one block) the first carries the kernels; param_time (a
    division, no optimizer step) counts once.
    """
    rows, before = [], ""
    for row in workload.rows:
        block = block_times(times, row.name)
        if block is not None and row.name == before:
            block = Block(0, 0, 0)
        if row.name == "grad_param_compute":
            rows.append(_with(row, row.forward.compute, round(times.average(PARAM_TIME) * 1000.0), row.weight_grad.compute))
        else:
            rows.append(row if block is None else _with(row, block.forward, block.input_grad, block.weight_grad))
        before = row.name
    return replace(workload, rows=tuple(rows))


def fill_text_as_aicb(workload: TextWorkload, times: KernelTimes, recompute: bool = False) -> TextWorkload:
    """Return the workload with the compute columns that AICB's ``workload_generate_aiob`` writes.

    Attention and MLP rows: the block's time in all three columns, half of it in each of a column and a row linear. The last
    row linear of the model (final_column) takes half of an attention block, although logit_time is there. The weight gradient
    of an embedding takes the backward time of whatever came before it. recompute: attention's forward counts twice.
    """
    cache = compute_cache(times, recompute)
    left_over, rows, before = cache["grad_backward"], [], ""
    for row in workload.rows:
        forward, backward, weight = row.forward.compute, row.input_grad.compute, row.weight_grad.compute
        stage = "attention" if row.name == "final_column" else row.name.split("_")[0]
        if row.name == "grad_param_compute":
            backward = cache["grad_forward"] + cache["grad_backward"]
        elif "embedding" in row.name and row.name != "embedding_grads":
            forward, weight = cache.get("Emb", 1), left_over
        elif row.name == "mlp_moelayer":
            if before != row.name:
                forward = backward = left_over = cache["mlp_forward"]
        elif stage in ("attention", "mlp"):
            halves = 2 if "column" in row.name or "row" in row.name else 1
            whole = cache.get(row.name, 0) if row.name in LATENT_ROWS else cache[f"{stage}_backward"]
            doubled = 2 if recompute and "attention" in row.name else 1
            forward, backward = whole * doubled // halves, whole // halves
            weight = left_over = backward
        rows.append(_with(row, forward, backward, weight))
        before = row.name
    return replace(workload, rows=tuple(rows))


def _with(row: Row, forward: int, input_grad: int, weight_grad: int) -> Row:
    return replace(
        row,
        forward=replace(row.forward, compute=forward),
        input_grad=replace(row.input_grad, compute=input_grad),
        weight_grad=replace(row.weight_grad, compute=weight_grad),
    )


def fill_csv_as_aicb(workload: CsvWorkload, times: KernelTimes, recompute: bool = False) -> CsvWorkload:
    """Return the workload with AICB's nanoseconds in each computation: of the first stage whose first word its stage contains.

    So each of the six GEMMs of a linear's three passes takes the time of its whole block.
    """
    cache = compute_cache(times, recompute)

    def filled(item: Item) -> Item:
        found = (ns for stage, ns in cache.items() if stage.split("_")[0] in item.stage)
        return replace(item, elapsed=next(found, item.elapsed)) if item.kind == COMPUTATION else item

    others = tuple(fill_csv_as_aicb(section, times, recompute) for section in workload.others)
    return replace(workload, items=tuple(filled(item) for item in workload.items), others=others)


def fill_csv(workload: CsvWorkload, times: KernelTimes) -> CsvWorkload:
    """Return the workload with our nanoseconds: of a linear's two backward GEMMs the first carries what is no GEMM."""
    items, before = [], ""
    for item in workload.items:
        name = item.stage.replace("Linearattention", "Linear.attention").replace("Linearmlp", "Linear.mlp").split(".")[-1]
        block = block_times(times, name) if item.kind == COMPUTATION else None
        if block is None:
            items.append(item)
            before = ""
            continue
        second = before == item.stage
        ns = block.forward if item.stage.startswith("forward") else block.weight_grad if second else block.input_grad
        items.append(replace(item, elapsed=ns))
        before = "" if second else item.stage
    return replace(workload, items=tuple(items), others=tuple(fill_csv(section, times) for section in workload.others))
