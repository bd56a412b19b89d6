"""Python names of Megatron-LM's arguments where they are not their flags', as its logs and Primus's files have them."""

from __future__ import annotations

from collections.abc import Mapping

#: Python name -> flag, where they differ by more than dashes.
FLAGS: Mapping[str, str] = {
    "fp8": "fp8-format",
    "fp4": "fp4-format",
    "microbatch_group_size_per_vp_stage": "microbatch-group-size-per-virtual-pipeline-stage",
}
#: The same of switches that are true unless the flag stands.
INVERTED: Mapping[str, str] = {
    "add_bias_linear": "disable-bias-linear",
    "gradient_accumulation_fusion": "no-gradient-accumulation-fusion",
    "overlap_p2p_comm": "no-overlap-p2p-communication",
    "masked_softmax_fusion": "no-masked-softmax-fusion",
    "bias_gelu_fusion": "no-bias-gelu-fusion",
    "bias_swiglu_fusion": "no-bias-swiglu-fusion",
    "bias_dropout_fusion": "no-bias-dropout-fusion",
    "apply_rope_fusion": "no-rope-fusion",
    "async_tensor_model_parallel_allreduce": "no-async-tensor-model-parallel-allreduce",
    "fp8_wgrad": "no-fp8-wgrad",
    "tp_comm_split_ag": "disable-tp-comm-split-ag",
    "tp_comm_split_rs": "disable-tp-comm-split-rs",
    "check_for_nan_in_loss_and_grad": "no-check-for-nan-in-loss-and-grad",
    "perform_initialization": "no-initialization",
}
