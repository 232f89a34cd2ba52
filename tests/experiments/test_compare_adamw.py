"""Tests of the comparison of the optimizer with plain PyTorch, on a small model.

The comparison passes for the optimizer as it is and fails for typical mistakes in it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from megatrain.experiments import compare_adamw
from megatrain.runtime.optimizer import adamw as optimizer

CONFIG = {
    "model_type": "qwen2",
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 257,
    "tie_word_embeddings": True,
}
WORDS = [
    "--batch",
    "2",
    "--seq",
    "32",
    "--loss-chunk",
    "20",
    "--steps",
    "12",
    "--rate",
    "1e-3",
    "--device",
    "cpu",
]


@pytest.fixture
def compare(tmp_path: Path) -> Iterator[Any]:
    """Returns a function that runs the comparison on one thread.

    The function returns the status and the content of the result file.
    """
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "text.txt").write_text(
        "".join(f"{number} sheep and {number * number} goats\n" for number in range(300))
    )
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    out = tmp_path / "result.json"

    def run(*words: str) -> tuple[int, dict[str, Any]]:
        status = compare_adamw.main(
            [
                "--model",
                str(tmp_path / "config.json"),
                "--data",
                str(tmp_path / "text.txt"),
                "--out",
                str(out),
                *WORDS,
                *words,
            ]
        )
        return status, json.loads(out.read_text())

    yield run
    torch.set_num_threads(threads)


@pytest.mark.parametrize("policy", ["overlapped", "k_buffer"])
def test_ours_is_as_near_to_plain_pytorch_as_bf16_lets_it_be(
    compare: Any, policy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status, result = compare("--policy", policy)
    assert (status, result["failures"]) == (0, [])
    assert {name: len(losses) for name, losses in result["losses"].items()} == {
        "ours": 12,
        "reference": 12,
        "again": 12,
    }
    assert result["losses"]["ours"][-1] < result["losses"]["ours"][0] - 0.1, "the loss falls"
    assert 0 < result["loss_differences"]["ours"]["most"] <= compare_adamw.LOSS_LIMIT
    assert set(result["weights"]) == {"embedding", "attention", "biases", "mlp", "norms", "all"}
    assert all(min(found["ours"], found["noise"]) > 0 for found in result["weights"].values()), (
        "all three runs differ"
    )
    assert result["weights"]["all"]["parameters"] == sum(
        found["parameters"] for kind, found in result["weights"].items() if kind != "all"
    )
    assert (
        "passed: losses within 0.001, weights within 1.5 times the noise" in capsys.readouterr().out
    )


@pytest.mark.parametrize(
    "mistake", [{"decay": 1.0}, {"root_scale": 1.0}, {"epsilon": 1e-5}, {"rest1": 0.09}]
)
def test_a_mistake_in_the_update_is_found(
    compare: Any, monkeypatch: pytest.MonkeyPatch, mistake: dict[str, float]
) -> None:
    """A mistake in the update makes the comparison fail.

    The mistakes are no weight decay, no bias correction, another epsilon and a slightly wrong first
    moment.
    """
    right = optimizer.Scalars.of
    monkeypatch.setattr(
        compare_adamw, "SETTINGS", msgspec.structs.replace(compare_adamw.SETTINGS, weight_decay=2.0)
    )  # A decay of 0.1 would be below the noise after twelve steps.
    monkeypatch.setattr(optimizer.Scalars, "of", lambda *given: right(*given)._replace(**mistake))
    status, result = compare()
    assert status == 1
    assert any(failure.startswith("weights, all: ") for failure in result["failures"])


def test_losses_that_differ_are_found() -> None:
    runs = [
        compare_adamw.AdamWRun(losses=losses, weights={}, seconds=1.0)
        for losses in ([2.0, 1.0], [2.0, 1.0011])
    ]
    differences = compare_adamw.loss_differences(*runs)
    assert differences["most"] == pytest.approx(0.0011 / 1.0011)
    assert [text.split()[0] for text in compare_adamw.failures(differences, {})] == ["losses"]
    assert [text.split()[0] for text in compare_adamw.failures({"most": float("nan")}, {})] == [
        "losses"
    ]


@pytest.mark.usefixtures("compare")
def test_a_mistake_of_the_user_gives_a_one_line_error(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert compare_adamw.main(["--model", "no-such-model", "--device", "cpu"]) == 2
    assert capsys.readouterr().err.startswith("compare_adamw: ")
    assert compare_adamw.main(["--model", str(tmp_path / "config.json"), "--steps", "0"]) == 2
