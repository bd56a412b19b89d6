"""What a reader must know of how a config was taken: a sentence each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from predictor.kernels.known_constants import ROWS_FOR_PHYSICS
from profiler.errors import printable
from profiler.profile.profile import QUICK, Device, Profile
from profiler.units import GBIT, GIB
from solver.api import DEFAULT_FRAMEWORK, of_another_framework
from solver.formats.config_file import RunConfig
from solver.spec.cluster import Cluster
from solver.spec.idle import idle_settings
from solver.spec.strategy import Strategy
from solver.step.problem import Problem

_FITTED = {"linear": "GEMMs", "flash_attn": "attention kernels"}  #: kernels that have a physical model, by table
#: Times of the device's own network (or of the widest NIC of today) and memory beyond which figures are hardly a GPU's.
_WIDEST, _USUAL_NIC, _ROOMIEST = 2.5, 800 * GBIT, 1.5
_SHOWN_KEYS = 6  #: names of keys in a note
_OF_BATCH = ("micro_batch_size", "recompute")  #: axes of a layout that a config may leave to what starts it
_SAID = ("zero", "grad_dtype", "framework", "precision")  #: what reports say elsewhere, or vary


def profile_notes(profile: Profile) -> Iterator[str]:
    """Yield what a profile lacks for predictions: it holds a trial's sizes only, or too few kernels of a kind for a fit."""
    if profile.derivation is not None:
        return
    if profile.meta.get(QUICK):
        yield "the profile holds the few sizes of a run with --quick, which tries the harness: measure again without it"
    for table, kernels in _FITTED.items():
        if (count := len(profile.table(table))) < ROWS_FOR_PHYSICS:
            yield (
                f"the profile holds {count} {kernels}: their times rest on the device's peak rates and usual constants, "
                f"which {ROWS_FOR_PHYSICS} or more would be fitted to"
            )


def cluster_notes(cluster: Cluster, device: Device) -> Iterator[str]:
    """Yield which figures of a cluster look like those of a whole node: they are of one GPU."""
    if cluster.network_bandwidth > _WIDEST * max(device.network_bandwidth, _USUAL_NIC):
        stated, node = cluster.network_bandwidth / GBIT, cluster.network_bandwidth / GBIT / cluster.gpus_per_node
        yield (f"inter_node_gbit_per_gpu {stated:,.4g} is taken as each GPU's; if a node has as much, state {node:,.4g}")
    if cluster.memory_bytes > _ROOMIEST * device.memory_bytes:
        yield (
            f"memory of {cluster.memory_bytes / GIB:,.1f} GiB is taken as each GPU's, of which a {device.name} has "
            f"{device.memory_bytes / GIB:.1f}"
        )


def config_notes(config: RunConfig, of: Problem, stated: set[str] | None, takes_gpus: bool) -> Iterator[str]:
    """Yield the notes on a config of which ``of`` is the problem.

    stated: axes of a layout that it states, where its own layout is predicted. takes_gpus: nothing states a number of GPUs, of
    which the default was taken.
    """
    if stated is not None and not stated:
        yield "the config states no layout: each size is 1, ZeRO is the framework's default, the rest is data parallel"
    if stated and (open_ := [f"{key} {getattr(Strategy, key)}" for key in _OF_BATCH if key not in stated]):
        yield f"not stated by the config, assumed: {', '.join(open_)}"
    yield from _other_framework(config, of)
    yield from _gradient_type(config, of)
    yield from _as_the_framework(config, of)
    if 0 < (positions := config.model.max_position_embeddings) < of.run.seq_len:
        yield f"{of.model.name} states {positions} positions; it is taken as trained for {of.run.seq_len}"
    if config.model.num_nextn_predict_layers and not of.model.num_nextn_predict_layers:
        yield f"without {of.model.name}'s modules of multi-token prediction: {of.framework.name} has none"
    yield from _idle(config, of)
    announced = {f"left out of the estimate: {what}" for what in of.left_out}
    yield from (printable(line, 400) for line in config.notes if line not in announced)
    yield from _gpus(config, of, takes_gpus)
    yield from _not_read(config)


def _other_framework(config: RunConfig, of: Problem) -> Iterator[str]:
    other = of_another_framework(config, of.run.framework)
    lost = [
        f"{key} {value} (now {getattr(of.run, key)})"
        for key, value in other.items()
        if key != "framework" and value != getattr(of.run, key)
    ]
    if lost:
        yield (
            f"not taken over from the config of {config.layout.get('framework', DEFAULT_FRAMEWORK)}, as {of.run.framework} is "
            f"asked for: {', '.join(lost)}; --set takes one over"
        )


def _gradient_type(config: RunConfig, of: Problem) -> Iterator[str]:
    if of.framework.reduces_narrow and of.run.grad_dtype != "fp32" and "grad_dtype" not in config.layout:
        yield (
            f"gradients are accumulated and reduced in {of.run.grad_dtype}, as {of.framework.name}'s performance recipes do; "
            "--set grad_dtype=fp32 as its other recipes do"
        )


def _as_the_framework(config: RunConfig, of: Problem) -> Iterator[str]:
    """Yield which settings that nobody stated are the framework's own, where these are not what every framework has."""
    own = {key: value for key, value in {**of.framework.flags, **of.framework.best_practice}.items() if key not in _SAID}
    taken = [key for key, value in own.items() if getattr(of.run, key) == value != getattr(Strategy, key)]
    idle = idle_settings(taken, of.model, of.run.precision, of.framework)
    of_experts = ["moe_dispatcher"] * (of.model.is_mixture_of_experts and "moe_dispatcher" not in taken)
    words = [
        key if own.get(key) is True else f"{key} {str(getattr(of.run, key)).lower()}"
        for key in (*taken, *of_experts)
        if key not in idle and key not in config.layout
    ]
    if words:
        yield f"defaults of {of.framework.name} (--set changes them): {', '.join(words)}"


def _idle(config: RunConfig, of: Problem) -> Iterator[str]:
    changed = [key for key, value in config.layout.items() if value != getattr(Strategy, key, value)]
    nothing = idle_settings(changed, of.model, of.run.precision, of.framework)
    yield from (f"{key} of the config changes nothing{why}" for key, why in nothing.items() if key not in of.framework.flags)
    if config.layout.get("zero") == 0 and config.layout.get("zero_shard_size", 1) > 1:
        yield "zero_shard_size of the config changes nothing with zero 0"


def _gpus(config: RunConfig, of: Problem, takes_gpus: bool) -> Iterator[str]:
    if takes_gpus or ("world_size" in config.assumed and config.layout.get("world_size")):
        yield f"the config states no number of GPUs: {of.run.world_size} are taken; --world_size says how many"
    each, here = config.gpus_per_node, of.cluster.gpus_per_node
    if each > here:
        yield f"it launches {each} ranks on a node; of {of.cost.device.name} that is {each / here:g} nodes of {here} GPUs"


def _not_read(config: RunConfig) -> Iterator[str]:
    if config.ignored:
        yield f"not read from the config: {listed_keys(config.ignored, _SHOWN_KEYS)}"


def listed_keys(keys: Sequence[str], most: int) -> str:
    """Return the names of the first ``most`` keys, and how many more there are."""
    more = f" and {len(keys) - most} more" if len(keys) > most else ""
    return f"{printable(', '.join(keys[:most]), 400)}{more}"
