"""How a framework communicates: tensor, data and pipeline parallelism."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


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
    views_one_sequence: bool = False  #: but of a micro batch of one sequence an all-gather needs no copy (torch since 2.11)
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
    #: Of these, autograd's joining of a unit's gradients, which comes before they are cast to a wider type (FSDP1:
    #: _runtime_utils.py, _post_backward_hook).
    joins_before_cast: bool = False
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
    shard_step_bytes: float = 0.0  #: the same of what a rank updates under ZeRO-1 to 3
    overflow_bytes: float = 0.0  #: and of looking for overflows there, in fp16 runs
    optimizer_launches: float = 0.0  #: kernels that the host launches for each tensor in a step; 0: for all at once
    gradient_passes: float = 2.0  #: further reads or writes of the gradients that a rank updates in a step (norm, clipping)
    #: Reads or writes of all gradients that a rank accumulates: zeroing, the search for NaN.
    buffer_passes: float = 0.0
    #: The same, of dividing them by the number of ranks, which one rank does not do.
    scaling_passes: float = 0.0

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
