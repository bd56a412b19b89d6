"""The three GEMMs of a linear layer."""

from __future__ import annotations

from enum import IntEnum


class GemmLayout(IntEnum):
    """Which GEMM of a linear layer: x W^T, dy W, dy^T x, named by how BLAS reads the two operands."""

    TN = 0  #: forward
    NN = 1  #: input gradient
    NT = 2  #: weight gradient
