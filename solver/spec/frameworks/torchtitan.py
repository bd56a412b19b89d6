"""torchtitan: FSDP2 with per-layer all-gathers and prefetch, DTensor, eager kernels unless compiled.

Sources: pytorch/torchtitan torchtitan/config_manager.py (late 2024, commit 0011fb9), config/job_config.py (mid 2025, 000204a),
parallelisms/parallelize_llama.py (004b314), run_train.sh (0168bd5).
"""

from __future__ import annotations

from solver.spec.can_run import FUSED_CAPS, CanRun
from solver.spec.choices import TpMode
from solver.spec.framework import ASSUMED_LAUNCH, Framework
from solver.spec.frameworks.pytorch import CLIPPING, FSDP_STAGES
from solver.spec.kernels import Kernels
from solver.spec.memory_use import EXPANDABLE_GAPS, MemoryUse, Recomputation
from solver.spec.parallelism import DataParallel, Pipeline, TensorParallel

TORCHTITAN_2025 = Framework(
    name="torchtitan-2025-06",
    family="torchtitan",
    released="2025-06",  # 0.1.0
    aliases=("torchtitan 0.1", "torchtitan v0.1"),
    broad_aliases=("torchtune", "veomni"),  # which shard with FSDP2
    flags={
        "zero": 3,
        "grad_dtype": "fp32",
        "fused_norm": False,  # nn.RMSNorm: a chain of kernels before torch 2.9
        "cp_comm": "allgather",  # context_parallel_rotate_method
        "fp8_recipe": "tensorwise",  # torchao's float8 scales whole tensors
    },
    can_run=CanRun(
        zero_stages=FSDP_STAGES,
        zero_with_pipeline=(0, 2),  # weights stay gathered, and gradients are reduced after the last micro batch
        tp_modes=(TpMode.MSP,),  # parallelize_llama.py: SequenceParallel norms
        cp_comms=("allgather", "ring"),  # the latter is rotate method alltoall
        packed_exchanges=(),  # SDPA has no documents
        shards="context",  # FSDP's mesh is of data- and context-parallel ranks together
        gathers_fp8_shards=True,  # enable_fsdp_float8_all_gather
        leaves_unaligned=True,  # components/quantization/utils.py: module_filter_fn
        copies_alone=True,  # DDP is not composed with other parallelism
        casts_by_shards=True,  # distributed/utils.py: maybe_enable_amp
        recompute_shares=(0.25, 0.5),  # every fourth or second layer
        compiles_tp_overlap=True,  # asynchronous tensor parallelism is a pass of torch.compile
        replicated_kv_heads=False,  # DTensor shards whole heads
        schedules=("1f1b", "interleaved", "gpipe", "zb-v"),  # of torch.distributed.pipelining 2.6
        unfilled_stages=0,  # its schedules.py: Schedule1F1B
        compiles_split_backward=False,  # its schedules.py
    ),
    kernels=Kernels(
        fused_qkv=False,
        fused_gate_up=False,
        fused_elementwise=False,
        torch_loss=True,
        compiled_loss=True,
        flash_attention=2,
        torch_context_parallel=True,
        repeats_kv=True,  # models/llama3/model/model.py: repeat_kv
    ),
    tensor_parallel=TensorParallel(  # parallelize_llama.py: always with SequenceParallel norms
        regathers_input=False,
        shares_input=True,
        async_backward=False,
        splits_sequence=True,
        copies_sequence=True,
        gathers_quantised=("tensorwise",),  # its Float8ColwiseParallel and PrepareFloat8ModuleInput of torchao
    ),
    data_parallel=DataParallel(
        all_gather_copies=2.0,
        shard_cast_bytes=10.0,  # _fsdp_param.py, all_gather_inputs; _fsdp_collectives.py, all_gather_copy_in
        wraps_lone_experts=True,  # distributed/parallel_dims.py, _mesh_exist: efsdp wherever ep is above 1
        # chunk_cat casts into the message: 278 G elements/s on H100 from 16 to 32 bits (pytorch's pull request 120678), which
        # takes as long as 2.7 reads or writes of 4 bytes at the rate of other copies there
        reduce_scatter_copies=2.7,
        accumulating_gemms=False,
        shards_units=True,
        accumulates_whole=True,
        gradient_passes=CLIPPING,
    ),
    recomputation=Recomputation(stops_early=True, selective_by_op=True, compiled_with_layers=True),
    # torch/distributed/pipelining/stage.py sends outputs whole; parallelize_llama.py: no reshard after forward
    pipeline=Pipeline(scatter_gather=False, keeps_weights=True, keeps_messages=True),
    # run_train.sh sets expandable_segments
    memory=MemoryUse(
        frees_gradients=True,
        copies_gradients=True,
        drops_logits=True,  # train.py: del pred; behind a pipeline its stage keeps them
        root_stays=("embedding", "head"),  # models/llama3/infra/parallelize.py of 0.1: the root holds both
        allocator_gaps=(EXPANDABLE_GAPS, EXPANDABLE_GAPS),
        synchronisation_bytes=(4.0, 0.0),  # replicas alone are DDP's, whose buckets are as large as all gradients
    ),
)

