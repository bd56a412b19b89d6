"""Random layouts beside the frameworks' own packages: do they take what is exported, and divide layers and order passes alike?

    make framework-checks        # installs them beside the project's environment, and runs this

Megatron-Core builds its configuration of each layout's arguments, and says which layers every chunk holds and in which order
its passes run; torchtitan reads each exported file and lays out its mesh. Nothing is trained. Transformer Engine is not there:
what Megatron-Core asks of its release is answered with a recent one.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np

from profiler.errors import InputError
from solver import load_problem
from solver.formats.export import exported
from solver.formats.megatron.export import megatron_arguments
from solver.schedule.op_orders import stage_order
from solver.schedule.stages import stage_layers
from solver.search.space import cross, enumerate_splits
from solver.spec.layer_kinds import is_linear, window_of
from solver.spec.model import ModelSpec
from solver.spec.strategy import Strategy
from solver.step.stage_kinds import chunk_sizes

MODELS = Path(__file__).resolve().parents[1] / "configs" / "models"
DENSE = ("llama3_8b", "llama3_70b", "llama3_405b", "nemotron4_340b", "qwen2_7b", "qwen3_8b", "mistral_7b")
EXPERTS = (
    "qwen3_30b_a3b",
    "qwen3_235b_a22b",
    "mixtral_8x7b",
    "deepseek_v2_lite",
    "deepseek_v3",
    "glm4_5",
    "kimi_k2",
    "gpt_oss_20b",
    "qwen3_next_80b_a3b",
)
WORLDS, SEQUENCES, LENGTH, EACH = (8, 64, 512, 2048), 2048, 4096, 25
#: Arguments whose names differ from those of the configuration.
NAMES = {
    "decoder_first_pipeline_num_layers": "num_layers_in_first_pipeline_stage",
    "num_experts": "num_moe_experts",
    "decoder_last_pipeline_num_layers": "num_layers_in_last_pipeline_stage",
    "fp8_format": "fp8",
    "num_virtual_stages_per_pipeline_rank": "virtual_pipeline_model_parallel_size",
}


def layouts(models: tuple[str, ...], framework: str, **run: Any) -> Iterator[tuple[ModelSpec, Strategy]]:
    """Yield random layouts that a search offers."""
    random = np.random.default_rng(0)
    for name in models:
        for world in WORLDS:
            config = MODELS / f"{name}.json"
            problem = load_problem(config, world, profile="h100_sxm", seq_len=LENGTH, framework=framework, **run)
            splits = enumerate_splits(problem, SEQUENCES).splits
            chosen = np.sort(random.choice(len(splits), min(2 * EACH, len(splits)), replace=False))
            offered = cross(problem, splits.take(chosen))
            for i in random.choice(len(offered), min(EACH, len(offered)), replace=False):
                yield problem.model, offered.strategy(int(i), problem.run)


def chunks(model: ModelSpec, run: Strategy) -> list[list[tuple[int, int]]]:
    """Return (first layer, layers) of every chunk of every stage, as estimates have them."""
    counted = int(run.account_for_embedding_in_pipeline_split), int(run.account_for_loss_in_pipeline_split)
    ends = run.num_layers_in_first_pipeline_stage, run.num_layers_in_last_pipeline_stage
    held = stage_layers(model.num_hidden_layers, *(np.array([value]) for value in (run.pp, *ends, *counted)))
    of_stages = int(held.first[0]), int(held.middle[0]), int(held.last[0])
    sizes = chunk_sizes(model.num_hidden_layers, run.pp, run.vpp, of_stages, *counted)
    first = np.cumsum((0, *sizes))
    return [[(int(first[i]), sizes[i]) for i in range(stage, len(sizes), run.pp)] for stage in range(run.pp)]


def megatron_config(flags: dict[str, Any]) -> Any:
    """Return Megatron-Core's configuration of arguments. Raises what it raises for those that it refuses."""
    import torch
    import torch.nn.functional as F  # noqa: N812
    from megatron.core.fusions.fused_bias_geglu import quick_gelu
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    given = {flag[2:].replace("-", "_"): value for flag, value in flags.items()}
    kind = MLATransformerConfig if "multi_latent_attention" in given else TransformerConfig
    known = {NAMES.get(name, name): value for name, value in given.items()}
    known = {name: value for name, value in known.items() if name in kind.__dataclass_fields__}
    for name in ("moe_layer_freq", "window_size", "window_attn_skip_freq", "no_rope_freq", "linear_attention_freq"):
        if name in known:  # "([0]*3+[1]*58)", "127,0"
            known[name] = eval(str(known[name]), {"__builtins__": {}})
    if "swiglu" in given or "quick_geglu" in given:
        known |= {"gated_linear_unit": True, "activation_func": quick_gelu if "quick_geglu" in given else F.silu}
    if "recompute_modules" in known:
        known["recompute_modules"] = str(known["recompute_modules"]).split()
    known |= {"pipeline_dtype": torch.bfloat16, "params_dtype": torch.bfloat16}
    known["add_bias_linear"] = "disable_bias_linear" not in given
    return kind(**known)


