"""The framework that a name means: of a run that was measured, or of a search that asks for today's best."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache

from profiler.errors import InputError, closest
from solver.spec.framework import Framework
from solver.spec.frameworks import (
    deepspeed,
    internevo,
    llm_foundry,
    maxtext,
    megatron,
    megatron_forks,
    nanotron,
    nemo,
    pytorch,
    torchtitan,
)
from solver.spec.frameworks.megatron import GENERIC

FRAMEWORKS: tuple[Framework, ...] = (
    *internevo.FAMILY,
    *megatron.FAMILY,
    *nemo.FAMILY,
    *megatron_forks.FAMILY,
    *deepspeed.FAMILY,
    *torchtitan.FAMILY,
    *pytorch.FAMILY,
    *llm_foundry.FAMILY,
    *nanotron.FAMILY,
    *maxtext.FAMILY,
)

_TRANSFORMER_ENGINE = re.compile(r"transformer[-_ ]engine\D{0,10}(\d+)\.(\d+)")
#: After an alias: no further letter of its last word, nor a further digit of its last number.
_NOT_LONGER = r"(?![a-z])(?<!\d(?=\d))"
_DUMMY_GRADIENTS_SINCE = (2, 3)
_ORIGINAL_INPUTS_SINCE = (2, 6)  # save_original_input; Megatron-Core's attention.py asks for 2.7 in 4 bits


@cache
def framework_of(name: str) -> Framework:
    """The release that ``name`` means for a run: the one whose alias stands first in it, in whole words (of several at one
    place the longest decides; case and punctuation do not matter); else one whose broad alias does; else GENERIC.

    A release of Transformer Engine in the name ("..., transformer-engine 2.11.0") decides what depends on it.
    """
    framework = _first_named(name, [(f, (f.name, *f.aliases)) for f in FRAMEWORKS])
    framework = framework or _first_named(name, [(f, f.broad_aliases) for f in FRAMEWORKS]) or GENERIC
    engine = _TRANSFORMER_ENGINE.search(name.lower())
    if engine:
        release = int(engine[1]), int(engine[2])
        originals = framework.memory.original_inputs and release >= _ORIGINAL_INPUTS_SINCE
        keeps = {"dummy_gradients": release >= _DUMMY_GRADIENTS_SINCE, "original_inputs": originals}
        return framework.derive(framework.name, framework.released, memory=keeps)
    return framework


def first_with_experts(framework: Framework) -> Framework:
    """Return the release, or the first later one of its family that is described with mixtures of experts, if there is one."""
    later = [f for f in FRAMEWORKS if f.family == framework.family and f.can_run.experts and f.released >= framework.released]
    return framework if framework.can_run.experts or not later else min(later, key=lambda f: f.released)


def known_framework(name: str) -> Framework:
    """As framework_of, for a name that a user chose: raises InputError where no framework, or no release, answers to it."""
    framework = framework_of(name)
    names = [*(f.name for f in FRAMEWORKS), GENERIC.name]
    if framework.name == GENERIC.name and name != GENERIC.name:
        families = {f.family for f in FRAMEWORKS}
        raise InputError(f"no framework is called {name!r}{closest(name, [*families, *names])}; known are {', '.join(names)}")
    if unknown := unknown_release(name):
        family = [f for f in FRAMEWORKS if f.family == framework.family]
        written = re.search(r"\W*".join(map(re.escape, unknown.split())), name, re.IGNORECASE)
        raise InputError(
            f"{written[0] if written else unknown!r} of {name!r} is no release that is described"
            f"{closest(name, [alias for f in family for alias in (f.name, *f.aliases)])}; described are "
            f"{', '.join(f.name for f in family)}; docs/frameworks.md says which others are alike"
        )
    return framework


@cache
def unknown_release(name: str) -> str:
    """Return what follows the name of a framework where that states no release, or "": a release may be stated more closely."""
    text = _words(_TRANSFORMER_ENGINE.split(name.lower())[0])
    names = [_words(alias) for alias in _every_name() if not alias.endswith(".")]  # the beginning of a release is none
    ends = [(len(alias), place.end()) for alias in names if (place := re.search(re.escape(alias) + _NOT_LONGER, text))]
    end = max(ends, default=(0, len(text)))[1]
    rest = text[end:]
    states_release = any(character.isdigit() for character in text[:end])
    return "" if states_release or any(alias in rest for alias in names) else rest.strip()


@cache
def names_another(name: str) -> bool:
    """Whether ``name`` begins with that of another trainer, of which its framework is only a part ("metaseq (FSDP)")."""
    return not any(re.match(re.escape(_words(alias)) + _NOT_LONGER, _words(name)) for alias in _every_name())


def release_for_search(name: str) -> str:
    """Return the release that a search means by ``name``: of the bare name of a family, or its first word ("megatron"), the
    newest release, of an alias its release; a name that states a release of Transformer Engine too, or none that is described,
    comes back as it is."""
    families = {f.family for f in FRAMEWORKS if _words(f.family) == _words(name) or _begins_family(f, name)}
    family = [f for f in FRAMEWORKS if f.family in families]
    aliased = [f for f in FRAMEWORKS if _words(name) in map(_words, f.aliases)]
    found = max(family, key=lambda f: f.released) if family else next(iter(aliased), None)
    if found or _TRANSFORMER_ENGINE.search(name.lower()) or unknown_release(name) or framework_of(name).name == GENERIC.name:
        return found.name if found else name
    return framework_of(name).name


def _begins_family(framework: Framework, name: str) -> bool:
    shared = map(_words, framework.broad_aliases)
    return _words(name) in shared and _words(framework.family).startswith(_words(name))


def _first_named(name: str, aliases: Sequence[tuple[Framework, tuple[str, ...]]]) -> Framework | None:
    """The framework one of whose aliases stands first in ``name``; of several at one place the longest decides."""
    text, found = _words(name), []
    for i, (_, words) in enumerate(aliases):
        for alias in words:
            place = re.search(re.escape(_words(alias)) + _NOT_LONGER, text)
            found += [(-place.start(), len(_words(alias)), i)] if place else []
    return aliases[max(found)[2]][0] if found else None


@cache
def _every_name() -> tuple[str, ...]:
    """All names and aliases of the described frameworks, and of what stands for others."""
    return tuple(alias for f in (*FRAMEWORKS, GENERIC) for alias in (f.name, *f.aliases, *f.broad_aliases))


@cache
def _words(name: str) -> str:
    """Lower case, one space before every word."""
    return " " + re.sub(r"[^a-z0-9]+", " ", name.lower()).strip()
