"""Shell scripts are read with their own variables put in, and only those: what a shell alone knows keeps its name."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from profiler.errors import InputError
from solver.formats.config_file import load_run_config
from solver.formats.shell.script import read_shell

SCRIPT = """#!/bin/bash
NODES=${NUM_NODES:-2}   # as the scheduler says
GPUS=8
WORLD=$((GPUS * $NODES))
MODEL="--num-layers 32 --hidden-size 4096 --num-attention-heads 32"
ARGS=(
    --seq-length 4096 --max-position-embeddings 4096  # tokens
    "--micro-batch-size 1"
    --global-batch-size $(( WORLD * 4 ))
)
TYPE=${DTYPE:-bf16}
if [[ "$TYPE" == "fp8" ]]; then
    ARGS+=(--bf16 --fp8-format hybrid)
elif [ $GPUS -gt 4 ] && [ -n "$TYPE" ]; then
    ARGS+=(--bf16)
else
    ARGS+=(--fp16)
fi
export NCCL_DEBUG=WARN
mkdir -p "$LOGS"
torchrun --nproc_per_node $GPUS --nnodes $NODES --master_addr ${MASTER_ADDR:-localhost} \\
    pretrain_gpt.py ${MODEL} ${ARGS[@]} --save "$LOGS/$(date +%F)" --bf16x $@ 2>&1 | tee log.txt
