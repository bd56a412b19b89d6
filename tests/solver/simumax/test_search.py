"""SimuMax's searches honour every argument, and find what pricing one by one finds."""

from __future__ import annotations

import csv
import re
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from profiler.errors import InputError
from solver.simumax import PerfLLM

GIB = 2.0**30


def found(perf: PerfLLM, **changes: Any) -> tuple[dict[str, Any], dict[str, list[Any]]]:
    every: dict[str, list[Any]] = {}
    arguments = {
        "world_size": 8,
        "gmi_error": 10,
        "micro_batch_size": 1,
        "global_batch_size": 32,
        "all_search_result": every,
        "tp_search_list": [1, 2, 4],
        "ep_search_list": [1],
        "pp_search_list": [1, 2],
        "recompute_search_type": ["no_recompute"],
        "verbose": False,
    }
    return perf.search_best_parallel_strategy(**{**arguments, **changes}), every


def sizes(every: dict[str, list[Any]], name: str) -> set[int]:
    return {int(re.search(rf"[ .]{name}(\d+)", text)[1]) for text in every.get("parallelism", [])}  # type: ignore[index]


def test_finds_what_pricing_one_by_one_finds(configured: Any) -> None:
    perf = configured()
    best, every = found(
        perf, recompute_search_type=["no_recompute", "full_block"], tp_search_list=[1, 2], pp_search_list=[2, 3, 4]
    )
    expected = []
    for tp, pp, layers in product((1, 2), (2, 4), range(0, 17)):
        if layers > 32 // pp:
            continue
        other = configured(
            tp_size=tp,
            pp_size=pp,
            micro_batch_num=32 * tp * pp // 8,
            recompute_layer_num=layers,
            recompute_granularity="full_block" if layers else None,
        )
        other.run_estimate()
        peak = max(other.get_pp_stage_peak_mem(other.analysis_mem(), "peak_mem_with_reserved", toG=True).values())
        if peak <= 79.25 - 10:
            expected.append(other.analysis_cost()["duration_time_per_iter"])
    assert best["iter_time"] == pytest.approx(min(expected), rel=1e-12)
    assert sorted(every["iter_time"]) == pytest.approx(sorted(expected), rel=1e-12)  # pp 3 does not divide 8


def test_gmi_error_keeps_memory_free(configured: Any) -> None:
    perf = configured()
    peaks = []
    for free in (0, 10, 30, 45):
        _, every = found(perf, gmi_error=free, recompute_search_type="full_block", pp_search_list=[2])
        peaks.append([max(peak.values()) / GIB for peak in every["peak_mem_with_reserved"]])
        assert max(peaks[-1]) <= perf.system.memory / GIB - free
    assert len(peaks[0]) >= len(peaks[1]) >= len(peaks[2]) > len(peaks[3]) > 0
    for wrong in (-1, 80, True, "6"):
        with pytest.raises(InputError, match="gmi_error is"):
            found(perf, gmi_error=wrong)


def test_what_is_reserved_or_only_what_is_allocated(configured: Any) -> None:
    perf = configured()
    free = (perf.system.memory - 55e9) / GIB  # tp 1, pp 2 needs 54.7 GB, and 58.2 GB reserved
    _, reserved = found(perf, gmi_error=free)
    _, allocated = found(perf, gmi_error=free, use_reserved_memory=False)
    limit = perf.system.memory - free * GIB
    assert max(max(peak.values()) for peak in allocated["peak_mem"]) <= limit
    assert max(max(peak.values()) for peak in allocated["peak_mem_with_reserved"]) > limit
    assert len(allocated["iter_time"]) > len(reserved["iter_time"])


def test_lists_restrict(configured: Any) -> None:
    _, every = found(configured(), tp_search_list=[4, 8], pp_search_list=[1], micro_batch_size=2, global_batch_size=16)
    assert (sizes(every, "tp"), sizes(every, "pp"), sizes(every, "mbs"), sizes(every, "gbs")) == ({4, 8}, {1}, {2}, {16})
    _, every = found(configured(), tp_search_list=None, pp_search_list=None, world_size=16)
    assert (sizes(every, "tp"), sizes(every, "world_size:"), sizes(every, "ep")) == ({1, 2, 4, 8}, {16}, {1})
    assert {1, 2, 4, 8} <= sizes(every, "pp") <= set(range(1, 33))


def test_experts_are_not_split_where_there_are_none(configured: Any) -> None:
    with_etp, without = (found(configured(), use_etp=use)[1] for use in (True, False))
    assert with_etp["iter_time"] == without["iter_time"]


def test_layers_that_do_not_divide(configured: Any) -> None:
    _, every = found(configured(), world_size=24, global_batch_size=24, tp_search_list=[2], pp_search_list=[3], gmi_error=0)
    assert sizes(every, "pp") == {3}  # 11, 11 and 10 of 32 layers


def test_experts(configured: Any) -> None:
    perf = configured("mixtral_small", tp_size=1)
    _, every = found(perf, tp_search_list=None, ep_search_list=None, pp_search_list=[1])
    assert (sizes(every, "tp"), sizes(every, "ep"), sizes(every, "etp")) == ({1}, {1, 2, 4, 8}, {1})
    _, every = found(perf, tp_search_list=[1, 2], ep_search_list=[2, 4], pp_search_list=[1], use_etp=True)
    assert (sizes(every, "ep"), sizes(every, "etp")) == ({2, 4}, {1, 2})


