"""Three lines for scripts and notebooks: the numbers of a search, tables, pictures, files."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from profiler.errors import InputError
from solver import Answer, best_layout, explain, load_problem, search
from solver.formats.config_file import load_run_config
from solver.report.describe import describe


@pytest.fixture(scope="module")
def answer() -> Answer:
    return best_layout("llama3_8b", 64, framework="megatron-core", global_batch_tokens=1_048_576, top=3)


def test_numbers_are_those_of_a_search(answer: Answer) -> None:
    problem = load_problem("configs/models/llama3_8b.json", 64, framework="megatron-core")
    best = search(problem, 256, 3).best
    assert (answer.tgs, answer.seconds) == (float(best.tgs[0]), float(best.times.seconds[0]))
    assert answer.interval == explain(best, 0).interval and answer.memory_bytes == float(best.memory.device[0])
    assert answer.layout == best.layouts.strategy(0, problem.run) and answer.fits == (best.verdict(0) == "FITS")
    assert answer.layout.tp * answer.layout.cp * answer.layout.pp * answer.layout.dp == 64


def test_names_files_and_numbers_of_numpy_are_as_good(answer: Answer) -> None:
    problem = load_problem("llama3_8b", np.int64(64), framework="megatron-core")
    assert problem.model == load_problem("configs/models/llama3_8b.json", 64, framework="megatron-core").model
    assert problem.run.world_size == 64 and type(problem.run.world_size) is int
    assert float(search(problem, np.int32(256), 1).best.tgs[0]) == answer.tgs
    with pytest.raises(InputError, match="no model is called 'llama3_8c'"):
        load_problem("llama3_8c", 64)
    with pytest.raises(InputError, match="a config is .* it must be a file, a shipped model's name, or a RunConfig"):
        load_problem({"hidden_size": 64}, 64)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="world_size is 8.0; it must be a whole number"):
        load_problem("llama3_8b", 8.0)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="a cluster is a list; it must be a name under configs/clusters, a file, or a mapping"):
        load_problem("llama3_8b", 8, cluster=[1])  # type: ignore[arg-type]
    with pytest.raises(InputError, match="a profile is 3; it must be a name"):
        load_problem("llama3_8b", 8, profile=3)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="precision fp8 does not run on NVIDIA A100.*, whose number formats are bf16, fp16"):
        load_problem("llama3_8b", 8, profile="a100_sxm_80gb", precision="fp8")
    for wrong in ({"top": True}, {"jobs": 1.0}, {"fixed": {3: 2}}):
        with pytest.raises(InputError, match="top is True|jobs is 1.0|3 is no axis of a search"):
            search(problem, 256, **wrong)  # type: ignore[arg-type]


def test_tables(answer: Answer) -> None:
    pytest.importorskip("pandas")
    frame = answer.to_frame()
    plain = json.loads(json.dumps(answer.to_dict()))
    assert list(frame["step_s"]) == [one["step_s"] for one in plain["best"]] and len(frame) == 3
    assert frame["tp"][0] == answer.layout.tp and frame["verdict"][0] == plain["best"][0]["verdict"]
    assert plain["profile"].startswith("profile: h100_sxm")


def test_it_shows_itself(answer: Answer) -> None:
    console = Console(width=150, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(answer)
    text = console.export_text()
    assert f"{answer.tgs:,.0f} tokens/GPU/s" in text and "Why:" in text
    page = answer._repr_html_()
    assert page.startswith("<pre") and f"{answer.tgs:,.0f} tokens/GPU/s" in page and repr(answer).startswith("<Answer: ")
    assert repr(answer).endswith(f"{answer.best.verdict(0)}: {describe(answer.best, 0)}>")


def test_pictures_are_figures(answer: Answer, tmp_path: Path) -> None:
    for number, figure in enumerate((answer.plot(), answer.plot_stages(), answer.plot_step(), answer.plot_memory())):
        path = tmp_path / f"{number}.png"
        figure.savefig(path)
        assert path.read_bytes().startswith(b"\x89PNG") and figure.axes[0].get_xlabel()


def test_files(answer: Answer, tmp_path: Path) -> None:
    script, page = tmp_path / "run.sh", tmp_path / "out.html"
    answer.export(script)
    answer.report(page)
    with pytest.raises(InputError, match="out.pdf: the file must end in .html"):
        answer.report(tmp_path / "out.pdf")
    config = load_run_config(script)
    assert (config.layout["tp"], config.layout["pp"]) == (answer.layout.tp, answer.layout.pp)
    assert f"{answer.tgs:,.0f} tokens per GPU" in page.read_text()
    rival = answer.decision().rivals
    assert float(rival.times.seconds[0]) == pytest.approx(answer.seconds)


def test_what_is_launched_is_sure_to_fit_where_that_costs_nothing(tmp_path: Path) -> None:
    """As of foretrain search: micro batches of 2 may not fit, of 1 take 0.2% longer."""
    risky = best_layout("llama3_8b", 32, framework="nemo-24", global_batch_tokens=4_194_304)
    sure = risky.to_dict()["sure_to_fit"]
    assert not risky.fits and risky.layout.micro_batch_size == 2 and sure["layout"]["micro_batch_size"] == 1
    assert 1 < sure["step_s"] / risky.seconds < 1.01 and sure["memory_bound_bytes"] < risky.best.problem.cluster.memory_bytes
    script, page = tmp_path / "run.yaml", tmp_path / "out.html"
    risky.export(script)
    risky.report(page)
    assert load_run_config(script).layout["micro_batch_size"] == 1
    text = page.read_text()
    assert "micro_batch_size: 1\n" in text and "micro_batch_size: 2\n" not in text and "Sure to fit, +0.2% step time" in text


def test_a_device_and_a_cluster_that_contradict_each_other() -> None:
    asked = {"framework": "megatron-core", "global_batch_tokens": 1_048_576, "top": 1}
    with pytest.raises(InputError, match="the profile is h100_sxm, but the cluster is of a100_sxm_80gb; leave one out"):
        best_layout("llama3_8b", 64, profile="h100_sxm", cluster="dgx_a100", **asked)
    as_named = best_layout("llama3_8b", 64, as_device="h800_sxm", **asked)
    assert as_named.seconds == best_layout("llama3_8b", 64, profile="h800_sxm", **asked).seconds
    from_file = best_layout("llama3_8b", 64, as_device="configs/devices/h800_sxm.json", **asked)
    assert from_file.interval == as_named.interval


def test_ways_to_ask() -> None:
    by_file = best_layout("configs/7B_internlm2.py", 16, cluster="a100_50g", global_batch_sequences=64, fixed={"tp": 4}, top=1)
    assert by_file.layout.tp == 4 and "a100_sxm_80gb" in by_file.profile_text
    with pytest.raises(InputError, match="no model is called 'llama9'"):
        best_layout("llama9", 8, global_batch_sequences=64)
    with pytest.raises(InputError, match="give the global batch either as"):
        best_layout("llama3_8b", 8)
