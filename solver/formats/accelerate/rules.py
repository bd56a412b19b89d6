"""Rules of accelerate's settings, by dotted key.

Source: huggingface/accelerate 1.10: parallelism_config.py, utils/dataclasses.py (FullyShardedDataParallelPlugin),
utils/launch.py; as read.
"""

from __future__ import annotations

from solver.formats.rule import Arguments, Rule, implies

_PLUGIN, _SIZES = "FullyShardedDataParallelPlugin", "parallelism_config.py"


def _version(a: Arguments) -> int:
    return a.size("fsdp_config.fsdp_version")


def _sharded(a: Arguments) -> bool:
    return a.text("distributed_type") == "FSDP"


def _product(a: Arguments) -> int:
    sizes = ("dp_replicate", "dp_shard", "tp", "cp")
    product = 1
    for name in sizes:
        product *= a.size(f"parallelism_config.parallelism_config_{name}_size")
    return product


RULES = (
    Rule(
        "the sizes of parallelism_config multiply to num_processes",
        _SIZES,
        lambda a: not any(key.startswith("parallelism_config") for key in a) or _product(a) in (1, a.size("num_processes")),
    ),
    Rule(
        "parallelism_config with distributed_type FSDP needs fsdp_version 2",
        _SIZES,
        lambda a: implies(_sharded(a) and any(key.startswith("parallelism_config") for key in a), _version(a) == 2),
    ),
    Rule(
        "fsdp_version 2 needs a switch as fsdp_reshard_after_forward",
        _PLUGIN,
        lambda a: implies(
            _sharded(a) and _version(a) == 2, isinstance(a.get("fsdp_config.fsdp_reshard_after_forward", True), bool)
        ),
    ),
    Rule(
        "fsdp_version 2 excludes the state dict LOCAL_STATE_DICT",
        _PLUGIN,
        lambda a: implies(_version(a) == 2, a.text("fsdp_config.fsdp_state_dict_type") != "LOCAL_STATE_DICT"),
    ),
    Rule(
        "fsdp_cpu_ram_efficient_loading needs fsdp_sync_module_states",
        "utils/launch.py",
        lambda a: implies(
            _sharded(a) and a.on("fsdp_config.fsdp_cpu_ram_efficient_loading"),
            a.on("fsdp_config.fsdp_sync_module_states", True),
        ),
    ),
)
