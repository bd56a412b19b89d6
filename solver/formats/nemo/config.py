"""NeMo 1's YAML files as a model and a layout: Megatron-LM's arguments under other names (nemo_names)."""

from __future__ import annotations

from typing import Any

from solver.formats.file_run import FileRun, Source
from solver.formats.launch.ranks import Launch
from solver.formats.megatron.rules import CORE
from solver.formats.megatron.run import run_of_arguments
from solver.formats.model_file import model_beside
from solver.formats.nemo.interpolation import resolve
from solver.formats.nemo.names import (
    ACTIVATIONS,
    DESCRIBED,
    FRAMEWORK,
    GRADIENTS,
    INVERTED,
    KNOWN,
    MCORE,
    NORMS,
    OPTIMIZERS,
    PRECISIONS,
    SWITCHES,
    VALUES,
)
from solver.formats.nemo.rules import RULES
from solver.formats.rule import Arguments, broken, flattened
from solver.formats.syntax.known_keys import open_sections, unread_keys
from solver.formats.syntax.literal_python import Section
from solver.formats.syntax.section_reader import SectionReader
from solver.spec.frameworks import framework_of

_GPT2 = ("GPT2BPETokenizer", 50257)  #: a tokenizer that the configurations name, and its vocabulary


def is_nemo(sections: Section) -> bool:
    return "trainer" in sections and "model" in sections


def read_nemo(sections: Section, source: Source) -> FileRun:
    """Return the run of a file. Raises InputError for keys and values that are not known or not modelled."""
    where = str(source.path)
    if isinstance(sections["model"], Section):
        resolve(sections["model"])
    file = open_sections(sections, KNOWN, DESCRIBED, where)
    trainer, model = file.section("trainer"), file.section("model")
    flags = _model(model) | _vocabulary(model, source) | _precision(trainer, model) | _optimizer(model.section("optim"))
    launch = Launch(trainer.whole("num_nodes", 1), trainer.whole("devices"))
    world = launch.world_size
    given = {f"--{flag}": value for flag, value in flags.items()}
    read = run_of_arguments(given, world, source.path, rules=CORE)
    optim = model.section("optim")
    stated = "grad_sync_dtype" in optim
    # Megatron-Core's own optimizer (setup_mcore_distributed_parallel) sums in fp32 where apex's takes the model's type
    usual = "fp32" if optim.get("name") == MCORE else framework_of(FRAMEWORK).flags["grad_dtype"]
    gradients = str(optim.get("grad_sync_dtype", usual))
    if gradients not in GRADIENTS:
        raise optim.wrong("grad_sync_dtype", f"one of {', '.join(GRADIENTS)}")
    layout = {
        **read.layout,
        "framework": FRAMEWORK,
        "grad_dtype": GRADIENTS[gradients],
        "tp_comm_overlap": model.flag("ub_tp_comm_overlap", False),
        "p2p_overlap": model.flag("overlap_p2p_comm", True),
        **({"fp8_amax_reduction": "none"} if "--fp8-recipe" in given and not model.flag("reduce_amax", True) else {}),
    }
    ignored = tuple(unread_keys(sections, KNOWN, "", file.read))
    refusals = broken(RULES, Arguments(flattened(sections), world))
    assumed = () if stated or optim.get("name") == MCORE else ("grad_dtype",)
    return FileRun(read.model, layout, assumed, ignored, read.notes, (*read.refusals, *refusals), launch.gpus_per_node)


def _model(model: SectionReader) -> dict[str, Any]:
    flags: dict[str, Any] = {flag: model.get(key) for flag, key in VALUES.items()}
    flags |= {flag: model.flag(key, False) for flag, key in SWITCHES.items()}
    flags |= {flag: not model.flag(key, True) for flag, key in INVERTED.items()}
    if flags["ffn-hidden-size"] is None:  # megatron_gpt_config.yaml, gated or not
        flags["ffn-hidden-size"] = 4 * model.whole("hidden_size")
    flags["swiglu"] = ACTIVATIONS[model.choice("activation", ACTIVATIONS, "gelu")]
    flags["normalization"] = NORMS[model.choice("normalization", NORMS, "layernorm")]
    flags["attention-backend"] = "auto" if model.flag("use_flash_attention", True) else "unfused"
    if isinstance(flags["max-position-embeddings"], str):  # it refers to the sequence length
        flags.pop("max-position-embeddings")
    if flags["num-query-groups"] not in (None, flags["num-attention-heads"]):
        flags["group-query-attention"] = True
    if flags["recompute-granularity"] is None:
        flags = {flag: value for flag, value in flags.items() if not flag.startswith("recompute")}
    elif flags["recompute-granularity"] == "selective" and not model.flag("mcore_gpt", False):
        # its launcher's GPT-3 states both; Megatron-Core refuses that, NeMo's own layers are taken not to look at them
        flags |= {"recompute-method": None, "recompute-num-layers": None}
    if not model.flag("cpu_offloading", False):
        flags.pop("cpu-offloading-num-layers")
    return {flag: value for flag, value in flags.items() if value is not None and value is not False}


def _vocabulary(model: SectionReader, source: Source) -> dict[str, int]:
    """Return the vocabulary: stated padded, of GPT-2's tokenizer, or of the config.json beside the file."""
    if "override_vocab_size" in model:
        return {"vocab-size": model.whole("override_vocab_size"), "make-vocab-size-divisible-by": 1}
    if model.section("tokenizer").get("type") == _GPT2[0]:
        return {"vocab-size": _GPT2[1]}
    if source.vocab_size:
        return {"vocab-size": source.vocab_size}
    open_ = "its tokenizer is not read, so the vocabulary is open (model.override_vocab_size there, --vocab_size here)"
    beside = model_beside(source, open_)
    if beside.hidden_size != model.whole("hidden_size"):
        raise model.wrong("hidden_size", f"{beside.hidden_size}, as the config.json beside it has it")
    return {"vocab-size": beside.vocab_size}


def _precision(trainer: SectionReader, model: SectionReader) -> dict[str, Any]:
    word = str(trainer.get("precision", "32"))
    if word not in PRECISIONS:
        raise trainer.wrong("precision", f"one of {', '.join(PRECISIONS)}")
    flags: dict[str, Any] = {} if PRECISIONS[word] == "fp32" else {PRECISIONS[word]: True}
    if model.flag("fp8", False):
        if model.flag("fp8_e4m3", False) or not model.flag("fp8_hybrid", False):
            raise model.wrong("fp8_hybrid", "true beside fp8, because other formats are not modelled")
        flags |= {"fp8-format": "hybrid", "fp8-recipe": "delayed"}
    return flags


def _optimizer(optim: SectionReader) -> dict[str, bool]:
    sharded = OPTIMIZERS[optim.choice("name", OPTIMIZERS, "fused_adam")]
    flags = {
        "use-distributed-optimizer": sharded,
        "overlap-grad-reduce": optim.flag("overlap_grad_sync", sharded and optim.get("name") != MCORE),
        "overlap-param-gather": optim.flag("overlap_param_sync", False),
    }
    return {flag: value for flag, value in flags.items() if value}
