"""The problem: a model, the constants of the run, a cluster and its cost model; and the problem's layers, estimated once."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from predictor.cost_model import CostModel
from profiler.errors import InputError, require
from profiler.profile.profile import Device
from solver.layers.program import ADAPTERS, HOST_LINK, HOST_MEMORY
from solver.spec.alignment import left_in_16_bits, quantised_broken, unaligned
from solver.spec.cluster import Cluster
from solver.spec.framework import Framework
from solver.spec.frameworks import framework_of
from solver.spec.frameworks.for_model import framework_for
from solver.spec.layer_kinds import LayerKinds, layer_kinds
from solver.spec.model import ModelSpec, check_model
from solver.spec.multi_token import as_trained
from solver.spec.pipeline_layout import chunk_layers
from solver.spec.precision import PRIMARY, QUANTISED, ElementBytes, element_bytes
from solver.spec.recipes import WeightRecipe, recipe_of, weight_recipe
from solver.spec.rules.fp8_attention import fp8_attention_broken
from solver.spec.rules.graphs import graphs_left_out
from solver.spec.rules.offload import check_host
from solver.spec.run import Run
from solver.spec.soft_caps import left_out_of_caps, soft_cap_rule
from solver.spec.strategy import Strategy, layout_of
from solver.step.collective_checks import CHECKS_INFERRED, are_collectives_checked


@dataclass(frozen=True)
class Problem:
    """The inputs of an estimate.

    run: the constants (world size, sequence length, precision, overlap flags); layouts vary the rest.
    """

    model: ModelSpec
    run: Run
    cluster: Cluster
    cost: CostModel

    @property
    def element_bytes(self) -> ElementBytes:
        return element_bytes(self.run, self.framework)

    @property
    def left_out(self) -> tuple[str, ...]:
        """What model and run cost, in time or memory, beyond what is priced, in words."""
        caps = left_out_of_caps(self.model, self.run)
        return (
            *self.model.unmodelled,
            *unaligned(self.model),
            *left_in_16_bits(self.model, self.framework.can_run, self.run.precision),
            *self.run.unmodelled,
            *graphs_left_out(self.model, self.run),
            *caps,
        )

    @property
    def weight_recipe(self) -> WeightRecipe | None:
        """How quantised weights are kept; None where the linears are not quantised or the framework keeps no such copies."""
        recipe = recipe_of(self.run.precision, self.run.fp8_recipe)
        if recipe is None or not self.framework.memory.quantised_weights:
            return None
        copies = 1 + (recipe.by_axis or self.cost.device.transposes_fp8)
        return weight_recipe(recipe, copies, self.run.fp8_param_gather and self.run.precision in PRIMARY)

    @property
    def fp8_shards(self) -> float:
        """Bytes of a weight that FSDP quantises before it gathers it (torchao's enable_fsdp_float8_all_gather); 0: none is."""
        recipe = recipe_of(self.run.precision, self.run.fp8_recipe)
        there = self.run.fp8_param_gather and self.framework.can_run.gathers_fp8_shards
        return recipe.element if recipe is not None and there else 0.0

    @property
    def defers_sync(self) -> bool:
        """Whether gradients of sharded parameters stay whole until a step's last micro batch."""
        stated = self.run.defer_grad_sync
        return self.framework.data_parallel.defers_sync if stated is None else stated

    @property
    def overlaps_sharded_reduction(self) -> bool:
        """Whether gradients of weights that ZeRO-3 shards are reduced beside the backward pass."""
        stated = self.run.overlap_grad_reduce
        return self.framework.data_parallel.overlaps_sharded_unless_told if stated is None else stated

    @property
    def waits_for_norm(self) -> bool:
        """Whether the stages of a zero-bubble schedule wait for each other at the end of a step."""
        return self.run.precision not in self.framework.pipeline.validates_later

    @property
    def runs_no_sync(self) -> bool:
        """Whether gradients of sharded parameters stay whole until a step's last micro batch as under FSDP1's no_sync."""
        sync = self.framework.data_parallel
        return self.defers_sync and sync.no_sync and not sync.accumulates_whole

    @property
    def fused_accumulation(self) -> bool:
        """Whether the weight-gradient GEMMs add to the gradients: as the run states it, or as its framework does."""
        return self.framework.fuses_accumulation(self.run.gradient_accumulation_fusion)

    @cached_property
    def checks_collectives(self) -> bool:
        """Whether torch checks every collective before it starts."""
        return are_collectives_checked(self.run, self.cluster, self.cost.network)

    @property
    def inferred_network(self) -> tuple[str, ...]:
        """What was inferred from stated bus bandwidths and leaf switches, one sentence each."""
        inferred = self.checks_collectives and self.run.collective_checks is None
        return (CHECKS_INFERRED,) if inferred else self.cost.network.stated.sentences()

    def is_frozen(self, group: str) -> bool:
        """Whether the parameters of a group (PARAMETER_GROUPS) are not trained."""
        return self.run.lora_rank > 0 and group != ADAPTERS

    @cached_property
    def kinds(self) -> LayerKinds:
        """The kinds of the model's layers at this sequence length."""
        run = self.run
        ends = (run.num_layers_at_start_in_bf16, run.num_layers_at_end_in_bf16)
        return layer_kinds(self.model, run.seq_len, ends if run.precision in QUANTISED else (0, 0), run.document_tokens)

    @property
    def chunks(self) -> tuple[int, ...]:
        """The layers of every chunk where the run states a layout of its pipeline; otherwise ()."""
        return chunk_layers(self.run.pipeline_layout) if self.run.pipeline_layout else ()

    def with_run(self, **constants: Any) -> Problem:
        """Return the problem with other constants of its run."""
        return replace(self, run=self.run.replace(**constants))

    def layout(self, **choices: Any) -> Strategy:
        """Return a layout of the run with these axes; dp fills the world unless stated."""
        return layout_of(self.run, **choices)

    @property
    def framework(self) -> Framework:
        return framework_for(self.run.framework, self.model)

    def for_world(self, world: int, domain: int | None = None) -> Problem:
        """Return the problem on another number of GPUs.

        domain: GPUs of a whole NVLink domain, of which a job gets the part that divides it; None: the part of this problem.
        """
        whole = self.cluster if domain is None else replace(self.cluster, nvlink_domain=domain)
        cluster = whole.for_world(world)
        checked = self.checks_collectives or self.run.collective_checks  # what all-reduces over this world told
        run = self.run.replace(world_size=world, collective_checks=checked)
        network = self.cost.network.for_world(world, cluster.gpus_per_domain)
        cost = replace(self.cost, network=network.with_leaf_switches(cluster.leaf_switches(world)))
        return replace(self, run=run, cluster=cluster, cost=cost)


def problem_of(model: ModelSpec, run: Run, cluster: Cluster, cost: CostModel) -> Problem:
    """Return a Problem whose cost model runs the attention kernels of the run's framework.

    Every way in ends here: raises InputError for a model that this program cannot estimate, and for soft caps and number
    formats that framework or device lack. Whether the framework runs a layout is checked with it (solver.spec.feasibility).
    """
    model = as_trained(model, framework_of(run.framework))
    check_model(model, run.seq_len)
    require([soft_cap_rule(framework_of(run.framework), model, run)])
    check_host(cluster, run)
    _check_format(model, run, cost.device)
    if broken := fp8_attention_broken(model, run, cost.device):
        raise InputError(broken)
    cluster = cluster.for_world(run.world_size)
    node = cluster.gpus_per_domain
    network = cost.network.with_leaf_switches(cluster.leaf_switches(run.world_size))
    if cluster.link_peers != cost.device.link_peers:
        network = network.with_link_peers(cluster.link_peers)
    if not are_collectives_checked(run, cluster, network):  # else what the stated all-reduces took is no matter of the links
        network = network.with_stated_busbw(run.world_size, node, cluster.all_reduce_busbw, cluster.all_reduce_busbw_in_node)
    rates = {HOST_LINK: cluster.host_link, HOST_MEMORY: cluster.host_memory}
    rates = {name: rate for name, rate in rates.items() if rate}
    cost = replace(cost, network=network, host=replace(cost.host, rates=rates))
    version, own = attention_generation(run, cost), runs_flash_attention(run)
    return Problem(model, run, cluster, cost.with_flash_version(version, run.deterministic, own))


def _check_format(model: ModelSpec, run: Run, device: Device) -> None:
    """Raise InputError for a precision or an attention kernel that the device or the framework lacks, or that the model's sizes
    do not fit."""
    framework = framework_of(run.framework)
    if run.precision in QUANTISED and not framework.can_run.quantised:
        raise InputError(f"precision {run.precision} is none of {framework.name}'s, whose linears are 16-bit or fp32")
    if odd := quantised_broken(model, framework.can_run, run.precision):
        raise InputError(odd)
    if run.precision in QUANTISED and run.precision not in device.peak_flops:
        known = ", ".join(sorted(device.peak_flops))
        raise InputError(f"precision {run.precision} does not run on {device.name}, whose number formats are {known}")
    if run.precision == "bf16" and "bf16" not in device.peak_flops and "fp16" in device.peak_flops:
        raise InputError(f"{device.name} does not multiply in bf16; give it precision fp16, which it does")
    if run.attention == "flash" and not device.flash_version:
        raise InputError(f"no FlashAttention runs on {device.name}; give it attention unfused")
    if run.flash_generation > device.flash_version:
        raise InputError(
            f"flash_generation {run.flash_generation} does not run on {device.name}, whose latest is {device.flash_version}"
        )


def runs_flash_attention(run: Run) -> bool:
    """Whether a generation of FlashAttention stands for its own kernels: as stated, or as frameworks without Transformer Engine
    run them, which may run cuDNN's of that time."""
    return bool(run.flash_generation) or not framework_of(run.framework).kernels.transformer_engine


def attention_generation(run: Run, cost: CostModel) -> int:
    """Return the generation of FlashAttention that a run states or its framework uses on a device; 0: the device's best.

    Transformer Engine uses none of cuDNN's kernels for a deterministic run on Blackwell (get_attention_backend, as read).
    """
    framework = framework_of(run.framework)
    older = run.deterministic and framework.kernels.transformer_engine and cost.device.flash_version >= 4
    return 2 if older else run.flash_generation or framework.kernels.flash_attention
