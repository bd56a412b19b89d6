"""Print the table of docs/networks.md: Llama 3 70B on 1,024 H100 on networks that were simulated, beside the measured one."""

from __future__ import annotations

from dataclasses import dataclass

from accuracy_tables import table

from solver.api import load_problem
from solver.report.describe import describe
from solver.report.explain import explain
from solver.search.search import SearchResult, search

WORLD, SEQUENCES, MODEL = 1024, 1024, "configs/models/llama3_70b.json"
#: What stands in the table -> --cluster.
NETWORKS = {
    "400 Gbit/s InfiniBand, measured": None,
    "Spectrum-X, 400 Gbit/s": "Spectrum-X -g 1024",
    "DCN+, 100 Gbit/s": "DCN+ -g 1024 -bw 100Gbps -apbw 100Gbps -app 16",
    "NVL72, 400 Gbit/s between racks": "NVL -g 1152 -gps 72 -gt H100",
}


@dataclass(frozen=True)
class Found:
    name: str
    result: SearchResult

    def exposed(self) -> float:
        """Return the share of the step in exposed communication."""
        parts = explain(self.result.best, 0).by_part()
        communication = [value for part, value in parts.items() if part.endswith("_exposed")]
        return (sum(communication) + parts["gradient_sync"] + parts["parameter_gather"] + parts["pp_transfer"]) / sum(
            parts.values()
        )


def main() -> None:
    found = []
    for name, cluster in NETWORKS.items():
        problem = load_problem(MODEL, WORLD, profile="h100_sxm", cluster=cluster, framework="megatron-core")
        found.append(Found(name, search(problem, SEQUENCES)))
        print(name, describe(found[-1].result.best, 0), flush=True)
    first = float(found[0].result.best.tgs[0])
    rows = []
    for one in found:
        best = one.result.best
        rows.append(
            [one.name, f"{best.tgs[0]:,.0f}", f"{best.tgs[0] / first - 1:+.1%}", f"{one.exposed():.1%}", describe(best, 0)]
        )
    print(table(["network", "TGS", "beside the first", "exposed communication", "best layout"], rows))


if __name__ == "__main__":
    main()
