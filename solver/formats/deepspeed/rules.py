"""Rules of DeepSpeed's settings, by dotted key, and of Megatron-DeepSpeed's arguments, by flag.

Source: deepspeedai/DeepSpeed 0.19: runtime/config.py, runtime/engine.py, runtime/pipe/engine.py, runtime/zero/config.py;
deepspeedai/Megatron-DeepSpeed megatron/arguments.py (207b2d5), validate_args; as read.
"""

from __future__ import annotations

from solver.formats.rule import Arguments, Rule, implies

_START = "validate_args in Megatron-DeepSpeed's arguments.py"


def _stage(a: Arguments) -> int:
    return a.size("zero_optimization.stage", 0)


def _dtype(a: Arguments) -> str:
    return next((name for name in ("bf16", "fp16") if a.get(f"{name}.enabled") is True), "fp32")


def _tp(a: Arguments) -> int:
    return a.size("--tensor-model-parallel-size")


def _pp(a: Arguments) -> int:
    return a.size("--pipeline-model-parallel-size")


RULES = (
    Rule("ZeRO goes to stage 3", "runtime/config.py", lambda a: _stage(a) <= 3),
    Rule("a pipeline needs ZeRO below stage 2", "runtime/pipe/engine.py", lambda a: _pp(a) == 1 or _stage(a) < 2),
    Rule(
        "without ZeRO gradients are accumulated in the model's type (data_types.grad_accum_dtype)",
        "runtime/engine.py",
        lambda a: _stage(a) > 0 or a.text("data_types.grad_accum_dtype", _dtype(a)) in (_dtype(a), "auto"),
    ),
    Rule(
        "offload_optimizer.ratio below 1 needs stage 3",
        "runtime/zero/config.py",
        lambda a: float(a.get("zero_optimization.offload_optimizer.ratio", 1.0)) >= 1 or _stage(a) == 3,
    ),
    Rule(
        "bf16 excludes fp16",
        "runtime/config.py",
        lambda a: not (a.get("bf16.enabled") is True and a.get("fp16.enabled") is True),
    ),
    Rule("the ranks are a multiple of tp * pp", _START, lambda a: a.world % (_tp(a) * _pp(a)) == 0),
    Rule("--no-pipeline-parallel needs pp 1", _START, lambda a: implies("--no-pipeline-parallel" in a, _pp(a) == 1)),
    Rule(
        "--num-key-value-heads divides --num-attention-heads",
        _START,
        lambda a: a.size("--num-attention-heads") % a.size("--num-key-value-heads", a.size("--num-attention-heads")) == 0,
    ),
    Rule(
        "--sequence-parallel needs CUDA_DEVICE_MAX_CONNECTIONS=1",
        _START,
        lambda a: implies("--sequence-parallel" in a and _tp(a) > 1, a.sets("CUDA_DEVICE_MAX_CONNECTIONS", "1")),
    ),
    Rule(
        "--recompute-granularity selective excludes --recompute-method",
        _START,
        lambda a: implies(a.text("--recompute-granularity") == "selective", "--recompute-method" not in a),
    ),
    Rule(
        "--max-position-embeddings is at least --seq-length",
        _START,
        lambda a: a.size("--max-position-embeddings", 1 << 30) >= a.size("--seq-length"),
    ),
)
