"""The run: what all layouts of a search share, such as number formats, kernels, overlap and what waits on the host."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

from profiler.errors import InputError, shown
from solver.spec.bounds import NUMBERS, WHOLE_NUMBERS, number, whole_number
from solver.spec.choices import CHOICES, CUDA_GRAPH_MODULES, OFFLOAD_MODULES, RECOMPUTE_MODULES, check_choice
from solver.spec.documents import effective_document
from solver.spec.pipeline_layout import predicts_apart

DEFAULT_SEQ_LEN = 4096
#: Fields that name modules, of those that each may name.
_LISTED = {
    "recompute_modules": RECOMPUTE_MODULES,
    "cuda_graph_modules": CUDA_GRAPH_MODULES,
    "offload_modules": OFFLOAD_MODULES,
}
#: Types of the fields that are true or false; None: as the framework, or the rest of the run, implies.
SWITCH_TYPES: Mapping[str, Any] = {"bool": bool, "bool | None": bool | None}
_Run = TypeVar("_Run", bound="Run")


@dataclass(frozen=True, kw_only=True)
class Run:
    """The constants of a run; solver.spec.strategy.Strategy adds the axes of a layout.

    docs/settings.md lists the fields as they stand here (benchmarks/settings.py).
    """

    world_size: int  #: accelerators of the job
    seq_len: int  #: tokens of a sequence
    framework: str = "internevo-2024"  #: the release of docs/frameworks.md whose code runs it

    document_lengths: str = ""  #: packed documents that do not see each other, tokens:share joined by +; "": one a sequence
    pipeline_layout: str = ""  #: layers of every chunk (solver.spec.pipeline_layout); "": divided evenly
    micro_batch_group: int = 0  #: micro batches that interleaved stages run of one chunk before the next; 0: pp
    recompute_modules: str = "core_attn"  #: what selective recomputation recomputes: RECOMPUTE_MODULES joined by "+"
    recompute_stage_layers: str = ""  #: layers that each stage recomputes, joined by +; "": recompute_layers on every stage
    recompute_group: int = 1  #: consecutive layers of a chunk of which one input is kept, and which are recomputed at once

    precision: str = "bf16"  #: number format of the linears' GEMMs
    fp8_recipe: str = "delayed"  #: how precision fp8 scales its values; mxfp8 and nvfp4 are recipes of their own
    #: Delayed scaling: ranks over which each pass finds its largest values. all: that work on its layers. tensor: of the tensor
    #: and context group (tp_only_amax_red). none: each rank alone (reduce_amax off).
    fp8_amax_reduction: str = "all"
    fp8_param_gather: bool = False  #: quantised runs: weights of linears are stored and gathered so, or gathered so by FSDP
    fp8_attention: bool = False  #: quantised runs: fused attention multiplies in 8 bits (fp8_dot_product_attention)
    num_layers_at_start_in_bf16: int = 0  #: quantised runs: layers whose linears stay 16-bit
    num_layers_at_end_in_bf16: int = 0  #: the same of the last layers
    grad_dtype: str = "bf16"  #: number format in which gradients are added up and reduced

    attention: str = "flash"  #: fused (FlashAttention, cuDNN), or GEMMs and a softmax
    flash_generation: int = 0  #: of the FlashAttention that ran; 0: the framework's, else the best one for the device
    fused_softmax: bool | None = None  #: unfused attention: scale, mask and softmax are one kernel; None: as the framework does
    fused_norm: bool = True  #: norms are one kernel each way
    rope_fusion: bool | None = None  #: rotary embedding is one kernel (of latent attention two); None: as the framework does
    cross_entropy_fusion: bool = False  #: the loss is one kernel
    #: te: Transformer Engine's kernel, in place. native: Megatron's compiled functions, in fp32. linear: with the projection.
    cross_entropy_fusion_impl: str = "te"
    dropout: bool | None = None  #: after attention's softmax and before residuals; None: solver.spec.dropout
    gradient_accumulation_fusion: bool | None = None  #: weight-gradient GEMMs add to the buffer; None: as the framework does
    compile: bool = False  #: layers are compiled (torch.compile)
    compile_loss: bool | None = None  #: the cross entropy is compiled; None: with the model, where the framework does so
    cuda_graphs: bool = False  #: layers are replayed from CUDA graphs: the host launches nothing for them
    cuda_graph_modules: str = ""  #: the graphs are of these only: CUDA_GRAPH_MODULES joined by "+"; empty: of whole layers
    #: Attention, memory of new tensors and cuBLAS's workspaces are as torch's deterministic mode has them.
    deterministic: bool = False
    launch_blocking: bool = False  #: the host waits for every kernel before it launches the next (CUDA_LAUNCH_BLOCKING)

    #: Context-parallel ranks pass keys and values in a ring, gather them, or exchange heads (a2a: Ulysses).
    cp_comm: str = "ring"
    cp_a2a_size: int = 0  #: of a2a+ring: neighbouring ranks that exchange heads; cp over as many of them pass keys in a ring
    #: Gradients are reduced beside the backward pass; None: as the framework does in each ZeRO stage unless told (DeepSpeed).
    overlap_grad_reduce: bool | None = True
    overlap_param_gather: bool = True  #: ZeRO-1: parameters are gathered beside the next forward pass
    #: FSDP adds whole gradients until a step's last micro batch and reduces them once; None: as the framework does by default.
    defer_grad_sync: bool | None = None
    overlap_weight_gather: bool = True  #: ISP: prefetch the next block's weights while this block computes
    tp_comm_overlap: bool = False  #: tensor-parallel communication beside GEMMs (Transformer Engine's user buffers)
    p2p_overlap: bool = False  #: interleaved stages send beside the compute of other chunks
    #: Weight gradients of the head wait until the last stage has run its passes, while the other stages drain the pipeline.
    defer_embedding_wgrad_compute: bool = False
    wgrad_deferral_limit: int = 0  #: micro batches of a step whose gradients wait so; 0: all
    #: torch checks each collective before it starts (TORCH_DISTRIBUTED_DEBUG=DETAIL). None: not stated, which means no, unless
    #: the framework's scripts may turn it on and the stated all-reduces are late (solver.step.collective_checks).
    collective_checks: bool | None = None

    moe_dispatcher: str = "alltoall"  #: how tokens reach the ranks of their experts
    moe_capacity_factor: float = 0.0  #: rows of an expert over their mean, missing ones padded; 0: no token is dropped
    moe_imbalance: float = 1.0  #: load of the expert rank that gets most over the mean
    #: Which experts a token goes to. random: any of them, as real and randomly forced routers have it. consecutive: token i of
    #: top k to the experts from i * k on (NeMo Automodel's FakeBalancedGate, torchtitan's moe_force_load_balance).
    moe_routing: str = "random"
    moe_grouped_gemm: bool = True  #: one kernel for the GEMMs of all experts of a rank; otherwise one after the other
    moe_permute_fusion: bool = True  #: rows are put in the order of experts by one kernel each way
    moe_router_fp32: bool | None = None  #: the router multiplies and differentiates in fp32; None: as the framework does
    moe_router_fusion: bool = False  #: scores and choice of the experts are a kernel, and not a chain of them
    moe_shared_expert_overlap: bool = False  #: shared experts run beside the exchange of tokens
    moe_exchange_overlap: bool = False  #: the exchange of one micro batch runs beside the compute of another
    delay_wgrad_compute: bool = False  #: with moe_exchange_overlap: weight gradients run while gradients of inputs are sent
    #: MXFP8 runs: activation, probabilities, biases and the quantisation between the experts' GEMMs are part of their kernels
    moe_fused_experts: bool = False

    lora_rank: int = 0  #: rank of the adapters of the layers' linears, which alone are trained (LoRA); 0: all weights are
    optimizer: str = "adam"  #: muon: of the matrices of the layers; adam of all other parameters
    #: Adam's two moments: fp32, bf16, or 8-bit with their scales. remainder: in fp32, but of the fp32 weights only the 16 bits
    #: that bf16 weights lack are kept (Megatron's precision-aware optimizer, which keeps no more with narrow moments either).
    optimizer_states: str = "fp32"
    optimizer_offload_fraction: float = 0.0  #: share of the moments that is on the host, where Adam updates it
    offload_gradients: bool = False  #: that share of a rank's part of the gradients goes to the host in each micro batch
    offload_layers: int = 0  #: layers whose saved activations wait on the host for the backward pass
    offload_modules: str = ""  #: modules of every layer whose saved activations do: OFFLOAD_MODULES joined by "+"
    #: torch's allocator grows its segments, which leaves few gaps (PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True).
    expandable_segments: bool = False

    def __post_init__(self) -> None:
        self._check_types()
        for key, known in _LISTED.items():
            if key == "recompute_modules" or getattr(self, key) != "":
                object.__setattr__(self, key, _modules(key, getattr(self, key), known))
        self._check_sizes()

    def _check_types(self) -> None:
        """Refuse values of another type than their key's; numbers written as text or with a fraction of 0 are converted."""
        for field in fields(self):
            key, value = field.name, getattr(self, field.name)
            if key in CHOICES:
                check_choice(key, value)
            elif key in WHOLE_NUMBERS:
                whole_number(key, value)
            elif key in NUMBERS:
                object.__setattr__(self, key, number(key, value))
            elif not isinstance(value, SWITCH_TYPES.get(str(field.type), object)):
                raise InputError(f"{key} is {shown(value)}; it must be true or false")
        if not isinstance(self.pipeline_layout, str):
            raise InputError(f"pipeline_layout is {shown(self.pipeline_layout)}; it must be a text such as Et*3|t*4|t*4|t*3L")
        recomputed_layers_of(self.recompute_stage_layers)

    def _check_sizes(self) -> None:
        """Refuse settings that contradict each other."""
        if self.document_lengths:
            effective_document(self.document_lengths, self.seq_len)
        if (self.cp_comm == "a2a+ring") != (self.cp_a2a_size > 1):
            raise InputError(f"cp_comm a2a+ring needs cp_a2a_size above 1, and nothing else does; it is {self.cp_a2a_size}")
        if self.moe_routing == "consecutive" and self.moe_imbalance != 1:
            raise InputError(f"moe_imbalance {self.moe_imbalance:g} contradicts moe_routing consecutive, which is even")
        if self.moe_capacity_factor and self.moe_imbalance != 1:
            raise InputError(
                f"moe_imbalance {self.moe_imbalance:g} changes nothing beside moe_capacity_factor "
                f"{self.moe_capacity_factor:g}: every expert then gets as many rows; leave one out"
            )

    @property
    def unmodelled(self) -> tuple[str, ...]:
        """What the run's settings cost, in time or memory, beyond what is priced, in words."""
        left_out = {
            "what a deterministic run's kernels other than attention take longer": self.deterministic,
            "the memory that CUDA graphs hold": self.cuda_graphs,
            "that multi-token prediction runs a chunk before the loss": predicts_apart(self.pipeline_layout),
        }
        return tuple(what for what, there in left_out.items() if there)

    @property
    def recomputed_of_stages(self) -> tuple[int, ...]:
        """The layers that each stage recomputes, where they are stated stage by stage; otherwise ()."""
        return recomputed_layers_of(self.recompute_stage_layers)

    @property
    def modules_recomputed(self) -> tuple[str, ...]:
        """The modules of a layer that selective recomputation recomputes."""
        return tuple(self.recompute_modules.split("+"))

    @property
    def modules_graphed(self) -> tuple[str, ...]:
        """The modules of a layer that are CUDA graphs, where not whole layers are."""
        return tuple(self.cuda_graph_modules.split("+")) if self.cuda_graph_modules else ()

    @property
    def graphs_layers(self) -> bool:
        """Whether CUDA graphs are of whole layers."""
        return self.cuda_graphs and not self.cuda_graph_modules

    @property
    def modules_offloaded(self) -> tuple[str, ...]:
        """The modules of a layer whose saved activations wait on the host."""
        return tuple(self.offload_modules.split("+")) if self.offload_modules else ()

    @property
    def document_tokens(self) -> int:
        """Tokens of equal documents that make attention as large as those of ``document_lengths``; 0: those of a sequence."""
        tokens = effective_document(self.document_lengths, self.seq_len) if self.document_lengths else 0
        return tokens if tokens < self.seq_len else 0

    @property
    def attended_tokens(self) -> int:
        """Tokens of a sequence, or of its packed documents, that attend to each other."""
        return self.document_tokens or self.seq_len

    def replace(self: _Run, **changes: Any) -> _Run:
        """Return a copy with other values."""
        return replace(self, **changes)


