"""Compares training by the command line with a plain PyTorch loop.

The reference shares no code with megatrain. It reads the model folder with transformers, tokenizes
with the folder's tokenizer, and trains with `torch.optim.AdamW` and `clip_grad_norm_`. The tests
compare the weights in the exported folder `RUN/model`, as transformers loads them.

A step has as many rows as the data set, so the order of the rows does not matter.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_families import config_of
from transformers import AutoModelForCausalLM, AutoTokenizer

from megatrain.experiments.cli import main as cli
from megatrain.experiments.run_report import pictures

SEQUENCE = 24
ROWS = 4
STEPS = 3
RATE = 1e-3  # reached after 10 warm-up steps, and constant from there
BETAS = (0.9, 0.95)

FP32 = ("--dtype", "fp32")
CAPPED = ("--device-memory", "161.2MiB")  # 160 MiB are for libraries


def save_model(folder: Path, family: str = "llama", **changes: Any) -> None:
    sizes = {
        "vocab_size": 320,
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "intermediate_size": 96,
    }
    config = config_of(
        family,
        **{**sizes, "tie_word_embeddings": False, "bos_token_id": 0, "eos_token_id": 1, **changes},
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)


def save_tokenizer(folder: Path) -> None:
    """Saves a byte-level tokenizer with one id per byte.

    It has an end token and adds no special token at the beginning of a text.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate(["<s>", "<e>", *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer, tokenizer.decoder = (
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoders.ByteLevel(),
    )
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<e>").save_pretrained(folder)


def texts(lengths: list[int]) -> list[str]:
    """Returns different texts with these numbers of tokens, including the end token."""
    return [
        "".join(
            chr(97 + (7 * number + 3 * place * place + place) % 26) for place in range(length - 1)
        )
        for number, length in enumerate(lengths)
    ]


ONE_A_ROW = texts([SEQUENCE] * ROWS)
PACKED = texts([SEQUENCE // 2] * 2 * ROWS)
"""documents of half a row: any two of them fill a row"""


def reference(
    folder: Path,
    data: list[str],
    *,
    steps: int = STEPS,
    max_norm: float | None = 1.0,
    weight_decay: float = 0.0,
) -> dict[str, torch.Tensor]:
    """Returns the weights after `steps` steps of plain PyTorch in fp32.

    Each document has a separate forward pass. All its tokens but the first are labels.
    """
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).train()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    documents = [
        torch.tensor([[*tokenizer(text)["input_ids"], tokenizer.eos_token_id]]) for text in data
    ]
    labelled = sum(ids.shape[1] - 1 for ids in documents)
    tables = {id(model.get_input_embeddings().weight)}
    decayed = [each for each in model.parameters() if each.dim() >= 2 and id(each) not in tables]
    others = [each for each in model.parameters() if each.dim() < 2 or id(each) in tables]
    groups = [
        {"params": decayed, "weight_decay": weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=RATE, betas=BETAS, eps=1e-8)
    for number in range(1, steps + 1):
        optimizer.zero_grad()
        for ids in documents:
            logits = model(input_ids=ids, use_cache=False).logits[0, :-1].float()
            (
                torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="sum") / labelled
            ).backward()
        if max_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        for group in optimizer.param_groups:
            group["lr"] = RATE * min(number / 10, 1)
        optimizer.step()
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def weights_in(folder: Path) -> dict[str, torch.Tensor]:
    return {
        name: tensor.float()
        for name, tensor in (
            AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict().items()
        )
    }


def train(
    place: Path,
    data: list[str],
    plan: tuple[str, ...] = (),
    run: tuple[str, ...] = (),
    *,
    steps: int = STEPS,
) -> Path:
    """Runs `megatrain plan` and `megatrain train` on `data`; returns the exported model's folder.

    The commands have only the required options, the learning rate, and the words in `plan` and
    `run`.
    """
    (place / "rows.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in data))
    words = [
        "plan",
        str(place / "model"),
        "--hardware",
        "h200",
        "--batch",
        str(ROWS),
        "--seq",
        str(SEQUENCE),
        *plan,
        "--out",
        str(place / "plan.toml"),
    ]
    assert cli.main(words) == 0
    words = [
        "train",
        str(place / "plan.toml"),
        "--data",
        str(place / "rows.jsonl"),
        "--steps",
        str(steps),
        "--lr",
        str(RATE),
        "--warm-up",
        "10",
        "--schedule.kind",
        "constant",
        "--out",
        str(place / "run"),
        "--device",
        "cpu",
    ]
    assert cli.main([*words, *run]) == 0
    return place / "run" / "model"


Weights = dict[str, torch.Tensor]


def distances(ours: Weights, wanted: Weights, start: Weights) -> dict[str, float]:
    """Returns the error of each tensor's update relative to the reference's update.

    The key "" has the error over all tensors.
    """
    assert ours.keys() == wanted.keys() == start.keys()
    moved = [name for name in wanted if not torch.equal(wanted[name], start[name])]
    off = {name: float((ours[name] - wanted[name]).norm()) for name in moved}
    updates = {name: float((wanted[name] - start[name]).norm()) for name in moved}
    return {"": math.hypot(*off.values()) / math.hypot(*updates.values())} | {
        name: off[name] / updates[name] for name in moved
    }


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Returns a folder with a model. Switches off the picture of the loss, which takes longest."""
    monkeypatch.setattr(pictures, "draw_loss", lambda *_: None)
    save_model(tmp_path / "model")
    save_tokenizer(tmp_path / "model")
    return tmp_path


@pytest.mark.parametrize("policy", ["best", "overlapped", "k_buffer"])
def test_defaults_export_the_trained_model(place: Path, policy: str) -> None:
    """With the defaults, the exported model has the same updates as the reference.

    The defaults are bf16, global clipping, no checkpoints and no evaluation. The error of a model
    without its last update would be about one half.

    The error is computed over all tensors together. Weights of norms are near 1, and bf16 has no
    number between 1 and 1.0078, so norms alone cannot show three small updates.
    """
    start, wanted = weights_in(place / "model"), reference(place / "model", ONE_A_ROW)
    exported = train(place, ONE_A_ROW, () if policy == "best" else ("--policy", policy))
    assert distances(weights_in(exported), wanted, start)[""] < 0.2


CASES: dict[str, tuple[tuple[str, ...], tuple[str, ...], dict[str, Any]]] = {
    "best": ((), (), {}),
    "overlapped": (("--policy", "overlapped"), (), {}),
    "capped": (CAPPED, (), {}),
    "options": (
        ("--policy", "overlapped", "--batch", "2", "--accumulation", "2"),
        ("--max-norm", "0.05", "--weight-decay", "0.3", "--save-every", "2"),
        {"max_norm": 0.05, "weight_decay": 0.3},
    ),
    "accumulation": (("--policy", "overlapped", "--batch", "2", "--accumulation", "2"), (), {}),
    "clipping-none": (("--policy", "overlapped", "--clipping", "none"), (), {"max_norm": None}),
    "max-norm": (("--policy", "overlapped"), ("--max-norm", "0.05"), {"max_norm": 0.05}),
    "decay": (("--policy", "overlapped"), ("--weight-decay", "0.3"), {"weight_decay": 0.3}),
    "saved": (("--policy", "overlapped"), ("--save-every", "2"), {}),
    "one-step": (("--policy", "overlapped"), (), {"steps": 1}),
}


ALONE = ("accumulation", "max-norm", "decay", "saved")
"""cases whose options the case `options` combines"""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.nightly] * (name in ALONE)) for name in CASES]
)
def test_a_run_in_fp32_gives_the_reference_s_model(place: Path, name: str) -> None:
    plan, run, changed = CASES[name]
    start, wanted = weights_in(place / "model"), reference(place / "model", ONE_A_ROW, **changed)
    exported = train(place, ONE_A_ROW, (*FP32, *plan), run, steps=changed.get("steps", STEPS))
    assert max(distances(weights_in(exported), wanted, start).values()) < 2e-4


def test_documents_that_share_a_row_are_kept_apart(place: Path) -> None:
    start, wanted = weights_in(place / "model"), reference(place / "model", PACKED)
    exported = train(place, PACKED, FP32)
    assert max(distances(weights_in(exported), wanted, start).values()) < 2e-4


def test_a_resumed_run_gives_the_reference_s_model(place: Path) -> None:
    start, wanted = weights_in(place / "model"), reference(place / "model", ONE_A_ROW, steps=5)
    train(place, ONE_A_ROW, (*FP32, "--policy", "overlapped"), ("--save-every", "2"))
    assert (
        cli.main(["train", "--resume", str(place / "run"), "--steps", "5", "--device", "cpu"]) == 0
    )
    assert max(distances(weights_in(place / "run" / "model-5"), wanted, start).values()) < 2e-4


def test_an_exported_checkpoint_is_the_reference_s_model(place: Path) -> None:
    start, wanted = weights_in(place / "model"), reference(place / "model", ONE_A_ROW, steps=2)
    train(place, ONE_A_ROW, (*FP32, "--policy", "overlapped"), ("--save-every", "2"))
    assert (
        cli.main(
            ["export", str(place / "run"), "--from-step", "2", "--out", str(place / "exported")]
        )
        == 0
    )
    assert max(distances(weights_in(place / "exported"), wanted, start).values()) < 2e-4
