"""Tests that the weights read from a folder are those that `from_pretrained` reads.

Otherwise the folder is refused with the name of the file or the tensor.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from megatrain.runtime.files.checkpoint_names import hub_name
from megatrain.runtime.files.model_files import folder_weights
from megatrain.runtime.files.stored_tensors import summary
from megatrain.runtime.layers.functional_layers import config_of
from megatrain.simulator.base.errors import UserError
from megatrain.simulator.model.specs import ModelSpec

WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def save(model: ModelSpec, folder: Path, seed: int = 0, shard: str = "5GB") -> None:
    torch.manual_seed(seed)
    AutoModelForCausalLM.from_config(config_of(model), dtype=torch.float32).save_pretrained(
        folder, max_shard_size=shard
    )


def change(folder: Path, **changes: torch.Tensor | None) -> None:
    """Sets tensors of `model.safetensors`, or removes those that are None."""
    tensors: dict[str, Any] = {**load_file(folder / WHOLE), **changes}
    save_file(
        {name: tensor for name, tensor in tensors.items() if tensor is not None},
        folder / WHOLE,
        metadata={"format": "pt"},
    )


def compare(model: ModelSpec, folder: Path) -> list[str]:
    """Asserts that we read the weights that transformers loads, and returns the notes."""
    notes: list[str] = []
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with folder_weights(folder, notes.append) as read:
        for layer in model.stack.values():
            for tensor in layer.tensors:
                assert torch.equal(
                    read(layer.name, tensor.name, tensor.shape),
                    theirs.get_parameter(hub_name(layer.name, tensor.name)),
                ), tensor.name
    return notes


def refuse(folder: Path, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught, folder_weights(folder):
        pass
    assert "\n" not in str(caught.value)


@pytest.fixture
def tied(make_model: Callable[..., ModelSpec]) -> ModelSpec:
    return make_model(hidden=32, head_dim=8, tied=True)


def test_a_whole_file_is_read_even_if_there_is_an_index(
    make_model: Callable[..., ModelSpec], tmp_path: Path
) -> None:
    """If a model was saved again as one file, old shards and their index are ignored."""
    model = make_model(hidden=32, head_dim=8)
    save(model, tmp_path / "shards", seed=1, shard="30KB")
    save(model, tmp_path / "model")
    for path in (tmp_path / "shards").glob("model*"):
        path.rename(tmp_path / "model" / path.name)
    assert len(list((tmp_path / "model").glob("*.safetensors"))) > 2
    (note,) = compare(model, tmp_path / "model")
    assert (
        note == f"{tmp_path / 'model' / INDEX} is not read, because {WHOLE} is also there and"
        " transformers reads that"
    )
    for path in (tmp_path / "model").glob("model-*"):
        path.unlink()
    compare(model, tmp_path / "model")


def test_shards_are_read_by_their_index_and_one_that_is_missing_is_named(
    make_model: Callable[..., ModelSpec], tmp_path: Path
) -> None:
    model = make_model(hidden=32, head_dim=8)
    save(model, tmp_path, shard="30KB")
    save_file({"stray": torch.zeros(1)}, tmp_path / "adapter_model.safetensors")
    assert not compare(model, tmp_path)
    shard = sorted(tmp_path.glob("model-*"))[1]
    shard.unlink()
    with pytest.raises(OSError, match=shard.name):
        AutoModelForCausalLM.from_pretrained(tmp_path)
    refuse(
        tmp_path, rf"{shard.name}: found a file that cannot be read \(no such file or directory\)"
    )


def test_a_pickle_that_transformers_reads_is_refused_even_next_to_a_safetensors_file(
    make_model: Callable[..., ModelSpec], tmp_path: Path
) -> None:
    model = make_model(hidden=32, head_dim=8)
    save(model, tmp_path)
    torch.save(
        {name: tensor + 1 for name, tensor in load_file(tmp_path / WHOLE).items()},
        tmp_path / "pytorch_model.bin",
    )
    assert not compare(model, tmp_path), (
        "safetensors and a pickle: another file than transformers' was read"
    )
    (tmp_path / WHOLE).rename(tmp_path / "consolidated.safetensors")
    refuse(
        tmp_path,
        r"found no model\.safetensors and no index of shards, but pytorch_model\.bin, a pickle,"
        r" which is never opened: .*; fix: convert the weights",
    )


def test_a_file_that_the_config_names_is_refused(
    make_model: Callable[..., ModelSpec], tmp_path: Path
) -> None:
    save(make_model(hidden=32, head_dim=8), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(
        json.dumps({**config, "transformers_weights": "other.safetensors"})
    )
    refuse(
        tmp_path,
        r"config\.json: transformers_weights: found 'other\.safetensors'; allowed: weights in"
        r" model\.safetensors or in shards; fix: load",
    )


# ---- tied ----


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_head_that_equals_the_embedding_counts_as_tied(
    tied: ModelSpec, tmp_path: Path, dtype: torch.dtype
) -> None:
    save(tied, tmp_path)
    table = load_file(tmp_path / WHOLE)[EMBEDDING].to(dtype)
    change(tmp_path, **{EMBEDDING: table, HEAD: table.clone()})
    assert not compare(tied, tmp_path)


def test_a_tied_head_without_an_embedding_is_read_as_the_embedding(
    tied: ModelSpec, tmp_path: Path
) -> None:
    save(tied, tmp_path)
    change(tmp_path, **{HEAD: load_file(tmp_path / WHOLE)[EMBEDDING] + 1, EMBEDDING: None})
    assert not compare(tied, tmp_path)


def test_a_head_of_its_own_is_refused_where_the_config_ties_it(
    tied: ModelSpec, tmp_path: Path
) -> None:
    """A head that differs from the embedding is refused if the config ties them.

    transformers would not tie them.
    """
    save(tied, tmp_path)
    table = load_file(tmp_path / WHOLE)[EMBEDDING]
    table[-1, -1] += 1
    change(tmp_path, **{HEAD: table})
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert theirs.lm_head.weight is not theirs.model.embed_tokens.weight
    refuse(
        tmp_path,
        r": lm_head\.weight: found a matrix that differs from model\.embed_tokens\.weight, to which"
        r" tie_word_embeddings in config\.json ties it; "
        r"allowed: the same matrix; fix: set tie_word_embeddings to false in config\.json and make"
        r" the plan again",
    )
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    assert not compare(ModelSpec.load(str(tmp_path)), tmp_path)


@pytest.mark.parametrize(
    ("is_tied", "gone"),
    [(False, HEAD), (False, EMBEDDING), (False, "model.norm.weight"), (True, EMBEDDING)],
)
def test_a_tensor_that_is_missing_is_named(
    make_model: Callable[..., ModelSpec], tmp_path: Path, is_tied: bool, gone: str
) -> None:
    """A missing tensor is refused by name. transformers would initialize it at random."""
    save(make_model(hidden=32, head_dim=8, tied=is_tied), tmp_path)
    change(tmp_path, **{gone: None})
    refuse(
        tmp_path,
        rf"found no tensor {gone}; allowed: a tensor {gone} of shape \(.*32,?\); fix: use weights"
        r" that belong to this config\.json",
    )


# ---- quantized weights ----

UP = "model.layers.1.mlp.up_proj"


def add_to_config(folder: Path, **keys: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **keys}))


@pytest.mark.parametrize(
    ("method", "tensors", "found"),
    [
        (
            {"quant_method": "fp8"},
            {f"{UP}.weight": torch.float8_e4m3fn, f"{UP}.weight_scale_inv": torch.float32},
            f"fp8, quant_method fp8, as in {UP}.weight",
        ),
        ({"quant_method": "x\ny"}, {f"{UP}.weight": torch.int8}, f"int8, as in {UP}.weight"),
        (None, {f"{UP}.weight": torch.uint8}, f"uint8, as in {UP}.weight"),
        (
            {"quant_method": "gptq"},
            {f"{UP}.weight": None, f"{UP}.qweight": torch.int32, f"{UP}.scales": torch.float16},
            f"packed int32, quant_method gptq, as in {UP}.qweight",
        ),
        (
            {"quant_method": "mxfp4"},
            {
                f"{UP}.weight": None,
                f"{UP}.weight_blocks": torch.int8,
                f"{UP}.weight_scales": torch.float8_e8m0fnu,
            },
            f"int8 and fp8, quant_method mxfp4, as in {UP}.weight_blocks",
        ),
    ],
)
def test_quantized_weights_are_refused_by_their_kind(
    make_model: Callable[..., ModelSpec],
    tmp_path: Path,
    method: dict[str, str] | None,
    tensors: dict[str, torch.dtype | None],
    found: str,
) -> None:
    save(make_model(hidden=32, head_dim=8), tmp_path)
    shape = load_file(tmp_path / WHOLE)[f"{UP}.weight"].shape
    change(
        tmp_path,
        **{
            name: None if dtype is None else torch.ones(shape).to(dtype)
            for name, dtype in tensors.items()
        },
    )
    if method:
        add_to_config(tmp_path, quantization_config=method)
    refuse(
        tmp_path,
        rf"^model {tmp_path}: found quantized weights: {found}; allowed: bf16, fp16 or fp32"
        r" weights; fix: dequantize the model first, or fetch the unquantized model$",
    )


def test_integers_that_are_not_weights_are_no_quantization(
    make_model: Callable[..., ModelSpec], tmp_path: Path
) -> None:
    """Old checkpoints have masks and positions, and some models have tables of integers."""
    model = make_model(hidden=32, head_dim=8)
    save(model, tmp_path)
    table = torch.zeros(4, dtype=torch.int32)
    change(tmp_path, **{"model.layers.0.attn.bias": table.to(torch.uint8), "router.table": table})
    (note,) = compare(model, tmp_path)
    assert note.endswith("exported: router.table")


# ---- adapters ----


def add_adapter(folder: Path, suffix: str = "safetensors", **keys: Any) -> None:
    config = {"peft_type": "LORA", "base_model_name_or_path": "org/base", **keys}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file({"lora_A.weight": torch.zeros(1)}, folder / f"adapter_model.{suffix}")


def test_an_adapter_beside_the_weights_is_named_once(
    make_model: Callable[..., ModelSpec], tmp_path: Path
) -> None:
    notes: list[str] = []
    save(make_model(hidden=32, head_dim=8), tmp_path)
    add_adapter(tmp_path)
    with folder_weights(tmp_path, notes.append):
        pass
    assert notes == [
        f"{tmp_path} also holds a LoRA adapter of org/base (adapter_config.json), which is neither"
        " trained nor exported: only the model's own weights are"
    ]


@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
@pytest.mark.parametrize("has_config", [True, False])
@pytest.mark.parametrize(
    ("keys", "found"),
    [
        ({}, r"a LoRA adapter of org/base \(adapter_config\.json\)"),
        ({"base_model_name_or_path": None, "peft_type": "IA3"}, "an adapter \\(adapter_config"),
    ],
)
def test_an_adapter_without_the_weights_of_its_base_is_refused(
    make_model: Callable[..., ModelSpec],
    tmp_path: Path,
    suffix: str,
    has_config: bool,
    keys: dict[str, Any],
    found: str,
) -> None:
    """An adapter is refused with its base, whether or not the config of the base is there."""
    if has_config:
        save(make_model(hidden=32, head_dim=8), tmp_path)
        (tmp_path / WHOLE).unlink()
    add_adapter(tmp_path, suffix, **keys)
    message = (
        rf"^model {tmp_path}: found a folder that holds {found}.*; allowed: a folder with whole"
        r" weights; fix: merge the adapter into its base first \(peft: merge_and_unload\), and"
    )
    if has_config:
        refuse(tmp_path, message)
    else:
        with pytest.raises(UserError, match=message):
            ModelSpec.load(str(tmp_path))


# ---- what is not the model's ----


def test_tensors_that_are_not_the_model_s_are_named(
    make_model: Callable[..., ModelSpec], tmp_path: Path
) -> None:
    model = make_model(hidden=32, head_dim=8, layers=2)
    save(model, tmp_path)
    others = {f"vision_tower.blocks.{index}.weight": torch.zeros(2) for index in range(3)} | {
        "model.layers.2.eh_proj.weight": torch.zeros(2)
    }
    old = {
        f"model.layers.{index}.self_attn.rotary_emb.inv_freq": torch.zeros(4) for index in range(2)
    }
    change(tmp_path, **others, **old)
    (note,) = compare(model, tmp_path)
    named = (
        "model.layers.2.*, vision_tower.blocks.0.*, vision_tower.blocks.1.*,"
        " vision_tower.blocks.2.*"
    )
    assert (
        note
        == f"{tmp_path} has 4 tensors that do not belong to the model and are neither trained nor"
        f" exported: {named}"
    )


def test_a_summary_counts_tensors_and_is_cut() -> None:
    assert (
        summary([f"mtp.layers.0.{name}" for name in "abc"] + ["head"]) == "mtp.layers.0.* (3), head"
    )
    assert summary(["tower.0.a", "tower.0.b", "tower.1.a"]) == "tower.0.* (2), tower.1.*"
    assert (
        summary(f"tower.{index}.a" for index in range(4))
        == "tower.0.*, tower.1.*, tower.2.*, tower.3.*"
    )
    assert (
        summary(f"tower.{index}.a" for index in range(9))
        == "tower.0.*, tower.1.*, tower.2.*, tower.3.* and 5 more"
    )