def megatron_chunks(config: Any) -> list[list[tuple[int, int]]]:
    """Return (first layer, layers) of every chunk of every stage, as Megatron-Core builds them."""
    from megatron.core import parallel_state
    from megatron.core.transformer.transformer_block import get_num_layers_to_build
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    size, virtual = config.pipeline_model_parallel_size, config.virtual_pipeline_model_parallel_size
    parallel_state.set_pipeline_model_parallel_world_size(size)
    found = []
    for stage in range(size):
        parallel_state.set_pipeline_model_parallel_rank(stage)
        parts = range(virtual) if virtual else (None,)
        found.append(
            [
                (get_transformer_layer_offset(config, part, stage), get_num_layers_to_build(config, part, stage))
                for part in parts
            ]
        )
    return found


def same_windows(config: Any, model: ModelSpec) -> bool:
    """Whether every layer has the window that Megatron-Core gives it, of the tokens before one (transformer/utils.py)."""
    from megatron.core.transformer.utils import is_layer_window_attention

    size, skips = config.window_size, config.window_attn_skip_freq
    layers = range(model.num_hidden_layers)
    seen = [size[0] + 1 if is_layer_window_attention(size, skips, layer + 1) else 0 for layer in layers]
    return seen == [window_of(model, layer) for layer in layers]


def same_linear_layers(config: Any, model: ModelSpec) -> bool:
    """Whether the layers with linear attention are those of Megatron-Core."""
    from megatron.core.models.gpt.experimental_attention_variant_module_specs import get_linear_attention_pattern

    ours = [int(is_linear(model, layer)) for layer in range(model.num_hidden_layers)]
    return not any(ours) or get_linear_attention_pattern(config) == ours


def megatron_order(stage: int, run: Strategy) -> list[tuple[int, int, int]]:
    """Return (kind, chunk, micro batch) of the passes of a stage, as Megatron-Core's interleaved schedule runs them."""
    from megatron.core.pipeline_parallel.schedules import get_schedule_table

    table = get_schedule_table(run.num_micro_batches, run.vpp, run.pp)
    warm_up = min(2 * (run.pp - stage - 1) + (run.vpp - 1) * run.pp, len(table))
    forwards = [(0, chunk, batch) for batch, chunk in table]
    backwards = [(1, run.vpp - 1 - chunk, batch) for batch, chunk in table]
    pairs = [one for pair in zip(forwards[warm_up:], backwards, strict=False) for one in pair]
    return forwards[:warm_up] + pairs + backwards[len(table) - warm_up :]


def check_megatron() -> str:
    """Compare with Megatron-Core; return what was compared. Raises AssertionError where it differs."""
    import megatron.core.transformer.moe.moe_utils as moe
    import megatron.core.transformer.transformer_config as configs
    from packaging.version import Version

    configs.is_te_min_version, configs.get_te_version = (lambda *_: True), (lambda: Version("2.9"))
    for kernel in (
        "fused_permute",
        "fused_permute_with_probs",
        "fused_sort_chunks_by_index",
        "fused_unpermute",
        "fused_sort_chunks_by_index_with_probs",
    ):
        setattr(moe, kernel, print)  # anything that is there
    taken = pipelines = orders = 0
    for precision in ("bf16", "fp8"):
        for model, run in layouts((*DENSE, *EXPERTS), "megatron-core", precision=precision):
            config = megatron_config(megatron_arguments(model, run, kinds=True))
            taken += 1
            assert same_windows(config, model) and same_linear_layers(config, model), model.name
            if run.pp > 1:
                assert megatron_chunks(config) == chunks(model, run), (model.name, run)
                pipelines += 1
            if run.vpp > 1 and run.num_micro_batches <= 64:
                ours = stage_order("interleaved", 1, run.pp, run.num_micro_batches, run.vpp)
                assert [tuple(one) for one in ours.tolist()] == megatron_order(1, run), run
                orders += 1
    return f"Megatron-Core: {taken} layouts taken, {pipelines} pipelines of the same layers, {orders} of the same order"


def check_torchtitan() -> str:
    """Let torchtitan read exported files; return how many. Raises what it raises for one that it refuses."""
    stub = ModuleType("torchtitan.models.moe.kernels")  # of Triton, which a CPU has no use for
    sys.modules[stub.__name__] = stub
    stub.__dict__["generate_permute_indices"] = None
    from torchtitan.config import ConfigManager
    from torchtitan.distributed import ParallelDims

    count = 0
    for model, run in layouts(("llama3_8b", "llama3_70b", "qwen3_30b_a3b"), "torchtitan"):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "run.toml"
            try:
                texts = exported(path, model, run, 8)
            except InputError:  # what the format does not say is refused
                continue
            path.write_text(texts["run.toml"])
            sizes = SimpleNamespace(**vars(ConfigManager().parse_args(["--job.config_file", str(path)]).parallelism))
        ParallelDims(
            dp_replicate=sizes.data_parallel_replicate_degree,
            dp_shard=sizes.data_parallel_shard_degree,
            cp=sizes.context_parallel_degree,
            tp=sizes.tensor_parallel_degree,
            pp=sizes.pipeline_parallel_degree,
            ep=sizes.expert_parallel_degree,
            etp=sizes.expert_tensor_parallel_degree,
            world_size=run.world_size,
        )
        count += 1
    return f"torchtitan: {count} files read"


if __name__ == "__main__":
    print(check_megatron())
    print(check_torchtitan())
