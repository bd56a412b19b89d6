"""Parameters and model FLOPs of a model, counted from its dimensions."""

from __future__ import annotations

from typing import Any

from solver.spec.layer_kinds import LayerKind, layer_kinds
from solver.spec.model import ModelSpec


def attention_linears(model: ModelSpec) -> int:
    """Return the weights of one layer's attention projections.

    Latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1): queries and keys-values go through a low rank each, and a
    rotary key that all heads share is projected beside the latter.
    """
    h, heads, qk, v = model.hidden_size, model.num_attention_heads, model.qk_head_dim, model.value_head_dim
    if not model.has_latent_attention:
        return h * qk * (heads * (1 + model.attention_gate) + model.num_key_value_heads) + h * v * (
            heads + model.num_key_value_heads
        )
    q = model.q_lora_rank * (h + heads * qk) if model.q_lora_rank else h * heads * qk
    kv = h * (model.kv_lora_rank + model.qk_rope_head_dim)
    kv += model.kv_lora_rank * heads * (model.qk_nope_head_dim + v)
    return q + kv + heads * v * h


def attention_others(model: ModelSpec) -> int:
    """Return one layer's biases and norms inside attention, and its attention sinks."""
    heads, kv = model.num_attention_heads, model.num_key_value_heads
    bias = model.qkv_bias * (heads * model.qk_head_dim + kv * (model.qk_head_dim + model.value_head_dim))
    latent = model.q_lora_rank + model.kv_lora_rank  # a norm each
    return bias + model.output_bias * model.hidden_size + latent + model.qk_norm_parameters + model.attention_sinks * heads


def linear_attention_linears(model: ModelSpec) -> int:
    """Return the weights of the projections of one layer's linear attention: queries, keys, values, the gate, two rates per
    head, and the output (solver.layers.linear_attention)."""
    keys, values = model.linear_key_width, model.linear_value_width
    return model.hidden_size * (2 * keys + 2 * values + 2 * model.linear_num_value_heads + values)


def linear_attention_others(model: ModelSpec) -> int:
    """Return the weights of its convolution, a decay and a bias per head, and its norm."""
    convolved = 2 * model.linear_key_width + model.linear_value_width
    return convolved * model.linear_conv_kernel_dim + 2 * model.linear_num_value_heads + model.linear_value_head_dim


def state_space_linears(model: ModelSpec) -> int:
    """Return the weights of both projections of one layer's Mamba-2: of the gate, values, keys, queries and a step per head,
    and of the output (solver.layers.state_space)."""
    width = model.mamba_width
    return model.hidden_size * (width + model.mamba_convolved + model.mamba_num_heads + width)


def state_space_others(model: ModelSpec) -> int:
    """Return the weights and biases of its convolution, a decay, a bias and a skip per head, and its norm."""
    return model.mamba_convolved * (model.mamba_conv_kernel_dim + 1) + 3 * model.mamba_num_heads + model.mamba_width


def _mixing(model: ModelSpec, kind: LayerKind) -> int:
    """Return the parameters of the block of a layer that mixes tokens."""
    if not kind.mixes_tokens:
        return 0
    if kind.state_space:
        return state_space_linears(model) + state_space_others(model)
    if kind.linear:
        return linear_attention_linears(model) + linear_attention_others(model)
    return attention_linears(model) + attention_others(model)


def adapter_parameters(model: ModelSpec, rank: int) -> int:
    """Return the parameters of the adapters of all layers (solver.layers.adapters), q, k, v, gate and up each with its own."""
    h, q, kv = model.hidden_size, model.num_attention_heads * model.head_dim, model.num_key_value_heads * model.head_dim
    mlp = mlp_matrices(model) * (h + model.intermediate_size)
    return model.num_hidden_layers * rank * (2 * (h + q) + 2 * (h + kv) + mlp)


def mlp_linears(model: ModelSpec, width: Any) -> Any:
    """Return the weights of an MLP, or of an expert, of ``width`` inner values (an int or an array)."""
    return model.hidden_size * width * mlp_matrices(model)


def mlp_matrices(model: ModelSpec) -> int:
    """Return the projections of an MLP: up and down, and the gate's where it has one."""
    return model.up_matrices + 1


def mlp_biases(model: ModelSpec, width: Any) -> Any:
    """Return the biases of an MLP, or of an expert, of ``width`` inner values (an int or an array)."""
    return model.mlp_bias * (model.up_matrices * width + model.hidden_size)


