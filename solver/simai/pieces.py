"""One kernel or message of a priced layout, with its seconds, its bytes, and the shapes of the GEMMs that it is."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from solver.layers.program import (
    COMBINE,
    COMPUTE,
    DISPATCH,
    FLASH_ATTN,
    FORWARD,
    GROUPED_LINEAR,
    INPUT_GRAD,
    LINEAR,
    MEMORY_BOUND,
    WEIGHT_GRAD,
    Op,
)

Shape = tuple[int, ...]
#: Products of flash attention: (name, first operand, second operand) over queries q, keys k and the dims d and v of a head.
_FLASH = {
    False: (("scores", "qd", "dk"), ("context", "qk", "kv")),
    True: (("d_value", "kq", "qv"), ("d_scores", "qv", "vk"), ("d_query", "qk", "kd"), ("d_key", "kq", "qd")),
}


@dataclass(frozen=True)
class Piece:
    """One kernel or message.

    kind: COMPUTE, or the collective's. ns: nanoseconds of all its runs. group: of a message: tp, ep, dp, ep_dp (copies of
    experts), embedding, or all. size: its bytes, of the whole buffer; runs: the messages in which they are sent, one after the
    other. shapes: operands of each GEMM that a kernel is.
    """

    name: str
    module: str
    kind: str
    phase: str
    ns: float
    group: str = ""
    size: float = 0.0
    runs: int = 1
    shapes: tuple[tuple[Shape, Shape], ...] = ()

    @property
    def is_message(self) -> bool:
        return self.kind != COMPUTE

    @property
    def sizes(self) -> list[int]:
        """Bytes of each message; they add up to all of them."""
        each, rest = divmod(round(self.size), self.runs)
        return [each + (number < rest) for number in range(self.runs)]


def piece_of(op: Op, key: int, seconds: float, keys: int, group: str = "") -> Piece:
    """Return the piece of an op whose dims are arrays of shape [keys], at ``key``.

    seconds: of all its runs. group: of a message (default: that of its stream; of ``.etp``, the tensor group, in which they are
    where experts are split as other weights are).
    """

    def at(name: str) -> float:
        return float(np.broadcast_to(np.asarray(op.dims.get(name, 1), dtype=float), keys)[key])

    count = float(np.broadcast_to(np.asarray(op.count, dtype=float), keys)[key])
    base = Piece(op.name, op.module, COMPUTE, op.phase, seconds * 1e9)
    if op.stream == COMPUTE or op.kind == MEMORY_BOUND:
        return replace(base, shapes=_shapes(op, {name: int(at(name)) for name in op.dims}, max(round(count), 1)))
    if op.kind in (DISPATCH, COMBINE):  # DeepEP's kernels, as the exchange that they replace
        return replace(base, kind="all2all", group="ep", size=at("tokens") * at("top_k") * at("row_bytes") * count)
    group = group or ("tp" if op.name.endswith(".etp") else op.stream)
    return replace(base, kind=op.kind, group=group, size=at("bytes") * count, runs=max(round(count), 1))


def _shapes(op: Op, dims: dict[str, int], count: int) -> tuple[tuple[Shape, Shape], ...]:
    if op.kind == LINEAR:
        m, n, k, batch = dims["m"], dims["n"], dims["k"], dims["batch"] * count
        return (((m, 1, k), (k, n)) if batch == 1 else ((batch, m, k), (batch, k, n)),)
    if op.kind == GROUPED_LINEAR:
        groups, m, n, k = (dims[name] for name in ("groups", "tokens_per_group", "n", "k"))
        order = {FORWARD: (m, k, n), INPUT_GRAD: (m, n, k), WEIGHT_GRAD: (n, m, k)}[op.phase]
        return (((groups, order[0], order[1]), (groups, order[1], order[2])),)
    if op.kind == FLASH_ATTN:
        batch = dims["batch"] * dims["heads"] * count
        size = {"q": dims["seq_q"], "k": dims["seq_kv"], "d": dims["head_dim"], "v": dims["v_head_dim"]}
        products = _FLASH[bool(dims["backward"])]
        return tuple(((batch, *(size[i] for i in a)), (batch, *(size[i] for i in b))) for _, a, b in products)
    return ()
