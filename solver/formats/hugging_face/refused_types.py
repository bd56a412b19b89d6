"""Model types that are refused, and what each is that a model of this program does not express.

Source: the configuration and modeling files of transformers 5.24, as read.
"""

from __future__ import annotations

from collections.abc import Mapping


def _names(words: str) -> frozenset[str]:
    return frozenset(words.split())


_ENCODERS = (
    "albert bert bert-generation big_bird camembert clip convbert data2vec-text deberta deberta-v2 distilbert electra ernie "
    "esm eurobert layoutlm longformer megatron-bert mobilebert modernbert mpnet mra nystromformer rembert roberta "
    "roberta-prelayernorm roc_bert roformer siglip squeezebert vit xlm xlm-roberta xlm-roberta-xl xmod"
)
_BOTH_ENDS = (
    "bart bigbird_pegasus blenderbot blenderbot-small led m2m_100 marian mbart mt5 mvp nllb-moe pegasus pegasus_x plbart "
    "prophetnet switch_transformers t5 t5gemma2 trocr umt5 whisper"
)
_HYBRID, _LINEAR = "a hybrid of attention and state-space layers", "a hybrid of attention and linear attention"
_INDEXED, _CONVOLUTIONS = "a model with learned sparse attention", "a hybrid of attention and short convolutions"
_PER_LAYER = "a model whose layers have token embeddings and sizes of their own"
_STREAMS = "a model with learned sparse attention and several residual streams"
_TWO_SIZES = "a model whose layers with a window have other heads than those that see all tokens"
_SHORT = "a model with short convolutions inside attention and a learned bias of distances"
#: What they are, for the refusal.
NOT_DECODERS: Mapping[str, str] = {
    **dict.fromkeys(_ENCODERS.split(), "an encoder"),
    **dict.fromkeys(_BOTH_ENDS.split(), "an encoder-decoder"),
    **dict.fromkeys(("mamba", "mamba2", "falcon_mamba"), "a state-space model"),
    **dict.fromkeys(("bamba", "falcon_h1", "zamba", "zamba2"), _HYBRID),
    **dict.fromkeys(("minimax_text_01", "minimax_m1"), "a hybrid of softmax attention and lightning attention"),
    **dict.fromkeys(("kimi_linear", "bailing_moe_linear", "bailing_hybrid"), _LINEAR),
    **dict.fromkeys(("axk2", "deepseek_v32", "glm_moe_dsa", "minimax_m3_vl_text"), _INDEXED),
    **dict.fromkeys(("deepseek_v4", "hy_v4"), _STREAMS),
    **dict.fromkeys(("dots3_note_text", "mimo_v2_flash"), _TWO_SIZES),
    **dict.fromkeys(("gemma3n", "gemma3n_text", "gemma4", "gemma4_text", "gemma4_unified", "gemma4_unified_text"), _PER_LAYER),
    **dict.fromkeys(("lfm2", "lfm2_moe", "lfm3"), _CONVOLUTIONS),
    **dict.fromkeys(("inkling_text", "inkling2_text", "inkling2_loop_text"), _SHORT),
    **dict.fromkeys(("ctrl", "xglm"), "a model with sinusoidal positions"),
    **dict.fromkeys(("rwkv", "xlstm"), "a recurrent model"),
    "axk1": "a model whose layers with experts have a third norm",
    "beam": "a model whose attention gate has a bias for each head",
    "bitnet": "a model with weights of one or two bits, and norms inside attention and MLP",
    "blt": "a model of bytes, which it groups into patches",
    "diffllama": "a model with differential attention",
    "doge": "a model with a learned mask of attention",
    "dory": "a model whose layers run several times, without norms",
    "gpt_neox_japanese": "a model with a bias in its last layer alone",
    "hrm_text": "a model whose layers run several times",
    "jamba": "a hybrid of attention, state-space layers and experts",
    "jetmoe": "a model with experts inside attention",
    "laguna": "a model with a gate for each head, whose number differs between layers",
    "longcat_flash": "a model whose layers have two attentions and two MLPs each, and experts that compute nothing",
    "minimax": "that of MiniMax's models (01 and M1 mix softmax and lightning attention; M2's is minimax_m2)",
    "modernbert-decoder": "a model whose head has a layer of its own",
    "moshi": "a model of sound, with a decoder inside each step",
    "nanochat": "a model whose norms of q and k have no weights",
    "openai-gpt": "a model whose norms follow the residual sums, without a last norm",
    "phi4_multimodal": "a model with adapters for pictures and sound beside its weights",
    "qwen4_exp_text": "a hybrid of linear and learned sparse attention, whose layers have token embeddings of their own",
    "recurrent_gemma": "a hybrid of attention and linear recurrence",
    "reformer": "a model with attention among hashed neighbours",
    "xlnet": "a model trained on permuted sequences",
    "zaya": "a model with convolutions inside attention, and routers that are networks of their own",
}

#: Other model types, of language models and of what has one as a part: none is another family's with a name like it.
UNDESCRIBED = _names(
    "bailing_moe mega code_llama cohere2_vision colqwen2 cpmant deepseek_vl deepseek_vl_hybrid dpt emu3 ernie4_5_vl_moe fuyu "
    "gemma3 git glm4v glm4v_moe got_ocr2 gpt-sw3 granite_speech granitevision internlm internvl llama4 llava llava_next "
    "mistral3 mllama open-llama ovis2 paligemma pixtral pvt qwen2_5_omni qwen2_audio qwen2_vl qwen2_vl_text qwen3_5 "
    "musicgen musicgen_melody dots3_note cohere_compass_text moss_transcribe_diarize gemma4_assistant gemma4_unified_assistant "
    "qwen4_exp qwen3_5_moe qwen3_omni_moe qwen3_vl qwen3_vl_moe shieldgemma2 smolvlm t5gemma transfo-xl voxtral yolos"
)
