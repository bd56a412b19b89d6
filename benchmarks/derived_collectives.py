"""Compare collectives that are derived for GB200, GB300 and B300 with NCCL's measured ones, which no fit uses.

usage: python benchmarks/derived_collectives.py DIR    (of <device>__comm__nccl__<version>__nccl_perf.parquet, aiconfigurator's)
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import pandas as pd

from predictor.fitted import cost_model
from profiler.profile.profiles import find_profile
from profiler.published.nccl_rows import OPS
from solver.api import CACHE

DEVICES = {"gb200": "gb200", "gb300": "gb300", "b300_sxm": "b300"}  #: in file names -> profile
HALF, LEAST = 2, 1 << 20  #: bytes of an element; of the smallest message that counts


def errors(path: Path, profile: str) -> dict[str, np.ndarray]:
    """Return predicted over measured time minus one, by op, of messages of 1 MiB and more in half precision."""
    rows = pd.read_parquet(path)
    rows = rows[(rows["nccl_dtype"] == "half") & (rows["message_size"] * HALF >= LEAST)]
    collectives = cost_model(find_profile(profile)[0], cache_dir=CACHE).network.collectives
    found = {}
    for name, of_op in rows.groupby("op_name"):
        size, ranks = of_op["message_size"].to_numpy(float) * HALF, of_op["num_gpus"].to_numpy()
        predicted = collectives.predict(OPS[str(name)], size, ranks, np.ones(len(of_op), dtype=int)).seconds
        found[str(name)] = predicted / (of_op["latency"].to_numpy() * 1e-3) - 1
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("folder", type=Path, metavar="DIR")
    folder = parser.parse_args().folder
    print("| device, NCCL | op | rows | MAPE | mean (signed) |\n|---|---|---:|---:|---:|")
    for start, profile in DEVICES.items():
        for path in sorted(folder.glob(f"{start}__comm__nccl__*__nccl_perf.parquet")):
            for op, error in errors(path, profile).items():
                label = f"{profile}, {path.name.split('__')[3]}"
                print(f"| {label} | {op} | {len(error)} | {abs(error).mean():.1%} | {error.mean():+.1%} |")


if __name__ == "__main__":
    main()
