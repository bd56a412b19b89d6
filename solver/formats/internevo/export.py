"""A layout as a configuration file of InternEvo, which its trainer runs; solver.formats.internevo.config reads it back.

Sources of what its trainer accepts: InternEvo internlm/initialize/launch.py (launch checks) and configs/7B_llama2.py (00a2a34).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from profiler.errors import require
from solver.formats.launch.torchrun import torchrun
from solver.spec.model import ModelSpec
from solver.spec.strategy import Strategy

#: Of releases that know all keys of a file: those of 2024 have neither sequence_2D nor a pipeline's mode.
VERSION, NEWER = "InternEvo 0.3 and later", "InternEvo after 0.5.2"
_DTYPES = {"bf16": "torch.bfloat16", "fp16": "torch.float16"}
_ENGINES = {"1f1b": "1f1b", "interleaved": "1f1b", "zb-h1": "zbh1"}
#: What a layout does not decide, with the values of InternEvo's own examples.
_OPTIMIZER = """\
grad_scaler = dict(
    fp16=dict(initial_scale=2**16, min_scale=1, growth_interval=1000),
    growth_factor=2, backoff_factor=0.5, max_scale=2**24, hysteresis=2,
)
loss = dict(label_smoothing=0)
adam = dict(lr=1e-4, adam_beta1=0.9, adam_beta2=0.95, adam_beta2_c=0, adam_eps=1e-8, weight_decay=0.01)
lr_scheduler = dict(total_steps=data["total_steps"], init_steps=0, warmup_ratio=0.01, eta_min=1e-5, last_epoch=-1)
beta2_scheduler = dict(init_beta2=adam["adam_beta2"], c=adam["adam_beta2_c"], cur_iter=-1)
ckpt = dict(enable_save_ckpt=False, auto_resume=False)
monitor = dict(
    alert=dict(
        enable_feishu_alert=DO_ALERT, feishu_alert_address=None, light_monitor_address=None, alert_file_path="alerts.log",
    ),
    tensorboard=dict(queue_max_length=10),
)
use_fp32_norm = False
cudnn_deterministic = False
cudnn_benchmark = False
"""


def internevo_files(model: ModelSpec, run: Strategy, gpus_per_node: int, name: str) -> dict[str, str]:
    """Return file name -> text of NAME.py. Raises InputError for what InternEvo's settings do not express, by name."""
    _refuse(model, run)
    version = NEWER if run.cp > 1 or run.schedule == "zb-h1" else VERSION
    head = [
        f'"""{model.name} on {run.world_size} GPUs, for {version}.\n',
        f"{torchrun(run, gpus_per_node)} train.py --config {name}.py --launcher torch",
        'Training data are yours to name: train_folder None trains on random tokens.\n"""\n',
        f"JOB_NAME = {name!r}\nmodel_type = {_type(model)!r}\nDO_ALERT = False\n",
    ]
    sections = {
        "data": {
            "seq_len": run.seq_len,
            "micro_num": run.num_micro_batches,
            "micro_bsz": run.micro_batch_size,
            "valid_micro_num": 4,
            "valid_every": 0,
            "pack_sample_into_one": False,
            "total_steps": 20000,
            **({} if run.attention == "flash" and run.cp == 1 else {"use_packed_dataset": False}),
            "skip_batches": "",
            "rampup_batch_size": "",
            "min_length": 50,
            "train_folder": None,
            "valid_folder": None,
            "empty_cache_and_diag_interval": 200,
            "diag_outlier_ratio": 1.1,
        },
        "model": _model(model, run),
        "parallel": _parallel(run),
        "hybrid_zero_optimizer": {
            "overlap_sync_grad": run.overlap_grad_reduce,
            "overlap_sync_param": run.overlap_param_gather,
            "reduce_bucket_size": 512 * 1024 * 1024,
            "clip_grad_norm": 1.0,
        },
    }
    return {f"{name}.py": "\n".join([*head, *(_text(key, value) for key, value in sections.items()), _OPTIMIZER])}


