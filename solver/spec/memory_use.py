"""What a framework and its allocator hold, and what recomputation runs again."""

from __future__ import annotations

from dataclasses import dataclass

from profiler.units import GIB


@dataclass(frozen=True, kw_only=True)
class Recomputation:
    """What activation recomputation runs again."""

    includes_head: bool = False  #: full recomputation runs the final norm and the head again too
    full_by_module: bool = False  #: what it calls full recomputation recomputes attention, MLP and norms each on its own
    #: Without recomputation the norms, with the addition before the second one, are checkpoints of their own: they run again.
    norms_alone: bool = False
    selective_is_full: bool = False  #: what the framework calls selective recomputation recomputes whole layers
    #: Recomputation of a layer ends with the last tensor that backward needs, so the down projection does not run again.
    stops_early: bool = False
    compiled_with_layers: bool = False  #: torch.compile compiles a layer with its checkpoint; of one with experts, its modules
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
    #: The trainer holds a micro batch's logits until the next one has its own, and the loss writes their gradient beside them.
    keeps_logits: bool = False
    #: The optimizer's zero_grad frees the gradients (torch's set_to_none): of the first micro batch there are none at its loss.
    frees_gradients: bool = False
    frees_half_gradients: bool = False  #: so it does with 16-bit ones of ZeRO-1 and 2 (DeepSpeed)
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
