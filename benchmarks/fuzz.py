"""``make fuzz``: thousands of damaged inputs of the command; each must be answered or refused with one sentence, quickly.

    python benchmarks/fuzz.py --inputs 2000 --seed 0

An input is a set of files (a model, a layout, a cluster, an InternEvo config, a file of cases, a profile, a log of nccl-tests)
and options, in which some values were replaced by odd ones, keys were renamed or removed, or characters were changed. A defect
is a traceback, an exit status other than 0 and 2, a message of several lines or of control characters, a result that is not
finite and positive, or an answer that takes longer than SECONDS. Defects are printed with the input that made them; the exit
status is 1 if there are any.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import random
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

from gen_profiler_data import main as measuring
from profiler.profile.devices import DEVICES
from profiler.profile.profile import TABLE_COLUMNS, Profile, Table
from profiler.profile.store import plain_profile, read_profile
from solver.commands.command_line import main as command
from solver.commands.console import main as console
from solver.options.terminal_run import run as guarded

SECONDS = 20.0
SENTENCE = ("error: ", "usage: ", "gen_profiler_data.py: ", "warning: ")  #: how what the commands say begins
IMPORT = ("--import-nccl-tests",)
ROOT = Path(__file__).resolve().parent.parent
MODEL = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8, "num_attention_heads": 8,
         "num_key_value_heads": 4, "vocab_size": 32000}  # fmt: skip
LLAMA = {
    **MODEL,
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "max_position_embeddings": 4096,
    "rope_theta": 1e4,
}
LAYOUT = {"tp": 2, "pp": 2, "zero": 1, "micro_batch_size": 2, "num_micro_batches": 4, "seq_len": 2048,
          "framework": "megatron-core", "recompute": "full", "recompute_layers": 2, "precision": "bf16"}  # fmt: skip
#: Further keys of a layout, one of which each odd layout has.
MORE: tuple[dict[str, Any], ...] = (
    {"schedule": "interleaved", "vpp": 2}, {"schedule": "zb-v", "vpp": 2, "framework": "torchtitan"},
    {"schedule": "v-min", "vpp": 2, "framework": "generic"}, {"pipeline_layout": "Et*3|(tt|)*2tL", "vpp": 2},
    {"recompute": "selective", "recompute_modules": "layernorm+mlp"}, {"optimizer_offload_fraction": 0.5},
    {"offload_layers": 2, "pp": 1, "recompute": "none"}, {"cp": 2, "cp_comm": "a2a+ring", "cp_a2a_size": 2},
    {"document_lengths": "512:3+2048:1"}, {"optimizer_states": "8bit"},
    {"cross_entropy_fusion": True, "cross_entropy_fusion_impl": "linear", "framework": "generic"},
)  # fmt: skip
SCRIPT = (
    "torchrun --nnodes 2 --nproc-per-node 8 pretrain_gpt.py --num-layers 8 --hidden-size 512 --num-attention-heads 8 "
    "--seq-length 2048 --max-position-embeddings 2048 --micro-batch-size 2 --global-batch-size 64 --bf16 --vocab-size 32000 "
    "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --pipeline-model-parallel-layout 'Et*4|t*4L' "
    "--sequence-parallel --recompute-granularity selective --recompute-modules 'layernorm mlp' --use-distributed-optimizer"
)
CLUSTER = {"hardware": "h100_sxm", "gpus_per_node": 8, "inter_node_gbit_per_gpu": 400, "memory_gib": 80,
           "host_link_gb_s": 50, "host_memory_gb_s": 40}  # fmt: skip
CASE = {"id": "x-1", "hardware": "h100_sxm", "cluster": {"inter_node_gbit_per_gpu": 400}, "model": MODEL,
        "run": {**LAYOUT, "world_size": 16}, "measured": {"step_s": 1.0, "peak_memory_gib": 10.0}}  # fmt: skip
OPTIONS = {"--world_size": "16", "--seq_len": "2048", "--global_batch_size": "131072", "--memory_limit_gib": "80", "--top": "3",
           "--framework": "megatron-core", "--fix": "tp=2"}  # fmt: skip
ODD: tuple[Any, ...] = (
    0, -1, 1, 2, 3, 7, 2.5, 1e308, -1e308, float("nan"), float("inf"), 2**31, 2**53, 2**63, 2**65, 10**40, 10**400, True, False,
    None, "", "8", "x", "\x1b[31m", "a\nb", "\0", "é" * 500, "none", "full", [], [1], {}, {"a": 1}, [[[]]],
)  # fmt: skip


@dataclass(frozen=True)
class Defect:
    """What was wrong, and the input that showed it."""

    what: str
    files: dict[str, str | bytes]
    arguments: tuple[str, ...]


def odd_object(plain: dict[str, Any], chance: random.Random) -> dict[str, Any]:
    """Return a copy in which one to three values, keys or objects inside are odd."""
    found: dict[str, Any] = json.loads(json.dumps(plain))
    for _ in range(chance.randint(1, 3)):
        target = found
        while (inner := [value for value in target.values() if isinstance(value, dict) and value]) and chance.random() < 0.7:
            target = chance.choice(inner)
        if not target:
            break
        key = chance.choice(list(target))
        action = chance.random()
        if action < 0.7:
            target[key] = chance.choice(ODD)
        elif action < 0.85:
            target[chance.choice(["num_experts", "sliding_window", "x" * 200, "", key.upper(), key + "s"])] = target.pop(key)
        else:
            del target[key]
    return found


def odd_text(plain: dict[str, Any], chance: random.Random) -> str:
    """Return the JSON of an odd object; sometimes with damaged characters."""
    text = json.dumps(odd_object(plain, chance))
    if chance.random() < 0.2:
        place = chance.randrange(len(text))
        text = text[:place] + chance.choice(["", '"', "{", "}" * 50, "[" * 2000, ",", "\0", "9" * 5000]) + text[place + 1 :]
    return text


def odd_python(chance: random.Random) -> str:
    """Return InternEvo's shipped config with some lines or words changed."""
    lines = (ROOT / "configs" / "7B_internlm2.py").read_text(encoding="utf-8").splitlines()
    for _ in range(chance.randint(1, 4)):
        place = chance.randrange(len(lines))
        words = [
            "import os",
            "x = 2 ** 10 ** 10",
            "data = dict(",
            "HIDDEN = -1",
            "model['hidden_size'] = 0",
            "}",
            "a = [0] * 10 ** 9",
        ]
        lines[place] = chance.choice(
            [chance.choice(words), lines[place].replace("=", "= -", 1), lines[place][: len(lines[place]) // 2], ""]
        )
    return "\n".join(lines)


def odd_script(chance: random.Random) -> str:
    """Return a script that launches Megatron-LM with one to three words changed, lost, or given twice."""
    words = SCRIPT.split(" ")
    odd = ["$TP", "--bf16", "-1", "0", "x", "'", "1e400", "--no-such-flag", "Et|", "(t|)*9999L", "\\", "#", "9" * 30, "é", ""]
    odd += ["\nfor", "eval", "bash -c", 'sh -c "', "\n((", "&& [[", "A[1]=2;", "A=(", "f() {", "\nif", "mpirun -np",
            "srun -n 16", "mpirun -np " + "9" * 5000]  # fmt: skip
    for _ in range(chance.randint(1, 3)):
        place = chance.randrange(len(words))
        words[place] = chance.choice([chance.choice(odd), f"{words[place]} {words[place]}", ""])
    return " ".join(words)


def odd_profile(chance: random.Random) -> bytes:
    """Return a small profile with odd values in its tables or facts, or with damaged bytes."""
    sizes = {"m": 64, "n": 64, "k": 64, "batch": 1, "bytes": 1 << 20, "intra": 8, "inter": 1, "seq_q": 64, "seq_kv": 64,
             "heads": 4, "kv_heads": 4, "head_dim": 64, "v_head_dim": 64}  # fmt: skip
    tables = {}
    for op in ("linear", "flash_attn", "all_reduce", "memory_bound"):
        names = [name for name in TABLE_COLUMNS[op] if name in sizes]
        columns = {
            name: np.full(12, sizes[name]) * (np.arange(12) + 1 if name in ("m", "bytes", "seq_q") else 1) for name in names
        }
        words = {"layout": "TN", "kind": "norm", "pass": "forward", "dtype": "bf16", "kernel": "fa3"}
        columns |= {name: word for name, word in words.items() if name in TABLE_COLUMNS[op]}  # type: ignore[dict-item]
        tables[op] = Table.from_columns(op, {**columns, "seconds": np.linspace(1e-4, 1e-3, 12)})
    plain = plain_profile(Profile("fuzzed", DEVICES["h100_sxm"], tables, {"laws": {}}), torch.from_numpy)
    objects: list[dict[str, Any]] = [plain, plain["meta"], plain["meta"]["device"], plain["tables"]]
    for _ in range(chance.randint(1, 2)):
        if chance.random() < 0.4:
            target = chance.choice(objects)
            target[chance.choice([*target, "x"])] = chance.choice(ODD)
            continue
        table = chance.choice([values for values in objects[3].values() if isinstance(values, dict)] or [{}])
        column = chance.choice([name for name, values in table.items() if hasattr(values, "shape")] or [""])
        if column:
            values = table[column].double()
            values[chance.randrange(len(values))] = chance.choice(
                [0, -1, 0.5, 1e30, 2.0**31, float("nan"), float("inf"), 1e-30]
            )
            table[column] = values
    file = io.BytesIO()
    torch.save(plain, file)
    content = bytearray(file.getvalue())
    for _ in range(chance.choice([0, 0, 0, 1, 5])):
        content[chance.randrange(len(content))] = chance.randrange(256)
    return bytes(content[: chance.choice([None, None, None, chance.randrange(len(content))])])


def odd_log(chance: random.Random) -> str:
    """Return a log of nccl-tests with some words of its lines changed."""
    ranks = "".join(
        f"#  Rank {r} Group 0 Pid {r} on n{r // 4} device {r % 4} [0000:{r % 4}:00] NVIDIA H100\n" for r in range(8)
    )
    rows = "".join(f"{1 << p} {1 << (p - 1)} half sum -1 {40 + p} 1 1 0 {40 + p} 1 1 0\n" for p in range(10, 30))
    lines = f"# nThread 1 nGpus 1 minBytes 1 maxBytes 2 step: 2 iters: 20\n{ranks}{rows}# Avg bus bandwidth : 1\n".splitlines()
    for _ in range(chance.randint(1, 6)):
        place = chance.randrange(len(lines))
        words = lines[place].split(" ")
        words[chance.randrange(len(words))] = str(chance.choice(ODD)).replace("\n", " ")
        lines[place] = " ".join(words)
    return "\n".join(lines)


def read(arguments: Sequence[str]) -> int:
    """Read a profile as the command does."""

    def reading(_: object) -> None:
        read_profile(arguments[0])

    return guarded(reading)


def odd_question(chance: random.Random) -> list[str]:
    """Return a command of the console: what fits, or a comparison with an odd side."""
    if chance.random() < 0.5:
        return ["fit"]
    plain = {"tp": "2", "pp": "2", "micro_batch_size": "2", "recompute": "full", "world_size": "32", "profile": "h200_sxm",
             "precision": "fp8", "seq_len": "1024", "num_micro_batches": "4"}  # fmt: skip
    side = dict(chance.sample(list(plain.items()), 2))
    if chance.random() < 0.5:
        side[chance.choice(list(side))] = str(chance.choice(ODD)).replace("\0", "")
    return ["compare", ".", ",".join(f"{name}={value}" for name, value in side.items())]


def odd_input(chance: random.Random) -> tuple[dict[str, str | bytes], list[str]]:
    """Return (files by name, arguments that name them)."""
    share = chance.random()
    if share < 0.06:
        return {"all_reduce.log": odd_log(chance)}, [*IMPORT, "all_reduce.log", "--output", ".", "--profile", "h100_sxm"]
    if share < 0.2:  # fitting one takes seconds, so most are only read
        fitted = ["--config", "model.json", "--world_size=16", "--json", "out.json", "--pre_profiling_data_path", "data.pt"]
        return {"data.pt": odd_profile(chance), "model.json": json.dumps(MODEL)}, fitted if share < 0.063 else ["data.pt"]
    options = {name: value for name, value in OPTIONS.items() if chance.random() < 0.4}
    files: dict[str, str | bytes] = {}
    kind = chance.choice(["model", "llama", "layout", "python", "cluster", "cases", "options", "script"])
    if kind == "cases":
        files["cases.jsonl"] = "\n".join(odd_text(CASE, chance) for _ in range(chance.randint(1, 3)))
        return files, ["--validate", "cases.jsonl"]
    if kind in ("model", "llama"):
        files["model.json"] = odd_text(MODEL if kind == "model" else LLAMA, chance)
    elif kind == "layout":
        files["model.json"] = odd_text({"name": "m", "model": MODEL, "layout": {**LAYOUT, **chance.choice(MORE)}}, chance)
    elif kind == "script":
        files["model.sh"] = odd_script(chance)
    elif kind == "python":
        files["model.py"] = odd_python(chance)
    else:
        files["model.json"] = json.dumps(MODEL)
    arguments = ["--config", next(iter(files))]
    if kind == "cluster":
        files["cluster.json"] = odd_text(CLUSTER, chance)
        arguments += ["--cluster", "cluster.json"]
    if kind == "options" and options:
        name = chance.choice(list(options))
        options[name] = str(chance.choice(ODD)).replace("\0", "")
    if chance.random() < 0.2:
        return files, [*odd_question(chance), *arguments, "--world_size=16", "--json", "out.json"]
    if chance.random() < 0.2:
        arguments.append("--balance")
    if chance.random() < 0.1:
        arguments += ["--export", "out.sh"]
    if chance.random() < 0.3:
        arguments.append("--run_all_solu")
    else:
        options.pop("--fix", None)
    options.setdefault("--world_size", "16")
    return files, [*arguments, *(f"{name}={value}" for name, value in options.items()), "--json", "out.json"]


def trouble(status: int | None, seconds: float, errors: str, result: str) -> str:
    """Return what is wrong with an answer, or "" if nothing is."""
    if status not in (0, 2):
        return f"exit status {status}"
    if seconds > SECONDS:
        return f"took {seconds:.0f} s"
    if "Traceback" in errors:
        return f"a traceback: {errors.strip().splitlines()[-1][:120]}"
    message = errors.strip()
    if status == 2 and not message.startswith(SENTENCE):
        return f"no sentence: {message[:80]!r}"
    sentence = status == 2 and not message.startswith("usage: ")
    if sentence and (len(message) > 1500 or any(ord(c) < 32 for c in message)):
        return f"a message of {len(message)} characters, or with control characters"
    content = json.loads(result) if result else {}
    sides = (side["best"][0] for side in content.get("sides", []))
    for best in (*content.get("best", []), *sides):
        figures = best["step_s"], best["tgs"], best["peak_memory_bytes"], best["mfu"]
        if not all(0 < figure < 1e30 for figure in figures) or best["mfu"] > 1.0:
            return f"figures {figures}"
    return ""


@contextlib.contextmanager
def inside(folder: str) -> Iterator[None]:
    """Work in ``folder`` (contextlib.chdir is of Python 3.11)."""
    before = os.getcwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def run(files: dict[str, str | bytes], arguments: Sequence[str], main: Callable[[Sequence[str]], int] | None = None) -> str:
    """Run the command on the files in a folder of their own; return what is wrong with the answer."""
    out, errors, start = io.StringIO(), io.StringIO(), time.perf_counter()
    with tempfile.TemporaryDirectory() as folder, inside(folder), contextlib.ExitStack() as patches:
        for name, text in files.items():
            Path(name).write_bytes(text if isinstance(text, bytes) else text.encode("utf-8", "replace"))
        if "data.pt" in files:  # fits of odd profiles are not kept
            patches.enter_context(mock.patch("solver.api.CACHE", Path(folder)))
        asked = console if {"fit", "compare"} & {*arguments[:1]} else command
        main = main or (measuring if IMPORT[0] in arguments else read if len(arguments) == 1 else asked)
        status: int | None = None
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
            try:
                status = main(arguments)
            except SystemExit as stop:
                status = stop.code if isinstance(stop.code, int) else None
            except Exception:
                errors.write(traceback.format_exc())
                status = 2
        result = Path("out.json")
        return trouble(status, time.perf_counter() - start, errors.getvalue(), result.read_text() if result.exists() else "")


def fuzz(inputs: int, seed: int) -> list[Defect]:
    """Run ``inputs`` odd inputs; return the defects."""
    chance = random.Random(seed)
    defects = []
    for _ in range(inputs):
        files, arguments = odd_input(chance)
        what = run(files, arguments)
        if what:
            defects.append(Defect(what, files, tuple(arguments)))
    return defects


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(arguments)
    start = time.perf_counter()
    defects = fuzz(args.inputs, args.seed)
    for defect in defects:
        print(f"{defect.what}: {' '.join(defect.arguments)}")
        for name, text in defect.files.items():
            print(f"    {name}: {text[:300]!r}")
    print(f"{args.inputs} inputs in {time.perf_counter() - start:.0f} s, {len(defects)} defects")
    return 1 if defects else 0


if __name__ == "__main__":
    sys.exit(main())
