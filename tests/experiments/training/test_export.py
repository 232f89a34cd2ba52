"""Tests of `megatrain export`: it writes a checkpoint as a model folder that transformers loads."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Command = Callable[..., Any]
TRAIN = (
    *("train", "plan.toml", "--data", "corpus", "--device", "cpu", "--save-every", "2"),
    *("--schedule.kind", "constant"),
)


@pytest.fixture
def trained(workplace: Path, command: Command, make_tokenizer: Callable[[Path], None]) -> Path:
    """Returns the folder of a run of four steps, with checkpoints after the second and the fourth.

    Its model has a tokenizer.
    """
    make_tokenizer(workplace / "tiny")
    assert command(*TRAIN, "--steps", 4, "--out", "run").status == 0
    return workplace / "run"


def tensors(folder: str | Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    return load_file(Path(folder) / "model.safetensors")


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    import torch

    return one.keys() == other.keys() and all(
        one[name].dtype == other[name].dtype and torch.equal(one[name], other[name]) for name in one
    )


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-100] ^= 1
    file.write_bytes(content)


def test_the_newest_checkpoint_has_the_weights_at_the_end_of_the_run(
    trained: Path, command: Command
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    outcome = command("export", "run", "--out", "out")
    assert (outcome.status, outcome.err) == (0, "")
    assert outcome.out == "wrote out: the weights after step 4, 57,632 parameters in fp32\n"
    assert same(tensors("out"), tensors(trained / "model"))
    assert {path.name: path.read_bytes() for path in Path("out").iterdir()} == {
        path.name: path.read_bytes() for path in (trained / "model").iterdir()
    }
    assert AutoModelForCausalLM.from_pretrained("out").config.use_cache
    assert (
        AutoTokenizer.from_pretrained("out")("how are you").input_ids
        == AutoTokenizer.from_pretrained("tiny")("how are you").input_ids
    )


def test_a_run_with_default_settings_can_be_exported(
    finished: Path, tmp_path: Path, command: Command
) -> None:
    """The error for a run without checkpoints names the model that the run wrote."""
    outcome = command("export", finished, "--out", tmp_path / "out")
    assert (outcome.status, outcome.err) == (0, "")
    assert same(tensors(tmp_path / "out"), tensors(finished / "model"))
    shutil.copytree(finished, tmp_path / "unsaved", ignore=shutil.ignore_patterns("checkpoints"))
    refused = command("export", tmp_path / "unsaved", "--out", tmp_path / "again")
    assert f"fix: use the trained model in {tmp_path / 'unsaved' / 'model'}\n" in refused.err


@pytest.mark.usefixtures("trained")
@pytest.mark.parametrize(
    "words",
    [("run", "--from-step", 2), ("run/checkpoints/step-00000002",)],
    ids=["a step", "a checkpoint's folder"],
)
def test_an_earlier_checkpoint_has_the_logits_of_a_shorter_run(
    command: Command, words: tuple[object, ...]
) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    assert command(*TRAIN, "--steps", 2, "--out", "short").status == 0
    assert command("export", *words, "--out", "out").status == 0
    models = [
        AutoModelForCausalLM.from_pretrained(folder).eval()
        for folder in ("out", "short/model", "run/model")
    ]
    with torch.no_grad():
        earlier, short, last = (model(torch.arange(20)[None]).logits for model in models)
    assert torch.equal(earlier, short)
    assert not torch.equal(earlier, last)


def test_bf16_is_the_master_rounded(trained: Path, command: Command) -> None:
    from megatrain.runtime.optimizer.adamw import round_to_bf16

    assert command("export", "run", "--out", "out", "--dtype", "bf16").status == 0
    assert same(
        tensors("out"),
        {name: round_to_bf16(value) for name, value in tensors(trained / "model").items()},
    )


@pytest.mark.usefixtures("workplace")
def test_masters_of_bf16_planes(command: Command) -> None:
    """The master weights of a bf16 run are the sum of the two planes in its checkpoint."""
    work = ("--batch", 2, "--seq", 16, "--loss-chunk", 16)
    assert command("plan", "tiny", "--hardware", "h200", *work, "--out", "plan.toml").status == 0
    assert command(*TRAIN, "--steps", 2, "--out", "run", "--set", "export_dtype=fp32").status == 0
    assert command("export", "run", "--out", "wide").status == 0  # the run's config says fp32
    assert same(tensors("wide"), tensors("run/model"))
    assert command("export", "run", "--out", "narrow", "--dtype", "bf16").status == 0
    assert (Path("narrow/model.safetensors").stat().st_size) < 0.6 * Path(
        "wide/model.safetensors"
    ).stat().st_size
    assert not same(
        tensors("wide"), {name: value.float() for name, value in tensors("narrow").items()}
    )


def test_a_damaged_checkpoint_is_skipped_with_a_note(trained: Path, command: Command) -> None:
    flip(trained / "checkpoints" / "step-00000004" / "state-00001.safetensors")
    outcome = command("export", "run", "--out", "out")
    assert outcome.status == 0
    said, wrote = outcome.out.splitlines()
    assert said.startswith(
        "skipped a damaged checkpoint: run/checkpoints/step-00000004/state-00001.safetensors:"
        " found checksum "
    )
    assert wrote.startswith("wrote out: the weights after step 2,")
    asked_for = command("export", "run", "--from-step", 4, "--out", "other")
    assert asked_for.status == 2
    assert "step-00000004/state-00001.safetensors: found checksum" in asked_for.err
    flip(trained / "checkpoints" / "step-00000002" / "state-00001.safetensors")
    assert command("export", "run", "--out", "other").status == 2
    assert not Path("other").exists()


def test_the_path_of_a_moved_model_can_be_given(trained: Path, command: Command) -> None:
    Path("tiny").rename("elsewhere")
    outcome = command("export", "run", "--out", "bare")
    assert outcome.status == 0
    assert outcome.out.startswith("the tokenizer and the generation config are not exported: ")
    assert same(tensors("bare"), tensors(trained / "model"))
    assert not Path("bare/tokenizer.json").exists()
    assert command("export", "run", "--out", "out", "--model", "elsewhere").status == 0
    assert Path("out/tokenizer.json").exists()


@pytest.mark.usefixtures("trained")
def test_invalid_values_give_one_line_errors(command: Command) -> None:
    Path("taken").mkdir()
    other = json.loads(Path("tiny/config.json").read_text())
    shutil.copytree("tiny", "another")
    Path("another/config.json").write_text(
        json.dumps({**other, "rope_parameters": {**other["rope_parameters"], "rope_theta": 7.0}})
    )
    for words, message in (
        (
            ("run", "--out", "taken"),
            "taken: found something there already; allowed: a folder that does not exist",
        ),
        (
            ("tiny", "--out", "out"),
            "tiny: found no checkpoint; allowed: the folder of a checkpoint, or of a run with a"
            " checkpoint",
        ),
        (("run", "--from-step", 3, "--out", "out"), "found no checkpoint of step 3; allowed: 2, 4"),
        (
            ("run", "--out", "out", "--model", "another"),
            "another/config.json: found rope_parameters",
        ),
        (
            ("run", "--out", "corpus/one.txt/out"),
            "corpus/one.txt, which is not a writable folder; allowed: a path in a writable folder",
        ),
    ):
        outcome = command("export", *words)
        assert outcome.status == 2, words
        assert message in outcome.err, outcome.err
        assert outcome.err.count("\n") == 1
        assert not Path("out").exists()


MEASURE = """
import json, sys
from pathlib import Path
import torch
from megatrain.runtime.training import exporting
from megatrain.runtime.files import model_files
run, out = map(Path, sys.argv[1:])

