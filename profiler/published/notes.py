"""Notes of the shipped profiles, and the page SOURCES.md."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from profiler.profile.profile import Profile
from profiler.published.rows import Ledger

#: Note for ``meta["sustained"]``.
SUSTAINED = (
    "kernels were timed one at a time, in loops of some ten to a hundred launches at boost clock; training at the power limit"
    " is slower, by a factor that belongs to the machine: how much slower a second laboratory timed the same GEMMs"
)
#: Sustained-clock derating of parts that no second laboratory timed: the factor of the part with the same chip (H100 for H200,
#: the larger A100 for the smaller).
SAME_CHIP_SCALE = {"h200_sxm": 1.154, "a100_sxm_40gb": 1.076}

_GEMM = "GEMMs: forward layout only (TN); no input or weight gradients are published for this GPU"
_PAGED = "attention: the forward kernel of a serving engine over a paged cache; slow under about 2,000 tokens"
_TRAINING = "norm, softmax, activation and eager kernels: those of GH200, whose chip is the same, scaled to this memory"
_HOT = "Transformer Engine kernels timed back to back on the same buffers: too fast where they are small"

PROFILE_NOTES: Mapping[str, Sequence[str]] = {
    "h100_sxm": (
        _GEMM,
        _PAGED,
        "attention backward: only forward plus backward of FlashAttention 2 in fp16, read from a figure",
        "collectives between nodes: one cluster of 10 nodes, messages of 32 MiB and more",
        _TRAINING,
    ),
    "h200_sxm": (
        _GEMM,
        _PAGED,
        "no attention backward, no collectives between nodes",
        _TRAINING,
    ),
    "b200_sxm": (
        "two laboratories: a grid of forward GEMMs; GEMMs of layers in all passes, a quarter slower",
        _HOT,
        _PAGED,
        "no collectives between nodes, no point to point, no norm, rope or activation kernels",
    ),
    "a100_sxm_80gb": (
        _GEMM,
        _PAGED,
        "attention backward: only forward plus backward of FlashAttention 2 in fp16, read from a figure",
        "collectives between nodes: all_reduce and point to point of two nodes, up to 64 MiB",
    ),
    "a100_sxm_40gb": (
        "measurements of the 80 GB part, whose chip and links are the same; memory-bound kernels scaled to this memory",
        _GEMM,
        _PAGED,
    ),
    "a100_pcie_80gb": (_HOT, "collectives: fitted constants of one node in laws.intra_node; no measurements"),
}

_PAGE = """# Where the shipped profiles come from

Written by `python -m profiler.published HARDWARE_DIR --output prof_data` from measurements that others published.
Each measurement of a profile names its source as owner/repository:path. Please cite and credit them, not us.

| source | what | how it was measured | licence |
|---|---|---|---|
| ai-dynamo/aiconfigurator (commit 095f58a), systems/data | forward GEMMs, attention of serving engines, \
NCCL of one node, fp8 quantisation, DeepEP's dispatch and combine | CUDA graphs, \
3 warm-ups, 6 replays (attention 20); GEMMs are medians over up \
to 7 collections of the same shape (`repeats`, `spread`); random operands. NCCL: nccl-tests, 40 warm-ups, 60-100 \
repeats. DeepEP's normal kernels: its own tests (best of their tuning), kernel times; dispatch of fp8 rows, combine of bf16 \
rows; random routing; between nodes 400 Gbit/s per GPU | Apache-2.0, NVIDIA |
| microsoft/vidur, data/profiling | fp16 GEMMs and memory-bound kernels of the layers of seven models, all_reduce \
and send/recv on up to two nodes | CUDA events and torch.profiler, to 1 us; one GPU warm from call to call | MIT, \
Microsoft |
| MooreThreads/SimuMax, configs/system | GEMMs, grouped GEMMs and attention in all passes for A100-PCIe and \
B200; fitted constants of collectives, permute and cross entropy; a log of H100 collectives | Transformer Engine, 25 \
warm-ups, about 75 calls on the same buffers | Apache-2.0, Moore Threads |
| VIA-Research/vTrain, trace/a100 | all_reduce of 2-8 A100 | table of its authors | MIT, KAIST |
| xxrjun/nccl-tests-cluster | collectives of H100 on 1, 2 and 10 nodes of 8 x 400 Gbit/s | nccl-tests, medians over \
equal runs on several nodes | Apache-2.0 |
| deepseek-ai/DeepEP (commit 41cad94), docs/README_Hybrid-EP.md | Hybrid-EP's dispatch and combine on H100, B200 and GB200 | \
rates of kernels ("Kernel Only"), 4,096 tokens, random routing; turned into times | MIT, DeepSeek and NVIDIA |
| DebarghaG/estimate-train-time (commit 1ac4d5e4) | memory-bound kernels of GPT-NeoX's blocks, forward and \
backward, on A100 and GH200 (96 GB of HBM3) | CUDA events, fp16; chains of eager kernels include their launches where they \
are small | MIT |
| Dao-AILab/flash-attention, assets | FlashAttention 2 and 3, cuDNN | bar labels of its figures, read by eye | \
BSD-3-Clause |

## What was left out, and why

