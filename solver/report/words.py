"""Names of parts and units of time, as all reports print them."""

from __future__ import annotations

from profiler.units import GIB

HOUR, DAY = 3600.0, 86400.0  #: seconds

PART_NAMES = {
    "compute": "compute",
    "recompute": "recomputation",
    "tp_exposed": "exposed tensor-parallel communication",
    "cp_exposed": "exposed context-parallel communication",
    "wp_exposed": "exposed weight-parallel communication",
    "ep_exposed": "exposed exchange of expert tokens",
    "fsdp_exposed": "exposed ZeRO-3 all-gather and reduce-scatter",
    "offload_exposed": "activations on their way to and from the host",
    "amax": "exchange of largest values (FP8)",
    "pp_transfer": "pipeline send/recv",
    "bubble": "pipeline bubble",
    "gradient_accumulation": "gradient accumulation",
    "gradient_sync": "exposed gradient synchronisation",
    "parameter_gather": "exposed parameter all-gather",
    "optimizer": "optimizer and gradient norm",
    "stragglers": "waiting for the slowest rank",
}


def gibibytes(size: float, fits: bool) -> str:
    """Return the memory of a layout in GiB; ? where it may not fit."""
    return f"{size / GIB:.1f}{'' if fits else '?'}"


def parameter_count(count: float) -> str:
    """Return how many parameters a model has, in billions; a small model's in millions, and the smallest one's one by one."""
    if count >= 1e7:
        return f"{count / 1e9:.2f} B parameters"
    return f"{count / 1e6:.1f} M parameters" if count >= 1e5 else f"{count:,.0f} parameters"


def seconds(value: float, like: float | None = None) -> str:
    """Return a time with three significant digits, from microseconds to days; minutes begin at two, as hours and days do.

    like: a time whose unit is taken.
    """
    units = (("days", 2 * DAY, DAY), ("h", 2 * HOUR, HOUR), ("min", 120.0, 60.0), ("s", 1.0, 1.0), ("ms", 1e-3, 1e-3))
    for unit, least, scale in units:
        if abs(value if like is None else like) >= least:
            return f"{rounded(value / scale)} {unit}"
    return f"{rounded(value / 1e-6)} us"


def token_rate(per_gpu_second: float) -> str:
    """Return tokens per GPU and second: whole ones, of a slow machine three digits."""
    return f"{per_gpu_second:,.0f}" if per_gpu_second >= 100 else f"{per_gpu_second:.3g}"


def between(interval: tuple[float, float], like: float, word: str = "to") -> str:
    """Return the two ends of an interval, in the unit of the time that it is of."""
    return f" {word} ".join(seconds(end, like) for end in interval)


def probability(share: float) -> str:
    """Return a probability in percent; no estimate is certain."""
    return f"{share:.0%}" if 0.01 <= share <= 0.99 else "more than 99%" if share > 0.5 else "less than 1%"


def rounded(value: float) -> str:
    """Return a figure with three digits, or all whole ones."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
