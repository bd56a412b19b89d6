"""torchtitan's TOML files as a model and a layout; solver.formats.torchtitan.keys has the sources.

A missing key has the release's own default. The model is a flavor of torchtitan's code: those of Llama are known, the
config.json of another stands beside the file.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from profiler.errors import InputError
from solver.formats.file_run import FileRun, Source
from solver.formats.model_file import model_beside, shipped_model
from solver.formats.rule import Arguments, broken, flattened
from solver.formats.syntax.known_keys import check_keys, open_sections, unread_keys
from solver.formats.syntax.literal_python import Section
from solver.formats.syntax.section_reader import SectionReader
from solver.formats.syntax.toml_text import read_toml
from solver.formats.torchtitan.earlier import with_names_of_today
from solver.formats.torchtitan.keys import R2024, R2025, R2026, RELEASES, Release, attention_kernels
from solver.formats.torchtitan.rules import RULES
from solver.formats.torchtitan.stages import listed_stages, stages_at_points
from solver.spec.frameworks import framework_of
from solver.spec.model import ModelSpec
from solver.spec.model_attention import attention_of
from solver.spec.rules.experts import dispatchers_of

ROTATES = {"allgather": "allgather", "alltoall": "ring"}  #: shards of keys go round in a ring of all-to-alls
_COMPILED = ("model", "loss")  #: what compile.components may name, all unless it says less
_DTYPES = {"bfloat16": "bf16", "float32": "fp32"}
_RESHARD = ("default", "always", "never")
_RECIPES = ("tensorwise",)
_BACKENDS = {"standard": "alltoall", "deepep": "deepep"}
#: Linears of a layer that are quantised, and torchtitan's word for skipping those that are too small for it.
_LINEARS = (
    *(f"layers.0.attention.{name}" for name in ("wq", "wk", "wv", "wo")),
    *(f"layers.0.feed_forward.{name}" for name in ("w1", "w2", "w3")),
)
_BY_SIZE = "auto_filter_small_kn"
#: Tables and keys that no release before 0.2 has.
_SINCE_2025_10 = ("compile", "quantize", "debug")
_KEYS_SINCE_2025_10 = (
    "module_fqns_per_model_part",
    "pipeline_parallel_first_stage_less_layers",
    "pipeline_parallel_last_stage_less_layers",
    "expert_tensor_parallel_degree",
    "expert_parallel_comm_backend",
)


def read_torchtitan(source: Source) -> FileRun:
    """Return the run of a TOML file. Raises InputError for keys and values that are not known or not modelled."""
    tables, where = with_names_of_today(read_toml(source.text, source.path)), str(source.path)
    release = _release(tables)
    file = open_sections(tables, release.known, release.described, where)
    model = _model(file, release, source)
    layout, assumed = _layout(file, release, model, source.world)
    longest = int(layout["seq_len"])  # ModelArgs.update_from_config: a flavor's own length gives way to the run's
    if 0 < model.max_position_embeddings < longest:
        model = model.replace(max_position_embeddings=longest)
    refusals = () if release.year < 2025 else broken(RULES, Arguments(flattened(tables)))
    notes = tuple(_notes(file, release, model, layout["precision"]))
    return FileRun(model, layout, assumed, tuple(unread_keys(tables, release.known, "", file.read)), notes, refusals)


def _notes(file: SectionReader, release: Release, model: ModelSpec, precision: str) -> Iterator[str]:
    """Yield what the estimate takes otherwise than the file says, and why."""
    newer, ranks = release.year >= 2026, file.section(release.ranks)
    degree = ranks.get("expert_parallel_degree", 1) if newer else 1
    if degree != 1 and not model.is_mixture_of_experts:
        yield f"expert_parallel_degree {degree} changes nothing: {model.name} has no experts"
    elif degree != 1 and ranks.get("expert_parallel_comm_backend") == "deepep" and not _reads_backend(model):
        yield "expert_parallel_comm_backend deepep changes nothing: torchtitan's code of this model exchanges by all-to-all"
    if _compiles_no_layers(release, model) and file.section("compile").flag("enable", False):
        yield "compile.enable compiles no layers of this model in torchtitan's code"
    section = file.section("model")
    if own := attention_kernels(section.text("name", "llama3"), section.text("flavor", "debugmodel")):
        priced = "FlashAttention 2's" if model.attention_sinks else "scaled_dot_product_attention's"
        yield f"attention is estimated as {priced} kernels; this model has {own}"
    quantised = precision in ("fp8", "mxfp8")
    if quantised and "output" not in _filters(file, release, precision) and release.year >= 2025:
        yield "the head is estimated in 16 bits; torchtitan has it in 8, as output is not among filter_fqns"


def _release(tables: Section) -> Release:
    """Return the newest release that knows all keys of a file; of one with keys that none knows, what its tables speak for."""
    training = tables.get("training")
    older = isinstance(training, Section) and any(key in training for key in ("batch_size", "tensor_parallel_degree"))
    if older and "parallelism" not in tables:
        return R2024
    known = next((release for release in RELEASES if _knows(release, tables)), None)
    if known is not None:
        return known
    parallelism = tables.get("parallelism")
    newer = isinstance(parallelism, Section) and any(key in parallelism for key in _KEYS_SINCE_2025_10)
    return R2026 if newer or any(table in tables for table in _SINCE_2025_10) else R2025


def _knows(release: Release, tables: Section) -> bool:
    try:
        check_keys(tables, release.known, "", "")
    except InputError:
        return False
    return True


def _model(file: SectionReader, release: Release, source: Source) -> ModelSpec:
    section = file.section("model")
    name, flavor = section.text("name", "llama3"), section.text("flavor", "debugmodel")
    if (name, flavor) in release.flavors:
        return flavor_model(release.flavors[name, flavor], flavor)
    return model_beside(source, f"flavor {flavor!r} of torchtitan's model {name!r} is not known here")


def flavor_model(shipped: str, flavor: str) -> ModelSpec:
    """Return a model that is shipped here as a flavor of torchtitan has it: without multi-token prediction; Llama 4 without
    norms of queries and keys, and but for its "irope" with rotary embedding and whole causal attention in all layers."""
    model = shipped_model(shipped).replace(num_nextn_predict_layers=0)
    if not model.attention_chunk_size:
        return model
    whole = {} if flavor.endswith("_irope") else {"attention_chunk_size": 0, "layer_types": (), "no_rope_layers": ()}
    return model.replace(qk_norm="none", **whole)


@dataclass(frozen=True)
class _Sizes:
    tp: int
    cp: int
    pp: int
    replicate: int
    shard: int  #: -1: the ranks that are left

    @property
    def dp(self) -> int:
        return self.replicate * self.shard if self.shard > 0 else 0


def _sizes(file: SectionReader, release: Release, world: int) -> _Sizes:
    """Return the degrees; a shard degree of -1 is what the others leave of ``world`` ranks, where their number is known."""
    ranks, pipeline = file.section(release.ranks), file.section(release.pipeline)
    sizes = _Sizes(
        tp=ranks.whole("tensor_parallel_degree", 1),
        cp=pipeline.whole("context_parallel_degree", 1),
        pp=pipeline.whole("pipeline_parallel_degree", 1),
        replicate=ranks.whole("data_parallel_replicate_degree", 1),
        shard=ranks.whole("data_parallel_shard_degree", -1, least=-1),
    )
    others = sizes.tp * sizes.cp * sizes.pp * sizes.replicate
    if world and sizes.shard < 0:
        if world % others:
            raise ranks.wrong(
                "data_parallel_shard_degree", f"a number: the other degrees, {others}, do not divide {world} GPUs"
            )
        sizes = replace(sizes, shard=world // others)
    if sizes.shard == 0 or (sizes.shard < 0 and sizes.replicate > 1):
        raise ranks.wrong(
            "data_parallel_shard_degree", "a number of ranks beside data_parallel_replicate_degree, or --world_size stated"
        )
    return sizes


def _layout(file: SectionReader, release: Release, model: ModelSpec, world: int) -> tuple[dict[str, Any], tuple[str, ...]]:
    pipeline, sizes = file.section(release.pipeline), _sizes(file, release, world)
    rotates = pipeline.choice("context_parallel_rotate_method", ROTATES, "allgather")
    found: dict[str, Any] = {
        **framework_of(release.framework).flags,
        **attention_of(framework_of(release.framework), model),
        "framework": release.framework,
        "seq_len": file.section("training").whole("seq_len", 2048),
        "tp": sizes.tp,
        "tp_mode": "msp" if sizes.tp > 1 else "mtp",
        "cp": sizes.cp,
        "cp_comm": ROTATES[rotates],
        "tp_comm_overlap": pipeline.flag("enable_async_tensor_parallel", False),
    }
    if sizes.dp:
        found |= {"dp": sizes.dp, "world_size": sizes.dp * sizes.tp * sizes.cp * sizes.pp}
    divided = listed_stages if release.year >= 2026 else stages_at_points
    stages, assumed = divided(pipeline, release, sizes.pp, model.num_hidden_layers)
    found |= _experts(file, model) if release.year >= 2026 else {}
    found |= stages | _zero(file, release, sizes) | _batch(file, release, sizes, stages["vpp"]) | _training(file, release)
    found |= _recompute(file.section("activation_checkpoint"), model.num_hidden_layers, sizes.pp)
    if found["compile"] and _compiles_no_layers(release, model):
        found |= {"compile": False, "compile_loss": found.get("compile_loss", True) or None}
    return found, assumed


def _compiles_no_layers(release: Release, model: ModelSpec) -> bool:
    return model.attention_sinks and not framework_of(release.framework).can_run.compiles_sinks


def _experts(file: SectionReader, model: ModelSpec) -> dict[str, Any]:
    """Return how experts are divided and chosen; without experts the keys have no effect."""
    ranks = file.section("parallelism")
    forced = file.section("debug").flag("moe_force_load_balance", False)
    degree = ranks.whole("expert_parallel_degree", 1)
    backend = ranks.choice("expert_parallel_comm_backend", _BACKENDS, "standard")
    if not model.is_mixture_of_experts:
        return {}
    dispatcher = _BACKENDS[backend] if degree > 1 and _reads_backend(model) else "alltoall"
    return {"ep": degree, "moe_dispatcher": dispatcher, **({"moe_routing": "consecutive"} if forced else {})}


def _reads_backend(model: ModelSpec) -> bool:
    """Whether torchtitan's code of a model has DeepEP: its qwen3 and gpt_oss exchange tokens by all-to-all all the same."""
    return "deepep" in dispatchers_of(framework_of(R2026.framework).can_run, model)


