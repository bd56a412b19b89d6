"""The strategy: one parallel layout of a run with every choice stated."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from profiler.errors import InputError, counted
from solver.spec.run import Run


def replicas(is_isp: Any, tp: Any, cp: Any, dp: Any, wp: Any) -> Any:
    """Return the ranks of a stage that hold copies of one shard of its linears, int64: there are tp shards, under ISP wp."""
    return np.maximum(tp * cp * dp // np.where(is_isp, wp, tp), 1)


def expert_replicas(tp: Any, cp: Any, dp: Any, ep: Any, etp: Any) -> Any:
    """Return the ranks of a stage that hold copies of the same experts (edp)."""
    return tp * cp * dp // (ep * etp)


@dataclass(frozen=True, kw_only=True)
class Strategy(Run):
    """One layout: world_size = tp * cp * dp * pp, and ranks are numbered in the order tp, cp, dp, pp.

    Experts divide the ranks of a stage anew: tp * cp * dp = etp * ep * edp, numbered in the order etp, ep, edp.
    """

    tp: int = 1  #: ranks that split each layer (tensor parallelism)
    #: How: mtp as Megatron does; msp with sequence parallelism; fsp and isp as InternEvo does (solver.spec.choices.TpMode).
    tp_mode: str = "mtp"
    wp: int = 1  #: ISP: ranks that share the weights of the layers
    cp: int = 1  #: ranks that split each sequence (context parallelism)
    ep: int = 1  #: ranks that share the experts of a layer
    etp: int = 1  #: ranks that split each expert
    pp: int = 1  #: stages of the pipeline
    vpp: int = 1  #: chunks of a stage (virtual stages)
    schedule: str = "1f1b"  #: order of the passes of the stages
    num_layers_in_first_pipeline_stage: int = 0  #: layers of the first stage; 0: an even share
    num_layers_in_last_pipeline_stage: int = 0  #: layers of the last stage; 0: an even share
    account_for_embedding_in_pipeline_split: bool = False  #: the embedding takes the place of a layer of the first stage
    account_for_loss_in_pipeline_split: bool = False  #: head and loss take the place of a layer of the last stage
    dp: int = 1  #: replicas (data parallelism)
    zero: int = 1  #: what replicas share: 1 optimizer states, 2 gradients too, 3 weights too (FSDP)
    zero_shard_size: int = 1  #: ranks that share one copy of it (InternEvo's zp; fewer than all: hybrid sharding)
    micro_batch_size: int = 1  #: sequences of a micro batch on one replica
    num_micro_batches: int = 1  #: micro batches of a step on one replica (gradient accumulation)
    recompute: str = "none"  #: what the backward pass recomputes: nothing, recompute_modules, or whole layers
    recompute_layers: int = -1  #: of how many layers of a stage; -1: of all

    def _check_sizes(self) -> None:
        """Refuse sizes that contradict each other."""
        super()._check_sizes()
        if self.tp * self.cp * self.dp * self.pp != self.world_size:
            raise InputError(
                f"tp {self.tp} * cp {self.cp} * dp {self.dp} * pp {self.pp} = {self.tp * self.cp * self.dp * self.pp} "
                f"ranks, but world_size is {self.world_size}"
            )
        if self.tp * self.cp * self.dp % (self.ep * self.etp):
            raise InputError(
                f"ep {self.ep} * etp {self.etp} does not divide the "
                f"{counted(self.tp * self.cp * self.dp, 'rank')} of a pipeline stage"
            )

    @property
    def run(self) -> Run:
        """The constants alone."""
        return Run(**{name: getattr(self, name) for name in CONSTANTS})

    @property
    def recomputes_all(self) -> bool:
        """Whether all layers of every stage are recomputed."""
        return self.recompute == "full" and self.recompute_layers < 0 and not self.recompute_stage_layers

    @property
    def replicas(self) -> int:
        """Ranks of a stage that hold copies of one shard of its linears."""
        return int(replicas(self.tp_mode == "isp", self.tp, self.cp, self.dp, self.wp))

    @property
    def counts_ends(self) -> int:
        """How many of embedding and loss take the place of a layer."""
        return self.account_for_embedding_in_pipeline_split + self.account_for_loss_in_pipeline_split

    @property
    def edp(self) -> int:
        """Ranks that hold copies of the same experts."""
        return int(expert_replicas(self.tp, self.cp, self.dp, self.ep, self.etp))

    @property
    def global_batch_sequences(self) -> int:
        """Sequences per optimizer step."""
        return self.dp * self.micro_batch_size * self.num_micro_batches

    @property
    def tokens(self) -> int:
        """Tokens per optimizer step."""
        return self.global_batch_sequences * self.seq_len

    def replace(self, **changes: Any) -> Strategy:
        """Return a copy with other values; another recomputation is of all stages, unless it is stated stage by stage, and of
        one layer at a time unless it is of all layers."""
        if {"recompute", "recompute_layers"} & changes.keys():
            changes.setdefault("recompute_stage_layers", "")
            other = replace(self, **changes)
            return other if other.recomputes_all or "recompute_group" in changes else replace(other, recompute_group=1)
        return replace(self, **changes)


CONSTANTS = tuple(field.name for field in fields(Run))
#: What distinguishes the layouts of one run.
AXES = tuple(field.name for field in fields(Strategy) if field.name not in CONSTANTS)


def layout_of(run: Run, **choices: Any) -> Strategy:
    """Return a layout of ``run`` with these axes (and other constants, where they state some); dp fills the world unless
    stated. Raises InputError for sizes that contradict each other."""
    return Strategy(**filled({**{name: getattr(run, name) for name in CONSTANTS}, **choices}))


def filled(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a layout with dp, which fills the world unless it is among them."""
    ranks = math.prod(int(values.get(name, 1)) for name in ("tp", "cp", "pp"))
    return {"dp": max(values["world_size"] // ranks, 1), **values}
