"""Files that AICB and SimAI-Analytical wrote (tests/data/simai/WORKLOADS.md), and small workloads for hand-worked cases."""

from __future__ import annotations

import csv
import gzip
from collections.abc import Iterator
from pathlib import Path

from solver.simai.collective_time import Machine
from solver.simai.workload_text import TextWorkload, parse_workload_text

DATA = Path(__file__).parent / "data" / "simai"
TEXTS = sorted(path.name.removesuffix(".txt.gz") for path in (DATA / "simai_workload").glob("*.gz"))
TABLES = sorted(path.name.removesuffix(".csv.gz") for path in (DATA / "workload_csv").glob("*.gz"))
HEADER = "HYBRID_TRANSFORMER_FWD_IN_BCKWD model_parallel_NPU_group:"
MACHINE = Machine(gpus=8, nics=8, nvlink=360.0, nic=48.5)
#: Workload of each analytical result that is not called like it.
_OF_CASE = {
    "gpt7b_tp2_aiobExample_A100nic23.5": "gpt7b_tp2_pp1_ws4096_gbs8192_seq4096_aiobExample",
    "gpt7b_tp2_aiobExample_dpo0.8_tpo0.5": "gpt7b_tp2_pp1_ws4096_gbs8192_seq4096_aiobExample",
    "gpt13b_tp4_ws4_aiobExample": "gpt13b_tp4_pp1_ws4_gbs2_seq4096_aiobExample",
    "gpt175b_tp8_pp8_sp_aiobExample": "gpt175b_tp8_pp8_ws128_gbs32_seq2048_sp_aiobExample",
    "gpt175b_tp8_pp8_sp_aiobExample_ppo0.5": "gpt175b_tp8_pp8_ws128_gbs32_seq2048_sp_aiobExample",
    "mixtral_tp2_ep8_sp_aiobExample": "mixtral8x7b_tp2_ep8_ws128_gbs128_seq2048_sp_aiobExample",
    "deepseek16b_sp_aiobExample": "deepseek16b_tp1_ep16_ws2048_gbs4096_seq4096_sp_aiobExample",
    "example_workload_analytical_A100": "example_workload_analytical",
}


def unpacked(path: Path) -> str:
    return gzip.decompress(path.read_bytes()).decode()


def text_of(name: str) -> str:
    return unpacked(DATA / "simai_workload" / f"{name}.txt.gz")


def table_of(name: str) -> str:
    return unpacked(DATA / "workload_csv" / f"{name}.csv.gz")


def analytical_cases() -> Iterator[tuple[str, str, list[str]]]:
    """Yield (case, name of its workload, arguments) of every result of SimAI-Analytical."""
    with (DATA / "analytical" / "arguments.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            yield row["case"], _OF_CASE.get(row["case"], row["case"]), row["args"].split()


def result_of(case: str) -> str:
    return unpacked(DATA / "analytical" / f"{case}-EndToEnd.csv.gz")


def small(
    *rows: str, tp: int = 2, ep: int = 1, pp: int = 1, vpp: int = 1, ga: int = 1, gpus: int = 16, rest: str = ""
) -> TextWorkload:
    """Return a workload of a few rows."""
    first = f"{HEADER} {tp} ep: {ep} pp: {pp} vpp: {vpp} ga: {ga} all_gpus: {gpus} {rest}"
    return parse_workload_text("\n".join([first, str(len(rows)), *rows]), "small.txt")
