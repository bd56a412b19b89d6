"""What a framework can run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from solver.spec.choices import CHOICES, ONE_F_ONE_B, SCHEDULES, V_SHAPED, TpMode

#: Soft caps with unfused attention only, or also inside FlashAttention's kernels (solver.spec.soft_caps).
UNFUSED_CAPS, FUSED_CAPS = "unfused", "flash"


@dataclass(frozen=True, kw_only=True)
class CanRun:
    """Layouts that the release can run: what a search may choose from."""

    zero_stages: tuple[int, ...]
    zero_with_pipeline: tuple[int, ...] = (0, 1)  #: of these; DeepSpeed's engine asserts less than 2
    tp_modes: tuple[TpMode, ...] = (TpMode.MTP, TpMode.MSP)  #: empty: none; where shards are gathered again, FSP is MSP
    #: Ranks that ZeRO shards over: "any" of those that hold copies, "all", or whole groups of "context"-parallel ranks.
    shards: Literal["any", "all", "context"] = "any"
    shards_experts_alike: bool = False  #: the experts' states too are cut into as many copies as the others'
    copies_alone: bool = False  #: whole copies (ZeRO-0) only where nothing but data is divided
    casts_by_shards: bool = (
        False  #: mixed precision is FSDP's: ranks that divide a model of which nothing is sharded stay in fp32
    )
    unsharded_gradients_as_model: bool = False  #: ZeRO-0 accumulates gradients in the model's type only
    changed_states_need_zero: bool = False  #: moments in fewer bits, or on the host, need ZeRO
    replicated_kv_heads: bool = True  #: tp may exceed the key and value heads, which are then copied
    gathers_qkv_since: str = ""  #: the release that gathers q, k and v where tp exceeds the kv heads, which is not modelled
    cp_comms: tuple[str, ...] = ("ring", "a2a", "allgather")  #: exchanges of context parallelism; empty: no context parallelism
    packed_exchanges: tuple[str, ...] = ("a2a", "allgather")  #: of these, those of packed documents
    context_modes: tuple[TpMode, ...] = tuple(TpMode)  #: tensor-parallel modes with which cp may be above 1
    pipeline: bool = True
    pipelines_qk_norm: bool = True  #: also of models with norms of q and k
    compiles_sinks: bool = True  #: torch.compile, also of models with attention sinks
    divides_sinks: bool = True  #: pipelines and context parallelism, also of models with attention sinks
    unfilled_stages: int | None = None  #: 1F1B has at least as many micro batches as stages, but for so many; None: any number
    overlaps_interleaving: bool = False  #: interleaved stages need p2p_overlap
    schedules: tuple[str, ...] = ONE_F_ONE_B  #: orders of the passes of a pipeline
    micro_batch_groups: bool = False  #: interleaving with other groups of micro batches than pp
    uneven_stages: bool = True  #: layers need not divide by pp
    stated_end_stages: bool = False  #: the layers of the first and the last stage may be stated; the others share the rest
    pipeline_layout: bool = False  #: the layers of every chunk may be stated
    counts_embedding_and_loss: bool = False  #: embedding and loss may each count as a layer where layers are split evenly
    recompute: tuple[str, ...] = CHOICES["recompute"]
    #: Shares of a stage's layers that a search recomputes, beside none and all; empty: the framework knows only these.
    recompute_shares: tuple[float, ...] = (0.25, 0.5, 0.75)
    recomputes_by_stage: bool = False  #: each stage may recompute another number of layers
    recomputes_groups: bool = False  #: one input may be kept for several layers, which are recomputed at once
    recompute_modules: tuple[str, ...] = ("core_attn",)  #: that selective recomputation may be of
    cuda_graph_modules: tuple[str, ...] = ()  #: of which CUDA graphs may be, other than of whole layers
    multi_token_prediction: bool = False  #: modules of multi-token prediction; a model that has them is trained without them
    predicts_with_context: bool = True  #: these together with context parallelism
    experts: bool = False  #: mixtures of experts
    linear_attention: bool = False  #: layers with a gated delta rule
    splits_linear_attention: bool = False  #: tp may be above 1 with them
    state_space: bool = False  #: models of layers that are one block each, Mamba-2 among them
    experts_in_fp16: bool = True
    folds_experts: bool = False  #: ep and etp divide all ranks of a stage anew; otherwise etp is tp, and ep divides dp * cp
    splits_experts: bool = True  #: etp may be more than 1
    splits_biased_experts: bool = True  #: etp may be more than 1 where experts have biases
    experts_beside_tp: bool = True  #: tp may be above 1 with experts
    splits_alone: bool = True  #: without ep experts may be whole beside tp above 1; otherwise tp splits each (not modelled)
    dispatchers: tuple[str, ...] = ("alltoall", "allgather")
    routings: tuple[str, ...] = ("random",)  #: moe_routing; the last is what its forced balance does
    deepep_of_amd: bool = False  #: deepep on AMD's GPUs too
    plain_deepep: bool = False  #: deepep only of models without norms of q and k and without attention sinks
    overlaps_exchange: bool = False  #: moe_exchange_overlap, with or without delay_wgrad_compute
    defers_head: bool = False  #: defer_embedding_wgrad_compute
    fuses_experts: bool = False  #: moe_fused_experts
    quantised: bool = True  #: linears in fp8 and narrower formats
    gathers_fp8_shards: bool = False  #: fp8_param_gather where FSDP quantises each rank's shard before it gathers them
    fp8_attention: bool = False
    fuses_projection: bool = False  #: the cross entropy with the vocabulary's projection (cross_entropy_fusion_impl linear)
    chooses_rope: bool = False  #: rope_fusion
    chooses_router_type: bool = False  #: moe_router_fp32
    compiles_loss_apart: bool = False  #: compile_loss: the loss is compiled without the model, or the model without it
    compiles_tp_overlap: bool = False  #: tp_comm_overlap is torch.compile's
    leaves_unaligned: bool = False  #: quantised runs leave linears of sizes that their GEMMs refuse in 16 bits
    gathers_after_reducing: bool = False  #: overlap_param_gather needs overlap_grad_reduce
    splits_backward_tied: bool = True  #: schedules that split the backward pass run with tied embeddings
    overlaps_muon: bool = True  #: Muon's gradients may be reduced beside compute
    tp_comm_overlap: bool = False  #: a search may turn it on (Transformer Engine's user buffers)
    adapters: bool = False  #: lora_rank
    soft_caps: str = ""  #: UNFUSED_CAPS, FUSED_CAPS or none
    optimizers: tuple[str, ...] = ("adam",)
    optimizer_states: tuple[str, ...] = ("fp32",)  #: of Adam's moments
    #: To the host: "optimizer" (a share of the moments), "gradients" (always with them), "activations" (of some layers),
    #: "modules" (of some modules of each layer).
    offloads: tuple[Literal["optimizer", "gradients", "activations", "modules"], ...] = ()
    #: Schedules that the framework runs with pipeline_layout.
    layout_schedules: tuple[str, ...] = SCHEDULES
    #: Gradients and parameters may be synchronised beside compute under a schedule that splits the backward pass.
    overlaps_split_backward: bool = True
    compiles_split_backward: bool = True  #: torch.compile together with a schedule that splits the backward pass

    @property
    def laid_out(self) -> tuple[str, ...]:
        """Schedules of layouts with pipeline_layout: also the chunks of one of layout_schedules."""
        return (*self.layout_schedules, "interleaved")

    @property
    def chunks_stages(self) -> bool:
        """Whether stages may have several chunks."""
        return "interleaved" in self.schedules or any(name in V_SHAPED for name in self.schedules)
