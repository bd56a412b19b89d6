"""Build a network of one pod from options."""

from __future__ import annotations

import numpy as np

from predictor.network.topology.templates import Options, file_name
from predictor.network.topology.types import LinkKind, Topology

_NVLINK, _NIC, _UP = range(3)


def generate(options: Options) -> Topology:
    """Return the network of ``options``, which make_options has checked.

    Nodes are numbered GPUs, NVSwitches, ASWs (all of plane 1, then of plane 2), PSWs (the same). Each GPU links to all
    NVSwitches of its server and to one ASW per plane: GPUs fill segments of gpus_per_asw x rails, and within a segment each
    rail has its own ASW. Each ASW links to all PSWs, with two planes to those of its plane.
    """
    servers = options.gpus // options.gpus_per_server
    nvswitches = options.gpus + np.arange(servers * options.nvswitches_per_server)
    asws = options.gpus + len(nvswitches) + np.arange(options.total_asws)
    psws = options.gpus + len(nvswitches) + len(asws) + np.arange(options.psws)
    gpu_ends, gpu_kinds = _gpu_links(options, int(asws[0]))
    up_source, up_target = _up_links(options, asws, psws)
    gpu = np.repeat(np.arange(options.gpus), gpu_ends.shape[1])
    return Topology(
        name=file_name(options),
        gpus=options.gpus,
        gpus_per_server=options.gpus_per_server,
        gpu_type=options.gpu_type,
        nvswitches=nvswitches,
        switches=np.concatenate([asws, psws]),
        source=np.concatenate([gpu, up_source]),
        target=np.concatenate([gpu_ends.ravel(), up_target]),
        kind=np.concatenate([gpu_kinds.ravel(), np.full(len(up_source), _UP)]).astype(np.uint8),
        kinds=(
            LinkKind(options.nvlink_bandwidth, options.nvlink_latency, options.error_rate),
            LinkKind(options.bandwidth, options.latency, options.error_rate),
            LinkKind(options.asw_psw_bandwidth, options.latency, options.error_rate),
        ),
    )


def _gpu_links(options: Options, first_asw: int) -> tuple[np.ndarray, np.ndarray]:
    """Return [gpus, links of one]: the switch at the other end, and the kind: NVSwitches first, then the ASW of each plane."""
    gpu = np.arange(options.gpus)[:, None]
    each = options.nvswitches_per_server
    nvswitch = options.gpus + gpu // options.gpus_per_server * each + np.arange(each)
    plane = np.arange(options.planes) * (options.segments * options.rails)
    segment = gpu // (options.gpus_per_asw * options.rails)
    asw = first_asw + segment * options.rails + gpu % options.rails + plane
    kinds = np.concatenate([np.full_like(nvswitch, _NVLINK), np.full_like(asw, _NIC)], axis=1)
    return np.concatenate([nvswitch, asw], axis=1), kinds


def _up_links(options: Options, asws: np.ndarray, psws: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the ASW and the PSW of every link between them, by ASW."""
    if not options.dual_plane:
        return np.repeat(asws, len(psws)), np.tile(psws, len(asws))
    first = -(-len(psws) // 2)  # an odd PSW belongs to the first plane
    half = len(asws) // 2
    planes = ((asws[:half], psws[:first]), (asws[half:], psws[first:]))
    sources = [np.repeat(leaves, len(spines)) for leaves, spines in planes]
    targets = [np.tile(spines, len(leaves)) for leaves, spines in planes]
    return np.concatenate(sources), np.concatenate(targets)