def status(key):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))

write = model_files.write_tensors
before = []

def begin(*given):
    if not before:
        Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
        before.append(status("VmRSS"))
    return write(*given)

model_files.write_tensors = begin
model_files._PIECE = 2**18  # 1 MiB in fp32
exporting.export_run(run, out, dtype="fp32")
written = (out / "model.safetensors").stat().st_size
print(json.dumps({"peak": status("VmHWM") - before[0], "written": written}))
"""


@pytest.mark.nightly  # two processes, and a model of 26 MB
@pytest.mark.usefixtures("workplace")
def test_an_export_holds_only_a_few_pieces_in_memory(command: Command) -> None:
    """An export holds only a few pieces of the model in memory at a time.

    A model of 26 MB in fp32 is written from the two planes of a bf16 checkpoint. The peak counts
    all resident memory, with mapped files.
    """
    from transformers import LlamaConfig

    LlamaConfig(
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        vocab_size=24_000,
        max_position_embeddings=64,
        tie_word_embeddings=False,
    ).save_pretrained("wide")
    assert (
        command(
            "plan",
            "wide",
            "--hardware",
            "h200",
            "--policy",
            "double_buffer",
            "--batch",
            1,
            "--seq",
            8,
            "--loss-chunk",
            8,
            "--out",
            "wide.toml",
        ).status
        == 0
    )
    words = (
        "train",
        "wide.toml",
        "--data",
        "corpus",
        "--device",
        "cpu",
        "--init",
        "random",
        "--steps",
        1,
        "--save-every",
        1,
        "--no-export",
        "--out",
        "run",
    )
    assert command(*words).status == 0
    # Without a fixed threshold, glibc raises it as pieces are freed. It then keeps 6 to 12 MB of
    # freed memory in its heap, a different amount each time.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, "run", "out"],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert found["written"] > 25_000_000
    assert found["peak"] < 10_000_000, found  # a few pieces, not the whole model
