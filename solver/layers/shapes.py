"""Local sizes of a layer under every split: number of tokens, heads and columns on one rank."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from solver.layers.program import Groups, LayerKeys, micro_batch_tokens
from solver.spec.choices import TpMode
from solver.spec.cluster import Cluster
from solver.spec.dropout import applies_dropout
from solver.spec.framework import Framework
from solver.spec.frameworks import framework_of
from solver.spec.layer_kinds import PLAIN, LayerKind
from solver.spec.model import ModelSpec
from solver.spec.precision import activation_bytes
from solver.spec.recipes import FP32, HALF, Recipe, delays_scales, recipe_name, recipe_of
from solver.spec.run import Run


@dataclass(frozen=True)
class Shapes:
    """Arrays of shape [keys], derived once from keys, model and the constants of the run.

    tokens: in one rank's micro batch after the context split. local_tokens: tokens / tp. linear_tokens: rows of its GEMMs.
    norm_tokens: rows of norms and residuals. split: ranks that share one linear's weight by columns or rows (1 under ISP).
    """

    model: ModelSpec
    run: Run
    framework: Framework
    keys: LayerKeys
    groups: Groups
    kind: LayerKind
    tokens: np.ndarray
    local_tokens: np.ndarray
    linear_tokens: np.ndarray
    norm_tokens: np.ndarray
    split: np.ndarray
    heads: np.ndarray
    kv_heads: np.ndarray
    vocab: np.ndarray
    sequence_split: np.ndarray  #: bool: MSP or FSP
    heads_shared: np.ndarray  #: context-parallel ranks over which all-to-alls divide the heads
    keeps_shard: np.ndarray  #: bool: a column linear keeps only its shard of the input

    @property
    def element(self) -> int:
        """Bytes per element of an activation."""
        return activation_bytes(self.run)

    @property
    def input_element(self) -> float:
        """Bytes per element of what a quantised linear keeps of its input."""
        return self.recipe.element if self.recipe and self.framework.memory.quantised_inputs else self.element

    @property
    def casts_kept_inputs(self) -> bool:
        """Whether a quantised linear casts an input again for its gradient that another module keeps in 16 bits."""
        delayed = delays_scales(self.run.precision, self.run.fp8_recipe)
        return self.recipe is not None and self.framework.memory.original_inputs and not delayed

    @property
    def copies_kept_inputs(self) -> bool:
        """Whether it keeps a quantised copy of such an input instead."""
        return self.input_element != self.element and not self.casts_kept_inputs

    @property
    def gathered_element(self) -> float:
        """Bytes per element of a linear's operand in an all-gather of the tensor group."""
        return self.recipe.element if self.recipe and self.gathers_quantised else self.element

    @property
    def gathers_quantised(self) -> bool:
        """Whether operands of quantised linears are all-gathered as such over the tensor group."""
        name = recipe_name(self.run.precision, self.run.fp8_recipe)
        return self.recipe is not None and name in self.framework.tensor_parallel.gathers_quantised

    @property
    def recipe(self) -> Recipe | None:
        """How the linears of this layer quantise their operands; None where they do not."""
        return recipe_of(self.run.precision, self.run.fp8_recipe) if self.kind.quantised else None

    @property
    def gathered_by_norm(self) -> np.ndarray:
        """Whether the norm all-gathers what its linears read: bool [keys]."""
        return self.sequence_split & self.framework.tensor_parallel.norm_gathers

    @property
    def dropout(self) -> bool:
        return applies_dropout(self.model, self.run)

    @property
    def core_kv_heads(self) -> np.ndarray:
        """Heads of keys and values that the attention core works on, keeps and exchanges."""
        return self.heads if self.framework.kernels.repeats_kv else self.kv_heads

    @property
    def kv_width(self) -> int:
        """Width of a key and its value."""
        return self.model.qk_head_dim + self.model.value_head_dim

    @property
    def kv_elements(self) -> np.ndarray:
        """Elements of the keys and values that the attention core works on."""
        return self.tokens * self.core_kv_heads * self.kv_width

    @property
    def qkv_width(self) -> np.ndarray:
        """Width of one token's queries, keys and values, as the attention core works on them."""
        return self.heads * self.model.qk_head_dim + self.core_kv_heads * self.kv_width

    @property
    def context_elements(self) -> np.ndarray:
        """Elements of the attention core's output."""
        return self.tokens * self.heads * self.model.value_head_dim

    @property
    def wide_stream(self) -> bool:
        """Whether the residual stream of a 16-bit run is fp32."""
        return self.framework.memory.wide_stream and self.element == HALF

    @property
    def stream_element(self) -> int:
        """Bytes of an element of the residual stream."""
        return FP32 if self.wide_stream else self.element

    @property
    def overlaps_backward_collectives(self) -> bool:
        """Whether tensor-parallel collectives of the backward pass run beside its GEMMs."""
        return self.framework.tensor_parallel.async_backward or self.run.tp_comm_overlap

    @property
    def exposed_backward(self) -> np.ndarray:
        """Share of the collectives that would run beside weight gradients, or read again beside input gradients, that stays
        exposed: all where a schedule splits the backward pass, [keys].

        Source: the zero-bubble authors' tensor_parallel/layers.py (async_op=wgrad_compute) and zbpp_utils.py
        (WeightGradStore.pop: pre_func(async_op=False)).
        """
        return self.keys.splits_backward.astype(float)

    @property
    def exposed_all_reduce(self) -> np.ndarray:
        """The same of all-reduced input gradients, [keys]."""
        return np.maximum(self.exposed_backward, float(not self.framework.tensor_parallel.async_all_reduce))

    @property
    def accumulates(self) -> bool:
        """Whether weight-gradient GEMMs add to the buffer of gradients, which nothing but tables then needs a kernel for."""
        fuses = self.framework.fuses_accumulation(self.run.gradient_accumulation_fusion)
        return fuses and self.framework.data_parallel.accumulating_gemms

    @property
    def fused_elementwise(self) -> bool:
        """Whether a chain of element-wise kernels is one kernel, by hand or by a compiler."""
        return self.framework.kernels.fused_elementwise or self.run.compile

    @property
    def up_linears(self) -> tuple[str, ...]:
        """Names of the linears before an MLP's activation: of gate and up, one GEMM or two, or of up alone."""
        if not self.model.gated_mlp:
            return ("w1",)
        return ("w13",) if self.framework.kernels.fused_gate_up else ("w1", "w3")

    @property
    def weight_shards(self) -> np.ndarray:
        """Ranks over which ISP shards a block's weights, [keys]; 1 in other modes."""
        return np.where(self.keys.is_mode(TpMode.ISP), self.keys.wp, 1)

    @property
    def fused_norm(self) -> bool:
        """Whether a norm is one kernel, by hand or by a compiler."""
        one = self.framework.kernels.one_layernorm and self.model.norm == "layernorm"
        return self.run.fused_norm or self.run.compile or one

    @property
    def norm_gradient(self) -> str:
        """The kind of a fused norm's backward kernel; torch.compile writes one that reads its inputs as torch's own does."""
        return "norm_grad_torch" if self.run.compile else self.framework.kernels.norm_gradient

    @property
    def fused_softmax(self) -> bool:
        """Whether scale, mask and softmax of unfused attention are one kernel: as the run states, or as the framework does."""
        stated = self.run.fused_softmax
        return self.framework.kernels.fused_softmax if stated is None else stated

    @property
    def fused_rope(self) -> bool:
        """Whether rotary embedding is one kernel: as the run states, or as the framework does."""
        stated = self.run.rope_fusion
        return self.framework.kernels.fused_rope or self.fused_elementwise if stated is None else stated

    @property
    def fused_latent_rope(self) -> bool | None:
        """Whether rotary embedding of latent attention is two kernels with what puts keys together, or eager chains (False)."""
        stated = self.run.rope_fusion
        return self.framework.kernels.fused_latent_rope if stated is None else stated

    @classmethod
    def of(cls, keys: LayerKeys, model: ModelSpec, run: Run, cluster: Cluster, kind: LayerKind = PLAIN) -> Shapes:
        framework = framework_of(run.framework)
        isp, mtp = keys.is_mode(TpMode.ISP), keys.is_mode(TpMode.MTP)
        tokens = micro_batch_tokens(keys.micro_batch_size, run.seq_len, keys.cp)
        local = np.maximum(tokens // keys.tp, 1)
        sequence_split = keys.is_mode(TpMode.MSP, TpMode.FSP) & (keys.tp > 1)
        keeps_shard = sequence_split & (keys.is_mode(TpMode.FSP) | framework.tensor_parallel.regathers_input)
        heads_shared = {"a2a": keys.cp, "a2a+ring": np.minimum(keys.cp, run.cp_a2a_size)}.get(
            run.cp_comm, np.ones_like(keys.cp)
        )
        return cls(
            model=model,
            run=run,
            framework=framework,
            keys=keys,
            kind=kind,
            groups=Groups.of(keys, cluster.gpus_per_domain, heads_shared),
            heads_shared=heads_shared,
            tokens=tokens,
            local_tokens=local,
            linear_tokens=np.where(isp, local, tokens),
            norm_tokens=np.where(mtp, tokens, local),
            split=np.where(isp, 1, keys.tp),
            heads=np.maximum(model.num_attention_heads // keys.tp, 1),
            kv_heads=np.maximum(model.num_key_value_heads // keys.tp, 1),
            vocab=np.maximum(model.padded_vocab(keys.tp) // keys.tp, 1),
            sequence_split=sequence_split,
            keeps_shard=keeps_shard,
        )
