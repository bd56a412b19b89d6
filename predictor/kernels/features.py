"""Inputs of the learnt corrections of GEMMs and attention: positions and features of shapes."""

from __future__ import annotations

import numpy as np

from predictor.kernels.attn_physics import AttnMachine, AttnPhysics, AttnShape, attn_times
from predictor.kernels.gemm_physics import GemmMachine, GemmPhysics, gemm_times

_FEATURE_TILES = ((128, 128), (128, 256), (256, 128), (64, 256), (256, 64), (64, 64))


def gemm_coordinates(m: np.ndarray, n: np.ndarray, k: np.ndarray, batch: np.ndarray) -> np.ndarray:
    """Position of a shape among the measured ones, in octaves.

    A batch acts like a larger m, so new batches count half; so does work beyond the largest measured, where power is the
    limit.
    """
    return np.log2(np.stack([m * batch, n, k, np.sqrt(batch), np.sqrt(m * batch * n * k)], axis=1))


def gemm_features(
    physics: GemmPhysics, machine: GemmMachine, m: np.ndarray, n: np.ndarray, k: np.ndarray, batch: np.ndarray
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


def attn_coordinates(shape: AttnShape) -> np.ndarray:
    """Position of a call among the measured ones, in octaves.

    Keys per query (which the mask and context parallelism change) and the group size count half, since the physical model
    covers them well.
    """
    columns = (
        np.log2(shape.seq_q),
        0.5 * np.log2(shape.keys_per_query / shape.seq_q),
        np.log2(shape.batch * shape.heads),
        0.5 * np.log2(np.maximum(shape.heads / shape.kv_heads, 1)),
        np.log2(shape.head_dim + shape.v_head_dim),
    )
    return np.stack(columns, axis=1)


def attn_features(physics: AttnPhysics, machine: AttnMachine, shape: AttnShape) -> np.ndarray:
    """Inputs of the correction, shape [rows, features]: sizes, the regime of the physical model, waves."""
    times = attn_times(physics, machine, shape)
    waves = shape.blocks / machine.sms
    columns = (
        np.log2(shape.batch),
        np.log2(shape.seq_q),
        np.log2(shape.keys_per_query),
        np.log2(shape.heads),
        np.log2(shape.kv_heads),
        np.log2(shape.heads / shape.kv_heads),
        shape.head_dim,
        shape.v_head_dim,
        np.log2(shape.batch * shape.heads),
        np.log2(shape.batch * shape.kv_heads),
        np.log2(shape.batch * shape.seq_q),
        np.log2(shape.flops),
        np.log(waves),
        waves / np.ceil(waves),
        np.log((times.seconds + times.cache) / physics.launch),
        np.log(times.spread / times.longest),
        np.log(times.spread / times.memory),
        np.log(times.seconds / (times.cache + 1e-3 * times.seconds)),
    )
    return np.stack(columns, axis=1)


def _alignment(size: np.ndarray, most: int) -> np.ndarray:
    """log2 of the largest power of two, at most ``most``, that divides a size."""
    return np.log2(np.gcd(size.astype(np.int64), most))
