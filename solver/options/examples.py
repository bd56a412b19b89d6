"""Examples of each command, as its --help shows them; a test runs every one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

#: Command -> (what to type, what it answers); the first one also stands in the help of the program.
EXAMPLES: Mapping[str, Sequence[tuple[str, str]]] = {
    "search": (
        ("foretrain search --model_size llama3_70b --framework megatron-core --world_size 512", "every layout, best first"),
        (
            "foretrain search --config configs/models/qwen3_30b_a3b.json --world_size 64 --fix tp=4 --search "
            "cp,ep --csv best.csv",
            "tensor groups of 4; only context and expert parallelism vary",
        ),
    ),
    "predict": (
        ("foretrain predict --config configs/7B_internlm2.py --world_size 64", "the layout that the config states"),
        (
            "foretrain predict --config configs/7B_internlm2.py --world_size 64 --as h20 --trace step.json",
            "the same on another device, and its step for Perfetto",
        ),
    ),
    "compare": (
        (
            "foretrain compare --config configs/7B_internlm2.py --world_size 64 . tp=2 profile=h200_sxm,tp=2",
            "the config's layout (.), another one, and that one on H200",
        ),
        ("foretrain compare --config configs/7B_internlm2.py --world_size 64 . cluster=h100_100g", "a network of 100 Gbit/s"),
    ),
    "fit": (
        ("foretrain fit --config configs/7B_internlm2.py --world_size 64", "what else fits, and what breaks next"),
        ("foretrain fit --config configs/7B_internlm2.py --world_size 64 --memory_limit_gib 40", "on GPUs of 40 GiB"),
    ),
    "explain": (
        ("foretrain explain --model_size llama3_70b --framework megatron-core --world_size 512", "its rivals, and how sure"),
        (
            "foretrain explain --model_size llama3_8b --framework megatron-core --world_size 64 --report why.html",
            "the same as a file for colleagues",
        ),
    ),
    "plan": (
        (
            "foretrain plan --model_size llama3_70b --framework megatron-core --tokens 15e12 --days 90 "
            "--min_gpus 1024 --max_gpus 4096",
            "the fewest GPUs for 15 T tokens in 90 days",
        ),
        (
            "foretrain plan --model_size llama3_8b --tokens 1e12 --days 30 --machines h100_sxm=2,gb200=6 "
            "--min_gpus 64 --max_gpus 256",
            "machines and their prices beside each other",
        ),
    ),
    "sweep": (
        (
            "foretrain sweep out.csv --models llama3_8b,llama3_70b --world_sizes 128,256 --machines "
            "h100_sxm,h200 --plot out.png",
            "the best layout of each combination; started again it goes on where it stopped",
        ),
        ("foretrain sweep few.csv --models llama3_8b --world_sizes 32 --seq_lens 4096,8192 --machines h100_sxm", "sequences"),
    ),
    "export": (
        (
            "foretrain export run.sh --model_size llama3_70b --framework megatron-core --world_size 512 --best",
            "the script that launches the best layout",
        ),
        (
            "foretrain export run.toml --model_size llama3_8b --framework torchtitan --world_size 64 --best --fix tp=8,zero=3",
            "settings of torchtitan",
        ),
    ),
    "health": (
        ("foretrain health job.json --config configs/7B_internlm2.py --world_size 64", "what differs from the prediction"),
        ("foretrain health job.log --config configs/7B_internlm2.py --world_size 64", "the same from its log"),
    ),
    "import": (
        (
            "foretrain import job.log --config configs/7B_internlm2.py --world_size 64 --runs runs.jsonl",
            "where the gap to the prediction comes from; adds the run to a file",
        ),
        ("foretrain import job.json --config configs/7B_internlm2.py --world_size 64", "from a measured number alone"),
    ),
    "learn": (
        ("foretrain learn runs.jsonl --output mine.json", "what own runs tell of the machine, and what that is worth"),
        ("foretrain predict --config configs/7B_internlm2.py --world_size 256 --learned mine.json", "which uses it"),
    ),
    "validate": (
        ("foretrain validate runs.jsonl", "predicted beside measured"),
        ("foretrain validate runs.jsonl --json errors.json", "every prediction, with its interval and assumptions"),
    ),
    "measure": (
        ("foretrain measure --nproc-per-node 8 --budget 30", "half an hour on all GPUs of a node"),
        ("foretrain measure --nproc-per-node 2 --budget 5", "five minutes on two"),
    ),
}


def epilog(command: str) -> str:
    """Return the examples of a command, as text under its help."""
    return "\n".join(["examples:", *(f"  {line}\n      {answer}" for line, answer in EXAMPLES[command])])


def overview() -> str:
    """Return the first example of every command."""
    return "\n".join(["examples (foretrain COMMAND --help has more):", *(f"  {lines[0][0]}" for lines in EXAMPLES.values())])
