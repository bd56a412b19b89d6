"""Rules of InternEvo's configuration, by dotted key.

Source: InternLM/InternEvo internlm/initialize/launch.py (args_sanity_check, 0.5.2 and the state of 2024 with sequence_2D),
internlm/core/scheduler/pipeline_scheduler.py, as read.
"""

from __future__ import annotations

from solver.formats.rule import Arguments, Rule, implies

_LAUNCH = "args_sanity_check in launch.py"


def _size(a: Arguments, name: str) -> int:
    """Size of a section of ``parallel``, which may also stand as a number."""
    return a.size(f"parallel.{name}.size", a.size(f"parallel.{name}"))


def _mode(a: Arguments) -> str:
    return a.text("parallel.tensor.mode", "mtp")


def _schedule(a: Arguments) -> str:
    return a.text("parallel.pipeline.mode", "1f1b").lower()


def _planes(a: Arguments) -> bool:
    return a.on("parallel.sequence_2D.enable")


RULES = (
    Rule(
        "fsdp excludes a pipeline and tensor.mode isp",
        _LAUNCH,
        lambda a: implies(a.on("parallel.zero1.fsdp"), _size(a, "pipeline") == 1 and _mode(a) != "isp"),
    ),
    Rule("weight.size above 1 needs tensor.mode isp", _LAUNCH, lambda a: _size(a, "weight") <= 1 or _mode(a) == "isp"),
    Rule(
        "num_chunks above 1 needs pipeline.interleaved_overlap=True",
        _LAUNCH,
        lambda a: implies(a.size("model.num_chunks") > 1, a.on("parallel.pipeline.interleaved_overlap")),
    ),
    Rule(
        "num_chunks above 1 needs data.micro_num in multiples of the pipeline",
        "pipeline_scheduler.py",
        lambda a: implies(a.size("model.num_chunks") > 1, a.size("data.micro_num") % _size(a, "pipeline") == 0),
    ),
    Rule(
        "packed data (data.use_packed_dataset) needs model.use_flash_attn=True",
        _LAUNCH,
        lambda a: implies(a.on("data.use_packed_dataset", True), a.on("model.use_flash_attn", True)),
    ),
    Rule(
        "sequence_2D needs data.use_packed_dataset=False",
        _LAUNCH,
        lambda a: implies(_planes(a), not a.on("data.use_packed_dataset", True)),
    ),
    Rule(
        "sequence_2D's head_size * context_size is the size of tensor",
        _LAUNCH,
        lambda a: implies(
            _planes(a),
            a.size("parallel.sequence_2D.head_size") * a.size("parallel.sequence_2D.context_size") == _size(a, "tensor"),
        ),
    ),
    Rule(
        "pipeline.mode ZBH1 excludes overlap_sync_grad and several chunks",
        _LAUNCH,
        lambda a: implies(
            _schedule(a) == "zbh1", not a.on("hybrid_zero_optimizer.overlap_sync_grad") and a.size("model.num_chunks") == 1
        ),
    ),
    Rule(
        "pipeline.mode ZBH1 under isp excludes weight.overlap",
        _LAUNCH,
        lambda a: implies(_schedule(a) == "zbh1" and _mode(a) == "isp", not a.on("parallel.weight.overlap")),
    ),
)
