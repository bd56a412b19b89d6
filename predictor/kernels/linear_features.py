"""What the learnt correction of a GEMM sees of its shape."""

from __future__ import annotations

import numpy as np

from predictor.kernels.gemm_physics import GemmPhysics, Machine, gemm_times

_FEATURE_TILES = ((128, 128), (128, 256), (256, 128), (64, 256), (256, 64), (64, 64))


def coordinates(m: np.ndarray, n: np.ndarray, k: np.ndarray, batch: np.ndarray) -> np.ndarray:
    """Position of a shape among the measured ones, in octaves.

    A batch acts like a larger m, so new batches count half; so does work beyond the largest measured, where power is the
    limit.
    """
    return np.log2(np.stack([m * batch, n, k, np.sqrt(batch), np.sqrt(m * batch * n * k)], axis=1))


def features_of(
    physics: GemmPhysics, machine: Machine, m: np.ndarray, n: np.ndarray, k: np.ndarray, batch: np.ndarray
) -> np.ndarray:
    """Inputs of the correction, [rows, features]: sizes, the regime of the physical model, tiles, waves, alignment."""
    bare = gemm_times(physics, machine, m, n, k, batch)
    rows = m * batch
    columns = [np.log2(rows), np.log2(n), np.log2(k), np.log2(rows * n * k), np.log2(k / np.sqrt(rows * n))]
    columns += [np.log(bare.compute / bare.memory), np.log(bare.seconds / physics.launch), bare.tile.astype(np.float64)]
    for tm, tn in _FEATURE_TILES:
        waves = batch * np.ceil(m / tm) * np.ceil(n / tn) / machine.sms
        columns += [np.log(waves), waves / np.ceil(waves)]
    columns += [x / (np.ceil(x / t) * t) for x, t in ((m, 128), (m, 256), (n, 256))]
    columns += [_alignment(m, 64), _alignment(n, 256), _alignment(k, 256)]
    return np.stack(columns, axis=1)


def _alignment(size: np.ndarray, most: int) -> np.ndarray:
    """log2 of the largest power of two, at most ``most``, that divides a size."""
    return np.log2(np.gcd(size.astype(np.int64), most))
