"""Tests of model families against transformers' models: tensors, saved bytes and FLOPs."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import pytest
import torch
import transformers
from decoder_layers import (
    TORCH_DTYPE,
    different_layers,
    kept_bytes,
    layer_of,
    register_one_kernel,
    turns_of,
)
from family_sample import SAMPLE, others_nightly
from tiny_families import OWN, SMALL, config_of
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM
from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

from megatrain.runtime.layers import gemma3n, grouped_experts
from megatrain.simulator.model.families import FAMILIES
from megatrain.simulator.model.layer_memory import saved_bytes
from megatrain.simulator.model.op_work import layer_flops, op_work
from megatrain.simulator.model.specs import ModelSpec
from megatrain.simulator.model.workload import Dtype, Workload

TIED, UNTIED = {"tie_word_embeddings": True}, {"tie_word_embeddings": False}
BIASED = {"attention_bias": True}
GEMMA4_EXPERTS = {
    "enable_moe_block": True,
    "num_experts": 8,
    "top_k_experts": 2,
    "moe_intermediate_size": 96,
}
WINDOW = {"use_sliding_window": True, "sliding_window": 16}
VARIATIONS: dict[str, list[dict[str, Any]]] = {
    "llama": [
        BIASED,
        {"mlp_bias": True},
        {"head_dim": 32},
        {"num_key_value_heads": 8},
        {"num_key_value_heads": 1},
    ],
    "mistral": [{"sliding_window": None}, {"sliding_window": 16}, {"head_dim": 32}],
    "qwen2": [{**WINDOW, "max_window_layers": 2}],
    "qwen3": [BIASED, {"head_dim": 64}, {**WINDOW, "max_window_layers": 3}],
    "gemma": [BIASED, {"head_dim": 32}],
    "gemma2": [
        BIASED,
        {"head_dim": 32},
        {"attn_logit_softcapping": None},
        {"layer_types": ["full_attention"] * 6},
    ],
    "gemma3_text": [{"head_dim": 32, "sliding_window_pattern": 3}, BIASED],
    "phi3": [{"sliding_window": 16}],
    "phi": [{"qk_layernorm": True}],
    "olmo2": [BIASED],
    "olmo3": [BIASED],
    "glm4_moe": [
        {"first_k_dense_replace": 3, "use_qk_norm": True},
        BIASED,
        {"n_shared_experts": 2},
    ],
    "glm": [{"attention_bias": False}],
    "glm4": [{"attention_bias": False, "head_dim": 64}],
    "granite": [BIASED, {"mlp_bias": True}],
    "granitemoe": [BIASED, {"num_local_experts": 4}],
    "cohere": [{"use_qk_norm": True}, BIASED],
    "cohere2": [{"sliding_window_pattern": 2}, BIASED],
    "smollm3": [BIASED, {**WINDOW, "no_rope_layer_interval": 2}, {"mlp_bias": True}],
    "gpt_oss": [
        {"attention_bias": False},
        {"layer_types": ["full_attention", "sliding_attention"] * 3},
    ],
    "mixtral": [{"sliding_window": 16}, {"num_local_experts": 4}],
    "qwen2_moe": [
        {"mlp_only_layers": [0, 3]},
        {"decoder_sparse_step": 2},
        {"qkv_bias": False},
        WINDOW,
    ],
    "qwen3_moe": [{"mlp_only_layers": [1]}, {"decoder_sparse_step": 3}, BIASED, WINDOW],
    "qwen3_next": [
        {"full_attention_interval": 2},
        {"mlp_only_layers": [0, 5]},
        {"linear_conv_kernel_dim": 3},
    ],
    "deepseek_v3": [
        {"q_lora_rank": None},
        {"first_k_dense_replace": 0},
        {"n_shared_experts": 2},
        BIASED,
    ],
    "olmoe": [BIASED, {"num_experts_per_tok": 3}],
    "starcoder2": [{"use_bias": False}, {"sliding_window": 16}],
    "falcon_h1": [
        BIASED,
        {"mlp_bias": True},
        {"mamba_d_ssm": None},
        {"mamba_rms_norm": True},
        {"mamba_proj_bias": True, "projectors_bias": True},
    ],
    "gpt_neox": [{"attention_bias": False}, {"use_parallel_residual": False}],
    "arcee": [BIASED, {"mlp_bias": True}],
    "cwm": [{"layer_types": ["full_attention"] * 6}],
    "deepseek_v2": [{"q_lora_rank": None}, {"n_shared_experts": 1}, {"mlp_bias": True}, BIASED],
    "dots1": [{"max_window_layers": 3, "sliding_window": 16}, BIASED],
    "ernie4_5": [{"use_bias": True}],
    "exaone4": [{"sliding_window_pattern": 2, "sliding_window": 16}],
    "exaone_moe": [{"first_k_dense_replace": 3}, {"num_shared_experts": 2}],
    "glm4_moe_lite": [{"mlp_layer_types": ["dense", "sparse"] * 3}],
    "gemma4_text": [
        GEMMA4_EXPERTS,
        {"attention_k_eq_v": False},
        {"layer_types": ["full_attention", "sliding_attention"] * 3},
        BIASED,
    ],
    "dbrx": [
        {"attn_config": {"kv_n_heads": 1, "rope_theta": 10000.0, "clip_qkv": 8.0}},
        {"ffn_config": {"ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 1}},
    ],
    "gemma3n_text": [
        BIASED,
        {"num_kv_shared_layers": 0},
        {"num_kv_shared_layers": 2, "layer_types": ["full_attention", "sliding_attention"] * 3},
        {"intermediate_size": [64, 96, 128, 64, 96, 128]},
        {"altup_num_inputs": 2},
    ],
    "gpt2": [{"n_inner": 192}],
    "granitemoeshared": [{"shared_intermediate_size": 64}, BIASED],
    "helium": [BIASED, {"mlp_bias": True}],
    "hyperclovax": [{"use_post_norm": False}, BIASED],
    "jais2": [{"attention_bias": False}, {"mlp_bias": False}],
    "llama4_text": [
        {"no_rope_layer_interval": 2},
        {"interleave_moe_layer_step": 1},
        {"moe_layers": [0, 4]},
        {"no_rope_layers": [1, 0] * 3},
        BIASED,
    ],
    "mellum": [
        {"layer_types": ["full_attention", "sliding_attention"] * 3},
        {"mlp_layer_types": ["dense", "sparse"] * 3},
    ],
    "minicpm3": [{"mlp_bias": True}, BIASED],
    "youtu": [{"mlp_bias": True}, BIASED],
    "ministral": [
        {"sliding_window": None},
        {"layer_types": ["full_attention", "sliding_attention"] * 3},
    ],
    "ministral3": [{"sliding_window": 16}],
    "nemotron": [BIASED, {"mlp_bias": True}],
    "qwen3_5_text": [{"full_attention_interval": 2}, BIASED],
    "seed_oss": [{"attention_bias": False}, {"attention_out_bias": True}],
    "stablelm": [{"use_qkv_bias": True}, {"use_parallel_residual": True}, {"qk_layernorm": True}],
    "apertus": [BIASED],
    "falcon": [
        {"new_decoder_architecture": True, "num_kv_heads": 2},
        {"multi_query": False},
        {"parallel_attn": False, "bias": True},
        {"new_decoder_architecture": True, "num_ln_in_parallel_attn": 1},
    ],
    "mpt": [{"attn_config": {"clip_qkv": 6.0}}],
    "granite_swa": [BIASED, {"mlp_bias": True}, {"layer_types": ["full_attention"] * 6}],
    "granitemoe_swa": [BIASED, {"shared_intermediate_size": 64}],
    "mimo_v2_flash": [BIASED, {"layer_types": ["full_attention", "sliding_attention"] * 3}],
    "ernie4_5_moe": [
        {"use_bias": True},
        {"moe_num_shared_experts": 0},
        {"moe_layer_start_index": 2, "moe_layer_end_index": 4, "moe_layer_interval": 2},
    ],
    "hunyuan_v1_moe": [BIASED, {"moe_topk": 1}],
    "laguna": [
        BIASED,
        {"gating": "per-element"},
        {"layer_types": ["full_attention", "sliding_attention"] * 3, "sliding_window": 16},
    ],
    "minimax": [{"layer_types": ["full_attention", "full_attention", "linear_attention"] * 2}],
    "jetmoe": [{"num_key_value_heads": 2, "num_attention_heads": 4}, {"num_local_experts": 4}],
    "phimoe": [BIASED, {"lm_head_bias": True}, {"sliding_window": 16}, {"num_local_experts": 4}],
    "persimmon": [{"qk_layernorm": False}],
    "hy_v3": [
        BIASED,
        {"mlp_bias": True},
        {"num_shared_experts": 2},
        {"mlp_layer_types": ["dense", "sparse"] * 3},
    ],
    "axk1": [{"first_k_dense_replace": 2, "moe_layer_freq": 2}, {"n_shared_experts": 2}, BIASED],
    "aria_text": [BIASED, {"mlp_bias": True}, {"moe_num_shared_experts": 1}],
    "cohere2_moe": [
        BIASED,
        {"num_shared_experts": 2},
        {"first_k_dense_replace": 2, "prefix_dense_intermediate_size": 64},
        {"sliding_window_pattern": 2},
    ],
}
NEVER_TIED = ("dbrx",)
"""Families for which transformers refuses a tied head."""
CASES = [
    (family, changes)
    for family in FAMILIES
    for changes in ({}, TIED, UNTIED, *VARIATIONS.get(family, []))
    if not (changes is TIED and family in NEVER_TIED)
]
NAMES = [
    f"{family}-{','.join(f'{key}={value}' for key, value in changes.items()) or 'plain'}"
    for family, changes in CASES
]


def meta_model_of(config: transformers.PretrainedConfig) -> torch.nn.Module:
    """Returns the model on the meta device, without memory for its weights."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def compare(spec: ModelSpec, model: Any) -> None:
    """Asserts that both models have the same tensors.

    Tensors of decoder layers have the same order, and other tensors have the same names.
    """
    ways = [
        prefix
        for prefix, module in model.named_modules()
        if isinstance(module, torch.nn.ModuleList) and len(module) == spec.layers
    ]
    way = min(ways, key=lambda prefix: prefix.count("."))
    layers = {f"{way}.{index}.": [] for index in range(spec.layers)}
    outside = {}
    for name, parameter in (
        (name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad
    ):
        layer = next((prefix for prefix in layers if name.startswith(prefix)), None)
        if layer is None:
            outside[name.removeprefix(f"{way.rpartition('.')[0]}.")] = tuple(parameter.shape)
        else:
            layers[layer].append((name.removeprefix(layer), tuple(parameter.shape)))
    family = FAMILIES[spec.family]
    moved = (family.embedding_norm, *family.entrance, *family.exit)
    entered = [
        tensor
        for layer in spec.decoders
        for tensor in layer.tensors
        if any(name and tensor.name.startswith(f"{name}.") for name in moved)
    ]
    assert [
        [(tensor.name, tensor.shape) for tensor in layer.tensors if tensor not in entered]
        for layer in spec.decoders
    ] == list(layers.values())
    ours = entered + [
        tensor
        for layer in spec.stack.values()
        if layer.kind != "decoder"
        for tensor in layer.tensors
    ]
    assert {tensor.name: tensor.shape for tensor in ours} == outside
    assert len(ours) == len(outside)
    assert spec.parameters == sum(
        parameter.numel() for parameter in model.parameters() if parameter.requires_grad
    )


@pytest.mark.parametrize(("family", "changes"), CASES, ids=NAMES)
def test_tensors_are_those_of_transformers_in_its_order(
    family: str, changes: dict[str, Any]
) -> None:
    config = config_of(family, **changes)
    given = {
        "model_type": family,
        **{
            key: value
            for key, value in {**SMALL, **OWN.get(family, {}), **changes}.items()
            if value is not None
        },
    }
    if None in changes.values():
        given |= changes  # null is a value of its own for these keys
    model = meta_model_of(config)
    for content in (
        config.to_dict(),
        given,
    ):  # with all defaults, as transformers writes it, and without
        spec = ModelSpec.from_config(content, "config.json")
        compare(spec, model)
        types = getattr(config, "layer_types", None)
        assert [layer.attention for layer in spec.decoders] == (
            types or [spec.decoders[0].attention] * 6
        )
        sliding = bool(types and "sliding_attention" in types) or (
            not types and getattr(config, "sliding_window", None)
        )
        assert any(layer.attention == "sliding_attention" for layer in spec.decoders) == bool(
            sliding
        )


# ---- saved bytes


@pytest.fixture(scope="module", autouse=True)
def one_kernel_attention() -> None:
    register_one_kernel()


SHAPES: list[dict[str, Any]] = [
    {},
    {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4},
    {
        "hidden_size": 128,
        "intermediate_size": 320,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
    },
]
SAVED = (
    [(family, {}) for family in FAMILIES]
    + [("gemma4_text", GEMMA4_EXPERTS)]
    + [("gemma3n_text", {"activation_sparsity_pattern": [0.5] * 6, "altup_correct_scale": False})]
    + [
        (family, changes)
        for family in ("llama", "mistral", "qwen2", "qwen3")
        for changes in SHAPES[1:]
    ]
)
SAVED += [
    ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    ("falcon", {"multi_query": False}),
    ("mpt", {"attn_config": {"clip_qkv": 6.0}}),
]
BOUNDED = ("falcon", "codegen", "minimax")
"""Families for which the prediction is an upper bound, at most 1.4 times what autograd keeps."""
SAVED += [
    ("gemma2", {"attn_logit_softcapping": None}),
    ("stablelm", {"qk_layernorm": True}),
    ("phimoe", {"input_jitter_noise": 0.01}),
    ("cohere2_moe", {"num_shared_experts": 2}),
]


IN_FP32 = ("llama", "gemma2", "gpt_oss", "qwen3_moe", "qwen3_next", "deepseek_v3", "bloom", "opt")
"""Families that normal tests also test in fp32.

They have norms, caps, sinks, experts, linear and latent attention, written-out scores, and biases.
"""


@pytest.mark.parametrize(
    ("family", "changes", "dtype"),
    [
        pytest.param(
            family,
            changes,
            dtype,
            id=f"{family}{index}-{dtype}",
            marks=[]
            if family in (SAMPLE if dtype == "bf16" else IN_FP32)
            else [pytest.mark.nightly],
        )
        for index, (family, changes) in enumerate(SAVED)
        for dtype in ("bf16", "fp32")
    ],
)
def test_saved_bytes_are_those_kept_by_autograd(
    family: str, changes: dict[str, Any], dtype: Dtype
) -> None:
    config = config_of(family, **changes)
    batch, sequence = 1, 256
    spec = ModelSpec.from_config(config.to_dict(), "config.json")
    torch.manual_seed(0)
    attention = (
        "sdpa" if family == "falcon" else "eager" if spec.writes_scores else "one_kernel"
    )  # falcon calls PyTorch's kernels itself
    model: Any = (
        AutoModelForCausalLM.from_config(config, attn_implementation=attention)
        .to(TORCH_DTYPE[dtype])
        .train()
    )
    grouped_experts.install(model)
    if FAMILIES[family].carried:
        gemma3n.install(model)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 0, 0.05)
    positions = torch.arange(sequence)[None]
    work = Workload(batch=batch, sequence=sequence, dtype=dtype)
    for layer in different_layers(spec):
        x_BSH = torch.randn(
            batch, sequence, spec.carried, dtype=TORCH_DTYPE[dtype], requires_grad=True
        )
        turns, module = (
            turns_of(model, x_BSH, positions, layer.attention),
            layer_of(model, layer.name),
        )
        tensors = (
            tensor
            for turn in turns.values()
            if turn is not None
            for tensor in (turn if isinstance(turn, tuple) else (turn,))
        )
        given = {
            tensor.untyped_storage().data_ptr()
            for tensor in (x_BSH, *tensors, *module.parameters(), *module.buffers())
        }

        entered = FAMILIES[family].embedding_norm and layer.name == "0"
        norm = (
            getattr(model.get_decoder(), FAMILIES[family].embedding_norm)
            if entered
            else torch.nn.Identity()
        )
        given |= {parameter.untyped_storage().data_ptr() for parameter in norm.parameters()}

        def forward(
            module: Any = module,
            norm: Any = norm,
            x: torch.Tensor = x_BSH,
            turns: dict[str, Any] = turns,
        ) -> object:
            return module(norm(x), attention_mask=None, position_ids=positions, **turns)

        saved = saved_bytes(spec, layer.name, work)
        kept = kept_bytes(forward, given)
        if family in BOUNDED:
            assert kept <= saved * 1.003 <= 1.4 * kept, layer.signature
        else:
            assert saved == pytest.approx(kept, rel=0.1), layer.signature


