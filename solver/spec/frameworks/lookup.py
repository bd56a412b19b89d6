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
    *internevo.FAMILY, *megatron.FAMILY, *nemo.FAMILY, *megatron_forks.FAMILY, *deepspeed.FAMILY, *torchtitan.FAMILY,
    *pytorch.FAMILY, *llm_foundry.FAMILY, *nanotron.FAMILY, *maxtext.FAMILY,
)  # fmt: skip

_TRANSFORMER_ENGINE = re.compile(r"transformer[-_ ]engine\D{0,10}(\d+)\.(\d+)")
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
    """As framework_of, for a name that a user chose: raises InputError where no framework answers to it."""
    framework = framework_of(name)
    if framework.name == GENERIC.name and name != GENERIC.name:
        names = [*(f.name for f in FRAMEWORKS), GENERIC.name]
        families = {f.family for f in FRAMEWORKS}
        raise InputError(f"no framework is called {name!r}{closest(name, [*families, *names])}; known are {', '.join(names)}")
    return framework


def release_for_search(name: str) -> str:
    """Return the release that a search means by ``name``: of the bare name of a family its newest release, of an alias its
    release; any other name comes back as it is (it may state more, such as a release of Transformer Engine)."""
    family = [f for f in FRAMEWORKS if _words(f.family) == _words(name)]
    aliased = [f for f in FRAMEWORKS if _words(name) in map(_words, f.aliases)]
    found = max(family, key=lambda f: f.released) if family else next(iter(aliased), None)
    return found.name if found else name


def _first_named(name: str, aliases: Sequence[tuple[Framework, tuple[str, ...]]]) -> Framework | None:
    """The framework one of whose aliases stands first in ``name``; of several at one place the longest decides."""
    text, found = _words(name), []
    for i, (_, words) in enumerate(aliases):
        for alias in words:
            place = re.search(re.escape(_words(alias)) + "(?![a-z])", text)
            found += [(-place.start(), len(_words(alias)), i)] if place else []
    return aliases[max(found)[2]][0] if found else None


def _words(name: str) -> str:
    """Lower case, one space before every word."""
    return " " + re.sub(r"[^a-z0-9]+", " ", name.lower()).strip()
