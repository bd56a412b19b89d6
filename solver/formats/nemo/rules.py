"""Rules of NeMo 1's configuration beside those of Megatron-Core, by dotted key.

Source: NVIDIA/NeMo 1.23: megatron_base_model.py and megatron_gpt_model.py of nemo/collections/nlp/models/language_modeling, as
read.
"""

from __future__ import annotations

from solver.formats.bridge.rules import VIRTUAL_STAGES
from solver.formats.rule import Rule, implies

_BASE, _GPT = "megatron_base_model.py", "megatron_gpt_model.py"
_HALF = ("16", "16-mixed", "fp16")

RULES = (
    VIRTUAL_STAGES,
    Rule(
        "virtual stages need megatron_amp_O2",
        _GPT,
        lambda a: implies(a.size("model.virtual_pipeline_model_parallel_size") > 1, a.on("model.megatron_amp_O2")),
    ),
    Rule(
        "fp16 with megatron_amp_O2 needs the optimizer distributed_fused_adam",
        _BASE,
        lambda a: implies(
            a.text("trainer.precision") in _HALF and a.on("model.megatron_amp_O2"),
            a.text("model.optim.name") == "distributed_fused_adam",
        ),
    ),
    Rule(
        "fp8 needs one of fp8_e4m3 and fp8_hybrid",
        _GPT,
        lambda a: implies(a.on("model.fp8"), a.on("model.fp8_e4m3") != a.on("model.fp8_hybrid")),
    ),
    Rule("trainer.accumulate_grad_batches is 1", _GPT, lambda a: a.size("trainer.accumulate_grad_batches") <= 1),
    Rule(
        "fewer key and value heads need mcore_gpt",
        _GPT,
        lambda a: implies(
            a.size("model.num_query_groups", a.size("model.num_attention_heads")) != a.size("model.num_attention_heads"),
            a.on("model.mcore_gpt"),
        ),
    ),
)