@pytest.mark.parametrize("family", others_nightly(FAMILIES))
def test_linear_flops_are_those_counted_by_torch(family: str) -> None:
    """The predicted FLOPs of matrix products are those that torch counts on the CPU.

    The normal tests count a sample, since `test_family_numbers.py` has the numbers of all families.

    On the CPU, torch counts no attention kernels. Experts run one by one, because torch does not
    count grouped products.
    """
    config, workload = config_of(family), Workload(batch=2, sequence=64)
    spec = ModelSpec.from_config(config.to_dict(), "config.json")
    attention = (
        "sdpa" if family == "falcon" else "eager" if spec.writes_scores else "one_kernel"
    )  # falcon calls PyTorch's kernels itself
    model: Any = AutoModelForCausalLM.from_config(
        config, attn_implementation=attention, experts_implementation="eager"
    ).requires_grad_(False)  # PyTorch cannot count what DBRX's experts do with parameters
    if FAMILIES[family].carried:
        gemma3n.install(model)
    positions = torch.arange(workload.sequence)[None]
    for layer in different_layers(spec):
        x_BSH = torch.randn(workload.batch, workload.sequence, spec.carried)
        turns = turns_of(model, x_BSH, positions, layer.attention)
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            layer_of(model, layer.name)(x_BSH, attention_mask=None, position_ids=positions, **turns)
        left_out = (
            ("conv",) if family == "llama4_text" else ("bmm", "conv")
        )  # its experts are batched matrix products
        products = sum(
            count
            for op, count in counter.get_flop_counts()["Global"].items()
            if not any(name in str(op) for name in left_out)
        )
        assert op_work(spec, "forward", layer.name, workload).linear_flops == products, (
            layer.signature
        )


