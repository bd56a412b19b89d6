"""The global batch of a command: what --global_batch_size says, else the config's own, else the default."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from copy import copy

from profiler.errors import InputError
from solver.api import configured_batch, configured_strategy
from solver.formats.config_file import RunConfig
from solver.options.arguments import DEFAULT_TOKENS
from solver.step.problem import Problem

_UNEVEN = "no data-parallel ranks can then have that factor"
_ROUNDED = 1 / 8  #: the share of a batch that rounding may add or leave out
_ADVICE = ", and --round_batch rounds the batch"


def odd_factor(gpus: int) -> int:
    """Return the largest odd number that divides a number of GPUs."""
    return gpus // (gpus & -gpus)


def uneven_worlds(batch: Callable[[int], int], worlds: Sequence[int], rounds: bool) -> str:
    """Return in words on which numbers of GPUs the batch is no multiple of their odd factor; "" if on none.

    rounds: it was rounded, and holds less than the factor.
    """
    uneven = [f"{world:,}" for world in worlds if batch(world) % odd_factor(world)]
    sentence = (
        f"on {', '.join(uneven)} GPUs the batch does not divide by their odd factor; {_UNEVEN}{'' if rounds else _ADVICE}"
    )
    return sentence if uneven else ""


def rounded_batch(tokens: int, seq_len: int, rounds: bool, group: int) -> tuple[int, str]:
    """Return (sequences of a global batch of ``tokens``, a note if it was rounded).

    rounds: round to whole sequences, and to the nearest multiple of ``group`` sequences, or of the largest half, quarter and so
    on of it with which no more than an eighth of the batch is added or left out. Raises InputError for a batch that is not a
    whole number of sequences and may not be rounded.
    """
    if not rounds:
        if tokens % seq_len:
            meant = f"; {tokens} sequences are {tokens * seq_len}" if tokens < seq_len else ""
            raise InputError(
                f"--global_batch_size {tokens} tokens is not a whole number of sequences of {seq_len} tokens; "
                f"try {max(tokens // seq_len, 1) * seq_len}, or --round_batch{meant}"
            )
        return tokens // seq_len, ""
    while abs(_nearest(tokens, seq_len * group) - tokens) > _ROUNDED * tokens and group > 1:
        group = group // 2 if group % 2 == 0 else 1
    sequences = _nearest(tokens, seq_len * group) // seq_len
    if sequences * seq_len == tokens:
        return sequences, ""
    return sequences, f"global batch rounded from {tokens:,} to {sequences * seq_len:,} tokens, {sequences:,} sequences"


def _nearest(tokens: int, unit: int) -> int:
    """Return the nearest multiple of ``unit`` that is not zero."""
    return max(round(tokens / unit), 1) * unit


def searched_batch(args: argparse.Namespace, problem: Problem, config: RunConfig, group: int | None = None) -> tuple[int, str]:
    """Return the same of a search, rounded to a multiple of ``group`` sequences (None: the GPUs).

    Where no batch is asked for: that of the config's own layout on these GPUs, as a prediction of it has, else the default
    number of tokens, rounded so that the GPUs divide it. That too is said where the config states a batch, but of a layout that
    these GPUs do not hold. Of a batch that an odd factor of the GPUs does not divide it is said what that costs.
    """
    world = problem.run.world_size if group is None else group
    stated, note = args.global_batch_size is None and "num_micro_batches" in config.layout, ""
    if stated:
        if (sequences := configured_batch(problem, config)) is not None:
            return sequences, f"global batch: the config's own, {sequences:,} sequences"
        note = f"global batch: the default, because the config's tp * cp * pp do not divide {problem.run.world_size} GPUs"
    tokens = args.global_batch_size or DEFAULT_TOKENS
    rounds = args.round_batch or args.global_batch_size is None
    found, rounded = rounded_batch(tokens, problem.run.seq_len, rounds, world)
    odd = odd_factor(world)
    uneven = f"global batch: {found:,} sequences, which the factor {odd} of {world:,} GPUs does not divide; {_UNEVEN}"
    uneven += "" if rounds else _ADVICE
    return found, "\n".join(filter(None, (note, rounded, uneven if found % odd else "")))


def stated_batch(args: argparse.Namespace, problem: Problem, config: RunConfig) -> tuple[int | None, str]:
    """Return (sequences of ``--global_batch_size``, a note if it was rounded); None for the config's own micro batches.

    It is rounded to a multiple of the sequences that all data-parallel ranks of the config's layout take at once.
    """
    if args.global_batch_size is None:
        return None, ""
    group = 1
    if args.round_batch:
        layout = configured_strategy(problem, config)
        group = layout.dp * layout.micro_batch_size
    return rounded_batch(args.global_batch_size, problem.run.seq_len, args.round_batch, group)


def batch_or_default(args: argparse.Namespace, problem: Problem, config: RunConfig) -> tuple[int | None, str]:
    """Return the same, and the default number of tokens where neither the option nor the config states a batch."""
    if args.global_batch_size is None and configured_batch(problem, config) is None:
        args = copy(args)
        args.global_batch_size = DEFAULT_TOKENS
    return stated_batch(args, problem, config)