TORCHTITAN_2024 = TORCHTITAN_2025.derive(
    "torchtitan-2024-12",
    "2024-12",
    aliases=("torchtitan",),  # its published runs are of December 2024
    pipeline={"micro_batches_as_stages": True},  # parallelisms/pipelining_utils.py
    kernels={"compiled_loss": False},  # what these runs reserve holds the logits in fp32 and their gradients
    data_parallel={"optimizer_bytes_per_parameter": 96.0},  # AdamW is not fused by default, as in fms-fsdp
)

#: 0.2.2, with torch 2.9 or later, whose RMSNorm is one kernel. Sources: its wheel, config/job_config.py,
#: distributed/{parallel_dims,expert_parallel,activation_checkpoint,pipeline_parallel}.py, models/{attention.py,moe},
#: models/llama4/infra/parallelize.py.
TORCHTITAN_2026 = TORCHTITAN_2025.derive(
    "torchtitan-2026-02",
    "2026-02",
    aliases=("torchtitan 0.2", "torchtitan v0.2"),
    flags={"fused_norm": True, "moe_permute_fusion": False},
    can_run={
        "experts": True,
        "folds_experts": True,
        "splits_experts": False,
        "splits_alone": False,
        "shards_experts_alike": True,  # parallel_dims.py: experts are divided within a group of shards
        "dispatchers": ("alltoall", "deepep"),  # expert_parallel_comm_backend
        "pipelines_qk_norm": False,  # models/qwen3/__init__.py: pipelining_fn is None
        "compiles_sinks": False,  # models/gpt_oss/infra/parallelize.py: no apply_compile
        "divides_sinks": False,  # models/gpt_oss: the same, and FlexAttention, with which no model splits its sequences
        "routings": ("random", "consecutive"),  # debug.moe_force_load_balance
        "plain_deepep": True,  # only models/deepseek_v3 and llama4 read expert_parallel_comm_backend
        "pipeline_layout": True,  # module_fqns_per_model_part
        "compiles_loss_apart": True,  # compile.components
        "counts_embedding_and_loss": True,  # pipeline_parallel_first_stage_less_layers and _last_, 1 by default
        "uneven_stages": False,
        "layout_schedules": ("1f1b", "gpipe", "interleaved"),
    },
    kernels={
        "flash_attention": 0,  # scaled_dot_product_attention tries cuDNN's first
        "flex_sinks": True,  # models/gpt_oss
        "repeats_kv": False,  # models/llama3/model/model.py: enable_gqa
        "experts_gate_apart": True,
        "biased_experts_eager": True,  # models/gpt_oss/model/moe.py
        "one_grouped_kernel": True,  # models/moe/moe.py: torch._grouped_mm
        "probabilities_in_activation": False,  # score_before_experts is off
        "combines_in_fp32": True,
        "latent_values_are_views": True,  # models/deepseek_v3/model/model.py: torch.split of the up projection
    },
    tensor_parallel={"experts_gather": True, "views_one_sequence": True},
    memory={"root_stays": ("head",)},  # models/llama4/infra/parallelize.py: units of their own; the last is not resharded
    # activation_checkpoint.early_stop; models/qwen3/infra/parallelize.py lists no all-to-all
    recomputation={"stops_early": False, "keeps_exchange_of_normed": False},
)