echo done
"""


def words(text: str) -> list[str]:
    return [word.text for word in read_shell(text).words]


def test_a_script_in_the_style_of_megatrons_examples(tmp_path: Path) -> None:
    path = tmp_path / "train.sh"
    path.write_text(SCRIPT.replace("--bf16x ", ""))
    config = load_run_config(path)
    assert {key: config.layout[key] for key in ("world_size", "dp", "seq_len", "micro_batch_size", "num_micro_batches")} == {
        "world_size": 16,
        "dp": 16,
        "seq_len": 4096,
        "micro_batch_size": 1,
        "num_micro_batches": 4,
    }
    assert (config.model.num_hidden_layers, config.layout["precision"], config.ignored) == (32, "bf16", ("--save",))
    taken = "DTYPE is bf16; NUM_NODES is 2"  # not MASTER_ADDR, which decides nothing
    assert config.notes == (
        "vocabulary of 50,257 (GPT-2's): neither --vocab-size nor --tokenizer-type is stated",
        f"the script's own, unless the environment (--env) says otherwise: {taken}",
    )


def test_a_default_that_decides_a_chain_is_of_its_words() -> None:
    found = read_shell('A=1; [ "${KIND:-fp8}" = fp8 ] && A=2; run $A; run 3')
    assert [(word.text, set(word.defaults)) for word in found.words if word.text != ";"] == [
        ("run", set()),
        ("2", {"KIND"}),
        ("run", set()),
        ("3", set()),
    ]


@pytest.mark.skipif(shutil.which("bash") is None, reason="compares with bash")
def test_the_words_are_those_that_bash_passes(tmp_path: Path) -> None:
    (tmp_path / "torchrun").write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    (tmp_path / "torchrun").chmod(0o755)
    text = SCRIPT.replace("$(date +%F)", "now").replace('mkdir -p "$LOGS"', "LOGS=/tmp/logs").replace("| tee log.txt", "")
    done = subprocess.run(
        ["bash", "-c", text], env={"PATH": f"{tmp_path}:/usr/bin:/bin"}, capture_output=True, text=True, check=True
    )
    assert " ".join(words(text)) == f"torchrun {' '.join(done.stdout.split()[:-1])} ;"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("A=1; B=$A; run $B ${B}x", "run 1 1x ;"),
        ("run $HOME/x `ls`", "run $HOME/x `ls` ;"),
        ('A="x y"; run "$A"', "run x y ;"),
        ("A=(1 2); A+=(3); run ${A[@]} ${A[*]}", "run 1 2 3 1 2 3 ;"),
        ("A=${B:-${C:-7}}; run $A ${A}", "run 7 7 ;"),
        ("run $((7 / 2 * (1 + 3) % 5)) $((2 ** 3)) $((1 / 0))", "run 2 8 $((1 / 0)) ;"),
        ("if [ -f x ]; then A=1; else A=2; fi; run $A", "run $A ;"),  # only the machine knows
        ("if [ 1 -eq 2 ]; then run a; elif [ 2 -eq 2 ]; then run b; else run c; fi", "run b ;"),
        ("for N in 1 2; do A=$N; done; run $A", "run $A ;"),
        ("N=3; if ! [ $N -ge 3 ] || [ $N != 4 ]; then run yes; fi", "run yes ;"),
        ("A=1 # run no\nrun '#' $A", "run # 1 ;"),
        ('run --list "([0]*3+[1]*11)"', "run --list ([0]*3+[1]*11) ;"),
        ("A=2; [ $A -gt 4 ] && A=4; run $A", "run 2 ;"),
        ("A=2; [ $A -gt 1 ] && A=4; run $A", "run 4 ;"),
        ('A=1; [[ -z "$A" ]] && A=5; run $A', "run 1 ;"),
        ("A=1; [ -f x ] && A=2; run $A", "run $A ;"),
        ("[ 1 -eq 2 ] && run a || run b", "run b ;"),
        ("cd x && run $((1 + 1)) || exit 1", "cd x ; run 2 ;"),
        ("A=1; case $M in\n 7b) A=2 ;;\nesac; run $A", "run $A ;"),  # M is the environment's
        ("M=7b; case $M in\n 7b) A=2 ;;\n*) A=1;;\nesac; run $A", "run 2 ;"),
        ("M=7b; case $M\nin (13b | 70b) A=2 ;;\n(*) A=1\nesac; run $A", "run 1 ;"),
        ("M=7b; case $M in 13b|7b) A=2; run a;; 7*) A=1; run b;; esac; run $A", "run a ; run 2 ;"),  # the first that matches
        ("M=70b; case $M in 7b) A=2;; 7?b) A=1;; esac; run $A", "run 1 ;"),
        ("A=3; case x in y) A=1;; esac; run $A", "run 3 ;"),
        ("A=3; case x in esac; run $A", "run 3 ;"),
        ("case x in $Y) A=1;; x) A=2;; esac; run $A", "run $A ;"),
        ("case $M in *) A=2;; esac; run $A", "run 2 ;"),
        ("case x in x) A=1;& y) A=2;; esac; run $A", "run $A ;"),  # goes on
        ("case x in x) A=1;;& *) A=2;; esac; run $A", "run $A ;"),
        ("case x in\nx) case y in z) A=1;; y) A=2;; esac;;\n*) A=3;; esac; run $A", "run 2 ;"),
        ("case x in x) if [ 1 -eq 1 ]; then A=1; else A=2; fi;; esac; run $A", "run 1 ;"),
        ("A=2\nbig() {\n A=8\n}\nrun $A", "big ; run $A ;"),
        ("A=2\ncat > x <<EOF\nA=8 don't\nEOF\nrun $A", "cat ; run 2 ;"),
        ("run x#1 $A1 # no", "run x#1 $A1 ;"),
        ("A=1; declare -i A=2; export B=3; run $A $B", "run 2 3 ;"),
        ("A=2; ((A*=2)); run $A", "run 4 ;"),
        ("A=2; unset A; run $A", "run $A ;"),
        ("A=1; run '$A' \\$A x\"$A\"y", "run $A $A x1y ;"),
        ("A=ab; A+=cd; run $A < /dev/null", "run abcd ;"),
        ('A=1; if [ -n "${KEY}" ]; then A=2; fi; [ -z $KEY ] && B=3; run $A $B', "run 1 3 ;"),  # not set here
        ('echo "no run/x.py"; run a', "run a ;"),
    ],
)
def test_what_a_shell_would_make_of_it(text: str, expected: str) -> None:
    found = " ".join(words(text)).removesuffix(" ;")
    assert found.removeprefix("; ") == expected.removesuffix(" ;")


def test_a_variable_that_grows_is_cut() -> None:
    text = "A=xxxxxxxxxx\n" + "A=$A$A\n" * 60 + "run $A"
    assert max(map(len, words(text))) <= 200_000


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ("GPUS=8", "GPUS=$(nvidia-smi -L | wc -l)", "${ARGS[@]} is not known from the script alone"),
        ("--seq-length 4096", "--seq-length $LENGTH", "$LENGTH is not known from the script alone; write its value"),
        ("NODES=${NUM_NODES:-2}", "NODES=$1", "$(( WORLD * 4 )) is not known from the script alone"),
        ("TYPE=${DTYPE:-bf16}", "TYPE='", "it cannot be read as a command: No closing quotation"),
        (
            "echo done",
            "MORE=(--lr 1",
            "it cannot be read as a command: the list that MORE is set to has no closing parenthesis",
        ),
        ("--nnodes $NODES", "--nnodes " + "9" * 5000, "must say the number of GPUs, as numbers"),
        ("GPUS=8", "if true; then\n" * 200, "it cannot be read as a command: blocks are nested too deeply"),
        ("echo done", "torchrun pretrain_gpt.py --num-layers 2", "it launches pretrain_gpt.py more than once"),
    ],
)
def test_what_only_the_shell_knows_is_refused(old: str, new: str, sentence: str, tmp_path: Path) -> None:
    path = tmp_path / "train.sh"
    path.write_text(SCRIPT.replace("--bf16x ", "").replace(old, new))
    with pytest.raises(InputError) as refused:
        load_run_config(path)
    assert sentence in str(refused.value)


RUN = "torchrun --nnodes 1 --nproc-per-node 8 pretrain_gpt.py --num-layers 32 --hidden-size 4096 --num-attention-heads 32 "
RUN += "--seq-length 4096 --max-position-embeddings 4096 --micro-batch-size 1 --global-batch-size 64 --bf16 --vocab-size 32000 "
RUN += "--tokenizer-type NullTokenizer"


@pytest.mark.parametrize(
    ("script", "tp", "notes"),
    [
        (f"TP=4; ( TP=2 )\n{RUN} --tensor-model-parallel-size $TP", 4, ()),
        (f"TP=4\n(cd /tmp; TP=2; bash prepare.sh)\n{RUN} --tensor-model-parallel-size $TP", 4, ()),
        (f"TP=4\nTP=2 bash prepare.sh\n{RUN} --tensor-model-parallel-size $TP", 4, ()),
        (f"export A=1 TP=2\nCUDA_DEVICE_MAX_CONNECTIONS=1 {RUN} --tensor-model-parallel-size $TP $@", 2, ()),
        (f'set -euo pipefail\nmain() {{\n{RUN} --tensor-model-parallel-size 2 "$@"\n}}\nmain "$@"', 2, ()),
        (
            f"TP=2\nsource ./cluster.env\n. more.env\n{RUN} --tensor-model-parallel-size $TP",
            2,
            ("not read, though the script runs it and it may set variables: ./cluster.env, more.env",),
        ),
        (
            f'TP=2\nif [ -n "$WIDE" ]; then TP=4; fi\n{RUN} --tensor-model-parallel-size $TP',
            2,
            ("the script's own, unless the environment (--env) says otherwise: WIDE is not set",),
        ),
        (
            f"TP=${{1:-4}}\n{RUN} --tensor-model-parallel-size $TP",
            4,
            ("the script's own, unless the environment (--env) or its arguments say otherwise: $1 is 4",),
        ),
    ],
)
def test_what_reaches_the_launch_and_what_may_change_it(script: str, tp: int, notes: tuple[str, ...], tmp_path: Path) -> None:
    path = tmp_path / "run.sh"
    path.write_text(script)
    config = load_run_config(path)
    assert config.layout["tp"] == tp and config.notes == notes


@pytest.mark.parametrize(
    "script",
    [
        f'launch() {{ {RUN} "$@"; }}\nlaunch --tensor-model-parallel-size 4',
        f'function launch {{\n{RUN} "$@"\n}}\nlaunch --tensor-model-parallel-size 4',
        f'set -- --tensor-model-parallel-size 4\n{RUN} "$@"',
    ],
)
def test_arguments_that_a_script_passes_on_are_not_lost(script: str, tmp_path: Path) -> None:
    path = tmp_path / "run.sh"
    path.write_text(script)
    with pytest.raises(InputError, match=r"\$@ is not known from the script alone; write its value"):
        load_run_config(path)


LAUNCHED = RUN.removeprefix("torchrun --nnodes 1 --nproc-per-node 8 ")


@pytest.mark.parametrize(
    ("script", "stated", "gpus", "per_node"),
    [
        (f"#SBATCH --nodes=4\n#SBATCH --gpus-per-node=8\n#SBATCH --ntasks-per-node=8\nsrun python {LAUNCHED}", 0, 32, 8),
        (
            f"#SBATCH -N 2\n#SBATCH --gres=gpu:h100:4\nsrun torchrun --nnodes $SLURM_NNODES --nproc-per-node 8 {LAUNCHED}",
            0,
            16,
            8,
        ),
        (f"srun -N 4 --gpus-per-node=8 python {LAUNCHED}", 0, 32, 8),
        (f"python {LAUNCHED}", 16, 16, 0),  # nothing but the user says how many
        (f"torchrun --nproc-per-node gpu {LAUNCHED}", 8, 8, 0),
        (f"torchrun --nnodes 1:4 --nproc-per-node 8 {LAUNCHED}", 32, 32, 0),
    ],
)
def test_gpus_that_slurm_or_the_user_states(script: str, stated: int, gpus: int, per_node: int, tmp_path: Path) -> None:
    path = tmp_path / "run.sh"
    path.write_text(script)
    config = load_run_config(path, stated)
    assert config.layout["world_size"] == gpus and config.gpus_per_node == per_node


def test_a_script_that_says_no_number_of_gpus_is_told_how_to(tmp_path: Path) -> None:
    path = tmp_path / "run.sh"
    path.write_text(f"python {LAUNCHED}")
    with pytest.raises(InputError, match="its launcher must say the number of GPUs, as numbers .*; or give --world_size"):
        load_run_config(path)


def test_a_script_is_taken_for_other_gpus_that_the_user_states(tmp_path: Path) -> None:
    path = tmp_path / "run.sh"
    path.write_text(f"torchrun --nnodes 4 --nproc-per-node 8 {LAUNCHED}")
    launched, asked = load_run_config(path), load_run_config(path, 64)
    assert (launched.layout["world_size"], asked.layout["world_size"]) == (32, 64)
    assert asked.layout["dp"] == 2 * launched.layout["dp"]
    batch = [one.layout["dp"] * one.layout["micro_batch_size"] * one.layout["num_micro_batches"] for one in (launched, asked)]
    assert batch[0] == batch[1]
    assert "it launches 32 GPUs; its arguments are taken for 64" in asked.notes and not any(
        "launches" in n for n in launched.notes
    )


def test_variables_of_the_environment_in_which_a_script_runs(tmp_path: Path) -> None:
    path = tmp_path / "train.sh"
    path.write_text(SCRIPT.replace("--bf16x ", ""))
    config = load_run_config(path, variables={"NUM_NODES": "4", "DTYPE": "fp8"})
    assert (config.layout["world_size"], config.layout["precision"]) == (32, "fp8")
    assert not [note for note in config.notes if "unless the environment" in note]
    with pytest.raises(InputError, match="--env NUM_NODE: .*train.sh reads no variable of that name"):
        load_run_config(path, variables={"NUM_NODE": "4"})
    path.write_text("NUM_NODES=2\n" + path.read_text())
    with pytest.raises(InputError, match="--env NUM_NODES changes nothing: .*train.sh itself sets it, in NUM_NODES=2; change"):
        load_run_config(path, variables={"NUM_NODES": "4"})
    path.write_text("NUM_NODES=${NUM_NODES:-2}\n" + path.read_text().removeprefix("NUM_NODES=2\n"))
    assert load_run_config(path, variables={"NUM_NODES": "4"}).layout["world_size"] == 32


def test_the_vocabulary_of_a_tokenizer_that_a_script_only_names(tmp_path: Path) -> None:
    path = tmp_path / "train.sh"
    path.write_text(
        SCRIPT.replace("--bf16x ", "--tokenizer-type HuggingFaceTokenizer --tokenizer-model meta-llama/Llama-3-8B ")
    )
    with pytest.raises(InputError, match="state its tokens, --vocab-size there or --vocab_size here"):
        load_run_config(path)
    model = load_run_config(path, vocab_size=128256).model
    assert (model.vocab_size, model.padded_vocab_size) == (128256, 128256)
    path.write_text(path.read_text().replace("--tokenizer-type", "--vocab-size 32000 --tokenizer-type"))
    with pytest.raises(InputError, match="--vocab_size 128256: .*train.sh has a vocabulary of 32,000; leave it out"):
        load_run_config(path, vocab_size=128256)


LAUNCH = "torchrun --nproc_per_node 8 pretrain_gpt.py --num-layers 32 --hidden-size 4096 --num-attention-heads 32 --bf16 "
LAUNCH += "--seq-length 4096 --max-position-embeddings 4096 --micro-batch-size 1 --global-batch-size 8"


@pytest.mark.parametrize(
    "script",
    [
        f"chmod +x examples/pretrain_gpt.py\ncp pretrain_gpt.py /tmp\n{LAUNCH}",
        f'CMD="{LAUNCH} 2>&1 |& tee log.txt"\neval $CMD',
        f'CMD="{LAUNCH} &> log.txt"\neval $CMD',
        f"export LAUNCHER='torchrun --nproc_per_node 8 --master_addr '$MASTER_ADDR\n"
        f'export CMD="{LAUNCH.removeprefix("torchrun --nproc_per_node 8 ")} --data-path $DATA"\nsrun bash '
        f"-c '$LAUNCHER $CMD'",
    ],
    ids=["copied before", "errors too", "redirected", "partly known"],
)
def test_one_launch_is_found(script: str, tmp_path: Path) -> None:
    path = tmp_path / "train.sh"
    path.write_text(script)
    assert (load_run_config(path).layout["world_size"], load_run_config(path).model.num_hidden_layers) == (8, 32)


def test_a_command_in_brackets_is_one_word_however_many_are_in_it() -> None:
    count = "$(python -c 'import torch; print(torch.cuda.device_count())')"
    plain = count.replace("'", "")
    assert words(f"GPUS={count}\ntorchrun --nproc_per_node $GPUS train.py\n")[-3:-1] == [plain, "train.py"]
    assert words("N=$(( (1 + 2) * 3 ))\nrun $N $(a (b (c)))\n")[-4:-1] == ["run", "9", "$(a (b (c)))"]


_JOB = """#!/bin/bash
#SBATCH --nodes=2
#SBATCH --gpus-per-node=8
srun bash -x -c "torchrun --nproc_per_node 8 --nnodes \\$SLURM_NNODES pretrain_gpt.py ${ARGS}"
"""
_ARGS = (
    "--num-layers 32 --hidden-size 4096 --num-attention-heads 32 --seq-length 4096 --max-position-embeddings 4096 "
    "--micro-batch-size 1 --global-batch-size 64 --bf16"
)


@pytest.mark.parametrize(
    "script",
    [
        f'ARGS="{_ARGS}"\nsbatch --parsable <<EOF\n{_JOB}EOF\n',
        f'ARGS="{_ARGS}"\ncat > job.sbatch <<EOF\n{_JOB}EOF\nsbatch --exclusive job.sbatch',
        f"cat > job.sh <<'EOF'\n{_JOB.replace('${ARGS}', _ARGS)}EOF\nbash job.sh\n",
    ],
)
def test_jobs_that_a_script_writes_and_submits(script: str, tmp_path: Path) -> None:
    path = tmp_path / "submit.sh"
    path.write_text(script)
    config = load_run_config(path)
    layout = {"world_size": 16, "dp": 16, "num_micro_batches": 4, "seq_len": 4096, "precision": "bf16"}
    assert layout.items() <= config.layout.items() and config.gpus_per_node == 8


def test_a_document_that_no_shell_runs_adds_no_commands() -> None:
    assert "torchrun" not in words("cat <<EOF\ntorchrun train.py\nEOF\n")
    assert "torchrun" not in words("bash run.sh <<EOF\ntorchrun train.py\nEOF\n")
    assert "torchrun" not in words("cat > job.sh <<EOF\ntorchrun train.py\nEOF\nchmod +x job.sh\n")
    assert words("cat > job.sh <<EOF\nbash job.sh\nEOF\nbash job.sh\n").count("job.sh") == 2  # once, and in itself


def test_arguments_that_only_files_decide_are_named(tmp_path: Path) -> None:
    path = tmp_path / "train.sh"
    path.write_text(
        'LOAD=()\nif [ -f "$CKPT/latest.txt" ]; then LOAD=(--load "$CKPT"); fi\n'
        f'torchrun --nproc_per_node 8 pretrain_gpt.py {_ARGS} --save "$CKPT" "${{LOAD[@]}}"\n'
    )
    with pytest.raises(InputError, match=r"\$\{LOAD\[@\]\} is not known from the script alone; write its value"):
        load_run_config(path)
