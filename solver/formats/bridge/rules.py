"""Rules of Megatron-Bridge's configuration beside those of Megatron-Core, by dotted key.

Source: NVIDIA-NeMo/Megatron-Bridge 0.3: src/megatron/bridge/training/config.py, models/gpt_provider.py; Megatron-Core's
model_parallel_config.py, which it calls; as read.
"""

from __future__ import annotations

from solver.formats.rule import Arguments, Rule, implies

_CONFIG = "training/config.py"


def _graphs(a: Arguments) -> bool:
    return a.text("model.cuda_graph_impl", "none") != "none"


def _length(a: Arguments) -> object:
    """Return the tokens of a sample by either name of the key, of which the first is the newer."""
    return a.get("dataset.seq_length", a.get("dataset.sequence_length"))


def _saves_shards(a: Arguments) -> bool:
    """Whether checkpoints have the format of Megatron-FSDP, or a complete configuration has none."""
    neither = a.get("checkpoint.save") is None and a.get("checkpoint.load") is None
    return a.text("checkpoint.ckpt_format") == "fsdp_dtensor" or ("model._target_" in a and neither)


#: Of Megatron-Core, by the names that NeMo has too.
VIRTUAL_STAGES = Rule(
    "model.virtual_pipeline_model_parallel_size needs model.pipeline_model_parallel_size above 1",
    "parallel_state.py",
    lambda a: implies(
        a.size("model.virtual_pipeline_model_parallel_size") > 1, a.size("model.pipeline_model_parallel_size") > 1
    ),
)
RULES = (
    VIRTUAL_STAGES,
    Rule(
        "model.sequence_parallel needs model.tensor_model_parallel_size above 1",
        "model_parallel_config.py",
        lambda a: implies(a.on("model.sequence_parallel"), a.size("model.tensor_model_parallel_size") > 1),
    ),
    Rule(
        "model.seq_length equals dataset.seq_length, or dataset.sequence_length",
        _CONFIG,
        lambda a: a.get("model.seq_length") is None or _length(a) in (None, a["model.seq_length"]),
    ),
    Rule(
        "ddp.use_megatron_fsdp that saves or loads needs checkpoint.ckpt_format fsdp_dtensor, which recipes do not have",
        _CONFIG,
        lambda a: implies(a.on("ddp.use_megatron_fsdp"), _saves_shards(a)),
    ),
    Rule(
        "2 * model.context_parallel_size divides model.seq_length",
        _CONFIG,
        lambda a: (
            a.size("model.context_parallel_size") == 1
            or a.size("model.seq_length", 0) % (2 * a.size("model.context_parallel_size")) == 0
        ),
    ),
    Rule(
        "model.cuda_graph_impl needs rng.te_rng_tracker or model.use_te_rng_tracker",
        "models/gpt_provider.py",
        lambda a: implies(_graphs(a), a.on("rng.te_rng_tracker") or a.on("model.use_te_rng_tracker")),
    ),
    Rule(
        "comm_overlap has one of overlap_p2p_comm and batch_p2p_comm",
        "pipeline_parallel/schedules.py",
        lambda a: not (a.on("comm_overlap.overlap_p2p_comm") and a.on("comm_overlap.batch_p2p_comm")),
    ),
)