#: NVIDIA's trainer on torch: FSDP2 for what is no expert, experts over their own ranks (DeepEP), kernels of Transformer Engine.
NEMO_AUTOMODEL = TORCHTITAN_2025.derive(
    "nemo-automodel",
    "2025-08",
    family="nemo-automodel",
    aliases=("nemo automodel", "automodel"),
    # components/moe/parallelizer.py (apply_fsdp); of dense models components/distributed/config.py, bf16 in 2025's fsdp2.py
    flags={"grad_dtype": "fp32", "fused_norm": True},
    can_run={
        "gathers_fp8_shards": False,  # not read
        "tp_modes": (TpMode.MTP, TpMode.MSP),
        "recompute_shares": (),
        "compiles_tp_overlap": False,
        "casts_by_shards": False,  # parameters are bf16
        # torch's stages keep weights gathered and reduce gradients once (components/distributed/pipelining)
        "zero_with_pipeline": (0, 2),
        "experts": True,
        "folds_experts": True,
        "splits_experts": False,
        "experts_beside_tp": False,  # components/moe/parallelizer.py (parallelize_model) asserts it
        "linear_attention": True,  # models of transformers, and of its own with flash-linear-attention's kernels
        "adapters": True,  # components/_peft/lora.py
        "soft_caps": FUSED_CAPS,  # models of transformers
        "fuses_projection": True,  # cut or fused linear cross entropy (components/loss)
        "optimizer_states": ("fp32", "bf16"),  # torch.optim.Adam of bf16 parameters
        "dispatchers": ("alltoall", "allgather", "deepep", "hybridep"),
        "schedules": ("1f1b", "interleaved", "gpipe"),
        "routings": ("random", "consecutive"),  # backend.fake_balanced_gate
    },
    # components/moe/layers.py, until August 2026: split, add and join the biases of the experts' output
    kernels={
        "fused_elementwise": True,
        "flash_attention": 0,
        "fused_qkv": False,
        "repeats_kv": False,
        "bias_by_expert": True,
        "routes_consecutive": False,  # FakeBalancedGate
        "flex_sinks": True,  # examples/benchmark/configs/gptoss_*.yaml
        "launch_seconds": ASSUMED_LAUNCH,
    },  # layers of Transformer Engine
    # components/distributed/optimized_tp_plans.py: each linear is a ColwiseParallel of its own, which all-reduces its input's
    # gradient; under sequence parallelism the norm gathers (SequenceParallelAllGatherActivation)
    tensor_parallel={"shares_input": False, "norm_gathers": True},
    # components/distributed/parallelizer.py (DefaultParallelizationStrategy): a dense layer's modules are checkpoints
    recomputation={"full_by_module": True},
    # defer_fsdp_grad_sync: components/distributed/utils.py (get_sync_ctx, set_requires_gradient_sync), moe/fsdp_mixin.py
    data_parallel={"defers_sync": True, "wraps_lone_experts": False, "shard_cast_bytes": 4.0},
    # models are cast to torch_dtype, bf16, and torch.optim.Adam's states are like them
    memory={
        "weights_as_moments": True,
        "synchronisation_bytes": (0.0, 0.0),
        "drops_logits": False,  # recipes/llm/train_ft.py keeps the model's output
        "root_stays": ("head",),
        "held_gradient_bytes": 2,  # FSDP2 casts what it reduced to the parameters' type
    },
    uncertainty=0.12,  # compiled or not, and which attention, is not stated by its runs
)

FAMILY = (TORCHTITAN_2026, TORCHTITAN_2025, TORCHTITAN_2024, NEMO_AUTOMODEL)
