"""What the code of a training framework does that a layout does not choose, as a few small records.

A release is described once, in a file of its family under ``solver/spec/frameworks``; a later release is derived from an
earlier one by what changed (``Framework.derive``). docs/frameworks.md says how to add one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, is_dataclass, replace
from typing import Any, Literal

from profiler.units import GIB
from solver.spec.can_run import CanRun

_HALVES = ("bf16", "fp16")


#: Host time to launch one op where neither the framework's layers nor the machine's host were measured: assumed.
ASSUMED_LAUNCH = 40e-6


@dataclass(frozen=True, kw_only=True)
class Kernels:
    """Which kernels run, and what is fused into one."""

    transformer_engine: bool = False  #: layers are made of Transformer Engine's modules
    fused_qkv: bool = True  #: the q, k and v projections are one GEMM
    splits_interleaved: bool = False  #: their product holds them group by group, and is copied apart and joined again
    fused_gate_up: bool = True  #: gate and up projection are one GEMM
    one_layernorm: bool = False  #: LayerNorm is one kernel even where norms are not fused, as torch.nn.functional.layer_norm
    fused_elementwise: bool = True  #: rotary embedding and gated activation are one kernel each, not a chain of eager ones
    fused_latent_rope: bool = False  #: rotary embedding of latent attention, and what puts keys together, are two kernels
    fused_rope: bool = False  #: rotary embedding is one kernel even where other chains are not
    fused_softmax: bool = True  #: unfused attention: scale, mask and softmax are one kernel
    #: Kernels of a fused norm: (memory-bound kind, bytes per 16-bit element forward, backward); empty: one kernel.
    norm_kernels: tuple[tuple[str, float, float], ...] = ()
    #: Backward kernel of a fused norm: norm_grad (Apex's FastLayerNorm, Transformer Engine's, Triton's), norm_grad_apex (Apex's
    #: FusedLayerNorm) or norm_grad_torch (torch's own, or compiled).
    norm_gradient: Literal["norm_grad", "norm_grad_apex", "norm_grad_torch"] = "norm_grad"
    flash_attention: int = 0  #: generation of FlashAttention; 0: the best one for the device
    flex_sinks: bool = False  #: attention with sinks is torch's FlexAttention
    flash_unstated: int = 0  #: an older generation that runs which state none may have had; 0: none
    #: Whatever the micro batch, queries, keys and values of one GEMM are copied into tensors of their own, keys and values are
    #: joined and copied again; in the backward pass keys' and values' gradients are joined, all three joined and copied.
    splits_and_joins_kv: bool = False
    splits_groups: bool = False  #: queries, keys and values of groups are slices of one tensor, each copied
    #: How often q, k and v, and how often the context, are copied between the framework's order of dimensions (sequence first)
    #: and FlashAttention's (batch first). With one sequence in a micro batch the two orders are the same.
    attention_layout_copies: tuple[int, int] = (0, 0)
    torch_context_parallel: bool = False  #: a ring is that of torch.distributed.tensor.experimental
    repeats_kv: bool = False  #: keys and values are copied to as many heads as queries have before attention
    scaled_rope_fused: bool = True  #: the kernel of rotary embedding also multiplies by YaRN's attention factor
    clamps_apart: bool = False  #: clamps of experts' gate and up projections are kernels of their own
    #: Each expert's weights are parameters of their own: the host fetches each forward, and handles its gradient and its hook.
    experts_apart: bool = False
    #: Gate and up projections of the experts are grouped GEMMs of their own, the gradients of whose input are added.
    experts_gate_apart: bool = False
    routes_consecutive: bool = True  #: with moe_routing consecutive the router runs all the same
    #: The bias of the experts' output is added expert by expert: multiplied by the probabilities in fp32, added, joined.
    bias_by_expert: bool = False
    #: The GEMMs of all experts are one kernel (torch._grouped_mm); otherwise the host launches one for each, as Transformer
    #: Engine does.
    one_grouped_kernel: bool = False
    #: The bias of the q, k and v projection is added by a kernel of its own (Megatron's own linears); otherwise in the GEMM.
    #: The others are added in it, or in the activation's and the residual's kernel.
    bias_apart: bool = False
    bias_gradient_fused: bool = False  #: weight-gradient GEMMs also sum the gradients of biases (Transformer Engine)
    dropout: bool = False  #: unfused attention and residuals apply dropout, as GPT-2 did
    norm_quantises: bool = False  #: a norm before a quantised linear writes quantised values (Transformer Engine)
    #: GEMMs of fp32 runs round their operands to TF32: Transformer Engine's, and torch's with allow_tf32 (NVIDIA's containers).
    tf32: bool = False
    torch_loss: bool = False  #: the cross entropy is torch's, in fp32; otherwise Megatron's, in place
    compiled_loss: bool = False  #: torch.compile includes the cross entropy
    wide_logits: bool = False  #: the logits are cast to fp32 before the loss
    loss_metric: int = 0  #: reads and writes of each fp32 logit beside the loss, for what a log says of it
    #: Host time to launch one op: steps of many tiny kernels are bound by the host. None: of layers of plain PyTorch modules,
    #: which the profiler measures (solver/step/host.py).
    launch_seconds: float | None = None
    #: The probabilities are applied to the activation, so that the experts' outputs need not be kept.
    probabilities_in_activation: bool = True
    weighs_in_fp32: bool = False  #: torch's own kernels weigh and add the experts' outputs, in fp32

    def arithmetic(self, precision: str) -> str:
        """Return the number format in which GEMMs of a run of ``precision`` multiply."""
        return "tf32" if precision == "fp32" and self.tf32 else precision


@dataclass(frozen=True, kw_only=True)
class TensorParallel:
    """Communication of the tensor-parallel group."""

    #: Under sequence parallelism a linear keeps only its shard of the input and all-gathers it again in the backward pass.
    regathers_input: bool = True
    #: Projections that share an input (q, k, v; gate, up) are served by one collective, not by one each.
    shares_input: bool = False
    #: Under a sequence split the norm all-gathers its output, once for all linears that read it; shares_input is of the others.
    norm_gathers: bool = False
    #: Collectives of the backward pass (reduction of input gradients, all-gather of kept shards) overlap with GEMMs.
    async_backward: bool = True
    async_all_reduce: bool = True  #: so do all-reduces of input gradients; they alone may be waited for
    #: All-gathers and reduce-scatters along the sequence copy what they gathered, or will scatter (torch's DTensor).
    copies_sequence: bool = False
    gathers_quantised: tuple[str, ...] = ()  #: recipes whose operands are all-gathered quantised, not in 16 bits
    #: A run that does not say so splits activations along the sequence over its tensor group.
    splits_sequence: bool = False
    experts_follow: bool = False  #: a run that states no etp splits its experts as it splits the rest (etp is tp)
    #: Under a sequence split experts' input is all-gathered over the tensor group, of which each rank then sends its part, and
    #: their output reduce-scattered.
    experts_gather: bool = False
    vocab_parallel_loss: bool = True  #: the cross entropy works on sharded logits; otherwise on all-gathered ones
    #: All-gathered logits arrive in torch's list of tensors: copied out of one buffer, and joined again; of their gradient each
    #: rank copies its share.
    joins_logits: bool = False
    #: Seconds that each step of a ring takes more where the group spans nodes (one step fewer than ranks), and nothing hides.
    ring_step_delay: float = 0.0


@dataclass(frozen=True, kw_only=True)
class DataParallel:
    """Synchronisation of gradients and parameters, and the optimizer."""

    grad_collective: Literal["reduce_scatter", "all_reduce"] = "reduce_scatter"  #: of ZeRO-1
    reduces_whole_buckets: bool = False  #: ZeRO-2 all-reduces its buckets and keeps its part of each
    param_collective: Literal["all_gather", "broadcast"] = "all_gather"  #: of ZeRO-1
    #: Parameters of one bucket (one collective); bucket_elements_per_rank for each rank of the group if that is more. The last
    #: bucket of a backward pass cannot overlap with anything.
    bucket_elements: float = 40e6
    bucket_elements_per_rank: float = 0.0
    #: Without overlap_grad_reduce a buffer is one bucket (Megatron's DistributedDataParallel).
    buckets_to_overlap: bool = False
    #: Parameters of an all-gather of ZeRO-1 and 2; 0: those of a bucket.
    gather_bucket_elements: float = 0.0
    buckets_of_tensors: bool = False  #: a bucket is full when it exceeds 25 MiB (torch's DistributedDataParallel)
    #: Sharded gradients are reduce-scattered, and parameters gathered, in one collective, after the last backward pass.
    shards_at_once: bool = False
    #: Gradients are reduced beside the backward pass only where they are sharded and there is no pipeline.
    overlaps_sharded_alone: bool = False
    #: Seconds of the host for the part of a tensor that each rank owns, where both collectives are of lists: ZeRO 1 and 2.
    seconds_per_part: float = 0.0
    #: The gradients' norm is summed over tensor and pipeline ranks alone, and the loss over the others; else one sum over all.
    norm_of_model: bool = False
    bucket_copy_bytes: float = 0.0  #: per parameter: copies of gradients into buckets and back, casts and averaging included
    communicated_gradient_bytes: int = 0  #: of a gradient in the collective; 0: as it is accumulated
    #: FSDP: copies of all-gathered weights, and of whole gradients, between parameters and buffers (each a read and a write).
    all_gather_copies: float = 0.0
    #: Experts of which no other rank holds copies are a unit of FSDP's all the same, to be cast for each pass.
    wraps_lone_experts: bool = False
    reduce_scatter_copies: float = 0.0
    sharded_gather_copies: float = 0.0  #: further ones of the weights that ZeRO-3 gathers
    #: Memory traffic per parameter of a shard before ZeRO-3 gathers it: 6 bytes of a cast of fp32 to 16 bits, 4 of a copy.
    shard_cast_bytes: float = 0.0
    #: ZeRO-3 gathers and reduces tensor by tensor and waits for the device before each; what recomputation has gathered is
    #: gathered again for the gradients. Otherwise it does so layer by layer, beside compute.
    zero3_by_tensor: bool = False
    #: ZeRO-3's all-gathers are of consecutive tensors of at least so many parameters together, its reduce-scatters of those of
    #: a bucket, whatever layers these are of; 0: both are of whole units.
    gather_elements: float = 0.0
    #: A bucket has as many parameters as a matrix of hidden_size squared, and an all-gather nine tenths of that.
    buckets_by_hidden: bool = False
    #: Where a run does not say (overlap_grad_reduce None), only ZeRO-3 reduces gradients beside the backward pass.
    overlaps_sharded_unless_told: bool = False
    #: Below ZeRO-3 parameters are gathered in the optimizer's step, whatever overlap_param_gather says.
    gathers_in_step: bool = False
    #: ZeRO-2 is FSDP's SHARD_GRAD_OP: a message is of one unit, a layer or all outside the layers, and the gathered weights are
    #: freed after each backward pass and gathered again.
    shards_units: bool = False
    regathers_root: bool = False  #: ZeRO-3 frees embedding and head after the forward pass and gathers them again
    list_seconds_per_rank: float = 0.0  #: host time of such a collective per rank of its group: lists of views, copied singly
    partitions_whole_tensors: bool = False  #: ZeRO assigns whole tensors to ranks, so that one rank updates the largest tensor
    tensors_per_layer: int = 7  #: five or so linears and two norms
    #: Gradients of further micro batches are added inside the weight-gradient GEMM (under FSDP: to shards); otherwise a kernel
    #: of its own adds them to the buffer.
    fused_gradient_accumulation: bool = True
    accumulation_casts: bool = False  #: the kernel that adds gradients to the buffer is preceded by one that casts them
    #: Behind a pipeline ZeRO-2 adds the whole gradients of every micro batch to fp32 ones, the first of which it casts to them
    #: (FSDP2's accumulate_unsharded_grad_if_needed), and reduces these after the last.
    accumulates_whole: bool = False
    #: Without a pipeline too gradients stay whole until a step's last micro batch, unless a run says no (defer_grad_sync).
    defers_sync: bool = False
    #: A run may do so too (no_sync). Under FSDP1 gradients then stay in the type of compute, each micro batch's joined before
    #: they are added, and with ZeRO-2 gathered weights stay until the last one (_runtime_utils.py, _should_free_in_backward);
    #: where whole ones are accumulated (FSDP2) autograd adds them, and weights are gathered as ever.
    no_sync: bool = False
    accumulating_gemms: bool = True  #: weight-gradient GEMMs add to a buffer of fp32 gradients; otherwise they write 16 bits
    optimizer_bytes_per_parameter: float = 30.0  #: memory traffic of one Adam step
    #: Further traffic per parameter of a step on parameters that are not sharded (ZeRO-0), where gradients have 16 bits.
    whole_step_bytes: float = 0.0
    optimizer_launches: float = 0.0  #: kernels that the host launches for each tensor in a step; 0: for all at once
    gradient_passes: float = 2.0  #: further reads or writes of the gradients that a rank updates in a step (norm, clipping)
    #: Reads or writes of all gradients that a rank accumulates: zeroing, averaging, the search for NaN.
    buffer_passes: float = 0.0

    def bucket(self, hidden_size: int) -> float:
        """Return the parameters of a bucket of a model."""
        return float(hidden_size**2) if self.buckets_by_hidden else self.bucket_elements

    def gathered(self, hidden_size: int) -> float:
        """Return the least parameters of an all-gather of ZeRO-3; 0: a unit's."""
        return 0.9 * hidden_size**2 if self.buckets_by_hidden else self.gather_elements


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """Pipeline stages and what is sent between them."""

    #: Each tensor-parallel rank sends its share of the activation, and the receiving ranks all-gather the shares.
    scatter_gather: bool = True
    blocking_sends: float = 2.0  #: what a stage between two others waits for in a micro batch, one after the other
    #: The host waits for the device after each message that a pass waits for, and only then launches the next pass.
    synchronises: bool = False
    #: Buffers of what a stage receives of all micro batches are there all the while, and the outputs that it sent until their
    #: backward pass (torch/distributed/pipelining/stage.py).
    keeps_messages: bool = False
    #: How layers are assigned to stages: ``even``; ``last``: the last stages get what is left; ``items``: embedding, final norm
    #: and head count as layers; ``cost``: stages of equal multiplications in linears, of which the head's are as many as some
    #: layers'.
    assignment: Literal["even", "last", "items", "cost"] = "even"
    #: What the framework calls ZeRO-3 keeps gathered weights and whole gradients between the micro batches of a pipeline.
    keeps_weights: bool = False
    #: Number formats in which a stage updates its weights before the norm of all gradients is known, and corrects that
    #: afterwards (optimizer post-validation of the zero-bubble authors). Of V-shaped and automatic schedules.
    validates_later: tuple[str, ...] = ()
    #: A run that states no micro batches has as many as the pipeline has stages.
    micro_batches_as_stages: bool = False


