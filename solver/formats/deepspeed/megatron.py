"""Arguments of Megatron-DeepSpeed's pretrain_gpt.py as those of Megatron-LM that mean the same; names has the sources."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from profiler.errors import InputError, shown
from profiler.text_file import json_object
from solver.formats.deepspeed.names import ENDS_COUNT, NORMS, NOT_MODELLED, OWN, RENAMED, SWITCHES
from solver.formats.file_run import FileRun, Source
from solver.formats.launch.words import whole_argument
from solver.formats.megatron.run import run_of_arguments


def run_of_megatron_deepspeed(given: dict[str, Any], world: int, source: Source) -> FileRun:
    """Return the run of Megatron-DeepSpeed's arguments, as those of Megatron-LM that mean the same."""
    path = source.script or source.path.with_suffix(".sh")
    flags = _modelled({RENAMED.get(name.lstrip("-"), name.lstrip("-")): value for name, value in given.items()}, path)
    stage = json_object(source.text, source.path).get("zero_optimization", {}).get("stage", 0)
    if "zero-stage" in flags and _whole_or_none(flags["zero-stage"]) != stage:
        raise InputError(f"{path}: --zero-stage is {flags['zero-stage']}; {source.path.name} has stage {stage}")
    theirs: dict[str, Any] = {"attention-backend": "unfused"}
    for name, value in flags.items():
        if name in SWITCHES:
            theirs |= dict([SWITCHES[name]])
        elif name == "num-key-value-heads":
            theirs |= {"group-query-attention": True, "num-query-groups": value}
        elif name == "normalization":
            theirs[name] = next((word for word, own in NORMS.items() if own == value), value)
        elif name not in OWN and name != "pp-partition-method":
            theirs[name] = value
    own = {"embedding_norm": theirs.pop("embed-layernorm", False)}
    if theirs.get("position-embedding-type") == "alibi":
        own["position"], theirs["position-embedding-type"] = "alibi", "none"
    if flags.get("pp-partition-method") == ENDS_COUNT:
        theirs |= _ends(theirs, path)
    whole_argument(theirs, "global-batch-size", path)
    if source.vocab_size:
        theirs.setdefault("vocab-size", source.vocab_size)
    own_tokenizer = flags.get("tokenizer-type", "GPT2BPETokenizer") != "GPT2BPETokenizer"
    if own_tokenizer and theirs.keys().isdisjoint(("vocab-size", "padded-vocab-size")):
        raise InputError(f"{path}: state --vocab-size there or --vocab_size here, because the tokenizer's model is not read")
    read = run_of_arguments({f"--{name}": value for name, value in theirs.items()}, world, path, rules=())
    layout = {**read.layout, "gradient_accumulation_fusion": None, "p2p_overlap": False}
    return FileRun(read.model.replace(**own), layout, (), read.ignored, read.notes)


def _modelled(flags: dict[str, Any], path: Path) -> dict[str, Any]:
    """Return arguments without those that change nothing. Raises InputError for those whose effect is not modelled."""
    for name, (same, what) in NOT_MODELLED.items():
        if name in flags and flags[name] not in same:
            raise InputError(f"{path}: --{name} {shown(flags[name])}: not modelled, because it means {what}")
    return {name: value for name, value in flags.items() if name not in NOT_MODELLED or value == ENDS_COUNT}


def _ends(flags: Mapping[str, Any], path: Path) -> dict[str, int]:
    """Return the layers of the end stages, each one less than others where the embedding counts as a layer on both.

    Source: bigscience-workshop/Megatron-DeepSpeed megatron/model/gpt_model.py, and BLOOM's layout as published.
    """
    layers, pp = whole_argument(dict(flags), "num-layers", path), flags.get("pipeline-model-parallel-size", 1)
    if pp == 1:
        return {}
    if not isinstance(pp, int) or (layers + 2) % pp or "untie-embeddings-and-output-weights" in flags:
        raise InputError(
            f"{path}: --pp-partition-method {shown(ENDS_COUNT)} is modelled where the layers and the two ends of one "
            "embedding divide by the stages"
        )
    return dict.fromkeys(("decoder-first-pipeline-num-layers", "decoder-last-pipeline-num-layers"), (layers + 2) // pp - 1)


def _whole_or_none(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None