def recomputed_layers_of(text: str) -> tuple[int, ...]:
    """Return the numbers of ``recompute_stage_layers``: "3+8+8+0" has (3, 8, 8, 0). Raises InputError for any other text."""
    if not isinstance(text, str) or (text and not re.fullmatch(r"\d{1,4}(\+\d{1,4})*", text)):
        raise InputError(
            f"recompute_stage_layers is {shown(text)}; it must be a number of layers for each stage, as in 3+8+8+0"
        )
    return tuple(int(count) for count in text.split("+")) if text else ()


def _modules(key: str, given: Any, known: tuple[str, ...]) -> str:
    """Return names of modules, of one text or of a list, in the order of ``known`` and joined by "+"."""
    listed = given.split("+") if isinstance(given, str) else given
    if not isinstance(listed, list | tuple) or not listed or any(name not in known for name in listed):
        raise InputError(f"{key} is {shown(given)}; it must be one or several of {', '.join(known)}, joined by +")
    return "+".join(name for name in known if name in listed)


def run_from(values: Mapping[str, Any], where: str) -> Run:
    """Return a Run from a mapping of its field names. Raises InputError naming ``where`` and the first bad key."""
    known = {field.name for field in fields(Run)}
    unknown = sorted(set(values) - known)
    if unknown:
        raise InputError(f"{where}: unknown key {unknown[0]!r} of a run; known keys are {', '.join(sorted(known))}")
    try:
        return Run(**values)
    except InputError as error:
        raise InputError(f"{where}: {error}") from None
