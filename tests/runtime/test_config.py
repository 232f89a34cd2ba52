"""Config: one struct documents and checks every field, whatever it comes from; a mistake is one line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatrain.runtime.hyperparameters import AdamW, Group
from megatrain.runtime.training.config import Config, Training, checked, fields, full_name, parse_value
from megatrain.runtime.training.data_options import DataOptions
from megatrain.runtime.training.learning_rate import LearningRate
from megatrain.simulator.errors import UserError
from megatrain.simulator.files import write_toml

FULL = """
[training]
steps = 100
seed = 3

[optimizer]
weight_decay = 0.1
betas = [0.9, 0.99]

[[optimizer.groups]]
match = "*norm*"
rate_factor = 0.5

[schedule]
kind = "cosine"
rate = 3e-4

[data]
data = "corpus"
"""


def test_a_file_and_what_is_set_on_top_of_it(tmp_path: Path) -> None:
    (tmp_path / "train.toml").write_text(FULL)
    config = Config.load(tmp_path / "train.toml", {"schedule.rate": 1e-5, "training.seed": 4})
    assert config == Config(
        training=Training(steps=100, seed=4), optimizer=AdamW(weight_decay=0.1, betas=(0.9, 0.99), groups=(Group(match="*norm*", rate_factor=0.5),)),
        schedule=LearningRate(kind="cosine", rate=1e-5), data=DataOptions(data="corpus"),
    )  # fmt: skip
    write_toml(tmp_path / "again.toml", config)
    assert Config.load(tmp_path / "again.toml") == config


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("training.steps", 0, "training.steps: found 0; allowed: `int` >= 1; fix: correct this value"),
        ("training.steps", 1.5, "training.steps: found `float`; allowed: `int`"),
        ("training.seed", -1, "training.seed"),
        ("schedule.rate", float("nan"), "schedule.rate: found nan; allowed: `float` >= 0.0"),
        ("schedule.rate", float("inf"), "schedule.rate"),
        ("schedule.rate", -1.0, "schedule.rate"),
        ("schedule.rate", "fast", "schedule.rate: found `str`; allowed: `float`"),
        ("schedule.kind", "cosin", "schedule.kind: found 'cosin'; allowed: 'constant', 'linear', 'cosine', 'wsd'"),
        ("schedule.floor", 1.5, "schedule.floor"),
        ("optimizer.betas", [0.9, 1.0], r"optimizer.betas"),
        ("optimizer.betas", [0.9], r"optimizer.betas"),
        ("optimizer.epsilon", 0.0, "optimizer.epsilon"),
        ("optimizer.groups", [{"match": "*", "decay": 1}], r"optimizer.groups\[0\]: found unknown key `decay`; allowed: match, rate_factor, weight_decay"),
        ("optimizer.groups", [{"match": "*", "weight_decay": -1.0}], r"optimizer.groups\[0\].weight_decay: found -1.0; allowed: `float` >= 0.0"),
        ("evaluation.over_steps", -1, "evaluation.over_steps"),
        ("saving.keep_last", 0, "saving.keep_last: found 0; allowed: `int` >= 1"),
        ("saving.on_failure", "ignore", "saving.on_failure: found 'ignore'; allowed: 'stop', 'go on'"),
        ("data.packing", "tight", "data.packing: found 'tight'; allowed: '', 'documents', 'plain', 'none'"),
        ("logging.tracker", "mlflow", "logging.tracker: found 'mlflow'; allowed: '', 'wandb', 'trackio'"),
        ("trainig.steps", 1, "found unknown key `trainig`; allowed: data, evaluation, logging, optimizer, saving, schedule, training"),
        ("training.stepz", 1, "training: found unknown key `stepz`; allowed: deterministic, init, seed, steps"),
    ],
)
def test_what_cannot_be_is_one_line(key: str, value: Any, message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        Config.load(None, {"training.steps": 10, "schedule.warm_up_steps": 0, key: value})
    assert "\n" not in str(error.value)


def test_steps_must_be_said() -> None:
    with pytest.raises(UserError, match="training: found no key `steps`"):
        Config.load(None)


@pytest.mark.parametrize(("text", "message"), [("steps = ", "not TOML"), ("training = 3\n", "training: found 3; allowed: a section")])
def test_a_file_that_is_none_is_one_line(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "train.toml").write_text(text)
    with pytest.raises(UserError, match=f"train.toml.*{message}"):
        Config.load(tmp_path / "train.toml", {"training.steps": 1})


def test_what_python_builds_is_checked_too() -> None:
    with pytest.raises(UserError, match=r"config: schedule.rate"):
        checked(Config(training=Training(steps=100), schedule=LearningRate(rate=-1.0)))
    with pytest.raises(UserError, match="schedule: warm_up_steps: found 10"):
        Config(training=Training(steps=5), schedule=LearningRate(kind="linear"))


def test_every_field_says_what_it_means() -> None:
    assert all(field.meaning for field in fields().values())
    assert {name.partition(".")[0] for name in fields()} == {"training", "optimizer", "schedule", "data", "evaluation", "saving", "logging"}


def test_a_field_s_own_name_is_enough_where_it_is_the_only_one() -> None:
    assert full_name("rate") == full_name("schedule.rate") == "schedule.rate"
    with pytest.raises(UserError, match=r"--set every_steps: found a field of several sections; allowed: evaluation.every_steps, saving.every_steps"):
        full_name("every_steps")
    with pytest.raises(UserError, match=r"--set learning_rate: found no field of this name"):
        full_name("learning_rate")


@pytest.mark.parametrize(
    ("text", "value"),
    [("3e-4", 3e-4), ("10", 10), ("true", True), ("cosine", "cosine"), ('"10"', "10"), ("[0.9, 0.99]", [0.9, 0.99]), ("a b", "a b"), ("", "")],
)
def test_values_are_toml_and_words_need_no_quotes(text: str, value: Any) -> None:
    assert parse_value(text) == value
    assert type(parse_value(text)) is type(value)


def test_reading_a_config_loads_no_torch() -> None:
    program = "import sys, megatrain.runtime.training.config, megatrain.runtime.training.callback; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False, timeout=60).returncode == 0
