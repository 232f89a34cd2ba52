"""Why a causal language model of transformers is of no family here: by reason, so that a refusal says what stands against it."""

from __future__ import annotations

from megatrain.simulator.families.multimodal import INSIDE

_REASONS: dict[str, str] = {
    "an encoder with a head for text, not a stack of decoder layers": """
        bert bert-generation big_bird camembert data2vec-text electra ernie megatron-bert reformer rembert roberta roberta-prelayernorm roc_bert roformer
        xlm xlm-roberta xlm-roberta-xl xlnet xmod""",
    "the decoder of an encoder-decoder, with cross-attention": """
        bart bigbird_pegasus blenderbot blenderbot-small marian mbart musicgen musicgen_melody mvp pegasus plbart prophetnet trocr whisper""",
    "layers with a state-space, convolutional or recurrent mixer, whose costs are not known here": """
        bailing_hybrid bamba falcon_mamba granitemoehybrid jamba kimi_linear lfm2 lfm2_moe lfm3 mamba mamba2 nemotron_h olmo_hybrid
        recurrent_gemma rwkv xlstm zamba zamba2""",
    "a multimodal model: save its language model by itself and train that": """
        emu3 fuyu gemma3n gemma4_unified git got_ocr2 mllama moss_transcribe_diarize phi4_multimodal qwen4_exp""",
    "a multimodal model, without the text_config that says what its language model is": " ".join(INSIDE),
    "layers that pass on four streams of hidden states, are given rows of another embedding table, and attend to keys and values of an earlier layer": "gemma3n_text",
    "layers that are given rows of another embedding table, or keys and values of another layer or model, besides the hidden states": """
        gemma4_assistant gemma4_unified_assistant gemma4_unified_text""",
    "attention that writes its matrix out, whose memory is not predicted": "cpmant gpt_neo gpt_neox_japanese openai-gpt xglm",
    "a parameter that stays in fp32 beside bf16 weights": "afmoe",
    "attention to tokens that another network picks": "axk2 deepseek_v32 deepseek_v4 glm_moe_dsa",
    "a router that draws a token's experts at random while it is trained, so that a recomputed layer would draw others": "phimoe",
    "experts whose numbers of tokens the host reads in every layer, so that the schedule would wait for the GPU there": "dbrx jetmoe",
    "a router that rounds otherwise without gradients on a GPU, so that a recomputed layer could choose other experts": "kolibri1",
    "weights that are quantised while they are trained": "bitnet",
    "layers that run several times or at several lengths": "blt hrm_text",
}
"""reason -> `model_type`s of transformers 5.23"""

REFUSED: dict[str, str] = {family: reason for reason, families in _REASONS.items() for family in families.split()}
"""`model_type` -> why"""
NOT_YET = "not described here yet"
"""of any other: the same kind of layers, but nobody has written down what they are made of (docs/adding.md says how)"""
_UNDESCRIBED = """
    beam cohere_compass_text ctrl diffllama doge dots3_note dots3_note_text flint gpt-sw3 hy_v4 inkling2_text inkling_text longcat_flash
    minimax_m3_vl_text modernbert-decoder moshi qwen4_exp_text zaya"""
UNDESCRIBED = frozenset(_UNDESCRIBED.split())
"""the `model_type`s of transformers 5.23 for which that is so"""
