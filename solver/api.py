"""Three-line interface for scripts and notebooks; the command line is a thin layer over it.

>>> from solver import load_problem, search
>>> problem = load_problem("configs/7B_internlm2.py", world_size=128, profile="h100_sxm")
>>> search(problem, global_batch_sequences=1024).best.tgs
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from predictor.cost_model import CostModel
from predictor.fitted import cost_model
from predictor.network.topology.types import Topology
from profiler.errors import InputError, printable, shown
from profiler.profile.attention_times import FOLDER
from profiler.profile.devices import DATASHEETS
from profiler.profile.profile import Device, Profile
from profiler.profile.profiles import PROF_DATA, profile_of
from profiler.profile.profiles import as_device as rescaled
from profiler.units import GIB
from solver.formats.config_file import RunConfig, find_model, load_cluster, load_run_config
from solver.formats.topology_cluster import TOPOLOGY
from solver.search.space import enumerate_splits
from solver.spec.bounds import number, whole_number
from solver.spec.cluster import Cluster, cluster_of
from solver.spec.feasibility import check_layout
from solver.spec.frameworks import known_framework, release_for_search
from solver.spec.idle import idle_settings
from solver.spec.model_attention import attention_of
from solver.spec.run import DEFAULT_SEQ_LEN, Run, run_from
from solver.spec.soft_caps import without_soft_caps
from solver.spec.strategy import AXES, CONSTANTS, Strategy, replicas
from solver.step.layouts import Layouts, Splits
from solver.step.problem import Problem, problem_of
from solver.step.solutions import Solutions, estimate_layouts
from solver.step.timed_attention import with_timed_attention

#: Cache of the fits; deleting the folder makes the next start some seconds slower and changes nothing else.
CACHE = PROF_DATA / ".cache"
DEFAULT_FRAMEWORK = "megatron-core"  #: of configs that state none; those of InternEvo are run by InternEvo


def load_problem(
    config: str | Path | RunConfig,
    world_size: int,
    *,
    profile: str | Profile | None = None,
    as_device: str | None = None,
    cluster: str | Path | Mapping[str, Any] | None = None,
    seq_len: int | None = None,
    memory_limit_gib: float | None = None,
    approximate: bool = False,
    **constants: Any,
) -> Problem:
    """Return a Problem from a config: its model and the constants of its run, on ``world_size`` accelerators.

    config: a file of any format that --config reads, a shipped name as of --model_size, or a RunConfig. profile: a shipped
    profile's name, "data" for this machine's own measurements, a Profile, or None for the shipped default. as_device: a device
    of configs/devices, or a device file, to which the profile is rescaled. cluster: a name under configs/clusters or a file, or
    a mapping of its keys.
    seq_len: tokens of a sequence; a model with rotary embedding may be trained beyond the positions that it states.
    approximate: leave out the model's soft caps instead of refusing the model. constants: further Strategy fields
    (docs/settings.md) that all layouts share, such as precision. Raises InputError for input that cannot be used.
    """
    world_size = whole_number("world_size", world_size)
    run_config = config if isinstance(config, RunConfig) else load_run_config(named_file(config), world_size)
    model = without_soft_caps(run_config.model) if approximate else run_config.model
    described = described_cluster(cluster)
    varied = [key for key in constants if key in AXES]
    if varied:
        raise InputError(f"{varied[0]} is an axis of a search: fix it with search(..., fixed={{{varied[0]!r}: ...}})")
    found, _ = chosen_profile(profile, described, as_device)
    if "gpus_per_node" not in described:
        described |= _nodes_of_launch(run_config, found.device)
    cost, place = machine(found, described, world_size)
    place = _limited(place, memory_limit_gib)
    given = {key: value for key, value in run_config.layout.items() if key not in AXES}
    own = str(given.get("framework", DEFAULT_FRAMEWORK))
    framework = release_for_search(str(constants.get("framework") or own))
    given = {key: value for key, value in given.items() if key not in of_another_framework(run_config, framework)}
    chosen = known_framework(framework)
    precision = {"precision": Run.precision, **chosen.flags, **given, **constants}["precision"]
    for key, why in idle_settings(constants, model, str(precision), chosen).items():
        raise InputError(f"{key} changes nothing{why}; leave it out")
    recipe = {**given, **constants}.get("fp8_recipe")
    flags = {**chosen.flags_of(precision, recipe), **chosen.best_practice, **attention_of(chosen, model)}
    defaults = {key: value for key, value in flags.items() if key not in AXES}
    stated = whole_number("seq_len", seq_len) if seq_len is not None else run_config.seq_len
    length = stated or min(DEFAULT_SEQ_LEN, model.max_position_embeddings or DEFAULT_SEQ_LEN)
    if seq_len is not None and model.position != "learned" and 0 < model.max_position_embeddings < length:
        model = model.replace(max_position_embeddings=length)  # asked for, so trained for
    values = {**defaults, **given, **constants, "framework": framework, "world_size": world_size}
    run = run_from({**values, "seq_len": length}, run_config.name)
    return problem_of(model, run, place, cost)


def named_file(config: str | Path) -> Path:
    """Return the file of a config, or of a shipped one's name. Raises InputError for a name that none has."""
    if not isinstance(config, str | Path):
        raise InputError(f"a config is {shown(config)}; it must be a file, a shipped model's name, or a RunConfig")
    return Path(config) if isinstance(config, Path) or Path(config).suffix else find_model(config)


