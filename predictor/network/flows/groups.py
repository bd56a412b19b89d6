"""Groups of ranks that communicate at once when all GPUs train one model, in Megatron's order: tensor, expert, data.

Tensor ranks are neighbours. Expert groups take ranks of the same place in consecutive tensor groups and are carved out of data
parallelism, so that world = tensor x data, data = expert x expert_data. All functions return ranks as int64 [groups, members].
"""

from __future__ import annotations

import numpy as np

from profiler.errors import InputError, closest, shown


def tensor_groups(world: int, tensor: int) -> np.ndarray:
    """Return the tensor-parallel groups of ``world`` ranks; raise InputError where they do not divide the world."""
    _check(world, tensor, "tensor")
    return np.arange(world).reshape(-1, tensor)


def data_groups(world: int, tensor: int) -> np.ndarray:
    """Return the data-parallel groups: ranks of the same place in all tensor groups."""
    return tensor_groups(world, tensor).T.copy()


def expert_groups(world: int, tensor: int, expert: int) -> np.ndarray:
    """Return the expert-parallel groups: ranks of the same place in ``expert`` consecutive tensor groups."""
    _check(world, tensor * expert, "tensor x expert")
    return np.arange(world).reshape(-1, expert, tensor).transpose(0, 2, 1).reshape(-1, expert)


def expert_data_groups(world: int, tensor: int, expert: int) -> np.ndarray:
    """Return the groups of ranks that hold the same experts."""
    _check(world, tensor * expert, "tensor x expert")
    return np.arange(world).reshape(-1, expert * tensor).T.copy()


def strided_group(servers: int, intra: int, per_server: int, used: int) -> list[int]:
    """Return the first group of ``intra`` GPUs, as far apart as they can be, of the ``used`` ones in each of some servers."""
    apart = max(used // intra, 1)
    return [server * per_server + i * apart for server in range(servers) for i in range(intra)]


def training_groups(kind: str, world: int, tensor: int, expert: int = 1) -> np.ndarray:
    """Return the groups of ``kind``: tensor, data, expert or expert_data."""
    made = {
        "tensor": lambda: tensor_groups(world, tensor),
        "data": lambda: data_groups(world, tensor),
        "expert": lambda: expert_groups(world, tensor, expert),
        "expert_data": lambda: expert_data_groups(world, tensor, expert),
    }
    if kind not in made:
        raise InputError(f"no group is called {shown(kind)}{closest(kind, made)}; the kinds are {', '.join(made)}")
    return made[kind]()


def _check(world: int, part: int, name: str) -> None:
    if world < 1 or part < 1 or world % part:
        raise InputError(f"{world} GPUs do not divide into {name} groups of {part}; choose a divisor of the GPUs")
