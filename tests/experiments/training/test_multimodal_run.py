"""Tests of training a multimodal model, from `plan` to `export`.

Only its language model is trained. The other weights and files are copied unchanged.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny_multimodal

Command = Callable[..., Any]
WORK = (
    "--batch",
    2,
    "--seq",
    16,
    "--loss-chunk",
    16,
    "--dtype",
    "fp32",
    "--policy",
    "double_buffer",
    "--hardware",
    "h200",
)
TRAIN = (
    *("train", "plan.toml", "--data", "corpus", "--device", "cpu", "--save-every", 2),
    *("--schedule.kind", "constant"),
)
NOTE = (
    "only the language model is trained; 82 tensors of multi_modal_projector, vision_tower are"
    " exported unchanged"
)


@pytest.fixture
def whole(workplace: Path, make_tokenizer: Callable[[Path], None], command: Command) -> Path:
    """Makes a multimodal model folder with a tokenizer and a processor config, and its plan."""
    tiny_multimodal.save("gemma3", workplace / "whole")
    make_tokenizer(workplace / "whole")
    (workplace / "whole" / "preprocessor_config.json").write_text("{}")
    assert command("plan", "whole", *WORK, "--out", "plan.toml").status == 0
    return workplace / "whole"


def tensors(folder: str) -> dict[str, Any]:
    from safetensors.torch import load_file

    return load_file(Path(folder) / "model.safetensors")


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    import torch

    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.usefixtures("whole")
def test_a_multimodal_model_is_trained_resumed_and_exported(command: Command) -> None:
    from transformers import AutoModelForImageTextToText

    outcome = command(*TRAIN, "--steps", 2, "--out", "run")
    assert (outcome.status, NOTE in outcome.out + outcome.err) == (0, True)
    assert command(*TRAIN, "--steps", 4, "--resume", "run").status == 0
    assert command(*TRAIN, "--steps", 4, "--out", "straight").status == 0
    assert same(tensors("run/model-4"), tensors("straight/model"))
    outcome = command("export", "run", "--out", "out")
    assert (outcome.status, NOTE in outcome.out) == (0, True)
    first, last = tensors("whole"), tensors("out")
    assert same(last, tensors("run/model-4"))
    changed = {name.partition(".")[0] for name in first if not first[name].equal(last[name])}
    assert changed == {"language_model"}
    assert (Path("out") / "preprocessor_config.json").is_file()
    assert json.loads((Path("out") / "config.json").read_text())["model_type"] == "gemma3"
    _, found = AutoModelForImageTextToText.from_pretrained("out", output_loading_info=True)
    assert not any(found.values())


@pytest.mark.usefixtures("whole")
def test_check_and_plan_accept_a_multimodal_model(command: Command) -> None:
    assert command("check", "whole", *WORK).status == 0
    assert "will refuse" not in command("plan", "whole", *WORK, "--out", "again.toml").out


def test_a_folder_without_its_weights_is_refused_before_anything_is_trained(
    whole: Path, command: Command
) -> None:
    (whole / "model.safetensors").unlink()
    outcome = command(*TRAIN, "--steps", 2, "--out", "run")
    assert outcome.status == 2
    assert "no *.safetensors file" in outcome.err
    assert not Path("run").exists()


@pytest.mark.usefixtures("whole")
def test_a_language_model_with_random_weights_is_exported_alone(command: Command) -> None:
    from transformers import AutoModelForCausalLM

    outcome = command(*TRAIN, "--steps", 1, "--init", "random", "--out", "run")
    assert (outcome.status, "only the language model" in outcome.out + outcome.err) == (0, False)
    assert type(AutoModelForCausalLM.from_pretrained("run/model")).__name__ == "Gemma3ForCausalLM"