def _zero(file: SectionReader, release: Release, sizes: _Sizes) -> dict[str, Any]:
    """FSDP wherever ranks share parameters; weights are gathered again in the backward pass unless stages follow each other."""
    policy = "default"
    if release.year >= 2025:
        policy = file.section("parallelism").choice("fsdp_reshard_after_forward", _RESHARD, "default")
    again = policy == "always" or (policy == "default" and sizes.pp == 1)
    if sizes.shard < 0:
        return {"zero": 3 if again else 2, "zero_shard_size": -1}
    shared = sizes.shard * sizes.cp
    if shared == 1 and sizes.replicate > 1 and sizes.tp * sizes.pp > 1:
        raise file.section(release.ranks).wrong(
            "data_parallel_shard_degree", "above 1 with tensor or pipeline parallelism, which torchtitan's DDP does not run"
        )
    return {"zero": (3 if again else 2) if shared > 1 else 0, "zero_shard_size": shared}


def _batch(file: SectionReader, release: Release, sizes: _Sizes, vpp: int) -> dict[str, int]:
    """Return the micro batches: in a pipeline those of the local batch, else the local batches of a global one."""
    training, pipeline = file.section("training"), file.section(release.pipeline)
    local = training.whole(release.batch, 8)
    total = training.whole("global_batch_size", -1, least=-1) if release.year >= 2025 else -1
    steps = 1
    if total > 0:
        if not sizes.dp:
            raise file.section(release.ranks).wrong(
                "data_parallel_shard_degree", "a number beside training.global_batch_size, or --world_size stated"
            )
        steps, rest = divmod(total, local * sizes.dp)
        if rest or steps < 1:
            raise training.wrong("global_batch_size", f"a multiple of {release.batch} {local} * {sizes.dp} ranks")
    if sizes.pp == 1:
        return {"micro_batch_size": local, "num_micro_batches": steps}
    if steps > 1:
        raise training.wrong("global_batch_size", f"{local * sizes.dp}: several pipelines a step are not modelled")
    if release.year >= 2025:
        size = pipeline.whole("pipeline_parallel_microbatch_size", 1)
        count = local // size
    else:
        count = pipeline.whole("pipeline_parallel_microbatches", sizes.pp * vpp)  # pipelining_utils.py: as many as stages
        size = local // count
    if size * count != local:
        raise training.wrong(release.batch, f"a multiple of its micro batches ({size or count})")
    return {"micro_batch_size": size, "num_micro_batches": count}


