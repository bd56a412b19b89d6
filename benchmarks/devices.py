"""Write docs/devices.md: the best layout of two models on 512 of each of several devices, and changes to a device.

usage: python benchmarks/devices.py
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from accuracy_tables import table

from profiler.files import write_text
from profiler.profile.derived import derived_profile
from profiler.profile.devices import DATASHEETS, Datasheet
from profiler.profile.profile import Profile
from profiler.profile.profiles import find_profile
from profiler.units import GIB
from solver.api import load_problem
from solver.report.describe import describe
from solver.report.explain import explain
from solver.report.words import PART_NAMES
from solver.search.laid_out import search_with_strings

ROOT = Path(__file__).resolve().parents[1]
WORLD, TOKENS, SEQ_LEN = 512, 4_194_304, 4096
DEVICES = ("h100_sxm", "h200_sxm", "b200_sxm", "gb200", "gb300", "mi300x", "mi355x")
MODELS: Mapping[str, str] = {"llama3_70b": "Llama 3 70B", "deepseek_v3": "DeepSeek-V3"}
HEAD = (
    "device",
    "kernels",
    "precision",
    "tokens/s per GPU",
    "90% interval",
    "per watt",
    "TFLOP/s",
    "GiB",
    "largest parts of the step",
    "layout",
)
TEXT = (0, 1, 2, 8, 9)  #: columns of words


_COSTS = (
    "## What a better figure changes\n",
    "More power, a higher peak, faster memory and faster links make no kernel slower in the physical models. The learnt",
    "corrections of GEMMs and attention read the regime that results, and may take back up to 5% of one kernel.\n",
    "* **Peak.** At the power limit a higher peak changes nothing, and the profile's note says so. A 16-bit peak that rises",
    "  alone says that the units of narrower formats have grown less than those of 16 bits: NVFP4 on a chip whose NVFP4 peak",
    "  had grown more than its 16-bit peak is then slower.",
    "* **Measured and derived.** A second laboratory timed B200's GEMMs 1.43 times as long as the first at full clocks, which",
    "  the measured profile takes over; devices derived from it take the median of laboratories, 1.154. B200 derived from",
    "  itself is so 12 to 20% faster than measured, and of what GB200, B300 and GB300 are above B200 that much is no",
    "  difference of the chips.",
    "* **Multiprocessors.** More of them at the same peak are slower ones, at a lower clock that draws less power. Chips at",
    "  their power limit sustain more of the peak so (the table above has an H100 with twice as many). A chip that has power",
    "  left only loses: a kernel of few tiles leaves more of them idle in its last wave.",
    "* **NVLink domain.** Collectives that stay inside it delay the compute beside them by all that they move; of those that",
    "  leave it only what passes inside the node does. A larger domain may so cost up to 1.4%, and 0.003% where all of it is",
    "  hidden. Of links that a PCIe tree shares it is another matter: a layout whose groups span 16 A100 PCIe of one domain",
    "  may take a sixth longer than on two domains of 8 with a network between them.\n",
)


def best_row(title: str, model: str, profile: Profile, sheet: Datasheet, precision: str, **cluster: int) -> list[str]:
    """Return the row of the best layout; raises InputError where none fits or the device cannot run the precision."""
    config = ROOT / "configs" / "models" / f"{model}.json"
    constants = {"seq_len": SEQ_LEN, "framework": "megatron-core", "precision": precision}
    problem = load_problem(config, WORLD, profile=profile, cluster=cluster, **constants)
    best = search_with_strings(problem, TOKENS // SEQ_LEN, 1, jobs=2)[1].best
    why, tokens = explain(best, 0), best.tokens[0] / WORLD
    low, high = why.interval
    parts = sorted(why.by_part().items(), key=lambda item: -item[1])[:3]
    bound = ", ".join(f"{PART_NAMES[name].removeprefix('exposed ')} {value / why.seconds:.0%}" for name, value in parts)
    origin = f"derived from {profile.derivation.kernels.name}" if profile.derivation else "measured"
    return [
        title,
        origin,
        precision,
        f"{best.tgs[0]:,.0f}",
        f"{tokens / high:,.0f} to {tokens / low:,.0f}",
        f"{best.tgs[0] / sheet.power:.2f}",
        f"{best.flops_per_second[0] / 1e12:,.0f}",
        f"{best.memory.device[0] / GIB:.0f}",
        bound,
        describe(best, 0).replace("|", "\\|").replace("*", "\\*"),
    ]


def rows_of(model: str) -> list[list[str]]:
    """Return a row for each device, in 16 bits and in the narrower format that trains on it."""
    asked = [(name, DATASHEETS[name], precision) for name in DEVICES for precision in ("bf16", narrow(DATASHEETS[name]))]
    return [best_row(name, model, find_profile(name)[0], sheet, precision) for name, sheet, precision in asked]


def narrow(sheet: Datasheet) -> str:
    return "mxfp8" if "mxfp8" in sheet.device.peak_flops else "fp8"


def what_ifs() -> list[list[str]]:
    """Return rows of an H100 with twice the memory bandwidth or multiprocessors, and of a GB200 with other NVLink domains."""
    h100, base = find_profile("h100_sxm")[0], DATASHEETS["h100_sxm"]
    twice = replace(base, device=replace(base.device, memory_bandwidth=2 * base.device.memory_bandwidth))
    wide = replace(base, device=replace(base.device, num_sms=2 * base.device.num_sms))
    chips = {
        "h100_sxm as itself": base,
        "h100_sxm with twice the memory bandwidth": twice,
        "h100_sxm with twice the multiprocessors at the same peak": wide,
    }
    rows = [
        best_row(f"{title}: {name}", model, derived_profile("chip", sheet, h100), sheet, "bf16")
        for title, sheet in chips.items()
        for model, name in MODELS.items()
    ]
    gb200, sheet = find_profile("gb200")[0], DATASHEETS["gb200"]
    title = "gb200, NVLink domain of {}: DeepSeek-V3"
    return rows + [best_row(title.format(n), "deepseek_v3", gb200, sheet, "bf16", nvlink_domain=n) for n in (4, 72, 576)]


def origins() -> list[list[str]]:
    """Return a row for each source other than its maker's datasheet, of every device: its figures and where they are from."""
    return [
        [name, ", ".join(key for key, source in sheet.sources.items() if source == text), text]
        for name, sheet in DATASHEETS.items()
        for text in dict.fromkeys(sheet.sources.values())
        if "datasheet" not in text
    ]


