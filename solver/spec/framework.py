"""What the code of a training framework does that a layout does not choose, as a few small records.

A release is described once, in a file of its family under ``solver/spec/frameworks``; a later release is derived from an
earlier one by what changed (``Framework.derive``). docs/frameworks.md says how to add one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, is_dataclass, replace
from typing import Any

from solver.spec.can_run import CanRun
from solver.spec.kernels import Kernels
from solver.spec.memory_use import MemoryUse, Recomputation
from solver.spec.parallelism import DataParallel, Pipeline, TensorParallel

_HALVES = ("bf16", "fp16")

#: Host time to launch one op where neither the framework's layers nor the machine's host were measured: assumed.
ASSUMED_LAUNCH = 40e-6


@dataclass(frozen=True, kw_only=True)
class Framework:
    """One release of a framework."""

    name: str
    family: str  #: a search that names only the family takes its newest release
    released: str  #: the month since which this holds, as YYYY-MM
    aliases: tuple[str, ...] = ()  #: further names by which a run may call it; the name itself need not be among them
    broad_aliases: tuple[str, ...] = ()  #: names that it shares with others: they mean it only where nothing else is named
    #: Strategy fields of a run that says nothing: the release's own defaults.
    flags: Mapping[str, Any] = field(default_factory=dict)
    #: Strategy fields that a search sets beyond them: what the release offers and its users turn on.
    best_practice: Mapping[str, Any] = field(default_factory=dict)
    #: Vocabulary of a measured run that states none: that of the tokenizer of the release's own examples; 0: not known.
    example_vocab: int = 0
    #: The linears of a measured run's model without gates that states no biases have them, by the release's default.
    linear_bias: bool = False
    #: Embedding and head of such a model are one table where it does not say.
    tied_embeddings: bool = False
    #: Gradients of fp16 runs have 16 bits, where the flags say fp32 of bf16 ones (Megatron-LM's arguments.py).
    narrow_fp16_gradients: bool = False
    can_run: CanRun
    kernels: Kernels = Kernels()
    tensor_parallel: TensorParallel = TensorParallel()
    data_parallel: DataParallel = DataParallel()
    pipeline: Pipeline = Pipeline()
    #: Its flags reduce gradients in 16 bits, as its performance recipes do and its other recipes do not.
    reduces_narrow: bool = False
    scripts_check_collectives: bool = False  #: some versions of its own launch scripts set TORCH_DISTRIBUTED_DEBUG=DETAIL
    recomputation: Recomputation = Recomputation()
    memory: MemoryUse = MemoryUse()
    #: Standard deviation of log(step time) of what the description leaves open: 0.05 where the release's code was read and runs
    #: of several laboratories or models agree, more where settings or code are less certain. Judged, not fitted.
    uncertainty: float = 0.05

    def shares_vocabulary(self, is_isp: Any) -> Any:
        """Whether all data-parallel ranks share the states of embedding and head, under ZeRO-0 too; of the shape of ``is_isp``.

        So it is under InternEvo's ISP (create_param_groups: optimizer_mode DATA of embed_head).
        """
        return is_isp & self.data_parallel.partitions_whole_tensors

    @property
    def uses_megatron_fsdp(self) -> bool:
        """Whether its ZeRO-2 and 3 are Megatron-FSDP."""
        return self.memory.communication_unit > 0

    def fuses_accumulation(self, stated: bool | None) -> bool:
        """Whether the weight-gradient GEMMs add to the gradients: as a run states it, or as the release does."""
        return self.data_parallel.fused_gradient_accumulation if stated is None else stated

    def flags_of(self, precision: str | None, fp8_recipe: str | None = None) -> dict[str, Any]:
        """Return the flags of a run of ``precision``, whose 16-bit gradients have its type; recipes that quantise in blocks of
        128 keep 16-bit weights (NeMo's and Megatron-Bridge's mixed_precision.py: bf16_with_fp8_subchannel_scaling_mixed)."""
        found = dict(self.flags)
        if fp8_recipe == "blockwise":
            found.pop("fp8_param_gather", None)
        narrow = found.get("grad_dtype") in _HALVES or (self.narrow_fp16_gradients and precision == "fp16")
        if precision in _HALVES and narrow:
            found["grad_dtype"] = precision
        return found

    def derive(self, name: str, released: str, **changes: Any) -> Framework:
        """A later or related release: ``changes`` by field; of a record (kernels=..., memory=...) and of flags and
        best_practice only the named entries change. Aliases are not inherited."""
        merged: dict[str, Any] = {"aliases": (), "broad_aliases": (), **changes}
        for key, value in changes.items():
            old = getattr(self, key)
            if is_dataclass(old):
                merged[key] = replace(old, **value)  # type: ignore[type-var]
            elif isinstance(old, Mapping):
                merged[key] = {**old, **value}
        return replace(self, name=name, released=released, **merged)