* Times no machine can reach: GEMMs and attention above 97% of the datasheet peak, memory-bound kernels \
above 97% of the bandwidth of the memory (their data was in the cache), messages faster than the links (copies inside \
one GPU).
* Two attention tables of the serving collection that imply thousands of TFLOP/s, and its runs whose weights were \
never filled (4-8% too fast), did not enter the collection.
* Other serving backends and versions of attention: kept are the kernels that training can use. Block-scaled fp8.
* The fused mixture-of-experts tables: routing, two grouped GEMMs and the activation in one time, of backends that \
differ by a factor of two; they are not grouped GEMMs.
* DeepEP on 8 nodes: 17 GB/s per GPU of 50, with 4 as with 24 multiprocessors, although a token goes to at most 4 \
nodes; others publish 28 to 44, and this collection reaches 44 on 4 nodes. On H200: measurements that equal those of \
H100 in every digit.
* Of estimate-train-time: GEMMs (their gradients reach 95% of the tensor cores' peak, as random operands do not) and \
attention, whose backward passes on GH200 are faster than the chip; backward passes of norms on GH200, equal to the forward \
ones; chains of eager kernels on less than 50 MB (softmax) and 250 MB (rotary embedding), which the host launches too slowly, \
and of softmax on more than 4 GB, where times on GH200 no longer grow.
* Measurements without a stated licence (supercomputer logs of ALCF, texts of issues and pull requests, a log of an unnamed \
Hopper) and share-alike ones (ml-engineering book). Constants fitted to them may be in `laws.inter_node`; they \
themselves are not.
* Repeats: measurements equal in all but their time are merged to the median; `spread` is their relative half range.
* Thinning, never by looking at a time: bf16 GEMMs keep all of m, n and k >= 512, and an evenly spread fifth of \
the rest; fp8 GEMMs a third of those and a thirtieth of the rest; model GEMMs 24 log-spaced m per (n, k), m >= \
128; attention all of seq >= 1024 with batch <= 8, and a third of the rest; collectives 40 log-spaced sizes per curve; \
memory-bound kernels 240 log-spaced sizes per kind.
* Evenly spread means: sorted by shape, measurement i stays where the fraction of i times the golden ratio is below the share.

## Conventions

* `bytes` of a collective is the whole buffer (all_gather output, reduce_scatter input). p2p of groups of more \
than two ranks are rings in which all ranks send at once.
* GEMMs: out[m, n], summed over k. TN forward, NN input gradient, NT weight gradient, as Transformer Engine calls \
them. fp8 times of GEMMs include the quantisation of the activation.
* `memory_bound` bytes are what an ideal fused kernel reads and writes: norm, row, act, softmax and embedding 2, residual 3, \
gated_act 3 values per element of their output, rope 2 per element of q and k; quantize 2 bytes in, 1 out; backward passes \
(`_grad`) 3 of norm, act and softmax. `row` is vLLM's RMSNorm, `norm_grad_torch` torch's own backward kernel, `_eager` a \
chain of kernels with the bytes of the fused one. row, norm, residual and embedding are not sharded by tensor parallelism here.
* `pass` of attention: forward, backward, or forward_backward where only their sum was published.
* The 40 GB A100 takes the measurements of the 80 GB part: without GEMMs that the memory limits, with memory-bound times \
multiplied by the ratio of the bandwidths (their source says so).
* `laws.intra_node`: seconds = latency + traffic * bytes / bandwidth by op and ranks, constants fitted by SimuMax; \
`bandwidth_all_groups`: bandwidth while all such groups of the node work across PCIe at once. `laws.memory_bound`: \
seconds = latency_s + bytes / bandwidth, where its `bytes` says how bytes are counted. On the A100-PCIe the method \
behind these two constants is not published.
* `expert_exchange`: `tokens` per rank; `row_bytes` of a row as sent (fp8 with one fp32 scale for 128 values). Seconds of \
DeepEP: transmit plus notify (the kernel that exchanges counts, 0 in one node). `intra` may be more than a node's GPUs: \
GB200, up to 36 ranks of one NVLink domain.
* Device facts are from datasheets; memory is what a CUDA program is offered.

## Measurements
"""


def sources_page(built: Sequence[tuple[Profile, Ledger]]) -> str:
    """Return the text of SOURCES.md for the profiles and the ledgers of what they left out."""
    return _PAGE + "".join(_profile_section(profile, ledger) for profile, ledger in built)


def _profile_section(profile: Profile, ledger: Ledger) -> str:
    lines = [f"\n### {profile.name}: {profile.device.name}\n"]
    lines += [f"* {note}" for note in profile.meta["notes"]]
    lines += ["", "| table | measurements | of which | licence |", "|---|---|---|---|"]
    licences: Mapping[str, str] = profile.meta["licences"]
    for op, table in profile.tables.items():
        by_repository = Counter[str]()
        for source, number in zip(*np.unique(table["source"], return_counts=True), strict=True):
            by_repository[str(source).partition(":")[0]] += int(number)
        shares = ", ".join(f"{name} {number:,}" for name, number in by_repository.most_common())
        terms = ", ".join(sorted({licences[name] for name in by_repository}))
        lines.append(f"| {op} | {len(table):,} | {shares} | {terms} |")
    if ledger.left_out:
        left_out = "; ".join(f"{table}: {number:,} {reason}" for (table, reason), number in ledger.left_out.items())
        lines += ["", f"Measurements left out: {left_out}."]
    return "\n".join(lines) + "\n"