@dataclass(frozen=True, kw_only=True)
class Recomputation:
    """What activation recomputation runs again."""

    includes_head: bool = False  #: full recomputation runs the final norm and the head again too
    selective_is_full: bool = False  #: what the framework calls selective recomputation recomputes whole layers
    #: Recomputation of a layer ends with the last tensor that backward needs, so the down projection does not run again.
    stops_early: bool = False
    #: Selective recomputation keeps the output of every second GEMM, of fused attention and of reduce-scatters, and runs all
    #: else again (torchtitan's mode "op").
    selective_by_op: bool = False
    keeps_exchange_of_normed: bool = True  #: it keeps exchanged rows also of models with norms of q and k (torchtitan's qwen3)
    #: Selective recomputation keeps a layer's input and its queries, keys and values, and runs all else again.
    selective_keeps_qkv: bool = False


#: The most that the allocator's gaps are where its segments grow (expandable_segments), assumed. A published peak of
#: Megatron-Core on 16 B300 was 253 GiB, of which 100 came and went, and 257 GiB reserved.
EXPANDABLE_GAPS = 0.1


@dataclass(frozen=True, kw_only=True)
class MemoryUse:
    """What the framework and its allocator hold."""

    quantised_inputs: bool = False  #: linears of fp8 runs keep their input in fp8 (Transformer Engine), not in 16 bits
    #: But of an input that another module keeps in 16 bits (the context, what the router reads) the linear keeps no copy and
    #: quantises it again in the backward pass, unless scales are delayed (set_save_original_input; Transformer Engine 2.6).
    original_inputs: bool = False
    #: A quantised copy of every quantised weight is kept between micro batches (Transformer Engine); otherwise weights are
    #: quantised in every micro batch.
    quantised_weights: bool = False
    #: Bytes per parameter that synchronisation keeps between steps where ranks are data-parallel: without ZeRO, and with
    #: ZeRO-1 and 2.
    synchronisation_bytes: tuple[float, float] = (0.0, 0.0)
    partition_bytes: float = 0.0  #: per parameter that ZeRO-1 or 2 gives a rank, beside its states
    #: Bytes per parameter that a rank updates, weights and states of ZeRO-1 included, at the peak of a step whose gradients are
    #: joined and cast and then let go; 0: nothing beside what is held.
    step_peak: float = 0.0
    list_bytes: float = 0.0  #: per parameter of the lists that ZeRO-1 or 2 reduces and gathers after the last backward pass
    #: Buffers of an activation that a tensor group gathers, which stay once they were made.
    gathered_activation_buffers: int = 0
    #: Threads that call cuBLAS through torch (forward and backward), each with a workspace that torch's counter counts; 0: not
    #: described, part of what the runtime holds.
    cublas_threads: int = 0
    #: Unfused attention computes its scores in a buffer that stays (Megatron's own implementation).
    scores_buffer: bool = False
    #: The tokens that experts' ranks all-gather are in a buffer that stays (GlobalMemoryBuffer of Megatron-Core's all-gather
    #: dispatcher).
    token_buffer: bool = False
    offloads_master: bool = False  #: where moments are on the host, the fp32 master weights are there too, and only there
    #: Where moments are on the host, fp32 copies of 16-bit gradients stay for those that are updated on the device.
    keeps_wide_gradients: bool = False
    clips_on_host: bool = False  #: where moments are on the host, it unscales and clips the gradients
    #: The optimizer's step joins the 16-bit gradients that a rank updates and copies them to fp32: all under ZeRO-1 and 2, as
    #: many elements as this at a time under ZeRO-3. 0: it does neither.
    fp32_gradient_copy: float = 0.0
    #: The 16-bit gradients of the backward pass stay beside fp32 gradients, into which they are accumulated.
    keeps_half_gradients: bool = False
    #: Buckets of gradients (data_parallel.bucket_elements) that are allocated beside the gradients; buckets_as_needed: of no
    #: more elements than there are gradients.
    gradient_buckets: float = 0.0
    second_bucket: bool = False  #: another one under ZeRO-1 and 2 where gradients are reduced beside the backward pass
    buckets_as_needed: bool = False
    joins_buckets: bool = False  #: under ZeRO-2 and 3 the tensors of a bucket are joined in another one to be reduced
    live_elements: float = 0.0  #: parameters that ZeRO-3 holds gathered at a time, ahead of the layer that runs; 0: two layers
    runtime_bytes: float = 1.5 * GIB  #: CUDA context, NCCL's channels, cuBLAS's workspaces: outside the allocator (assumed)
    #: Weights are held in fp32 and cast for each GEMM (autocast), whose backward pass keeps the cast ones.
    fp32_weights: bool = False
    #: The embedding's output is then fp32 too, and with it the residual stream; a linear that reads a norm's output casts it
    #: for itself and keeps its own 16-bit copy (autocast keeps only casts of weights).
    wide_stream: bool = False
    weights_as_moments: bool = False  #: narrow moments are those of 16-bit parameters, of which there is no fp32 copy
    fused_adam_copies: bool = False  #: Adam with narrow moments is Transformer Engine's (spec.precision)
    keeps_shards: bool = False  #: ZeRO-3 shards the weights that it gathers beside the fp32 ones
    #: A layer's whole gradients are copied to the input of their reduction, which stays until the next layer's are (FSDP2).
    copies_gradients: bool = False
    #: What ZeRO-3 keeps gathered from the forward to the backward pass, of FSDP's root: "embedding", "head".
    root_stays: tuple[str, ...] = ()
    communication_unit: float = 0.0  #: parameters that Megatron-FSDP gathers and reduces at least at a time
    drops_logits: bool = False  #: unfused loss: nothing but autograd holds the logits, which are gone before its backward pass
    #: The optimizer's zero_grad frees the gradients (torch's set_to_none): of the first micro batch there are none at its loss.
    frees_gradients: bool = False
    bucket_views: bool = False  #: gradients that replicas sum are views of DDP's buckets, which stay
    held_gradient_bytes: int = 0  #: of a gradient that FSDP has reduced; 0: as it is reduced
    #: A 16-bit buffer stays for each distinct shape of a layer's linears and of the vocabulary's projection: Transformer Engine
    #: since 2.3 (get_dummy_wgrad in pytorch/module/base.py, which Megatron's own linears call too), where a GEMM that
    #: accumulates into the gradients must still return one to autograd.
    dummy_gradients: bool = False
    #: The 16-bit gradients of a micro batch are all there at the end of its backward pass, to be added to fp32 ones.
    half_gradients_at_end: bool = False
    keeps_exponentials: bool = False  #: of fp32 logits the loss keeps the exponentials in fp32 for its backward pass
    vocab_dummy_gradient: bool = False  #: without them, that of the vocabulary is there during its backward pass
    #: What the caching allocator reserves beyond the allocated peak, as a share of what comes and goes within a step (weights,
    #: gradients and states are allocated once and leave no gaps): with one pipeline stage, whose micro batches free their
    #: blocks in reverse order for the next, and with several, whose micro batches interleave. From Aleph Alpha's runs that
    #: fitted or did not, and from those that llm-foundry's micro batches filled.
    allocator_gaps: tuple[float, float] = (0.1, 0.35)
    #: Activations of a whole tensor group, for each layer, whose blocks cannot be used again before the collectives that read
    #: or wrote them on streams of their own have ended (torch's record_stream).
    collective_gaps: float = 0.0

    def gaps(self, expandable: bool) -> tuple[float, float]:
        """Return allocator_gaps, less where segments grow."""
        alone, several = self.allocator_gaps
        return (min(alone, EXPANDABLE_GAPS), min(several, EXPANDABLE_GAPS)) if expandable else (alone, several)


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

    def flags_of(self, precision: str | None) -> dict[str, Any]:
        """Return the flags of a run of ``precision``, whose 16-bit gradients have its type."""
        found = dict(self.flags)
        if precision in _HALVES and found.get("grad_dtype") in _HALVES:
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