def _training(file: SectionReader, release: Release) -> dict[str, Any]:
    training, model, compiles = file.section("training"), file.section("model"), file.section("compile")
    compiled: tuple[str, ...] = _COMPILED if training.flag("compile", False) else ()
    if compiles.flag("enable", False):
        compiled = tuple(compiles.texts("components") if "components" in compiles else _COMPILED)
        if wrong := set(compiled) - set(_COMPILED):
            raise compiles.wrong("components", f"of {' and '.join(_COMPILED)}, not {', '.join(sorted(wrong))}")
    apart = len(compiled) == 1
    return {
        "precision": _precision(file, release),
        "compile": "model" in compiled,
        **({"compile_loss": "loss" in compiled} if apart else {}),
        "deterministic": (file.section("debug") if release.year >= 2026 else training).flag("deterministic", False),
        "fused_norm": release.year >= 2026 or release.year < 2025 and model.text("norm_type", "rmsnorm") == "fused_rmsnorm",
    } | (_fp8(file, release) if _precision(file, release) == "fp8" else {})


def _fp8(file: SectionReader, release: Release) -> dict[str, Any]:
    gathers = _quantisation(file, release, "float8").flag("enable_fsdp_float8_all_gather", False)
    return {"fp8_recipe": "tensorwise", "fp8_param_gather": gathers}


