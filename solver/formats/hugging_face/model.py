"""Hugging Face ``config.json`` files: each model_type read as that architecture is, or refused by name."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from profiler.errors import InputError, closest, printable
from solver.formats.hugging_face.model_types import ARCHITECTURES, FAMILIES
from solver.formats.hugging_face.readers import Family
from solver.formats.hugging_face.refused_types import NOT_DECODERS, UNDESCRIBED
from solver.formats.hugging_face.unread_keys import is_harmless, is_other_work
from solver.formats.hugging_face.untimed import untimed_of
from solver.spec.model import ModelSpec
from solver.spec.model_from_keys import model_from_keys

#: Parts of a multimodal model beside its text model.
_TOWER = re.compile(r"(vision|image|visual|audio|speech|video|vq)_config")

#: Keys that a null switches off, where one that is left out has what its class has by default.
_OFF_BY_NULL = ("attn_logit_softcapping", "final_logit_softcapping", "sliding_window", "attention_chunk_size")
#: Parts of a model that training may leave out.
_LEFT_OUT = ("num_nextn_predict_layers", "num_mtp_modules")
MARKS = {"model_type", "architectures", "transformers_version"}
#: Methods whose weights train under adapters alone (transformers/quantizers).
_FEW_BITS = ("gptq", "awq", "aqlm", "hqq", "quip", "vptq", "spqr", "higgs", "eetq")
_OTHER_HEADS = re.compile(r"Classification$|QuestionAnswering$|ForMaskedLM$|RewardModel$|MultipleChoice$")


def model_of_config(config: Mapping[str, Any], where: str, name: str = "") -> ModelSpec:
    """Return the model that a ``config.json`` describes; for a multimodal model that of its ``text_config``.

    Raises InputError for a model_type that is not known, and for a key that changes shapes or work and is not known.
    """
    whole = config
    config, nested = _text_part(config)
    family, called = _family(config, where)
    given = _given(config, family if nested else None)
    try:
        _refuse_other_training({**whole, **given})
        values, read = family.read(given)
    except InputError as error:
        raise InputError(f"{where}: {error}") from None
    except (TypeError, ValueError, ZeroDivisionError, KeyError, AttributeError) as error:
        missing = (
            f"the model needs {error}" if isinstance(error, KeyError) else f"a model key has a value of the wrong kind: {error}"
        )
        raise InputError(f"{where}: {missing}") from None
    _refuse_unknown({**_outer(whole, nested), **given}, read, called, where)
    model = model_from_keys(values, where, name or str(config.get("name") or config.get("_name_or_path") or where))
    return model.replace(untimed=untimed_of(given))


def _refuse_other_training(given: Mapping[str, Any]) -> None:
    """Raise InputError for weights in a few bits, and for attention that is not causal, whatever the family.

    Of quantization_config only what loads weights for adapters (bitsandbytes, GPTQ, AWQ) says how a model is trained; that of a
    published FP8 or MXFP4 checkpoint says how it is stored.
    """
    for architecture in given.get("architectures") or ():
        if _OTHER_HEADS.search(str(architecture)):
            called = printable(str(architecture))
            raise InputError(f"architectures has {called}: only a head that predicts the next token is modelled")
    quantised = given.get("quantization_config")
    method = str(quantised.get("quant_method")) if isinstance(quantised, Mapping) else ""
    if method == "bitnet":
        raise InputError("quantization_config has quant_method bitnet: weights of one or two bits are not modelled")
    if method in _FEW_BITS:
        raise InputError(
            f"quantization_config has quant_method {method}: weights in a few bits under adapters are not modelled; remove it "
            "to estimate the training of 16-bit weights"
        )
    for key in ("load_in_4bit", "load_in_8bit"):
        if isinstance(quantised, Mapping) and quantised.get(key):
            raise InputError(
                f"quantization_config has {key}: weights in {key[8]} bits under adapters (QLoRA) are not modelled; remove it "
                "to estimate the training of 16-bit weights"
            )
    if given.get("use_bidirectional_attention"):
        raise InputError("use_bidirectional_attention is on: attention that is not causal is not modelled")


def _text_part(config: Mapping[str, Any]) -> tuple[Mapping[str, Any], bool]:
    """Return the text model of a multimodal config, and whether it is nested: then its class's defaults are left out."""
    text = config.get("text_config")
    return (text, True) if isinstance(text, dict) and "hidden_size" not in config else (config, False)


