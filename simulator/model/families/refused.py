"""Families of transformers that are not supported, and the reason for each.

An error about such a family quotes the reason, and `python -m megatrain.experiments.families`
prints it.
"""

from __future__ import annotations

from megatrain.simulator.model.families.multimodal import INSIDE

_REASONS: dict[str, str] = {
    "an encoder with a head for text, not a stack of decoder layers": (
        """
        bert bert-generation big_bird camembert data2vec-text electra ernie megatron-bert reformer
        rembert roberta roberta-prelayernorm roc_bert roformer xlm xlm-roberta xlm-roberta-xl xlnet
        xmod"""
    ),
    "the decoder of an encoder-decoder, with cross-attention": (
        """
        bart bigbird_pegasus blenderbot blenderbot-small marian mbart musicgen musicgen_melody mvp
        pegasus plbart prophetnet trocr whisper"""
    ),
    "layers with a state-space, convolutional or recurrent mixer whose costs are not known": (
        """
        bailing_hybrid bamba falcon_mamba granitemoehybrid jamba kimi_linear lfm2 lfm2_moe lfm3
        mamba mamba2 nemotron_h olmo_hybrid recurrent_gemma rwkv xlstm zamba zamba2"""
    ),
    "a multimodal model: save its language model on its own and train that": (
        """
        emu3 fuyu gemma4_unified git got_ocr2 mllama moss_transcribe_diarize
        phi4_multimodal qwen4_exp"""
    ),
    "a multimodal model without the text_config that describes its language model": " ".join(
        INSIDE
    ),
    "layers that also read rows of a second embedding table, or keys and values of another layer"
    " or model": "gemma4_assistant gemma4_unified_assistant gemma4_unified_text",
    "attention that writes out its score matrix, whose memory is not predicted": (
        "cpmant gpt_neo gpt_neox_japanese openai-gpt xglm"
    ),
    "a parameter that stays in fp32 next to bf16 weights": "afmoe",
    "attention to tokens that another network selects": (
        "axk2 deepseek_v32 deepseek_v4 glm_moe_dsa"
    ),
    "a router that rounds differently without gradients on a GPU, so that recompute could choose"
    " other experts": "kolibri1",
    "weights that are quantised during training": "bitnet",
    "layers that run several times or with several sequence lengths": "blt hrm_text",
}
"""Reason -> `model_type`s of transformers 5.23."""

REFUSED: dict[str, str] = {
    family: reason for reason, families in _REASONS.items() for family in families.split()
}
"""`model_type` -> the reason why it is not supported."""
NOT_YET = "not described here yet"
"""The reason for the families in `UNDESCRIBED`. They could be supported, but their layers are not
described yet (docs/adding.md)."""
_UNDESCRIBED = """
    beam cohere_compass_text ctrl diffllama doge dots3_note dots3_note_text flint gpt-sw3 hy_v4
    inkling2_text inkling_text longcat_flash minimax_m3_vl_text modernbert-decoder moshi
    qwen4_exp_text zaya"""
UNDESCRIBED = frozenset(_UNDESCRIBED.split())
"""The other `model_type`s of transformers 5.23 that are not supported, for the reason `NOT_YET`."""