def test_types_of_recomputation(configured: Any, capsys: pytest.CaptureFixture[str]) -> None:
    perf = configured(recompute_granularity="sdp_only", recompute_layer_num=7)
    one = {"tp_search_list": [4], "pp_search_list": [2]}
    assert set(found(perf, **one)[1]["recompute_status"]) == {"No Recompute"}
    full = found(perf, **one, recompute_search_type="full_block")[1]["recompute_status"]
    assert set(full) == {f"full_block, recompute_layer_num={count}" for count in range(1, 17)}
    own = found(perf, **one, recompute_search_type=["layer_only"])[1]["recompute_status"]
    assert set(own) == {"No Recompute", *(f"sdp_only, recompute_layer_num={count}" for count in range(1, 17))}
    chosen = found(perf, **one, recompute_search_type=["selective_recompute"])[1]["recompute_status"]
    assert len(set(chosen)) == 3
    assert all(text.startswith("selective_recompute, recompute_layer_num=16, attn_recompute=") for text in chosen)
    perf = configured("mixtral_small", tp_size=1)
    _, every = found(perf, ep_search_list=[4], recompute_search_type=["selective_recompute"], verbose=True)
    assert all("mlp_recompute=False" in text for text in every["recompute_status"])
    assert "strategies rejected: strategy field mlp_recompute" in capsys.readouterr().out
    with pytest.raises(InputError, match="recompute_search_type 'all' is not known"):
        found(perf, recompute_search_type="all")


def test_the_search_leaves_the_configuration_as_it_is(configured: Any) -> None:
    perf = configured()
    before = perf.strategy.to_dict()
    found(perf)
    perf.search_max_micro_batch_size()
    assert perf.strategy.to_dict() == before
    assert PerfLLM.search_best_parallel_strategy_with_recompute is PerfLLM.search_best_parallel_strategy


def test_dump(configured: Any, tmp_path: Path) -> None:
    best, every = found(configured(), dump_path=tmp_path)
    stem = "llama3_8b_a100_pcie_80gb_seqlen4096_worldsize8_gbs32"
    for name, rows in (("best_strategy", 1), ("all_search_strategies", len(every["iter_time"]))):
        with (tmp_path / f"{stem}_{name}.csv").open() as file:
            read = list(csv.DictReader(file))
        assert len(read) == rows
        assert float(read[0]["iter_time"]) == best["iter_time"]
    assert (tmp_path / "best_strategy_costs" / "strategy_config.json").exists()


def test_nothing_fits_or_divides(configured: Any) -> None:
    assert found(configured(), gmi_error=79) == ({}, {})
    with pytest.raises(InputError, match="no sizes of the lists divide world_size 8"):
        found(configured(), tp_search_list=[3])
    for name in ("tp_search_list", "pp_search_list"):
        for wrong in ([], "12", [0], [1.5], 2):
            with pytest.raises(InputError, match=name):
                found(configured(), **{name: wrong})
    with pytest.raises(InputError, match="world_size is 0"):
        found(configured(), world_size=0)


def test_batch_search(configured: Any) -> None:
    perf = configured(strategy="tp1_pp2_dp4_mbs1", tp_size=2)
    arguments = {"pp_size": 2, "dp_size": 2, "global_batch_size": 32, "gmi_error": 0, "verbose": False}
    mbs, mbn, peaks, costs = perf.search_max_micro_batch_size_fixed_gbs(**arguments)
    assert mbs == sorted(mbs, reverse=True)
    assert mbs[0] > 1 == mbs[-1]
    assert all(size * count * 2 == 32 and count >= 2 for size, count in zip(mbs, mbn, strict=True))
    assert len(costs) == len(peaks) == len(mbs)
    assert max(peaks[0].values()) > max(peaks[-1].values())
    half = perf.search_max_micro_batch_size_fixed_gbs(**arguments, memory_utils=0.5)
    assert half[0] == [
        size for size, peak in zip(mbs, peaks, strict=True) if max(peak.values()) <= perf.system.memory / GIB / 2
    ]
    assert perf.search_max_micro_batch_size_fixed_gbs(**arguments, save_all=False)[0] == mbs[:1]
    with pytest.raises(InputError, match="dp_size is 4, but the strategy's is 2"):
        perf.search_max_micro_batch_size_fixed_gbs(**{**arguments, "dp_size": 4})
    with pytest.raises(InputError, match="memory_utils is 0"):
        perf.search_max_micro_batch_size_fixed_gbs(**arguments, memory_utils=0)


def test_largest_micro_batch(configured: Any) -> None:
    perf = configured(micro_batch_num=1)
    size, peak = perf.search_max_micro_batch_size(micro_batch_num=1)
    assert peak <= perf.system.memory
    for other, fits in ((size, True), (size + 1, False)):
        perf.strategy.micro_batch_size = other
        perf.run_estimate()
        assert (perf.analysis_mem()["peak_mem"] <= perf.system.memory) == fits
    huge = configured()
    huge.model_config.layer_num = 300
    assert huge.search_max_micro_batch_size() == (0, 0.0)
