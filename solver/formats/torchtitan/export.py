"""A layout as a TOML file of torchtitan; what solver.formats.torchtitan.config reads as the same layout."""

from __future__ import annotations

from typing import Any

from profiler.errors import InputError, require
from solver.formats.file_run import model_path
from solver.formats.hugging_face.export import config_json
from solver.formats.launch.torchrun import nodes_of
from solver.formats.syntax.toml_text import write_toml
from solver.formats.torchtitan.config import ROTATES, flavor_model
from solver.formats.torchtitan.keys import HEAD_APART, RELEASES, Release, attention_kernels
from solver.formats.torchtitan.stages import assigned, stage_starts
from solver.spec.frameworks import framework_of
from solver.spec.model import ModelSpec
from solver.spec.pipeline_layout import chunk_layers
from solver.spec.strategy import Strategy

Tables = dict[str, dict[str, Any]]
#: Models of torchtitan of which no flavor can be described in a config.json.
_ONLY_ITS_OWN = ("gpt_oss", "deepseek_v3")


def torchtitan_files(model: ModelSpec, run: Strategy, gpus_per_node: int, name: str) -> dict[str, str]:
    """Return file name -> text: NAME.toml, and the model where torchtitan has no flavor of it. Raises InputError."""
    release = next(r for r in RELEASES if r.framework == framework_of(run.framework).name)
    same = [pair for pair in release.flavors if _same(model, release.flavors[pair], pair[1])]
    # those whose attention is the one that is estimated; users add other flavors, but no other gpt_oss or DeepSeek
    plain = [pair for pair in same if pair[0] in _ONLY_ITS_OWN or not attention_kernels(*pair)]
    flavor = min(plain, key=lambda pair: bool(attention_kernels(*pair)), default=None)
    tables: Tables = {"job": {"description": f"{model.name} on {run.world_size} GPUs"}}
    tables["model"] = dict(zip(("name", "flavor"), flavor or _own(model, release), strict=True))
    for table, values in (*_ranks(run, release), *_settings(model, run, release)):
        tables.setdefault(table, {}).update(values)
    nodes, each = nodes_of(run, gpus_per_node)
    comments = [
        f"{model.name} on {run.world_size} GPUs, for {release.version}.",
        f"On each of {nodes} nodes, with your data: NGPU={each} CONFIG_FILE={name}.toml ./run_train.sh",
    ]
    if flavor and (own := attention_kernels(*flavor)):
        comments.append(f"This flavor's attention is {own}, which the estimate leaves out.")
    if flavor:
        return {f"{name}.toml": write_toml(tables, comments)}
    comments.append(
        f"The flavor is yours to add to models/{tables['model']['name']} with the dimensions of {model_path(name)}."
    )
    return {f"{name}.toml": write_toml(tables, comments), model_path(name): config_json(model)}


def _same(model: ModelSpec, shipped: str, flavor: str) -> bool:
    return flavor_model(shipped, flavor).replace(name=model.name) == model


def _own(model: ModelSpec, release: Release) -> tuple[str, str]:
    """Return the model of torchtitan's code and the name of a flavor of it that users add."""
    plain = model.norm == "rmsnorm" and model.position == "rope" and model.gated_mlp and model.norms_per_layer == 2
    added = model.qkv_bias or model.output_bias or model.mlp_bias or model.tie_word_embeddings or model.sliding_window
    kind = (model.has_latent_attention, model.qk_norm)
    if release.year >= 2026 and plain and not (model.qkv_bias or model.output_bias or model.mlp_bias or model.sliding_window):
        if kind == (False, "head"):
            return "qwen3", model.name
        if kind == (True, "none") and model.is_mixture_of_experts and not model.num_nextn_predict_layers:
            return "deepseek_v3", model.name
    if not plain or added or kind != (False, "none") or model.is_mixture_of_experts:
        others = "; its qwen3 has the norms, ties and experts, its deepseek_v3 no multi-token prediction"
        raise InputError(
            f"{model.name}: torchtitan's llama3 has no biases, norms of q and k, windows, tied embeddings or experts"
            + others * (release.year >= 2026)
        )
    return "llama3", model.name


