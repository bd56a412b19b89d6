"""The description from which time, memory and FLOPs are computed: named ops, saved tensors and weights.

Every number is an array over *layer keys* (shape [keys]): one program describes the same layer for hundreds of splits at once.
An op that a key does not have has count zero there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np

from solver.spec.choices import Recompute, TpMode
from solver.spec.cluster import Placement, placement

LINEAR, GROUPED_LINEAR, FLASH_ATTN, MEMORY_BOUND = "linear", "grouped_linear", "flash_attn", "memory_bound"
ONE_KERNEL = "one kernel"
CHUNK_SCAN = "chunk_scan"  #: the gated delta rule of linear attention
STATE_SPACE = "state_space"  #: Mamba-2's kernels between its convolution and its norm
#: Modules of a layer: what is recomputed, captured in a graph and reported together.
ATTENTION, MAMBA, MLP = "attention", "mamba", "mlp"
ROUTER, EXCHANGE, EXPERT_MODULE, SHARED_EXPERTS = "router", "expert_exchange", "experts", "shared_experts"
DISPATCH, COMBINE = "dispatch", "combine"  #: exchange of an expert group by kernels of its own (DeepEP, hybrid-EP)
COMPUTE = "compute"  #: stream of kernels; the other streams are process groups: tp, cp, wp, ep
FORWARD, INPUT_GRAD, WEIGHT_GRAD = "forward", "input_grad", "weight_grad"
ONCE_PER_STEP = "step"  #: phase of what runs outside the layers, once a step or micro batch

#: Groups of parameters by the ranks that hold copies: linears, which ISP shards over ``wp``, experts, of which each rank of an
#: expert group holds some, adapters beside frozen linears, and all others.
LINEARS, OTHERS, EXPERTS, ADAPTERS = "linears", "others", "experts", "adapters"
PARAMETER_GROUPS = (LINEARS, OTHERS, EXPERTS, ADAPTERS)
VOCABULARY = "vocab"  #: the weight of the head's projection, and its op
#: Linears of a layer, and their weights: the projections of queries, keys and values (of linear attention also of its gate and
#: rates), attention's output, and the MLP's.
QKV_LINEARS = ("wq", "wk", "wv", "wqkv", "wqkvz", "wba", "wqkvzba")
OUTPUT_LINEAR = "wo"
UP_LINEARS, DOWN_LINEAR = ("w1", "w3", "w13"), "w2"
SCORES, CONTEXT = "scores", "context"  #: GEMMs of unfused attention, which have no weights
MULTI_TOKEN_PREFIX = "nextn."  #: of the names of ops of multi-token prediction
#: Bytes over the link to the host, and through the host's memory.
HOST_LINK, HOST_MEMORY = "host_link", "host_memory"

Array = Any  #: a numpy array of shape [keys], or a scalar that represents one


#: Variant of a collective that another one of the same ranks follows at once: the ranks wait for each other once.
BEFORE_ANOTHER = "before_another"


@dataclass(frozen=True)
class Op:
    """One kernel or collective of one pass of a layer.

    dims: by kind. linear: m, n, k, batch, layout, accumulate, parts (kernels over which m is spread; 1 where not given);
    grouped_linear: groups, tokens_per_group, n, k (of the forward pass), passes (as layout), accumulate; flash_attn: batch,
    seq_q, seq_kv, heads, kv_heads, head_dim, v_head_dim, causal, backward; chunk_scan: batch, seq, heads, key_dim, value_dim,
    backward; state_space: batch, seq, heads, head_dim, state_dim, groups, chunk, backward; memory_bound: bytes;
    dispatch, combine: tokens, row_bytes, top_k, experts, intra, inter, groups, chosen; other collectives: as message(). count:
    number of times per layer and micro batch. overlaps_with: the compute ops (``name.phase``) that run at the same time.
    exposed_share: share of an overlapped collective that stays exposed. recomputed_by: recompute levels that run it again.
    """

    name: str
    module: str
    kind: str
    phase: str
    dims: Mapping[str, Array]
    stream: str = COMPUTE
    count: Array = 1.0
    overlaps_with: tuple[str, ...] = ()
    exposed_share: Array = 0.0
    recomputed_by: tuple[Recompute, ...] = ()
    #: memory_bound: norm, rope, gated_act, ...; flash_attn: fp8; dispatch and combine: the dispatcher; grouped_linear:
    #: ONE_KERNEL, else the host launches a GEMM for each group; others: BEFORE_ANOTHER
    variant: str = ""
    launches: Array = 1.0  #: kernels that the host launches for each run of it
    after_host_sync: Array = False  #: the host launches it after it has waited for the device (a CUDA synchronisation)
    dtype: str = "bf16"

    @property
    def label(self) -> str:
        return f"{self.name}.{self.phase}"


def name_in_layer(op: Op) -> str:
    """Return the name that an op has in a layer, of one of multi-token prediction too."""
    return op.name.removeprefix(MULTI_TOKEN_PREFIX)


def weight_gemms(ops: Iterable[Op]) -> list[Op]:
    """Return the GEMMs with weights of a forward pass, in order."""
    return [op for op in ops if op.kind == LINEAR and op.phase == FORWARD and name_in_layer(op) not in (SCORES, CONTEXT)]


def operands(op: Op, split: Array = 1.0) -> Array:
    """Return the elements that all runs of a GEMM read; of the second operand, a ``split``-th part."""
    return 1.0 * op.dims["k"] * (op.dims["m"] + op.dims["n"] / split) * op.count


def message(size: Array, place: Placement) -> dict[str, Array]:
    """Return the dims of a collective (or p2p) on a whole buffer of ``size`` bytes over a group."""
    return {"bytes": np.maximum(size, 1), "intra": place.intra, "inter": place.inter, "strided": place.strided}


@dataclass(frozen=True)
class Saved:
    """A tensor that forward saves for backward. bytes: per micro batch. dropped_by: recompute levels that do not keep it.
    offloaded: share of it that waits on the host."""

    name: str
    bytes: Array
    dropped_by: tuple[Recompute, ...] = (Recompute.FULL,)
    offloaded: Array = 0.0


@dataclass(frozen=True)
class Weight:
    """Parameters of one layer on one rank, in elements. group: who holds copies of them (PARAMETER_GROUPS). matrices: number of
    equal matrices that they consist of."""

    name: str
    elements: Array
    group: str = OTHERS
    matrices: Array = 1


@dataclass(frozen=True)
class LayerKeys:
    """The sizes that a layer depends on: int64 arrays of shape [keys] (mode holds TpMode codes)."""

    mode: np.ndarray
    tp: np.ndarray
    cp: np.ndarray
    wp: np.ndarray
    ep: np.ndarray
    etp: np.ndarray
    micro_batch_size: np.ndarray
    splits_backward: np.ndarray  #: whether weight gradients are computed apart from those of inputs, 0 or 1

    def __len__(self) -> int:
        return len(self.mode)

    @property
    def columns(self) -> tuple[np.ndarray, ...]:
        return tuple(getattr(self, f.name) for f in fields(self))

    def is_mode(self, *modes: TpMode) -> np.ndarray:
        return np.logical_or.reduce([self.mode == int(mode) for mode in modes])  # of few, np.isin costs more


def micro_batch_tokens(micro_batch_size: np.ndarray, seq_len: int, cp: np.ndarray) -> np.ndarray:
    """Return the tokens of a micro batch on one context-parallel rank."""
    return micro_batch_size * seq_len // cp


@dataclass(frozen=True)
class Groups:
    """Placement of the groups inside a stage; tp ranks are adjacent, cp ranks are tp apart; of experts etp ranks are adjacent,
    ep ranks are etp apart (Megatron-Core's order; experts are folded over tp, cp and dp, arXiv 2504.14960)."""

    tp: Placement
    cp: Placement
    cp_heads: Placement  #: context-parallel ranks that exchange heads for sequence
    cp_ring: Placement  #: those that pass keys and values in a ring
    wp: Placement
    ep: Placement
    etp: Placement
    experts: Placement  #: ep and etp together

    @classmethod
    def of(cls, keys: LayerKeys, gpus_per_node: int, heads_shared: Array = 1) -> Groups:
        """heads_shared: neighbouring ranks of each context-parallel group that exchange heads."""
        return cls(
            placement(keys.tp, 1, gpus_per_node),
            placement(keys.cp, keys.tp, gpus_per_node),
            placement(np.broadcast_to(heads_shared, len(keys)), keys.tp, gpus_per_node),
            placement(np.maximum(keys.cp // heads_shared, 1), keys.tp * heads_shared, gpus_per_node),
            placement(keys.wp, 1, gpus_per_node),
            placement(keys.ep, keys.etp, gpus_per_node),
            placement(keys.etp, 1, gpus_per_node),
            placement(keys.ep * keys.etp, 1, gpus_per_node),
        )


@dataclass(frozen=True)
class LayerProgram:
    """All that one layer (or the embedding, or the head) computes and holds."""

    name: str
    keys: LayerKeys
    ops: tuple[Op, ...]
    saved: tuple[Saved, ...]
    weights: tuple[Weight, ...]
    buffer_bytes: Array = field(default=0.0)  #: buffer that all layers share and that stays
    transient_bytes: Array = field(default=0.0)  #: largest short-lived working set of its backward pass
    #: Of the head: its output, the logits, and what of them the loss does not hold in any case. A pipeline that keeps what its
    #: stages send keeps these too, until the stage's backward pass has ended.
    output_bytes: Array = field(default=0.0)
    output_beside_loss: Array = field(default=0.0)

    def saved_bytes(self, level: Recompute) -> np.ndarray:
        """Return the bytes kept per micro batch under a recompute level, on the device or the host; shape [keys]."""
        return self._sum(tensor.bytes for tensor in self.saved if level not in tensor.dropped_by)

    def offloaded_bytes(self, level: Recompute) -> np.ndarray:
        """Return those of the bytes kept that wait on the host; shape [keys]."""
        return self._sum(tensor.bytes * tensor.offloaded for tensor in self.saved if level not in tensor.dropped_by)

    def _sum(self, values: Iterable[Array]) -> np.ndarray:
        return sum((np.broadcast_to(np.asarray(v, dtype=float), len(self.keys)) for v in values), np.zeros(len(self.keys)))

    def weight_gradient_operands(self) -> np.ndarray:
        """Return the elements per micro batch that weight gradients read, inputs of linears and gradients of their outputs, of
        each linear its own; shape [keys]."""
        total = np.zeros(len(self.keys))
        for op in self.ops:
            d = op.dims
            if op.phase == WEIGHT_GRAD and op.kind == LINEAR:
                total = total + operands(op)
            elif op.phase == WEIGHT_GRAD and op.kind == GROUPED_LINEAR:
                total = total + 1.0 * d["groups"] * d["tokens_per_group"] * (d["n"] + d["k"]) * op.count
        return total

    def weight_elements(self, group: str | None = None) -> np.ndarray:
        """Return the parameters on one rank, all or only those of one group; shape [keys]."""
        return self._sum(w.elements for w in self.weights if group is None or w.group == group)

    def distinct_elements(self) -> dict[str, np.ndarray]:
        """Return the elements of linears, experts and the vocabulary by name, equal matrices once; shape [keys] each."""
        held = (w for w in self.weights if w.group != OTHERS or w.name == VOCABULARY)
        return {w.name: np.broadcast_to(np.asarray(w.elements / w.matrices, dtype=float), len(self.keys)) for w in held}
