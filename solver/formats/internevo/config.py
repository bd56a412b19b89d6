"""InternEvo's Python configuration files, parsed without executing them, as a model and a layout.

A missing key has InternEvo's own default (from its launch checks); such values are listed in ``assumed``. Keys mean what they
mean in InternEvo: the feed-forward width is rounded up to ``multiple_of``, ``checkpoint`` is the share of each pipeline chunk's
layers that is recomputed, ``zero1.size`` 1 turns ZeRO off and -1 means all ranks.
"""

from __future__ import annotations

import re
from typing import Any

from solver.formats.file_run import FileRun
from solver.formats.internevo.keys import DESCRIBED, KNOWN, MODEL_TYPES, OTHER_TYPES
from solver.formats.internevo.rules import RULES
from solver.formats.rule import Arguments, broken, flattened
from solver.formats.syntax.known_keys import check_described, check_keys, unknown_key, unread_keys
from solver.formats.syntax.literal_python import Assignments, read_assignments
from solver.formats.syntax.section_reader import SectionReader
from solver.spec.model import ModelSpec

ALL_RANKS = -1  #: value of zero_shard_size: every rank that holds the same parameters
ALL_LAYERS = -1  #: value of recompute_layers

_MODES = ("mtp", "msp", "fsp", "isp")
_DTYPES = {"torch.bfloat16": "bf16", "torch.float16": "fp16", "torch.half": "fp16"}
_SCHEDULES = {"1f1b": "1f1b", "zbh1": "zb-h1"}
_CONSTANT = re.compile(r"_*[A-Z][A-Z0-9_]*")  #: helper variables such as HIDDEN_SIZE are written in capitals


def internevo_run(text: str, where: str, name: str) -> FileRun:
    """Return the run that the source ``text`` of the file ``where`` describes.

    Raises InputError with the line, what is wrong in it and what would be valid.
    """
    assigned = read_assignments(text, where)
    _check_top_level(assigned, where)
    file = SectionReader(assigned.values, "", where, set())
    check_described(file, DESCRIBED)
    notes = _note_on_type(file)
    model_keys = file.section("model")
    model = _model(model_keys, file.section("moe"), name)
    layout, assumed = _Layout(file, model_keys, model.num_hidden_layers).values()
    refusals = broken(RULES, Arguments(flattened(assigned.values)))
    ignored = tuple(unread_keys(assigned.values, KNOWN, "", file.read))
    return FileRun(model, layout, assumed, ignored, notes, refusals)


def _note_on_type(file: SectionReader) -> tuple[str, ...]:
    """Return what there is to say of a model_type whose own code is not modelled. Raises InputError for one of other work."""
    called = file.text("model_type", MODEL_TYPES[0])
    if other := next((what for kind, what in OTHER_TYPES.items() if kind in called), ""):
        raise file.wrong("model_type", f"one of {', '.join(MODEL_TYPES)}, because {other}")
    return () if called in MODEL_TYPES else (f"model_type {called} is not known here: its keys are read as those of a Llama",)


def _check_top_level(assigned: Assignments, where: str) -> None:
    """Reject unknown sections and keys. A name in capitals, or one that the file itself uses, is a helper variable."""
    known = {key: below for key, below in KNOWN.items() if key in assigned.values}
    for key in assigned.values:
        if key not in KNOWN and key not in assigned.used and not _CONSTANT.fullmatch(key):
            raise unknown_key(key, KNOWN, "", assigned.values, where)
    for key, below in known.items():
        check_keys(assigned.values[key], below, key, where)