def described_cluster(cluster: str | Path | Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the keys of a cluster: of a name, of a file, or of a mapping. Raises InputError for what is none of these."""
    if isinstance(cluster, str | Path):
        return load_cluster(cluster)
    if cluster is not None and not isinstance(cluster, Mapping):
        raise InputError(f"a cluster is {shown(cluster)}; it must be a name under configs/clusters, a file, or a mapping")
    return dict(cluster or {})


def chosen_profile(
    profile: str | Profile | None, cluster: Mapping[str, Any], device: str | None = None, path: Path | None = None
) -> tuple[Profile, str]:
    """Return (profile, a sentence that states which): that of a name, of a file, or of the cluster's hardware, rescaled to
    ``device`` where one is named. Raises InputError where the cluster is of another device than the named profile."""
    for what, value in (("profile", profile), ("device", device)):
        if value is not None and not isinstance(value, str | Profile):
            raise InputError(f"a {what} is {shown(value)}; it must be a name")
    if isinstance(profile, Profile):
        return rescaled(profile, device) if device else (profile, "a profile of your own")
    hardware = None if TOPOLOGY in cluster else cluster.get("hardware")
    if profile and hardware not in (None, profile):
        raise InputError(f"the profile is {profile}, but the cluster is of {hardware}; leave one out")
    return profile_of(profile or (None if path else cluster.get("hardware")), path, device)


def of_another_framework(config: RunConfig, framework: str) -> dict[str, Any]:
    """Return the constants that a config states for its own framework and that a run under ``framework`` does not take over:
    all but number format and attention, where the two are different ones."""
    own = str(config.layout.get("framework", DEFAULT_FRAMEWORK))
    if known_framework(release_for_search(framework)) is known_framework(release_for_search(own)):
        return {}
    kept = (*AXES, "world_size", "seq_len", "precision", "attention")
    return {key: value for key, value in config.layout.items() if key not in kept}


def _nodes_of_launch(config: RunConfig, device: Device) -> dict[str, int]:
    """Return the GPUs of a node as a file launches them, where it does; the device's where several of its nodes hold them.

    Raises InputError where a whole number of its nodes does not.
    """
    each, here = config.gpus_per_node, device.gpus_per_node
    if each > here and each % here:
        raise InputError(
            f"{config.source}: it launches {each} ranks on a node, and {device.name} has {here} GPUs a node; "
            "state another gpus_per_node in a cluster file (--cluster), or launch fewer"
        )
    return {"gpus_per_node": min(each, here)} if each else {}


def machine(profile: Profile, described: Mapping[str, Any], world: int) -> tuple[CostModel, Cluster]:
    """Return the cost model and the cluster of a profile's devices in a described cluster (keys: configs/README.md).

    Where the description holds a topology, collectives between servers are simulated on it.
    """
    where = f"cluster {printable(str(described['name']))}" if "name" in described else "cluster"
    topology = described.get(TOPOLOGY)
    if TOPOLOGY in described and not isinstance(topology, Topology):
        raise InputError(f"{where}: a cluster holds no {TOPOLOGY}; give the .topo file or the template itself as the cluster")
    keys = {key: value for key, value in described.items() if key != TOPOLOGY}
    assumed = profile.name in DATASHEETS or bool(profile.derivation and profile.derivation.network_assumed)
    place = cluster_of(profile.device, keys, where, usual_network=assumed)
    cost = cost_model(profile, place.network_bandwidth, CACHE)
    if topology is None:
        return cost, place
    return _on_topology(cost, topology, place, world), replace(place, usual_network=False)


def _on_topology(cost: CostModel, topology: Topology, place: Cluster, world: int) -> CostModel:
    """Return a cost model whose collectives between servers are simulated on the topology."""
    # what simulates takes as long to import as all the rest
    from predictor.network.flows.calibrate import read_calibration
    from predictor.network.simulated import SimulatedNetwork, cache_file

    per, found = place.for_world(world).gpus_per_domain, read_calibration()
    network = SimulatedNetwork(
        topology, cost.network.measured_collectives, world, per, found, cache_file(CACHE, topology, found)
    )
    return replace(cost, network=replace(cost.network, collectives=network))


def _limited(cluster: Cluster, memory_limit_gib: float | None) -> Cluster:
    if memory_limit_gib is None:
        return cluster
    return replace(cluster, memory_bytes=number("memory_limit_gib", memory_limit_gib) * GIB)


def configured_strategy(problem: Problem, config: RunConfig, sequences: int | None = None) -> Strategy:
    """Return the layout that the config file states; dp fills the world, and the batch (in sequences) sets the micro batches.

    Raises InputError where the sizes do not multiply to the world size or do not divide the batch.
    """
    given = _sizes(problem, config)
    world, ranks = problem.run.world_size, _model_ranks(given)
    if world % ranks:
        raise InputError(f"{config.name}: tp * cp * pp is {ranks}, which does not divide world_size {world}")
    dp = _data_ranks(config, given, world)
    size = given.get("micro_batch_size", 1)
    if sequences is not None:
        if sequences % (dp * size):
            raise InputError(
                f"{config.name}: a global batch of {sequences} sequences is no multiple of dp {dp} * micro batch {size}"
            )
        given["num_micro_batches"] = sequences // (dp * size)
    if given.get("zero_shard_size", -1) < 1:  # InternEvo's -1: all ranks that share parameters
        given["zero_shard_size"] = _replicas({**given, "dp": dp}) if given.get("zero", Strategy.zero) else 1
    try:
        strategy = problem.layout(**{**given, "dp": dp})
        check_layout(problem.model, problem.cluster, strategy)
    except InputError as error:
        raise InputError(f"{config.name}: {error}") from None
    return strategy


def configured_batch(problem: Problem, config: RunConfig) -> int | None:
    """Return the sequences of a step of the config's layout on the problem's GPUs.

    None where it states no micro batches, and where it leaves dp open and its other sizes do not divide these GPUs. The
    framework need not run the layout: a search finds others. Raises InputError for another dp than there can be.
    """
    given = _sizes(problem, config)
    if "num_micro_batches" not in config.layout or ("dp" not in given and problem.run.world_size % _model_ranks(given)):
        return None
    dp = _data_ranks(config, given, problem.run.world_size)
    return int(dp * given.get("micro_batch_size", 1) * given["num_micro_batches"])


def _sizes(problem: Problem, config: RunConfig) -> dict[str, Any]:
    """Return the axes that the config states, over those that its framework has where nothing is said."""
    own = {key: value for key, value in config.layout.items() if key in AXES}
    return {key: value for key, value in problem.framework.flags.items() if key in AXES} | own


def _model_ranks(sizes: Mapping[str, Any]) -> int:
    """Return the ranks that hold one copy of the model."""
    return int(sizes.get("tp", 1) * sizes.get("cp", 1) * sizes.get("pp", 1))


def _data_ranks(config: RunConfig, sizes: Mapping[str, Any], world: int) -> int:
    """Return the data-parallel ranks that are left. Raises InputError where the config states others."""
    dp = world // _model_ranks(sizes)
    if sizes.get("dp", dp) != dp:
        raise InputError(f"{config.name}: dp is {sizes['dp']}, but world_size {world} leaves {dp} after tp, cp and pp")
    return dp


def _replicas(sizes: Mapping[str, Any]) -> int:
    """Return the ranks that hold the same parameters in a layout that states some of its sizes."""
    tp, cp, wp = (sizes.get(name, 1) for name in ("tp", "cp", "wp"))
    return int(replicas(sizes.get("tp_mode") == "isp", tp, cp, sizes["dp"], wp))


def without_filling(config: RunConfig, own: Strategy) -> dict[str, Any]:
    """Return the config's layout without what fills the world and the batch, so that other sizes may be put into it.

    own: the layout as it is written. The ranks of ZeRO are left out where they are all that hold the same parameters.
    """
    filling = {"world_size", "dp", "num_micro_batches"}
    if own.zero_shard_size == own.replicas:
        filling.add("zero_shard_size")
    return {name: value for name, value in config.layout.items() if name not in filling}


def time_attention(
    problem: Problem, profile: Profile, asked: int | list[Strategy], *, timing: bool = True, folder: Path | None = None
) -> tuple[Problem, str]:
    """Return (the problem with attention as timed on this machine, a message), where this machine has the profile's device.

    asked: what will be estimated, either a search's global batch in sequences or explicit layouts. folder: where times are
    stored (default: next to the shipped profiles). timing: False times nothing and uses stored times. On other machines the
    problem is returned unchanged. Nothing else in this interface times kernels: timing takes up to a minute and keeps the
    device busy.
    """

    def splits() -> Splits:
        return enumerate_splits(problem, asked).splits if isinstance(asked, int) else Layouts.of(asked).splits

    return with_timed_attention(problem, profile, splits, folder or PROF_DATA / FOLDER, timing)


def estimate(problem: Problem, strategies: list[Strategy]) -> Solutions:
    """Estimate explicit layouts of one problem.

    Raises InputError for no layouts, for one that no framework could run, and for one whose constants are not the problem's.
    """
    if not strategies:
        raise InputError("there is no layout to estimate: strategies is empty")
    for strategy in strategies:
        _same_constants(problem.run, strategy)
        check_layout(problem.model, problem.cluster, strategy)
    return estimate_layouts(problem, Layouts.of(strategies))


def _same_constants(run: Run, strategy: Strategy) -> None:
    """Raise InputError where a layout states a constant that the problem, which is estimated, has otherwise."""
    for name in CONSTANTS:
        if name == "recompute_modules" and strategy.recompute != "selective":
            continue
        if name == "recompute_group" and not strategy.recomputes_all:
            continue
        if getattr(strategy, name) != getattr(run, name):
            raise InputError(
                f"{name} is {shown(getattr(strategy, name))} in a layout, but {shown(getattr(run, name))} in the problem, of "
                f"which it is a constant: give it to load_problem({name}=...)"
            )


__all__ = ["configured_batch", "configured_strategy", "estimate", "load_problem", "time_attention", "without_filling"]
