"""The kernels of one device in seconds: a method for each kind, of arrays of shapes, which returns an Estimate."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from predictor.corrections import Corrections
from predictor.estimate import Basis, Estimate
from predictor.kernels.attn_physics import mean_keys
from predictor.kernels.block_scaled import block_scaled
from predictor.kernels.chunk_scan import chunk_scan
from predictor.kernels.derating import Deratings
from predictor.kernels.dtypes import BLOCKWISE, ELEMENT_BYTES, FAMILIES, HALF_BYTES
from predictor.kernels.flash_attn import FlashAttnModel
from predictor.kernels.flash_generations import AttentionKernel
from predictor.kernels.fp8_attention import RATIO_STD, fp8_attention_ratio
from predictor.kernels.grouped_linear import GroupedLinearModel
from predictor.kernels.linear import LinearModel
from predictor.kernels.measured_attention import MeasuredAttention
from predictor.kernels.memory_bound import MemoryBoundModel
from predictor.kernels.state_space import state_space
from profiler.profile.profile import Device

#: How much longer a backward pass of attention takes that adds its parts in a fixed order. Published: up to 37.9% fewer FLOPs
#: per second (arXiv 2601.21824, FlashAttention 3 on H800); assumed: half of that.
DETERMINISTIC_BACKWARD = 1 / (1 - 0.379 / 2)


@dataclass(frozen=True)
class KernelCosts:
    """The kernels of one device, under the load of a training run.

    memory: kernels that are bound by memory. measured_attention: attention calls timed on the device itself, under the load of
    a training run; these times already include the derating, but for the slowdown at the power limit.
    """

    device: Device
    linears: LinearModel
    grouped: GroupedLinearModel
    attention: FlashAttnModel
    memory: MemoryBoundModel
    deratings: Deratings = Deratings()
    attention_kernel: AttentionKernel = AttentionKernel()
    measured_attention: MeasuredAttention | None = None
    corrections: Corrections = Corrections()

    def linear(
        self,
        m: Any,
        n: Any,
        k: Any,
        batch: Any = 1,
        *,
        layout: Any = 0,
        accumulate: Any = False,
        dtype: str = "bf16",
        parts: Any = 1,
    ) -> Estimate:
        """A GEMM of m x n outputs over k, ``batch`` times; layout and accumulate as in predictor.kernels.linear.

        parts: kernels over which m is spread, which together take no less time than one.
        """

        def of(rows: Any) -> Estimate:
            alone = self.linears.predict(rows, n, k, batch, layout=layout, accumulate=accumulate, dtype=dtype)
            return self._gemm(alone, layout, dtype)

        whole = of(m)
        if np.max(parts, initial=1) == 1:
            return whole
        part = of(np.maximum(m // parts, 1))
        return whole._replace(seconds=np.maximum(whole.seconds, parts * part.seconds))

    def grouped_linear(
        self,
        groups: Any,
        tokens_per_group: Any,
        n: Any,
        k: Any,
        *,
        passes: Any = 0,
        accumulate: Any = False,
        dtype: str = "bf16",
        launched: bool = True,
    ) -> Estimate:
        """GEMMs of ``groups`` experts; arguments as in predictor.kernels.grouped_linear.

        launched: the host launches one for each group, for which it needs a time that the device's clocks do not change;
        otherwise they are one kernel.
        """
        alone = self.grouped.predict(groups, tokens_per_group, n, k, passes=passes, accumulate=accumulate, dtype=dtype)
        found = self._gemm(alone, passes, dtype)
        return found._replace(seconds=np.maximum(found.seconds, self.grouped.launch_seconds(groups) * launched))

    def _gemm(self, alone: Estimate, layout: Any, dtype: str) -> Estimate:
        scaled = block_scaled(alone, layout, self.device) if dtype == BLOCKWISE else alone
        return self.corrections.scaled(self._derated(scaled, dtype), "gemm")

    def flash_attn(
        self,
        batch: Any,
        seq_q: Any,
        seq_kv: Any,
        heads: Any,
        kv_heads: Any,
        head_dim: Any,
        v_head_dim: Any,
        causal: Any = True,
        backward: Any = False,
        dtype: str = "",
    ) -> Estimate:
        """Fused attention, forward or backward: the measured time where there is one, else the fit.

        dtype: "fp8", "mxfp8", or "" for 16 bits.
        """
        shape = (batch, seq_q, seq_kv, heads, kv_heads, head_dim, v_head_dim, causal, backward)
        best = self._derated(self.attention.predict(*shape), of="attention")
        if self.measured_attention is not None:
            # calls are timed as a profile's kernels are, so that the power limit costs them as much
            alone = best._replace(seconds=best.seconds / self.deratings.power_slowdown)
            found = self.measured_attention.instead_of(alone, *shape)
            best = found._replace(seconds=found.seconds * self.deratings.power_slowdown)
        kernel = self.attention_kernel
        scale = kernel.scale(seq_q, head_dim, causal) * np.where(backward, kernel.backward_scale, 1.0)
        if dtype:
            keys, dims = mean_keys(seq_q, seq_kv, causal), np.add(head_dim, v_head_dim)
            best = best._replace(relative_std=np.hypot(best.relative_std, RATIO_STD))
            scale = scale * fp8_attention_ratio(self.device, dtype, keys, dims, causal, backward)
        return self.corrections.scaled(best._replace(seconds=best.seconds * scale), "attention")

    def chunk_scan(self, batch: Any, seq: Any, heads: Any, key_dim: Any, value_dim: Any, backward: Any = False) -> Estimate:
        """The gated delta rule, forward or backward; arguments as in predictor.kernels.chunk_scan."""
        alone = chunk_scan(self.device, batch, seq, heads, key_dim, value_dim, backward)
        return self.corrections.scaled(self.corrections.less_certain(alone, "attention"), "attention")

    def state_space(
        self, batch: Any, seq: Any, heads: Any, head_dim: Any, state_dim: Any, groups: Any, chunk: Any, backward: Any = False
    ) -> Estimate:
        """Mamba-2's state-space kernels, forward or backward; arguments as in predictor.kernels.state_space."""
        alone = state_space(self.device, batch, seq, heads, head_dim, state_dim, groups, chunk, backward)
        return self.corrections.scaled(self.corrections.less_certain(alone, "attention"), "attention")

    def memory_bound(self, kind: str, size: Any) -> Estimate:
        """A kernel that moves ``size`` bytes, read plus written; no transposes where fp8 GEMMs read operands in both orders."""
        if kind == "transpose" and not self.device.transposes_fp8:
            none = np.zeros(np.shape(size))
            return Estimate(none, none, np.full(np.shape(size), np.int8(Basis.MEASURED)))
        return self.corrections.scaled(
            self.corrections.less_certain(self.memory.predict(kind, size), "memory_bound"), "memory_bound"
        )

    def with_flash_version(self, version: int, deterministic: bool = False, own: bool = True) -> KernelCosts:
        """The same device under a framework whose FlashAttention is of generation ``version`` (0: the device's best).

        deterministic: its results repeat to the bit. own: as of AttentionKernel.
        """
        measured = self.attention_kernel.measured
        behind = tuple(range(version or self.device.flash_version, measured or self.device.flash_version))
        backward = DETERMINISTIC_BACKWARD if deterministic else 1.0
        return replace(self, attention_kernel=AttentionKernel(measured, behind, own, backward))

    def _derated(self, estimate: Estimate, dtype: str = "bf16", of: str = "linear") -> Estimate:
        if ELEMENT_BYTES[FAMILIES.get(dtype, dtype)] >= HALF_BYTES:
            factor = self.deratings.attention if of == "attention" else self.deratings.linear
            return self.corrections.less_certain(estimate._replace(seconds=estimate.seconds * factor), of)
        factor, spread = self.deratings.quantised
        estimate = self.corrections.less_certain(estimate, "quantised")
        return estimate._replace(seconds=estimate.seconds * factor, relative_std=np.hypot(estimate.relative_std, spread))
