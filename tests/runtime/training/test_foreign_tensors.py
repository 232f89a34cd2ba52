"""Tests of tensors in a model's folder that do not belong to the model.

Training and export report them. A folder with other weights is refused before memory is allocated.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from megatrain.runtime.training import trainer as trainer_module
from megatrain.runtime.training.callback import Callback
from megatrain.runtime.training.exporting import export_run
from megatrain.simulator.base.errors import UserError


class Noting(Callback):
    def __init__(self) -> None:
        self.notes: list[str] = []

    def on_note(self, text: str) -> None:
        self.notes.append(text)


def change(place: Path, **changes: torch.Tensor | None) -> None:
    file = place / "small" / "model.safetensors"
    tensors: dict[str, Any] = {**load_file(file), **changes}
    save_file(
        {name: tensor for name, tensor in tensors.items() if tensor is not None},
        file,
        metadata={"format": "pt"},
    )


def test_a_training_and_an_export_name_them(place: Path, prepare: Any) -> None:
    change(place, **{"mtp.layers.0.weight": torch.zeros(3), "mtp.layers.0.bias": torch.zeros(3)})
    noting = Noting()
    prepare(place, steps=1, callbacks=[noting], **{"saving.every_steps": 1}).fit()
    expected = (
        f"{place / 'small'} has 2 tensors that do not belong to the model and are neither"
        " trained nor exported: mtp.layers.0.* (2)"
    )
    assert expected in noting.notes
    notes: list[str] = []
    export_run(place / "run", place / "out", on_note=notes.append)
    assert [note.partition(" has ")[2] for note in notes] == [expected.partition(" has ")[2]]
    assert not [
        name for name in load_file(place / "out" / "model.safetensors") if name.startswith("mtp")
    ]


def test_a_dequantized_model_is_exported_without_the_config_of_its_quantization(
    place: Path, prepare: Any
) -> None:
    """transformers refuses to load weights that are not quantized if the config has the key."""
    file = place / "small" / "config.json"
    config = json.loads(file.read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    file.write_text(json.dumps(config))
    noting = Noting()
    prepare(place, steps=1, callbacks=[noting], **{"saving.every_steps": 1}).fit()
    assert [note for note in noting.notes if "quantization" in note] == [
        f"{file} has quantization_config (quant_method fp8), but the weights are not quantized: an"
        " exported model does not have the key"
    ]
    export_run(place / "run", place / "out")
    for folder in (place / "run" / "model", place / "out"):
        assert "quantization_config" not in json.loads((folder / "config.json").read_text())
        AutoModelForCausalLM.from_pretrained(folder)


def test_an_export_needs_no_weights_of_the_folder(place: Path, run: Any) -> None:
    run(place, steps=1, **{"saving.every_steps": 1})
    (place / "small" / "model.safetensors").unlink()
    notes: list[str] = []
    export_run(place / "run", place / "out", on_note=notes.append)
    assert not notes


def test_other_weights_are_refused_before_memory_is_allocated(
    place: Path, run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    change(place, **{"model.norm.weight": None})
    monkeypatch.setattr(
        trainer_module, "Executor", lambda *_, **__: pytest.fail("memory was allocated")
    )
    with pytest.raises(
        UserError,
        match=(
            r"small: found no tensor model\.norm\.weight; allowed: a tensor model\.norm\.weight of"
            r" shape \(32,\)"
        ),
    ):
        run(place)