def _ranks(run: Strategy, release: Release) -> list[tuple[str, dict[str, Any]]]:
    """Return the tables of sizes. FSDP shards over data- and context-parallel ranks together."""
    _refuse(run)
    shard = max(run.zero_shard_size // run.cp, 1) if run.zero else 1
    theirs = {ours: word for word, ours in ROTATES.items()}
    found: list[tuple[str, dict[str, Any]]] = [
        (
            release.ranks,
            {
                "data_parallel_replicate_degree": run.dp // shard,
                "data_parallel_shard_degree": shard,
                "tensor_parallel_degree": run.tp,
            },
        ),
        (
            release.pipeline,
            {
                "enable_async_tensor_parallel": run.tp_comm_overlap,
                "pipeline_parallel_degree": run.pp,
                "context_parallel_degree": run.cp,
                "context_parallel_rotate_method": theirs[run.cp_comm] if run.cp > 1 else None,
            },
        ),
    ]
    if run.ep > 1:
        backend = "deepep" if run.moe_dispatcher == "deepep" else "standard"
        found.append(
            (
                release.ranks,
                {
                    "expert_parallel_degree": run.ep,
                    "expert_tensor_parallel_degree": run.etp,
                    "expert_parallel_comm_backend": backend,
                },
            )
        )
    if release.year >= 2025:
        again = {3: "always" if run.pp > 1 else "default", 2: "default" if run.pp > 1 else "never"}.get(run.zero, "default")
        found.append((release.ranks, {"fsdp_reshard_after_forward": again}))
    return found


def _refuse(run: Strategy) -> None:
    """Raise InputError for sizes that torchtitan does not run together."""
    rotates, alone = ROTATES.values(), not run.zero or run.zero_shard_size == 1
    rules = (
        (run.tp == 1 or run.tp_mode == "msp", f"tp_mode {run.tp_mode}: torchtitan splits activations along the sequence (msp)"),
        (run.cp == 1 or run.cp_comm in rotates, f"cp_comm {run.cp_comm}: torchtitan rotates keys as {' or '.join(rotates)}"),
        (
            alone or run.zero_shard_size % run.cp == 0,
            f"zero_shard_size {run.zero_shard_size}: torchtitan shards over whole groups of cp {run.cp} ranks",
        ),
        (
            not alone or run.dp * run.cp == 1 or run.tp * run.cp * run.pp == 1,
            f"zero {run.zero} over {run.zero_shard_size}: torchtitan keeps whole copies only where tp, cp and pp are 1",
        ),
    )
    require(rules)


def _settings(model: ModelSpec, run: Strategy, release: Release) -> list[tuple[str, dict[str, Any]]]:
    newer, dtype = release.year >= 2025, {"fp32": "float32"}.get(run.precision, "bfloat16")
    piped = run.pp > 1
    local = run.micro_batch_size * (run.num_micro_batches if piped else 1)
    training: dict[str, Any] = {
        "seq_len": run.seq_len,
        release.batch: local,
        "global_batch_size": run.global_batch_sequences if newer else None,
        "mixed_precision_param": dtype,
        "mixed_precision_reduce": "float32",
    }
    found: list[tuple[str, dict[str, Any]]] = [("training", training)]
    if release.year >= 2026:
        found += [("compile", _compile(run)), ("debug", _debug(run))]
    else:
        training |= {"compile": run.compile, "deterministic": run.deterministic or None}
    if piped:
        schedule = "interleaved" if run.schedule == "1f1b" and run.vpp > 1 else run.schedule
        if schedule not in release.schedules:
            raise InputError(f"schedule {schedule}: torchtitan has {', '.join(release.schedules)}")
        found.append(
            (
                release.pipeline,
                {
                    "pipeline_parallel_schedule": release.schedules[schedule],
                    **_stages(model, run, release),
                    **(
                        {"pipeline_parallel_microbatch_size": run.micro_batch_size}
                        if newer
                        else {"pipeline_parallel_microbatches": run.num_micro_batches}
                    ),
                },
            )
        )
    quantised = {ours: theirs for theirs, ours in release.converters.items()}.get(run.precision)
    if newer:
        if quantised:  # its settings stand in a table of its name
            recipe = run.fp8_recipe if run.precision == "fp8" else "mxfp8_cublas" if release.year >= 2026 else "mxfp8"
            gathers = {"enable_fsdp_float8_all_gather": True} if run.fp8_param_gather else {}
            found += [("model", {"converters": [quantised]}), (quantised, {"recipe_name": recipe, **gathers, **HEAD_APART})]
        found += [("optimizer", {"implementation": "fused"})]
    else:
        found += [("model", {"norm_type": "fused_rmsnorm" if run.fused_norm else "rmsnorm"})]
        gathers = {"enable_fsdp_float8_all_gather": True} if run.fp8_param_gather else {}
        found += [("float8", {"enable_float8_linear": True, **gathers})] if quantised == "float8" else []
    return [*found, ("activation_checkpoint", _recompute(model, run))]


def _debug(run: Strategy) -> dict[str, Any]:
    forced = True if run.moe_routing == "consecutive" else None
    return {"deterministic": run.deterministic, "moe_force_load_balance": forced}


def _compile(run: Strategy) -> dict[str, Any]:
    """Return what is compiled: model and loss together unless the run states the loss."""
    if run.compile_loss is None:
        return {"enable": run.compile}
    compiled = [name for name, holds in (("model", run.compile), ("loss", run.compile_loss)) if holds]
    return {"enable": bool(compiled), "components": compiled or None}


def _stages(model: ModelSpec, run: Strategy, release: Release) -> dict[str, Any]:
    """Return the keys that divide the layers: split points, or the modules of every stage."""
    layers, number = model.num_hidden_layers, run.pp * run.vpp
    if release.year < 2026:
        return {"pipeline_parallel_split_points": [f"layers.{first}" for first in stage_starts(layers, number)]}
    ends = run.account_for_embedding_in_pipeline_split, run.account_for_loss_in_pipeline_split
    sizes = list(chunk_layers(run.pipeline_layout)) if run.pipeline_layout else assigned(layers, number, *map(int, ends))
    firsts = [sum(sizes[:stage]) for stage in range(number)]
    listed = [[f"layers.{layer}" for layer in range(first, first + size)] for first, size in zip(firsts, sizes, strict=True)]
    listed[0].insert(0, "tok_embeddings")
    listed[-1] += ["norm", "output"]
    return {"module_fqns_per_model_part": listed}


def _recompute(model: ModelSpec, run: Strategy) -> dict[str, str]:
    if run.recompute == "selective":
        return {"mode": "selective", "selective_ac_option": "op"}
    each = model.num_hidden_layers // run.pp
    if run.recompute == "none" or run.recompute_layers < 0 or run.recompute_layers >= each:
        return {"mode": run.recompute}
    every = next((n for n in range(2, each + 1) if each // n == run.recompute_layers), 0)
    if not every or model.num_hidden_layers % run.pp:
        raise InputError(
            f"recompute_layers {run.recompute_layers}: torchtitan recomputes all layers or every n-th, which of {each} a stage "
            "gives no such number"
        )
    return {"mode": "selective", "selective_ac_option": str(every)}
