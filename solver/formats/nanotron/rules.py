"""Rules of nanotron's configuration, by dotted key.

Source: huggingface/nanotron 0.4: parallel/context.py, models/llama.py, parallel/pipeline_parallel/engine.py,
parallel/tensor_parallel/nn.py; src/nanotron/config/config.py (00708b8); as read.
"""

from __future__ import annotations

from solver.formats.rule import Arguments, Rule, implies

_MODEL = "models/llama.py"


def _model(a: Arguments, key: str, default: int = 1) -> int:
    return a.size(f"model.model_config.{key}", default)


def _heads(a: Arguments) -> int:
    return _model(a, "num_attention_heads")


def _keys(a: Arguments) -> int:
    return _model(a, "num_key_value_heads", _heads(a))


def _tp(a: Arguments) -> int:
    return a.size("parallelism.tp")


RULES = (
    Rule("num_attention_heads divides hidden_size", _MODEL, lambda a: _model(a, "hidden_size") % _heads(a) == 0),
    Rule("a head has an even size", _MODEL, lambda a: _model(a, "hidden_size") // _heads(a) % 2 == 0),
    Rule(
        "tp divides num_attention_heads and num_key_value_heads",
        _MODEL,
        lambda a: _heads(a) % _tp(a) == 0 and _keys(a) % _tp(a) == 0,
    ),
    Rule("num_key_value_heads divides num_attention_heads", _MODEL, lambda a: _heads(a) % _keys(a) == 0),
    Rule("tp divides intermediate_size", "tensor_parallel/nn.py", lambda a: _model(a, "intermediate_size") % _tp(a) == 0),
    Rule(
        "1f1b needs batch_accumulation_per_replica of at least pp - 1",
        "pipeline_parallel/engine.py",
        lambda a: implies(
            a.text("parallelism.pp_engine", "1f1b") == "1f1b",
            a.size("tokens.batch_accumulation_per_replica") >= a.size("parallelism.pp") - 1,
        ),
    ),
    Rule(
        "tp_mode ALL_REDUCE excludes tp_linear_async_communication",
        "tensor_parallel/nn.py",
        lambda a: not (a.text("parallelism.tp_mode") == "ALL_REDUCE" and a.on("parallelism.tp_linear_async_communication")),
    ),
)
