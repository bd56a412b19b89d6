# ruff: noqa: C408
"""An InternLM-like model of 70e9 parameters.

No model of this size was published: the layers are those of Llama 2 70B (arXiv 2307.09288), the vocabulary InternLM2's.
In InternEvo's format: its trainer reads this file as it is, and so does this program, which runs nothing in it.
"""

JOB_NAME = "70b_internlm"
model_type = "INTERNLM2"
DO_ALERT = False

VOCAB_SIZE = 92544
SEQ_LEN = 4096
HIDDEN_SIZE = 8192
NUM_ATTENTION_HEAD = 64
NUM_KV_ATTENTION_HEAD = 8
MLP_RATIO = 3.5
NUM_LAYER = 80

SAVE_CKPT_FOLDER = "local:checkpoints"
CHECKPOINT_EVERY = 500

# On 128 accelerators: 4 data-parallel ranks * 256 micro batches * 1 sequence * 4096 tokens = 4 Mi tokens a step.
data = dict(
    seq_len=SEQ_LEN,
    micro_num=256,
    micro_bsz=1,
    valid_micro_num=4,
    valid_every=0,
    pack_sample_into_one=False,
    total_steps=20000,
    skip_batches="",
    rampup_batch_size="",
    min_length=50,
    train_folder=None,
    valid_folder=None,
    empty_cache_and_diag_interval=200,
    diag_outlier_ratio=1.1,
)

model = dict(
    checkpoint=False,  # share of the layers whose activations are computed again: False, True or 0 to 1
    num_chunks=1,  # more: interleaved pipeline stages
    num_layers=NUM_LAYER,
    hidden_size=HIDDEN_SIZE,
    num_attention_heads=NUM_ATTENTION_HEAD,
    num_kv_attention_heads=NUM_KV_ATTENTION_HEAD,
    mlp_ratio=MLP_RATIO,  # the width is rounded up to a multiple of 256
    vocab_size=VOCAB_SIZE,
    no_bias=True,
    norm_type="rmsnorm",
    layer_norm_epsilon=1e-5,
    dtype="torch.bfloat16",
    use_flash_attn=True,
    parallel_output=True,
    embed_split_hidden=True,
    embed_grad_scale=1,
    apply_post_layer_norm=False,
    qk_interleaved=False,
)

# A node of 8 shares each layer, and 4 nodes are the stages of a pipeline.
parallel = dict(
    zero1=dict(size=-1),
    tensor=dict(size=8, mode="msp"),
    pipeline=dict(size=4, interleaved_overlap=True),
    weight=dict(size=1, overlap=True, memory_pool=True),
)

hybrid_zero_optimizer = dict(
    overlap_sync_grad=True,
    overlap_sync_param=False,
    reduce_bucket_size=512 * 1024 * 1024,
    clip_grad_norm=1.0,
)

grad_scaler = dict(
    fp16=dict(initial_scale=2**16, min_scale=1, growth_interval=1000),
    growth_factor=2,
    backoff_factor=0.5,
    max_scale=2**24,
    hysteresis=2,
)
loss = dict(label_smoothing=0)
adam = dict(lr=1e-4, adam_beta1=0.9, adam_beta2=0.95, adam_beta2_c=0, adam_eps=1e-8, weight_decay=0.01)
lr_scheduler = dict(total_steps=data["total_steps"], init_steps=0, warmup_ratio=0.01, eta_min=1e-5, last_epoch=-1)
beta2_scheduler = dict(init_beta2=adam["adam_beta2"], c=adam["adam_beta2_c"], cur_iter=-1)

ckpt = dict(
    enable_save_ckpt=False,
    save_ckpt_folder=SAVE_CKPT_FOLDER,
    auto_resume=False,
    checkpoint_every=CHECKPOINT_EVERY,
    async_upload=False,
    oss_snapshot_freq=int(CHECKPOINT_EVERY / 2),
)
monitor = dict(
    alert=dict(
        enable_feishu_alert=DO_ALERT,
        feishu_alert_address=None,
        light_monitor_address=None,
        alert_file_path=f"alerts/{JOB_NAME}.log",
    ),
    tensorboard=dict(queue_max_length=10),
)

use_fp32_norm = False
cudnn_deterministic = False
cudnn_benchmark = False