def page(tables: Mapping[str, Sequence[Sequence[str]]], changed: Sequence[Sequence[str]]) -> str:
    """Return the page as Markdown."""
    parts = [
        "# Two models on 512 of each device\n",
        f"Written by `make devices`: the fastest layout that fits, {TOKENS:,} tokens a step, sequences of {SEQ_LEN:,} tokens,",
        "Megatron-Core, each device's usual network. Per watt: tokens per second of one GPU over the limit of its power, not",
        "its host's. Derived devices were not measured ([fits.md](fits.md)); no step on AMD's was compared. Experts are",
        "predicted worse than dense models ([accuracy.md](accuracy.md)): read the intervals.\n",
    ]
    for model, rows in tables.items():
        parts += [f"## {MODELS[model]}\n", table(HEAD, rows, text=TEXT)]
    parts += [
        "## What if\n",
        "An H100 with twice the bandwidth of its memory, or twice the multiprocessors; a GB200 whose fastest links reach",
        "a host, a rack, or the whole job.\n",
        table(HEAD, changed, text=TEXT),
        *_COSTS,
        "## Figures that are not from a maker's datasheet\n",
        "All others are (`source` in `configs/devices`); rates count one direction, peaks no sparsity.\n",
        table(("device", "figures", "from"), origins(), text=(0, 1, 2)),
    ]
    return "\n".join(parts) + "\n"


def main() -> int:
    tables = {model: rows_of(model) for model in MODELS}
    write_text(ROOT / "docs" / "devices.md", page(tables, what_ifs()))
    print("wrote docs/devices.md")
    return 0


if __name__ == "__main__":
    sys.exit(main())
