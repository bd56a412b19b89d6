"""What each construct of a shell script makes of the launch: the words that it ends up with, or why they are not known."""

from __future__ import annotations

from pathlib import Path

import pytest

from profiler.errors import InputError
from solver.formats.config_file import load_run_config

PROGRAM = (
    "pretrain_gpt.py --num-layers 32 --hidden-size 4096 --num-attention-heads 32 --seq-length 4096 --bf16 --vocab-size 32000"
    " --max-position-embeddings 4096 --micro-batch-size 1 --global-batch-size 128 --tokenizer-type NullTokenizer"
)
RUN = f"torchrun --nnodes 1 --nproc-per-node 8 {PROGRAM}"
WITH_TP = f"{RUN} --tensor-model-parallel-size $TP"


def read(script: str, tmp_path: Path) -> dict[str, object]:
    path = tmp_path / "run.sh"
    path.write_text(script)
    return dict(load_run_config(path).layout)


@pytest.mark.parametrize(
    ("script", "blocks"),
    [
        ("DEBUG=0; if [ $DEBUG = 1 ]; then export CUDA_LAUNCH_BLOCKING=1; fi\n", False),
        ('echo "set CUDA_LAUNCH_BLOCKING=1 to debug"\n', False),
        ("cat <<EOF > env.sh\nexport CUDA_LAUNCH_BLOCKING=1\nEOF\n", False),
        ("export CUDA_LAUNCH_BLOCKING=1\nunset CUDA_LAUNCH_BLOCKING\n", False),
        ("( export CUDA_LAUNCH_BLOCKING=1; bash check.sh )\n", False),
        ("CUDA_LAUNCH_BLOCKING=1 bash check.sh; CUDA_LAUNCH_BLOCKING=0 ", False),
        ("BLOCK=1; export CUDA_LAUNCH_BLOCKING=$BLOCK\n", True),
        ("CUDA_LAUNCH_BLOCKING=1 ", True),
    ],
)
def test_the_environment_is_what_the_script_sets_and_not_what_it_mentions(script: str, blocks: bool, tmp_path: Path) -> None:
    assert read(script + RUN, tmp_path)["launch_blocking"] == blocks


@pytest.mark.parametrize(
    ("script", "tp"),
    [
        ("TP=2\n# old layout: TP=8 PP=2 \\\nTP=4", 4),  # a backslash continues no comment
        ("A=1;B=2; if [[ $A -eq 1 && $B -eq 2 ]]; then TP=4; else TP=2; fi", 4),
        ("A=1;B=3; if [ $A -eq 1 -a $B -eq 2 ]; then TP=4; else TP=2; fi", 2),
        ("A=1; if test $A -eq 1; then TP=4; else TP=2; fi", 4),
        ("SP=1; if (( SP == 1 )); then TP=4; else TP=2; fi", 4),
        ("SP=true; if $SP; then TP=4; else TP=2; fi", 4),
        ("A=1; B=2; if (( A == 1 && B == 2 )); then TP=4; else TP=2; fi", 4),
        ("A=1; B=2; if (( A == 1 && B == 3 )); then TP=4; else TP=2; fi", 2),
        ("A=1; B=2; if (( A == 1 && B == 3 )) || [ $B = 2 ]; then TP=4; else TP=2; fi", 4),
        ("TP=2; A=1; B=3; (( A == 2 || B == 3 )) && TP=4", 4),
        ("TP=2; false && TP=8", 2),
        ("TP=2; A=1; [ $A -eq 2 ] && TP=8", 2),
        ("TP=2; A=1; (( A == 1 )) && TP=8", 8),
        (": ${TP:=2}", 2),
        ("TP=2\nfor TP in 4; do :\ndone", 4),
        ("TP=2; eval TP=4 2>/dev/null; TP=8", 8),
        ("A=16; B=2; TP=$((A / (B * 2)))", 4),
        ("PP=2; if ((PP > 1)); then TP=4; else TP=2; fi", 4),
        ("PP=2\nif (( PP >= 4 )) ; then TP=4; else TP=2; fi", 2),
        ("TP=2\nwhile [[ $# -gt 0 ]]; do\ncase $1 in\n--tp) TP=$2; shift 2;;\nesac\ndone", 2),
        ("TP=4; ( case x in\n a) TP=2 ;;\n esac\n TP=8 )", 4),
        ("TP=4\n( TP=2; echo hi )", 4),
        ("SIZE=${1:-70b}\ncase $SIZE in\n  7b) TP=1 ;;\n  70b) TP=4 ;;\n  *) echo no; exit 1 ;;\nesac", 4),
        ("export A=1 TP=4\r", 4),
        ("USE=true; TP=${USE:+4}", 4),
        ("EMPTY=; TP=2${EMPTY:+4}", 2),
        ("EMPTY=; TP=${EMPTY+4}", 4),
        ("TP=2${NOT_SET:+4}", 2),  # the environment may have it, which is said
        ("SIZES=(1 2 4 8); I=1; TP=${SIZES[I+1]}", 4),
        ("SIZES=(1 2 8 4); TP=${SIZES[-1]}", 4),
        ("SIZES=(1 2 3 4); TP=${#SIZES[@]}", 4),
        ("declare -A SIZE_OF=([8b]=2 [70b]=4); MODEL=70b; TP=${SIZE_OF[$MODEL]}", 4),
        ("declare -A SIZE_OF; SIZE_OF[8b]=2; SIZE_OF[70b]=4; TP=${SIZE_OF[70b]}", 4),
        ("SIZES=(1 2); SIZES[1]=4; TP=${SIZES[1]}", 4),
        ("MODEL=llama-70b-tp4; TP=${MODEL##*-tp}", 4),
        ("RUN_NAME=tp4.pp2.json; TP=${RUN_NAME%%.*}; TP=${TP#tp}", 4),
        ("RUN_NAME=8/2; TP=$((${RUN_NAME/\\// / }))", 4),
        ("RUN_NAME=tp=48; TP=${RUN_NAME:3:1}", 4),
        ("SIZE=70B; if [ ${SIZE,,} = 70b ]; then TP=4; else TP=2; fi", 4),
        ("MODEL=llama3-70b; if [[ $MODEL == llama*70b ]]; then TP=4; else TP=2; fi", 4),
        ("MODEL=llama3-8b; if [[ $MODEL =~ 70b ]]; then TP=4; else TP=2; fi", 2),
        ("PP=8; TP=$((PP > 4 ? 4 : 2))", 4),
        ("TP=$((2 ** 2))", 4),
        ("TP=1; let TP=TP*4", 4),
        ("TP=3; ((TP++))", 4),
        ("TP=16; ((TP /= 4))", 4),
        ("PP=2; TP=$(expr $PP \\* 2)", 4),
        ('PP=2; TP=$(echo "$PP * 2" | bc)', 4),
        ("TP=$(basename /runs/4.sh .sh)", 4),
    ],
)
def test_variables_are_what_the_commands_that_run_make_them(script: str, tp: int, tmp_path: Path) -> None:
    assert read(f"{script}\n{WITH_TP}", tmp_path)["tp"] == tp