def router_parameters(model: ModelSpec) -> int:
    """Return the router's weight and bias, and the gate of the shared expert."""
    return model.num_experts * (model.hidden_size + model.router_bias) + model.shared_expert_gate * model.hidden_size


def expert_parameters(model: ModelSpec) -> int:
    """Return the parameters of one expert."""
    return mlp_linears(model, model.moe_intermediate_size) + int(mlp_biases(model, model.moe_intermediate_size))


def norms_of(model: ModelSpec, kind: LayerKind) -> int:
    """Return the norms of a layer over the hidden size; those of q and k are apart."""
    return model.norms_per_layer * kind.blocks // 2


def layer_parameters(model: ModelSpec, kind: LayerKind, active: bool = False) -> int:
    """Return the parameters of one layer. active: only those that one token passes through."""
    rest = _mixing(model, kind) + norms_of(model, kind) * model.norm_parameters
    if not kind.has_mlp:
        return rest
    if not kind.experts:
        return rest + mlp_linears(model, model.intermediate_size) + mlp_biases(model, model.intermediate_size)
    width = model.shared_expert_intermediate_size
    shared = mlp_linears(model, width) + (mlp_biases(model, width) if width else 0)
    experts = model.num_experts_per_tok if active else model.num_experts
    return rest + router_parameters(model) + experts * expert_parameters(model) + shared


def parameters(model: ModelSpec, active: bool = False) -> int:
    """Return all parameters, or those that one token passes through; multi-token prediction left out, vocabulary not padded."""
    found = layer_kinds(model)
    layers = sum(int(n) * layer_parameters(model, kind, active) for n, kind in zip(found.counts, found.kinds, strict=True))
    h = model.hidden_size
    tables = model.vocab_size * h * (1 if model.tie_word_embeddings else 2) + model.head_bias * model.vocab_size
    tables += model.learned_positions(0) * h
    return layers + tables + (1 + model.embedding_norm) * model.norm_parameters


def flops_per_token(model: ModelSpec, seq_len: int, whole_square: bool = False, frozen: bool = False) -> float:
    """Return the model FLOPs per token, forward and backward, with causal attention (half of the square, or all of it).

    6 * linears that a token passes through + 6 * heads * (d_qk + d_v) * tokens seen, as PaLM's appendix B with the causal half.
    Recomputation and the embedding lookup are not model FLOPs; the head is, and so are the multi-token prediction modules. Of
    linear attention its state counts: four products of keys with values per head and token, of Mamba-2 seven FLOPs for each
    value of the state and pass forward, as Megatron-LM's training.py does.
    frozen: of linears whose weights have no gradients, 4 instead of 6 (what adapters beside them compute is left out).
    """
    found = layer_kinds(model)
    layers = [*zip(found.counts.tolist(), found.kinds, strict=True)]
    layers.append((model.num_nextn_predict_layers, found.kinds[found.of_layer[-1]]))
    heads = model.num_attention_heads * (model.qk_head_dim + model.value_head_dim)
    linears = scores = 0.0
    for count, kind in layers:
        width = model.intermediate_size
        if kind.experts:
            width = model.num_experts_per_tok * model.moe_intermediate_size + model.shared_expert_intermediate_size
        router = kind.experts * model.num_experts * model.hidden_size
        mlp = (mlp_linears(model, width) + router) * kind.has_mlp
        linears += count * (_mixing_products(model, kind) + mlp)
        scores += count * heads * kind.seen_tokens(seq_len) * (2.0 if whole_square else 1.0)
    projections = model.num_nextn_predict_layers * (2 * model.hidden_size**2 + model.vocab_size * model.hidden_size)
    return (4.0 if frozen else 6.0) * (linears + projections + model.vocab_size * model.hidden_size) + 6.0 * scores


def _mixing_products(model: ModelSpec, kind: LayerKind) -> float:
    """Return the multiplications per token of the block of a layer that mixes tokens, but for the scores of attention."""
    if kind.state_space:
        return state_space_linears(model) + 3.5 * model.mamba_width * model.mamba_state_dim
    if kind.linear:
        return linear_attention_linears(model) + _state_products(model)
    return attention_linears(model) * kind.mixes_tokens


def _state_products(model: ModelSpec) -> int:
    """Return the multiplications per token of one layer's linear attention, beside its projections."""
    convolved = (2 * model.linear_key_width + model.linear_value_width) * model.linear_conv_kernel_dim
    return convolved + 4 * model.linear_num_value_heads * model.linear_key_head_dim * model.linear_value_head_dim
