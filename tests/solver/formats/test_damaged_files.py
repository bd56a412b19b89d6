"""Files of every format with lines lost, doubled or changed: they are read or refused with one sentence, and nothing else."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from round_trip import model_of

from profiler.errors import InputError
from solver.formats.config_file import load_run_config
from solver.formats.export import KINDS, Kind, exported
from solver.spec.frameworks import framework_of
from solver.spec.strategy import Strategy

_VALUES = ("-1", "0", "true", "null", "many", "[1, 2]", "{}", "1e400", "99999999999999999999", "''", "1.5", "{a: [b]}", "...")
_TIMES = 40


def damaged(text: str, chance: random.Random) -> str:
    """Return a text with one or two of its lines lost, doubled, cut short, or with another value."""
    lines = text.splitlines()
    for _ in range(chance.randint(1, 2)):
        at = chance.randrange(len(lines))
        line, how = lines[at], chance.randrange(5)
        if how == 0:
            del lines[at]
        elif how == 1:
            lines.insert(at, line)
        elif how == 2:
            lines[at] = line[: chance.randrange(len(line) + 1)]
        else:
            sign = next((sign for sign in ("=", ":", " ") if sign in line.strip()), " ")
            head, _, tail = line.partition(sign) if sign != " " else line.rpartition(" ")
            end = "," if tail.rstrip().endswith(",") else " \\" if tail.rstrip().endswith("\\") else ""
            lines[at] = f"{head}{sign}{chance.choice(_VALUES)}{end}"
        if not lines:
            return ""
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.what)
@pytest.mark.parametrize("model", ["llama3_8b", "deepseek_v3"])
def test_damaged_files_are_read_or_refused(kind: Kind, model: str, tmp_path: Path) -> None:
    name, ending = kind.frameworks[0], kind.ending
    if model == "deepseek_v3" and not (framework_of(name).can_run.experts and "Megatron" in kind.what):
        model = "llama2_7b"
    flags = {key: value for key, value in framework_of(name).flags_of("bf16").items() if key not in ("zero", "tp_comm_overlap")}
    run = Strategy(**{**flags, "world_size": 16, "dp": 16, "seq_len": 4096, "zero": 0, "framework": name})
    if name == "fsdp":
        run = run.replace(zero=3, zero_shard_size=16)
    if name.startswith("megatron-bridge"):
        run = run.replace(precision="fp8")
    files = exported(tmp_path / f"run{ending}", model_of(model), run, 8)
    chance, read = random.Random(11), 0
    for file, text in files.items():
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text(text)
    for _ in range(_TIMES):
        file = chance.choice(list(files))
        (tmp_path / file).write_text(damaged(files[file], chance))
        try:
            load_run_config(tmp_path / f"run{ending}")
            read += 1
        except InputError as error:
            assert "\n" not in str(error) and len(str(error)) > 20
        (tmp_path / file).write_text(files[file])
    assert 0 < read < _TIMES
