"""How switches spread flows over equal paths: a hash of addresses and ports, here MurmurHash3 of 32 bits, over arrays."""

from __future__ import annotations

import numpy as np

_FIRST_PORT, _TARGET_PORT = 10000, 100


def _rotate(x: np.ndarray, by: int) -> np.ndarray:
    return (x << np.uint32(by)) | (x >> np.uint32(32 - by))


def murmur(words: tuple[np.ndarray, ...], seed: np.ndarray) -> np.ndarray:
    """Return MurmurHash3 (x86, 32 bits) of keys made of uint32 ``words``, arrays of one shape, with a uint32 ``seed`` each."""
    h = seed.astype(np.uint32).copy()
    with np.errstate(over="ignore"):
        for word in words:
            k = _rotate(word.astype(np.uint32) * np.uint32(0xCC9E2D51), 15) * np.uint32(0x1B873593)
            h = _rotate(h ^ k, 13) * np.uint32(5) + np.uint32(0xE6546B64)
        h = h ^ np.uint32(4 * len(words))
        h = (h ^ (h >> np.uint32(16))) * np.uint32(0x85EBCA6B)
        h = (h ^ (h >> np.uint32(13))) * np.uint32(0xC2B2AE35)
        mixed: np.ndarray = h ^ (h >> np.uint32(16))
    return mixed


def flow_hash(source: np.ndarray, target: np.ndarray, count: np.ndarray, node: np.ndarray, seed: int) -> np.ndarray:
    """Return the hash that decides at ``node`` where a flow goes next; arrays of one shape.

    count: how many flows the pair (source, target) had before: each is a new connection, with the next source port. Every node
    has its own seed, and ``seed`` draws another network of the same kind.
    """
    ports = (np.uint32(_FIRST_PORT) + count.astype(np.uint32)) | np.uint32(_TARGET_PORT << 16)
    return murmur((_address(source), _address(target), ports), node.astype(np.uint32) ^ np.uint32((seed * 0x9E3779B1) % 2**32))


def _address(node: np.ndarray) -> np.ndarray:
    """Return IPv4 addresses of nodes: 11.0.0.1, 11.0.1.1, ... 11.0.255.1, 11.1.0.1 and so on."""
    number = node.astype(np.uint32)
    return np.uint32(0x0B000001) + (number // np.uint32(256) << np.uint32(16)) + (number % np.uint32(256) << np.uint32(8))
