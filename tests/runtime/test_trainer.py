"""Trainer: a run leaves its folder whole; what it refuses, it refuses before it writes anything."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from transformers import AutoModelForCausalLM

from megatrain.runtime import trainer
from megatrain.runtime.model_files import random_weights
from megatrain.runtime.templates import config_of
from megatrain.runtime.trainer import Progress, TrainingOptions, train
from megatrain.simulator.errors import UserError
from megatrain.simulator.memory import account
from megatrain.simulator.plan import Plan
from megatrain.simulator.policies import lower
from megatrain.simulator.timeline import Timeline

CPU = torch.device("cpu")
TEXT = "".join(f"def function_{index}(argument):\n    return argument + {index}\n\n" for index in range(200))


@pytest.fixture
def place(executable: Callable[..., Plan], tmp_path: Path) -> Path:
    """A folder with a plan, the model that it names, and a corpus."""
    plan = executable(vocabulary=300, dtype="fp32", accumulation=2)
    config = config_of(plan.model)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(tmp_path / "small")
    plan.save(tmp_path / "plan.toml")
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / "text.py").write_text(TEXT)
    return tmp_path


def run(place: Path, out: str = "run", **options: Any) -> Timeline:
    hooks = {key: options.pop(key) for key in ("on_step", "on_load") if key in options}
    return train(place / "plan.toml", place / "corpus", place / out, TrainingOptions(**{"steps": 5, "warm_up_steps": 2, **options}), CPU, **hooks)


def change_plan(place: Path, **changes: Any) -> None:
    msgspec.structs.replace(Plan.load(place / "plan.toml"), **changes).save(place / "plan.toml")


def test_a_run_leaves_its_folder_whole(place: Path) -> None:
    steps: list[Progress] = []
    loaded: list[int] = []
    measured = run(place, on_step=steps.append, on_load=loaded.append, rate=3e-3)
    out, plan = place / "run", Plan.load(place / "plan.toml")
    assert sorted(path.name for path in out.iterdir()) == ["environment.json", "measured.json", "memory.json", "metrics.jsonl", "model", "plan.toml"]

    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [step.number for step in steps] == [1, 2, 3, 4, 5]
    assert [row["loss"] for row in rows] == [step.result.loss for step in steps]
    assert all(math.isfinite(row["loss"]) and row["gradient_norm"] > 0 for row in rows)
    assert rows[0]["loss"] == pytest.approx(math.log(300), rel=0.05)
    assert rows[-1]["loss"] < rows[0]["loss"] - 0.1
    assert [row["rate"] for row in rows] == [1.5e-3, 3e-3, 3e-3, 3e-3, 3e-3]
    assert all(row["tokens_per_second"] == pytest.approx(plan.workload.step_tokens / row["seconds"], abs=0.1) for row in rows)
    assert sum(loaded) == plan.model.parameters

    assert Timeline.load(out / "measured.json") == measured
    assert measured.digest == plan.digest
    assert measured in [step.result.timeline for step in steps[2:]], "a step after the warm-up"
    memory = json.loads((out / "memory.json").read_text())
    predicted = account(lower(plan), 1, 1, 0, 0)
    assert (memory["device_pool_bytes"], memory["host_pool_bytes"]) == (predicted.device_peak_bytes, predicted.host_peak_bytes)
    environment = json.loads((out / "environment.json").read_text())
    assert {"device", "cores", "torch", "python"} <= environment.keys()

    kept = Plan.load(out / "plan.toml")
    assert kept.digest == plan.digest
    assert (out / kept.source).resolve() == (place / "small").resolve()
    exported = AutoModelForCausalLM.from_pretrained(out / "model")
    start = AutoModelForCausalLM.from_pretrained(place / "small")
    assert all(not torch.equal(parameter, start.get_parameter(name)) for name, parameter in exported.named_parameters())
    ids = torch.tensor([list(TEXT[:32].encode())])
    with torch.no_grad():
        assert float(exported(ids, labels=ids).loss) < float(start(ids, labels=ids).loss)


def test_the_same_seed_gives_the_same_run(place: Path) -> None:
    losses = []
    for out, seed in (("a", 0), ("b", 0), ("c", 1)):
        run(place, out, seed=seed, random_init=True, export=False, steps=2)
        losses.append([json.loads(line)["loss"] for line in (place / out / "metrics.jsonl").read_text().splitlines()])
        assert not (place / out / "model").exists()
    assert losses[0] == losses[1] != losses[2]


def test_a_run_keeps_the_hardware_file_of_its_plan(place: Path) -> None:
    (place / "measured-here.toml").write_text("# a machine\n")
    change_plan(place, hardware="measured-here.toml")
    run(place, steps=1, export=False)
    assert (place / "run" / "hardware.toml").read_text() == "# a machine\n"
    assert Plan.load(place / "run" / "plan.toml").hardware == "hardware.toml"


def test_the_rate_warms_up_linearly() -> None:
    options = TrainingOptions(steps=9, rate=1.0, warm_up_steps=4)
    assert [options.rate_at(number) for number in (1, 2, 3, 4, 5, 9)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    assert TrainingOptions(steps=1, rate=1.0, warm_up_steps=0).rate_at(1) == 1.0


# ---- refusals ----


def remove_model(place: Path) -> None:
    (place / "small" / "config.json").unlink()


def remove_weights(place: Path) -> None:
    (place / "small" / "model.safetensors").unlink()


def truncate_weights(place: Path) -> None:
    file = place / "small" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])


def empty_corpus(place: Path) -> None:
    (place / "corpus" / "text.py").write_text("pass")


def remove_corpus(place: Path) -> None:
    (place / "corpus" / "text.py").unlink()


def wrong_digest(place: Path) -> None:
    change_plan(place, digest="0123456789abcdef")


def small_device(place: Path) -> None:
    change_plan(place, device_limit_bytes=10_000)


def broken_plan(place: Path) -> None:
    (place / "plan.toml").write_text((place / "plan.toml").read_text() + "\nunknown = 1\n")


def remove_plan(place: Path) -> None:
    (place / "plan.toml").unlink()


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (remove_model, r"model .*small: found no config\.json; allowed: a Hugging Face model folder; fix: check `source` in the plan, or pass --init random"),
        (remove_weights, r"small: found no \*\.safetensors file"),
        (truncate_weights, r"small/model\.safetensors: found a file that cannot be read"),
        (empty_corpus, r"corpus .*corpus: found 5 tokens; allowed: at least the 65 of one step"),
        (remove_corpus, r"corpus .*corpus: found a folder without text files"),
        (wrong_digest, r"digest: found '0123456789abcdef'; allowed: "),
        (small_device, r"device memory: found pools of .*; allowed: 9\.77 KiB; fix: raise the limit by "),
        (broken_plan, r"plan\.toml.*unknown"),
        (remove_plan, r"plan\.toml: found "),
    ],
)
def test_a_refusal_is_one_line_and_writes_nothing(place: Path, spoil: Callable[[Path], None], message: str) -> None:
    spoil(place)
    before = sorted(place.rglob("*"))
    with pytest.raises(UserError, match=message) as error:
        run(place)
    assert "\n" not in str(error.value)
    assert sorted(place.rglob("*")) == before


@pytest.mark.parametrize("taken", ["run", "run/precious"])
def test_an_out_that_is_taken_is_left_alone(place: Path, taken: str) -> None:
    (place / taken).parent.mkdir(exist_ok=True)
    (place / taken).write_text("mine")
    before = sorted(place.rglob("*"))
    with pytest.raises(UserError, match="run: found something there already; allowed: a new or empty folder; fix: name another one with --out"):
        run(place)
    assert sorted(place.rglob("*")) == before
    assert (place / taken).read_text() == "mine"


def test_an_empty_out_is_used(place: Path) -> None:
    (place / "run").mkdir()
    run(place, steps=1, export=False)
    assert (place / "run" / "metrics.jsonl").read_text()


def test_an_out_that_cannot_be_made_is_an_error_before_the_first_step(place: Path) -> None:
    (place / "file").write_text("")
    before = sorted(place.rglob("*"))
    with pytest.raises((UserError, OSError)):  # the command prints either as one line
        run(place, "file/run", steps=1, on_step=lambda _: pytest.fail("a step was run"))
    assert sorted(place.rglob("*")) == before


@pytest.mark.parametrize(("option", "value"), [("steps", 0), ("rate", -1e-3), ("rate", math.nan), ("warm_up_steps", -1)])
def test_an_option_that_makes_no_sense_is_one_line(option: str, value: float) -> None:
    with pytest.raises(UserError, match=f"^training: {option}: found {value}; allowed: >= [01]; fix: "):
        TrainingOptions(**{"steps": 1, option: value})


def test_weights_come_from_the_folder_unless_random_ones_are_asked_for(place: Path) -> None:
    """At rate 0 and without decay, training leaves the weights as they were loaded."""
    for out, random_init in (("from-folder", False), ("random", True)):
        run(place, out, steps=1, rate=0.0, random_init=random_init)
    start = AutoModelForCausalLM.from_pretrained(place / "small").get_parameter("model.layers.1.mlp.up_proj.weight")
    name = "model.layers.1.mlp.up_proj.weight"
    assert torch.equal(AutoModelForCausalLM.from_pretrained(place / "from-folder" / "model").get_parameter(name), start)
    drawn = random_weights(0)("1", "mlp.up_proj.weight", (96, 32))
    assert torch.equal(AutoModelForCausalLM.from_pretrained(place / "random" / "model").get_parameter(name), drawn)


def test_a_full_disk_is_one_line() -> None:
    with pytest.raises(UserError, match=r"/dev/full: found no space left on device; allowed: a disk with room; fix: "):
        trainer._append(Path("/dev/full"), {"step": 1})
