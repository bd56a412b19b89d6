"""A tiny hybrid of Mamba-2, an MLP and attention, whose layers are one block each."""

from __future__ import annotations

from toy import TINY

from solver.spec.layer_kinds import LayerKind

#: 4 heads of 16 in 2 groups, a state of 8; layers: Mamba-2, MLP, Mamba-2, attention.
SEQ, HIDDEN, WIDTH, HEADS, STATE, GROUPS = 256, 64, 4 * 16, 4, 8, 2
KINDS = ("mamba", "mlp", "mamba", "full_attention")
HYBRID = TINY.replace(
    num_hidden_layers=4,
    layer_types=KINDS,
    one_block_layers=True,
    position="none",
    mamba_num_heads=HEADS,
    mamba_head_dim=16,
    mamba_state_dim=STATE,
    mamba_num_groups=GROUPS,
    mamba_conv_kernel_dim=4,
    mamba_chunk_size=128,
)
MAMBA = LayerKind(rope=False, state_space=True, has_mlp=False)
MLP = LayerKind(rope=False, mixes_tokens=False)
ATTENTION = LayerKind(has_mlp=False)