def _refuse(model: ModelSpec, run: Strategy) -> None:
    rules = (
        (not model.is_mixture_of_experts, f"{model.name}: mixtures of experts under InternEvo are not modelled"),
        (run.precision in _DTYPES, f"precision {run.precision}: InternEvo trains in {' or '.join(_DTYPES)}"),
        (
            run.grad_dtype == run.precision,
            f"grad_dtype {run.grad_dtype}: InternEvo's gradients have the parameters' {run.precision}",
        ),
        (run.recompute != "selective", "recompute selective: InternEvo recomputes whole layers"),
        (run.schedule in _ENGINES, f"schedule {run.schedule}: InternEvo runs {', '.join(_ENGINES)}"),
        (run.cp == 1 or run.tp_mode == "isp", f"cp {run.cp} with tp_mode {run.tp_mode}: InternEvo's sequence_2D needs isp"),
        (
            run.zero != 3 or (run.tp_mode != "isp" and run.pp == 1),
            "zero 3: InternEvo does not combine fsdp with isp or a pipeline",
        ),
        (
            run.recompute_layers < 0 or run.recompute_layers % run.vpp == 0,
            f"recompute_layers {run.recompute_layers}: InternEvo recomputes the same share of each of {run.vpp} chunks",
        ),
    )
    require(rules)


def _model(model: ModelSpec, run: Strategy) -> dict[str, Any]:
    """Return the model section. Its MLP is rounded up to a multiple_of, here a power of 2 that divides it."""
    wide, hidden = model.intermediate_size, model.hidden_size
    ratio = wide / hidden
    if int(hidden * ratio) != wide:  # rounding of the quotient
        ratio = (wide + 0.5) / hidden
    return {
        "checkpoint": _checkpoint(model, run),
        "num_chunks": run.vpp if run.pp > 1 else 1,
        "num_layers": model.num_hidden_layers,
        "hidden_size": hidden,
        "num_attention_heads": model.num_attention_heads,
        "num_kv_attention_heads": model.num_key_value_heads,
        **({} if model.head_dim * model.num_attention_heads == hidden else {"head_dim": model.head_dim}),
        "mlp_ratio": ratio,
        "multiple_of": min(wide & -wide, 256),
        "vocab_size": model.vocab_size,
        **_biases(model),
        "norm_type": model.norm,
        "layer_norm_epsilon": 1e-5,
        "dtype": _DTYPES[run.precision],
        "use_flash_attn": run.attention == "flash",
        "parallel_output": True,
        "embed_split_hidden": True,
        "embed_grad_scale": 1,
        "apply_post_layer_norm": False,
        "qk_interleaved": False,
    }


def _type(model: ModelSpec) -> str:
    """Return the model of InternEvo's registry that has these biases."""
    return "INTERNLM" if model.output_bias else "QWEN2" if model.qkv_bias else "LLAMA2"


def _biases(model: ModelSpec) -> dict[str, bool]:
    if _type(model) == "QWEN2":  # internlm/model/modeling_qwen2.py: with no_bias there are none at all
        return {"qkv_bias": True, "o_bias": False}
    return {"no_bias": not model.output_bias}


def _checkpoint(model: ModelSpec, run: Strategy) -> bool | float:
    """Return the share of each chunk's layers that is recomputed, in the middle of those that mean the same layers."""
    chunk = -(-model.num_hidden_layers // (run.pp * run.vpp))
    if run.recompute == "none" or run.recompute_layers < 0 or run.recompute_layers >= chunk * run.vpp:
        return run.recompute == "full"
    return (run.recompute_layers // run.vpp + 0.5) / chunk


def _parallel(run: Strategy) -> dict[str, Any]:
    """Return the parallel section. ZeRO over all that hold the same parameters is -1, so that it holds on other numbers too."""
    size = 1 if run.zero == 0 else -1 if run.zero_shard_size == run.replicas else run.zero_shard_size
    chunked = run.pp > 1 and run.vpp > 1
    planes = {
        "enable": True,
        "head_size": run.tp,
        "context_size": run.cp,
        "window_size": 1,
        "device_placement_strategy": {"head_first": True, "interleaved": False},
    }
    return {
        "zero1": {"size": size, "fsdp": run.zero == 3},
        "tensor": {"size": run.tp * run.cp, "mode": run.tp_mode},
        "pipeline": {
            "size": run.pp,
            "interleaved_overlap": run.p2p_overlap if chunked else True,
            "mode": _ENGINES[run.schedule] if run.pp > 1 else "1f1b",
        },
        "weight": {"size": run.wp, "overlap": run.overlap_weight_gather, "memory_pool": True},
        **({"sequence_2D": planes} if run.cp > 1 else {}),
    }


def _text(name: str, section: Mapping[str, Any]) -> str:
    return f"{name} = dict(\n" + "".join(f"    {key}={_value(value)},\n" for key, value in section.items()) + ")\n"


def _value(value: Any) -> str:
    if not isinstance(value, dict):
        return repr(value)
    return f"dict({', '.join(f'{key}={_value(inner)}' for key, inner in value.items())})"