def _given(config: Mapping[str, Any], defaults_of: Family | None) -> dict[str, Any]:
    """Return the keys that are not null, after the defaults of a nested config's class; a null that switches off is a zero.

    A head_dim that is null is hidden_size / heads, whatever its class has by default.
    """
    defaults = defaults_of.class_defaults if defaults_of else {}
    stated = {**defaults, **config, **{key: 0 for key in _OFF_BY_NULL if config.get(key, 0) is None}}
    hidden, heads = stated.get("hidden_size"), stated.get("num_attention_heads")
    if config.get("head_dim", 0) is None and isinstance(hidden, int) and isinstance(heads, int) and heads > 0:
        if hidden % heads:
            raise InputError(f"num_attention_heads {heads} does not divide hidden_size {hidden}; state head_dim, which is null")
        stated["head_dim"] = hidden // heads
    return {key: value for key, value in stated.items() if value is not None}


def _family(config: Mapping[str, Any], where: str) -> tuple[Family, str]:
    called = config.get("model_type")
    if called is None:
        classes = config.get("architectures") or []
        found = (
            [ARCHITECTURES[c] for c in classes if isinstance(c, str) and c in ARCHITECTURES]
            if isinstance(classes, list)
            else []
        )
        called = found[0] if found else classes
    if isinstance(called, str) and called in FAMILIES:
        return FAMILIES[called], called
    if isinstance(called, str) and called in NOT_DECODERS:
        raise InputError(f"{where}: model_type {called} is {NOT_DECODERS[called]}, which is not modelled")
    own = "write a model file of plain keys (configs/README.md)"
    if isinstance(called, str) and called in UNDESCRIBED:
        raise InputError(f"{where}: model_type {called} is of an architecture that is not modelled; if it fits, {own}")
    shown = repr(called)[:60] if isinstance(called, str) else "not given"
    raise InputError(
        f"{where}: model_type {shown} is not known{_meant(called)}; known are {', '.join(sorted(FAMILIES))}; or {own}"
    )


def _meant(called: Any) -> str:
    """Return a family that may be misspelt, as ``closest`` does; one with other digits is another version."""
    if not isinstance(called, str):
        return ""
    called = called.lower()
    alike = [family for family in FAMILIES if re.sub(r"\D", "", family) == re.sub(r"\D", "", called)]
    return closest(called, [family for family in alike if abs(len(family) - len(called)) <= 1 and family[0] == called[:1]])


def _outer(whole: Mapping[str, Any], nested: bool) -> dict[str, Any]:
    """Return what of a multimodal config concerns its text model too."""
    return {key: whole[key] for key in ("is_encoder_decoder",) if nested and key in whole}


def _refuse_unknown(given: Mapping[str, Any], read: set[str], called: str, where: str) -> None:
    for key, value in given.items():
        if key not in read and is_other_work(key, value, called):
            without = "; set it to 0 to estimate the model without it" if key in _LEFT_OUT else "; estimates would miss it"
            raise InputError(f"{where}: {key} of {called} is not modelled (it is {str(value)[:40]}){without}")


def unread_keys(config: Mapping[str, Any]) -> list[str]:
    """Return the keys of a ``config.json`` that are neither read nor refused nor known to be harmless, in order.

    Parts for pictures or sound, which are left out, come first.
    """
    towers = [f"{key} (the text model alone is estimated)" for key in sorted(config) if _TOWER.fullmatch(key) and config[key]]
    config, nested = _text_part(config)
    try:
        family, called = _family(config, "")
        given = _given(config, family if nested else None)
        read = family.read(given)[1]
    except (InputError, TypeError, ValueError, ZeroDivisionError, KeyError, AttributeError):
        return []  # no model can be read, which says why
    unread = (
        k
        for k, v in given.items()
        if k not in read and config.get(k) is not None and not is_harmless(k, called) and not is_other_work(k, v, called)
    )
    modules = called == "minimax_m2" and given.get("use_mtp") and given.get("num_mtp_modules")
    announced = (
        ["num_mtp_modules (modules that no published weights hold; the model without them is estimated)"] if modules else []
    )
    return towers + announced + sorted(unread)