class _MovedElements(TorchDispatchMode):
    """Counts PyTorch's functions and the elements of the tensors that each returns."""

    def __init__(self) -> None:
        super().__init__()
        self.of: Counter[str] = Counter()
        self.calls = 0
        """The functions called."""

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        self.calls += 1
        if isinstance(result, torch.Tensor):
            self.of[str(function)] += result.numel()
        return result


def test_the_loop_of_linear_attention_moves_the_bytes_that_autograd_moves() -> None:
    """For each chunk, autograd fills whole gradients with zeros (4 bytes an element), adds them (12
    bytes), and copies the gradient of the output (8 bytes).
    """
    config, tokens = config_of("qwen3_next"), 2048
    spec = ModelSpec.from_config(config.to_dict(), "config.json")
    layer = next(each.name for each in spec.decoders if each.attention == "linear_attention")
    chunk, moved, *_ = spec.computed_part(layer, Workload(batch=1, sequence=tokens)).loop
    heads = config.linear_num_value_heads
    sizes = (config.linear_key_head_dim, config.linear_key_head_dim, config.linear_value_head_dim)
    query, key, value = (torch.randn(1, tokens, heads, size, requires_grad=True) for size in sizes)
    decay, beta = (torch.rand(1, tokens, heads, requires_grad=True) for _ in range(2))
    output, _ = torch_chunk_gated_delta_rule(query, key, value, -decay, beta, chunk_size=chunk)
    with _MovedElements() as counted:
        output.sum().backward()
    of = counted.of
    count = (
        4 * of["aten.select_backward.default"]
        + 12 * of["aten.add.Tensor"]
        + 8 * of["aten.copy_.default"]
    )
    assert count / (tokens * tokens // chunk) == pytest.approx(moved, rel=0.05)
    works = [
        op_work(spec, "backward", layer, Workload(batch=2048 // length, sequence=length))
        for length in (2048, 64)
    ]
    assert works[0].unfused_bytes - works[1].unfused_bytes == tokens * moved * (2048 // 64 - 1)


def test_the_loop_of_linear_attention_calls_as_many_functions_as_pytorch() -> None:
    """The number of functions that one chunk adds, in both passes."""
    config = config_of("qwen3_next")
    spec = ModelSpec.from_config(config.to_dict(), "config.json")
    layer = next(each.name for each in spec.decoders if each.attention == "linear_attention")
    heads, size = config.linear_num_value_heads, config.linear_key_head_dim
    calls = []
    for tokens in (256, 320):
        query, key, value = (torch.randn(1, tokens, heads, size) for _ in range(3))
        decay, beta = (torch.rand(1, tokens, heads) for _ in range(2))
        for tensor in (query, key, value, decay, beta):
            tensor.requires_grad_()
        with _MovedElements() as forward:
            output, _ = torch_chunk_gated_delta_rule(query, key, value, -decay, beta)
        with _MovedElements() as backward:
            output.sum().backward()
        calls.append((forward.calls, backward.calls))
    (forward_calls, backward_calls), (more_forward, more_backward) = calls
    workload = Workload(batch=2, sequence=320)
    assert [op_work(spec, kind, layer, workload).calls for kind in ("forward", "backward")] == [
        5 * (more_forward - forward_calls),
        5 * (more_backward - backward_calls),
    ]
    full = next(each.name for each in spec.decoders if each.attention != "linear_attention")
    assert op_work(spec, "forward", full, workload).calls == 0


@pytest.mark.parametrize(
    ("sequence", "window"), [(64, None), (64, 16), (64, 63), (64, 64), (16, 64), (1, 16)]
)
def test_attention_counts_each_pair_once(sequence: int, window: int | None) -> None:
    """A query attends to half of itself and to the tokens before it, within its window."""
    config = config_of("mistral", sliding_window=window)
    spec, workload = (
        ModelSpec.from_config(config.to_dict(), "config.json"),
        Workload(batch=3, sequence=sequence),
    )
    pairs = (
        sum(min(index, window or sequence) for index in range(1, sequence + 1))
        - min(sequence, window or sequence) / 2
    )
    work = op_work(spec, "forward", "0", workload)
    assert work.attention_flops == pytest.approx(
        3 * pairs * 4 * config.num_attention_heads * config.head_dim
    )
    assert layer_flops(spec, "0", workload.tokens, sequence) == work.flops
    assert (
        op_work(spec, "backward", "0", workload).flops
        == 2 * op_work(spec, "recompute", "0", workload).flops
        == 2 * work.flops
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_the_signature_of_a_layer_names_its_window(family: str) -> None:
    """Measured times of a layer only hold for layers with the same window."""
    model = ModelSpec.from_config(config_of(family).to_dict(), "config.json")
    for layer in model.decoders:
        window = model.window(layer.name)
        named = re.findall(r"(?<=\dw)-?\d+", layer.signature)
        assert named == ([str(window)] if window else [])


def test_each_element_of_a_convolution_is_multiplied_once_per_token() -> None:
    """The count by torch above has no convolutions. Queries, keys and values pass through one."""
    tokens, channels = 64, 2 * 2 * 32 + 4 * 16
    short, long = (
        op_work(
            ModelSpec.from_config(
                config_of("qwen3_next", linear_conv_kernel_dim=kernel).to_dict(), "config.json"
            ),
            "forward",
            "0",
            Workload(batch=1, sequence=tokens),
        )
        for kernel in (3, 8)
    )
    assert long.flops - short.flops == tokens * channels * 2 * 5