@pytest.mark.parametrize(
    "script",
    [
        "TP=2; grep -q H100 gpus.txt && TP=8",
        "setup() {\n TP=8\n}\nTP=2\nsetup",
        "function setup {\n TP=8\n}\nTP=2\nsetup",
        'TP=2; eval "TP=8"',
        'TP=2; printf -v TP "%d" 4',
    ],
)
def test_variables_that_only_a_run_of_the_script_would_show_are_refused(script: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"\$TP is not known from the script alone"):
        read(f"{script}\n{WITH_TP}", tmp_path)


@pytest.mark.parametrize(
    ("behind", "sentence"),
    [
        ("\ncase $X\nfoo\nesac", "a case statement has no 'in' after its word"),
        (" \\ \n --tensor-model-parallel-size 4", "a blank stands behind a backslash"),
        (" --tensor-model-parallel-size 2 --sequence-parallel false", "--sequence-parallel takes no value"),
        (" --lr 1e-4 sequence-parallel", "'sequence-parallel' stands behind --lr; the argument is --sequence-parallel"),
        (" --log-progress -recompute-activations", "the argument is --recompute-activations"),
        (" --train-iters 10 20", "'20' stands behind --train-iters, which takes one value"),
    ],
)
def test_words_that_would_be_lost_are_refused(behind: str, sentence: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=sentence):
        read(RUN + behind, tmp_path)


@pytest.mark.parametrize(
    ("slurm", "launch", "gpus"),
    [
        ("-N 4\n#SBATCH --gpus-per-node=8", "srun -N 1 hostname\nsrun torchrun --nnodes $SLURM_NNODES --nproc_per_node 8", 32),
        (
            "--nodes=4",
            "python setup.py --num-nodes=16\ntorchrun --nproc-per-node 8",
            8,
        ),  # torchrun: one node where it says none
        ("-N4\n#SBATCH --ntasks-per-node=1\n#SBATCH --gpus-per-task=8", "srun torchrun --nnodes 4 --nproc_per_node gpu", 32),
        ("--nodes=4\n#SBATCH --ntasks-per-node=4\n#SBATCH --gres=gpu:8", "srun python", 16),  # a rank is a task
        ("--nodes=4\n#SBATCH --gres=gpu:8", "srun -N 2 --ntasks-per-node=8 python", 16),
        ("-N 8 --gpus-per-node=8 --ntasks-per-node=4  # a node has eight", "srun python", 32),
        (
            "--partition=x --nodes=16 --ntasks-per-node=1 --gres=gpu:4",
            "srun torchrun --nnodes $SLURM_NNODES --nproc_per_node 4",
            64,
        ),
        ("-N 2 -n 8", "srun python", 8),
        ("-N 4 --gpus-per-node 8", "N=$((SLURM_NNODES * 1)); torchrun --nnodes $N --nproc_per_node $SLURM_GPUS_PER_NODE", 32),
        ("-N 4\n#SBATCH -G 32", "srun torchrun --nnodes $SLURM_NNODES --nproc_per_node $GPUS", 32),
        ("-N 2\n#SBATCH --gres=gpu:a100:8,nvme:1", "srun torchrun --nnodes 2 --nproc_per_node $GPUS", 16),
    ],
)
def test_ranks_are_what_slurm_and_the_launcher_start(slurm: str, launch: str, gpus: int, tmp_path: Path) -> None:
    assert read(f"#SBATCH {slurm}\n{launch} {PROGRAM}", tmp_path)["world_size"] == gpus


