"""How many ranks DeepSpeed's launcher starts: one for each GPU of the hosts of its hostfile, or of its own host.

Source: DeepSpeed's launcher/runner.py (parse_args, fetch_hostfile, parse_inclusion_exclusion).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from profiler.errors import InputError, printable
from solver.formats.file_run import Source

_HOST = re.compile(r"^([\w.-]+)\s+slots=(\d+)\s*$", re.MULTILINE)


def starts(words: Sequence[str]) -> bool:
    """Whether a command is DeepSpeed's launcher."""
    return any(word.rpartition("/")[2] == "deepspeed" for word in words)


def asked(options: Mapping[str, str], variables: Mapping[str, str], source: Source) -> dict[str, str]:
    """Return the nodes and the GPUs of each that a command of the launcher says, as far as it does.

    options, variables: its own, and those of its environment. Nodes are those of the hostfile, whichever file it is in
    (without one there is its own host alone); ``--num_nodes`` takes the first of them, and ``--include`` names some, or some of
    their GPUs, as CUDA_VISIBLE_DEVICES does those of its own host.
    """
    hostfile = options.get("--hostfile", options.get("-H", ""))
    slots = {host: int(count) for host, count in _HOST.findall(source.beside(hostfile) or "")} if hostfile else {}
    if wanted := options.get("--include", options.get("-i", "")):
        return _included(wanted, slots, source)
    found = {"nodes": str(len(slots))} if slots else {} if hostfile else {"nodes": "1"}
    if slots:
        found["each"] = str(min(slots.values()))
    visible = variables.get("CUDA_VISIBLE_DEVICES", "")
    if not hostfile and re.fullmatch(r"\d+(,\d+)*", visible):
        found["each"] = str(len(visible.split(",")))
    return found


def _included(wanted: str, slots: Mapping[str, int], source: Source) -> dict[str, str]:
    """Return the nodes and GPUs of ``host:0,1@host:0,1``; a host alone means all of its GPUs."""
    hosts = [part.partition(":") for part in wanted.split("@")]
    counts = {len(gpus.split(",")) if gpus else slots.get(host, 0) for host, _, gpus in hosts}
    if len(counts) > 1:
        raise InputError(
            f"{source.path}: --include {printable(wanted)} has other numbers of GPUs on some hosts, which is not modelled"
        )
    each = counts.pop()
    return {"nodes": str(len(hosts))} | ({"each": str(each)} if each else {})