def _precision(file: SectionReader, release: Release) -> str:
    quantised = file.section("model").texts("converters")
    float8 = _quantisation(file, release, "float8")
    if release.year < 2025:
        quantised = ["float8"] if float8.flag("enable_float8_linear", False) else []
    held = _DTYPES[file.section("training").choice("mixed_precision_param", _DTYPES, "bfloat16")]
    if not quantised:
        return held
    if len(quantised) > 1 or quantised[0] not in release.converters or held != "bf16":
        raise file.section("model").wrong("converters", f"one of {', '.join(release.converters)}, with parameters in bfloat16")
    if release.converters[quantised[0]] == "fp8":
        float8.choice("recipe_name", _RECIPES, "tensorwise")
    return release.converters[quantised[0]]


def _quantisation(file: SectionReader, release: Release, kind: str) -> SectionReader:
    """Return the section of linears in 8 bits: float8 or mx."""
    return file.section("quantize").section("linear").section(kind) if release.year >= 2026 else file.section(kind)


def _filters(file: SectionReader, release: Release, precision: str) -> list[str]:
    """Return the parts of names of linears that stay in 16 bits.

    Raises InputError where those of layers are among them: torchao skips what contains one of the names.
    """
    section = _quantisation(file, release, "float8" if precision == "fp8" else "mx")
    for name in (found := section.texts("filter_fqns")):
        if name == _BY_SIZE or any(name in linear for linear in _LINEARS):
            raise section.wrong("filter_fqns", "output, router.gate or another name of no linear of attention and feed-forward")
    return found


def _recompute(checkpoint: SectionReader, layers: int, pp: int) -> dict[str, Any]:
    """Return recomputation: of all layers, within layers by op, or of every n-th layer."""
    mode = checkpoint.choice("mode", ("none", "full", "selective"), "selective")
    option = str(checkpoint.get("selective_ac_option", "2"))
    if mode != "selective":
        return {"recompute": mode, "recompute_layers": -1}
    if option == "op":
        return {"recompute": "selective", "recompute_layers": -1}
    if not option.isdecimal() or int(option) < 1:
        raise checkpoint.wrong("selective_ac_option", "op, or n for every n-th layer")
    if int(option) == 1:
        return {"recompute": "full", "recompute_layers": -1}
    if layers % pp:
        raise checkpoint.wrong("selective_ac_option", f"op with {layers} layers in {pp} stages, which do not divide")
    count = layers // pp // int(option)
    return {"recompute": "full" if count else "none", "recompute_layers": count or -1}