@pytest.mark.parametrize("words", ["1 2 4", "$ALL", "{1,2,4}", "$(seq 1 4)"])
def test_a_variable_that_a_loop_gives_several_values_is_not_known(words: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"\$\{?(TP|\(seq 1 4\))\}? is not known from the script alone"):
        read(f'ALL="1 2 4"\nTP=2\nfor TP in {words}; do\n{WITH_TP}\ndone', tmp_path)


@pytest.mark.parametrize(
    ("script", "said"),
    [
        (f'ARGS=("--tensor-model-parallel-size 2")\nARGS[1]=4\n{RUN} ${{ARGS[@]}}', "ARGS"),
        (f"set_to() {{ declare -n to=$1\nto=4\n}}\nTP=2\nset_to TP\n{WITH_TP}", "TP"),
        (f"TP=2\neval TP=4\n{WITH_TP}", "TP"),
    ],
)
def test_a_variable_that_is_set_out_of_sight_is_not_known(script: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=rf"\$\{{?{said}\S* is not known from the script alone"):
        read(script, tmp_path)


def test_a_command_that_is_put_together_first_is_read(tmp_path: Path) -> None:
    assert read(f'TP=4\ncommand="{WITH_TP} 2>&1 | tee log"\necho $command\neval "$command"', tmp_path)["tp"] == 4
    appended = "ARGS[${#ARGS[@]}]=--tensor-model-parallel-size\nARGS[${#ARGS[@]}]=4"
    assert read(f"ARGS=(--swiglu)\n{appended}\n{RUN} ${{ARGS[@]}}", tmp_path)["tp"] == 4


@pytest.mark.parametrize(
    ("launch", "gpus", "per_node"),
    [
        ("mpirun -np 32 python", 32, 0),
        ("mpirun -np 32 -npernode 8 python", 32, 8),
        ("/opt/hpcx/bin/mpirun -n 16 --map-by ppr:4:node -x PATH python", 16, 4),
        ("srun --ntasks 32 --ntasks-per-node 8 python", 32, 8),
        ("srun --ntasks=16 python", 16, 0),
    ],
)
def test_ranks_that_mpi_or_slurm_starts(launch: str, gpus: int, per_node: int, tmp_path: Path) -> None:
    path = tmp_path / "run.sh"
    path.write_text(f"{launch} {PROGRAM}")
    config = load_run_config(path)
    assert (config.layout["world_size"], config.gpus_per_node) == (gpus, per_node)


@pytest.mark.parametrize(
    "script",
    [
        f'TP=4; srun -l bash -c "python -u {PROGRAM} --tensor-model-parallel-size $TP"',
        f"export TP=4; srun -l sh -c 'python -u {PROGRAM} --tensor-model-parallel-size $TP'",
        f'COMMAND="python -u {PROGRAM} --tensor-model-parallel-size 4"\nsrun --container-image x /bin/bash -lc "${{COMMAND}}"',
        f'srun -l bash -c "\n cd /x && python {PROGRAM} \\\n  --tensor-model-parallel-size 4 2>&1 | tee log\n"',
    ],
)
def test_commands_that_a_shell_is_given_as_a_word(script: str, tmp_path: Path) -> None:
    found = read(f"#SBATCH --nodes=4 --ntasks-per-node=8\n{script}", tmp_path)
    assert (found["world_size"], found["tp"]) == (32, 4)


def test_what_the_given_shell_sets_is_of_its_environment(tmp_path: Path) -> None:
    head = "#SBATCH --nodes=2 --ntasks-per-node=8\n"
    assert read(f"{head}srun bash -c 'export CUDA_LAUNCH_BLOCKING=1; python {PROGRAM}'", tmp_path)["launch_blocking"] is True
    before = f"{head}bash -c 'export CUDA_LAUNCH_BLOCKING=1; python check.py'\n"
    assert read(f"{before}srun bash -c 'python {PROGRAM}'", tmp_path)["launch_blocking"] is False, "of another command"
    with pytest.raises(InputError, match=r"\$TP is not known from the script alone"):
        read(f"{head}srun bash -c 'python {PROGRAM} --tensor-model-parallel-size $TP'", tmp_path)


def test_a_shell_that_starts_itself_ends(tmp_path: Path) -> None:
    again = 'export AGAIN=\'bash -c "$AGAIN"\'\nbash -c "$AGAIN"\n'
    assert read(f"{again}{RUN}", tmp_path)["world_size"] == 8


def test_a_loop_at_the_end_of_a_script_is_no_defect(tmp_path: Path) -> None:
    assert read(f"{RUN}\nfor", tmp_path)["world_size"] == 8
