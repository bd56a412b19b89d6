"""Rules of torchtitan's job configuration, by dotted key of releases 0.1 and 0.2.

Source: pytorch/torchtitan 0.1.0, 0.2.0 and 0.2.2: distributed/parallel_dims.py, train.py, distributed/pipeline.py,
models/llama3/infra/parallelize.py; torch/distributed/pipelining/schedules.py; as read.
"""

from __future__ import annotations

from solver.formats.rule import Arguments, Rule, implies
from solver.formats.torchtitan.keys import FLEX_FLAVORS, VARLEN_FLAVOR

_DIMS, _PARALLELIZE, _PIPELINE = "parallel_dims.py", "llama3/infra/parallelize.py", "distributed/pipeline.py"
_ONE_STAGE, _SPLIT = ("1f1b", "gpipe"), ("zbvzerobubble", "interleavedzerobubble")


def _degree(a: Arguments, name: str) -> int:
    return a.size(f"parallelism.{name}_degree")


def _replicas(a: Arguments) -> int:
    return _degree(a, "data_parallel_replicate") * a.size("parallelism.data_parallel_shard_degree", -1)


def _stages(a: Arguments) -> int:
    named = a.get("parallelism.module_fqns_per_model_part", [])
    return len(named) or len(a.get("parallelism.pipeline_parallel_split_points", [])) + 1


def _piped(a: Arguments) -> bool:
    return _degree(a, "pipeline_parallel") > 1


def _schedule(a: Arguments) -> str:
    return a.text("parallelism.pipeline_parallel_schedule", "1F1B").lower()


def _micro_batches(a: Arguments) -> int:
    return a.size("training.local_batch_size", 8) // a.size("parallelism.pipeline_parallel_microbatch_size")


def _flex(a: Arguments) -> bool:
    """Whether the model is a flavor of torchtitan's with FlexAttention, or with variable-length attention."""
    sizes = {"deepseek_v3": ("16B", "236B", "671B"), "gpt_oss": ("20b", "120b")}
    flavor = a.text("model.flavor", "")
    return flavor in sizes.get(a.text("model.name", ""), ()) or flavor.endswith((*FLEX_FLAVORS, VARLEN_FLAVOR))


def _compiled(a: Arguments) -> bool:
    """Whether the model is compiled: by the key of 0.1, or the section of 0.2."""
    model = "model" in a.get("compile.components", ["model", "loss"])
    return a.on("training.compile") or (a.on("compile.enable") and model)


RULES = (
    Rule("training.global_batch_size is a multiple of local_batch_size times the data-parallel ranks", "train.py",
         lambda a: _replicas(a) < 0 or a.size("training.global_batch_size", -1) < 0
         or a.size("training.global_batch_size") % (a.size("training.local_batch_size", 8) * _replicas(a)) == 0),
    Rule("expert_parallel_degree divides the shards times context- and tensor-parallel ranks", _DIMS,
         lambda a: _degree(a, "expert_parallel") == 1 or a.size("parallelism.data_parallel_shard_degree", -1) < 0
         or a.size("parallelism.data_parallel_shard_degree") * _degree(a, "context_parallel") * _degree(a, "tensor_parallel")
         % (_degree(a, "expert_parallel") * a.size("parallelism.expert_tensor_parallel_degree")) == 0),
    Rule("pipeline_parallel_microbatch_size divides local_batch_size", _PIPELINE,
         lambda a: not _piped(a) or a.size("training.local_batch_size", 8)
         % a.size("parallelism.pipeline_parallel_microbatch_size") == 0),
    Rule("pipeline_parallel_degree divides the stages that the model is cut into", _PIPELINE,
         lambda a: not _piped(a) or _stages(a) == 1 or _stages(a) % _degree(a, "pipeline_parallel") == 0),
    Rule("1F1B and GPipe have one stage a rank, ZBVZeroBubble two", _PIPELINE,
         lambda a: not _piped(a) or _stages(a) == 1
         or implies(_schedule(a) in _ONE_STAGE, _stages(a) == _degree(a, "pipeline_parallel"))
         and implies(_schedule(a) == "zbvzerobubble", _stages(a) == 2 * _degree(a, "pipeline_parallel"))),
    Rule("1F1B needs as many micro batches as stages", "pipelining/schedules.py",
         lambda a: implies(_piped(a) and _schedule(a) == "1f1b", _micro_batches(a) >= _degree(a, "pipeline_parallel"))),
    Rule("Interleaved1F1B needs micro batches in whole rounds of the stages", "pipelining/schedules.py",
         lambda a: implies(_piped(a) and _schedule(a) == "interleaved1f1b",
                           _micro_batches(a) % max(1, _micro_batches(a) // _degree(a, "pipeline_parallel")) == 0)),
    Rule("schedules that split the backward pass exclude a compiled model", "pipelining/schedules.py",
         lambda a: implies(_piped(a) and _schedule(a) in _SPLIT, not _compiled(a))),
    Rule("enable_async_tensor_parallel needs a compiled model", "distributed/tensor_parallel.py",
         lambda a: implies(_degree(a, "tensor_parallel") > 1 and a.on("parallelism.enable_async_tensor_parallel"),
                           _compiled(a))),
    Rule("flavors with FlexAttention or varlen attention exclude context parallelism", "deepseek_v3/infra/parallelize.py",
         lambda a: a.size("parallelism.context_parallel_degree") == 1 or not _flex(a)),
    Rule("copies without shards exclude tensor and pipeline parallelism", _PARALLELIZE,
         lambda a: implies(_degree(a, "data_parallel_replicate") > 1 and _degree(a, "context_parallel") == 1
                           and a.size("parallelism.data_parallel_shard_degree", -1) == 1,
                           _degree(a, "tensor_parallel") == 1 and not _piped(a))),
    Rule("training.seq_len is a multiple of tp * 2 * cp", _DIMS,
         lambda a: a.size("training.seq_len", 2048)
         % (_degree(a, "tensor_parallel") * 2 * _degree(a, "context_parallel")) == 0),
    Rule("activation_checkpoint.selective_ac_option is op or a number", _PARALLELIZE,
         lambda a: implies(a.text("activation_checkpoint.mode", "selective") == "selective",
                           a.text("activation_checkpoint.selective_ac_option", "2").isdecimal()
                           or a.text("activation_checkpoint.selective_ac_option") == "op")),
)  # fmt: skip