def _model(keys: SectionReader, moe: SectionReader, name: str) -> ModelSpec:
    """Return the model section's model. The MLP width is multiple_of * ceil(int(hidden_size * mlp_ratio) / multiple_of)."""
    hidden, heads = keys.whole("hidden_size"), keys.whole("num_attention_heads")
    multiple = keys.whole("multiple_of", 256)
    ffn = multiple * -(-int(hidden * keys.number("mlp_ratio", 4.0)) // multiple)
    if "head_dim" not in keys and hidden % heads:
        raise keys.wrong("num_attention_heads", f"a divisor of hidden_size {hidden}")
    experts: dict[str, int] = {}
    if keys.whole("num_experts", 1) > 1:  # one expert is a dense model
        per_token = keys.whole("top_k", 0, least=0) or moe.whole("top_k", 1)
        shared = keys.whole("num_shared_experts", 0, least=0)
        experts = {
            "num_experts": keys.whole("num_experts"),
            "num_experts_per_tok": per_token,
            "moe_intermediate_size": ffn,
            "shared_expert_intermediate_size": shared * ffn,
        }
    bias = not keys.flag("no_bias", True)  # model types whose configs omit no_bias have no biases, or few
    return ModelSpec(
        name=name,
        hidden_size=hidden,
        intermediate_size=ffn,
        num_hidden_layers=keys.whole("num_layers"),
        num_attention_heads=heads,
        num_key_value_heads=keys.whole("num_kv_attention_heads", heads),
        head_dim=keys.whole("head_dim", hidden // heads),
        vocab_size=keys.whole("vocab_size"),
        qkv_bias=keys.flag("qkv_bias", bias),
        output_bias=keys.flag("o_bias", bias),
        mlp_bias=keys.flag("mlp_bias", bias),
        norm=keys.choice("norm_type", ("rmsnorm", "layernorm"), "rmsnorm"),
        **experts,  # type: ignore[arg-type]
    )


class _Layout:
    """The layout of a run, collected section by section; records which values are InternEvo's defaults."""

    def __init__(self, file: SectionReader, model: SectionReader, layers: int) -> None:
        self._file, self._model, self._layers = file, model, layers
        self._layout: dict[str, Any] = {"framework": "internevo-2024"}
        self._assumed: list[str] = []

    def values(self) -> tuple[dict[str, Any], tuple[str, ...]]:
        """Return (Strategy fields, those of them that the file does not state)."""
        parallel = self._file.section("parallel")
        self._data(self._file.section("data"))
        self._tensor(parallel)
        self._pipeline(parallel.sized("pipeline"))
        self._weight(parallel.sized("weight"))
        self._zero(parallel.sized("zero1"), parallel.section("fsdp"))
        self._recompute()
        self._precision()
        self._overlap(self._file.section("hybrid_zero_optimizer"))
        self._experts(parallel.sized("expert"), self._file.section("moe"))
        return self._layout, tuple(self._assumed)

    def _put(self, field: str, value: Any, given: bool = True) -> None:
        self._layout[field] = value
        if not given:
            self._assumed.append(field)

    def _data(self, data: SectionReader) -> None:
        if "seq_len" in data:
            self._put("seq_len", data.whole("seq_len"))
        if "micro_bsz" in data:
            self._put("micro_batch_size", data.whole("micro_bsz"))
        self._put("num_micro_batches", data.whole("micro_num", 1), "micro_num" in data)

    def _tensor(self, parallel: SectionReader) -> None:
        """Read tensor size and mode. Without a mode, sequence_parallel (the older key) selects MSP or MTP."""
        tensor, planes = parallel.sized("tensor"), parallel.section("sequence_2D")
        older = "msp" if parallel.flag("sequence_parallel", False) and "mode" not in tensor else "mtp"
        size, mode = tensor.whole("size", 1), tensor.choice("mode", _MODES, older)
        self._put("tp_mode", mode, "mode" in tensor or "sequence_parallel" in parallel)
        if planes.flag("enable", False):  # all-to-all to heads within head_size ranks, ring attention over context_size ranks
            heads, context = planes.whole("head_size", 1), planes.whole("context_size", 1)
            if heads * context != size:
                raise planes.wrong("head_size", f"such that head_size * context_size is the tensor size {size}")
            self._put("cp", context)
            size = heads
        self._put("tp", size, "size" in tensor)
        for key in ("parallel_output", "embed_split_hidden"):
            if size > 1 and not self._model.flag(key, True):
                raise self._model.wrong(key, "True with tensor parallelism, because gathered outputs are not modelled")

    def _pipeline(self, pipeline: SectionReader) -> None:
        """Read the pipeline section. Chunks per rank mean interleaving, which InternEvo does only with several stages."""
        if pipeline.flag("use_zeropp", False):
            raise pipeline.wrong("use_zeropp", "False, because that schedule is not modelled")
        pp = pipeline.whole("size", 1)
        self._put("pp", pp, "size" in pipeline)
        bubble = pipeline.flag("zero_bubble", False) and "mode" not in pipeline
        schedule = _SCHEDULES[pipeline.choice("mode", _SCHEDULES, "zbh1" if bubble else "1f1b")]
        chunks = self._model.whole("num_chunks", 1) if pp > 1 else 1
        if chunks > 1:
            if schedule != "1f1b":
                raise self._model.wrong("num_chunks", "1 with a zero-bubble schedule")
            schedule = "interleaved"
            self._put("p2p_overlap", pipeline.flag("interleaved_overlap", False), "interleaved_overlap" in pipeline)
        if pp * chunks > self._layers:
            raise pipeline.wrong("size", f"such that size * num_chunks is at most the {self._layers} layers")
        stated = pp == 1 or chunks > 1 or "mode" in pipeline or "zero_bubble" in pipeline
        self._put("schedule", schedule, stated)
        self._put("vpp", chunks, "num_chunks" in self._model)

    def _weight(self, weight: SectionReader) -> None:
        wp = max(weight.whole("size", 1, least=None), 1)
        if self._layout["tp_mode"] != "isp":
            if wp > 1:
                raise weight.wrong("size", "1, because only the tensor mode isp splits weights")
            return
        self._put("wp", wp, "size" in weight)
        self._put("overlap_weight_gather", weight.flag("overlap", False), "overlap" in weight)

    def _zero(self, zero1: SectionReader, newer: SectionReader) -> None:
        """Read ZeRO. size 1: no ZeRO; more: that many ranks share one copy of the optimizer; 0 or less: all of them do."""
        if newer.flag("enable", False):
            raise newer.wrong("enable", "False; fully sharded data parallelism is read from zero1=dict(fsdp=True)")
        size, fsdp = zero1.whole("size", ALL_RANKS, least=None), zero1.flag("fsdp", False)
        if fsdp and (self._layout["tp_mode"] == "isp" or self._layout["pp"] > 1):
            raise zero1.wrong("fsdp", "False with the tensor mode isp or a pipeline, which InternEvo cannot combine")
        self._put("zero", 3 if fsdp else 0 if size == 1 else 1, "size" in zero1)
        self._put("zero_shard_size", size if size > 0 else ALL_RANKS, "size" in zero1)

    def _recompute(self) -> None:
        share = self._model.get("checkpoint", False)
        if not isinstance(share, int | float) or not 0 <= share <= 1:
            raise self._model.wrong("checkpoint", "True, False or the share of layers, from 0 to 1")
        vpp = self._layout["vpp"]
        chunk = -(-self._layers // (self._layout["pp"] * vpp))
        covered = vpp * int(chunk * share)
        given, partial = "checkpoint" in self._model, 0 < covered < chunk * vpp
        self._put("recompute", "full" if covered else "none", given)
        self._put("recompute_layers", covered if partial else ALL_LAYERS, given)

    def _precision(self) -> None:
        """Parameters, activations and gradients have the model's dtype."""
        given = "dtype" in self._model
        dtype = _DTYPES[self._model.choice("dtype", _DTYPES, "torch.float16")]
        self._put("precision", dtype, given)
        self._put("grad_dtype", dtype, given)
        flash = "use_flash_attn"
        self._put("attention", "flash" if self._model.flag(flash, True) else "unfused", flash in self._model)

    def _experts(self, expert: SectionReader, moe: SectionReader) -> None:
        """Read how many ranks share the experts, and their capacity, beyond which tokens are dropped."""
        if self._model.whole("num_experts", 1) == 1:
            return
        size = expert.whole("size", 1, least=None)
        if size > 1:
            self._put("ep", size)
        if moe.flag("drop_tokens", True) and "capacity_factor" in moe:
            self._put("moe_capacity_factor", moe.number("capacity_factor", 1.0))

    def _overlap(self, zero: SectionReader) -> None:
        older = zero.flag("zero_overlap_communication", False)
        grad = zero.flag("overlap_sync_grad", older)
        self._put("overlap_grad_reduce", grad, "overlap_sync_grad" in zero or "zero_overlap_communication" in zero)
        self._put("overlap_param_gather", zero.flag("overlap_sync_param", False), "overlap_sync_param" in zero)
