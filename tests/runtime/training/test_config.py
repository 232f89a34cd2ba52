"""Tests of the config: every field is checked, whatever it is read from.

A mistake gives a one-line error.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatrain.runtime.data.options import DataOptions
from megatrain.runtime.optimizer.settings import AdamW, GroupSettings
from megatrain.runtime.training.config import (
    Config,
    TrainingSettings,
    checked,
    fields,
    full_name,
    parse_value,
)
from megatrain.runtime.training.learning_rate import LearningRate
from megatrain.simulator.base.errors import UserError
from megatrain.simulator.base.files import write_toml

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


def test_settings_override_the_file(tmp_path: Path) -> None:
    (tmp_path / "train.toml").write_text(FULL)
    config = Config.load(tmp_path / "train.toml", {"schedule.rate": 1e-5, "training.seed": 4})
    assert config == Config(
        training=TrainingSettings(steps=100, seed=4),
        optimizer=AdamW(
            weight_decay=0.1,
            betas=(0.9, 0.99),
            groups=(GroupSettings(match="*norm*", rate_factor=0.5),),
        ),
        schedule=LearningRate(kind="cosine", rate=1e-5),
        data=DataOptions(data="corpus"),
    )
    write_toml(tmp_path / "again.toml", config)
    assert Config.load(tmp_path / "again.toml") == config


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        (
            "training.steps",
            0,
            "training: found neither steps nor epochs; allowed: one of the two; fix: set steps",
        ),
        ("training.steps", 1.5, "training.steps: found `float`; allowed: `int`"),
        ("training.seed", -1, "training.seed"),
        ("schedule.rate", float("nan"), "schedule.rate: found nan; allowed: `float` >= 0.0"),
        ("schedule.rate", float("inf"), "schedule.rate"),
        ("schedule.rate", -1.0, "schedule.rate"),
        ("schedule.rate", "fast", "schedule.rate: found `str`; allowed: `float`"),
        (
            "schedule.kind",
            "cosin",
            "schedule.kind: found 'cosin'; allowed: 'constant', 'linear', 'cosine', 'wsd'",
        ),
        ("schedule.floor", 1.5, "schedule.floor"),
        ("optimizer.betas", [0.9, 1.0], r"optimizer.betas"),
        ("optimizer.betas", [0.9], r"optimizer.betas"),
        ("optimizer.epsilon", 0.0, "optimizer.epsilon"),
        (
            "optimizer.groups",
            [{"match": "*", "decay": 1}],
            (
                r"optimizer.groups\[0\]: found unknown key `decay`; allowed: match, rate_factor,"
                r" weight_decay"
            ),
        ),
        (
            "optimizer.groups",
            [{"match": "*", "weight_decay": -1.0}],
            r"optimizer.groups\[0\].weight_decay: found -1.0; allowed: `float` >= 0.0",
        ),
        ("evaluation.over_steps", -1, "evaluation.over_steps"),
        ("saving.keep_last", 0, "saving.keep_last: found 0; allowed: `int` >= 1"),
        (
            "saving.on_failure",
            "ignore",
            "saving.on_failure: found 'ignore'; allowed: 'stop', 'go on'",
        ),
        (
            "data.packing",
            "tight",
            "data.packing: found 'tight'; allowed: '', 'documents', 'plain', 'none'",
        ),
        (
            "logging.tracker",
            "mlflow",
            "logging.tracker: found 'mlflow'; allowed: '', 'wandb', 'trackio'",
        ),
        (
            "trainig.steps",
            1,
            (
                "found unknown key `trainig`; allowed: data, evaluation, logging, optimizer,"
                " saving, schedule, training"
            ),
        ),
        (
            "training.stepz",
            1,
            (
                "training: found unknown key `stepz`; allowed: deterministic, epochs, init, seed,"
                " steps"
            ),
        ),
    ],
)
def test_invalid_values_give_one_line_errors(key: str, value: Any, message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        Config.load(None, {"training.steps": 10, "schedule.warm_up_steps": 0, key: value})
    assert "\n" not in str(error.value)


def test_steps_or_epochs_are_required() -> None:
    with pytest.raises(UserError, match="training: found neither steps nor epochs"):
        Config.load(None)
    with pytest.raises(UserError, match="training: found both steps and epochs"):
        Config.load(None, {"training.steps": 3, "training.epochs": 0.5})


def test_the_last_setting_of_steps_or_epochs_counts(tmp_path: Path) -> None:
    (tmp_path / "train.toml").write_text(FULL)
    config = Config.load(tmp_path / "train.toml", {"training.epochs": 0.5})
    assert (config.training.steps, config.training.epochs) == (0, 0.5)
    assert (config.schedule.rate, config.schedule.warm_up_steps) == (3e-4, None)
    settled = config.with_steps(40)
    assert (settled.training.steps, settled.training.epochs) == (40, 0.0)
    assert settled.schedule.warm_up_steps == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [("steps = ", "not TOML"), ("training = 3\n", "training: found 3; allowed: a section")],
)
def test_an_invalid_config_file_gives_a_one_line_error(
    tmp_path: Path, text: str, message: str
) -> None:
    (tmp_path / "train.toml").write_text(text)
    with pytest.raises(UserError, match=f"train.toml.*{message}"):
        Config.load(tmp_path / "train.toml", {"training.steps": 1})


def test_a_config_built_in_python_is_checked_too() -> None:
    with pytest.raises(UserError, match=r"config: schedule: rate"):
        checked(Config(training=TrainingSettings(steps=100), schedule=LearningRate(rate=-1.0)))
    for steps in (-3, "3"):
        with pytest.raises(UserError, match=r"^config: training: steps: found (-3|`str`); allowed"):
            Config(training=TrainingSettings(steps=steps))  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"^config: training: found a dict; allowed: a TrainingSet"):
        Config(training={"steps": 3})  # type: ignore[arg-type]
    with pytest.raises(UserError, match="schedule: warm_up_steps: found 10"):
        Config(
            training=TrainingSettings(steps=5),
            schedule=LearningRate(kind="linear", warm_up_steps=10),
        )


def test_a_config_gets_a_learning_rate_and_the_file_of_a_run_keeps_it(tmp_path: Path) -> None:
    pretrained, random = (
        Config(training=TrainingSettings(steps=100, init=init)).schedule
        for init in ("model", "random")
    )
    assert (pretrained.kind, pretrained.rate, pretrained.warm_up_steps) == ("cosine", 1e-5, 3)
    assert random.rate == 3e-4
    old = '[training]\nsteps = 100\n[schedule]\nkind = "constant"\nrate = 0.001\nwarm_up_steps = 10'
    (tmp_path / "config.toml").write_text(old)
    resumed = Config.load(tmp_path / "config.toml", {"training.steps": 500})
    assert resumed.schedule == LearningRate(kind="constant", rate=1e-3, warm_up_steps=10)


def test_every_field_is_documented() -> None:
    assert all(field.meaning for field in fields().values())
    assert {name.partition(".")[0] for name in fields()} == {
        "training",
        "optimizer",
        "schedule",
        "data",
        "evaluation",
        "saving",
        "logging",
    }


DEFAULTS: dict[str, Any] = {
    "training.steps": 0,
    "training.epochs": 0.0,
    "training.seed": 0,
    "training.init": "model",
    "training.deterministic": False,
    "optimizer.weight_decay": 0.0,
    "optimizer.max_norm": 1.0,
    "optimizer.adagc_factor": 1.05,
    "optimizer.adagc_decay": 0.98,
    "optimizer.adagc_warm_up": 100,
    "optimizer.betas": (0.9, 0.95),
    "optimizer.epsilon": 1e-8,
    "optimizer.groups": (),
    "schedule.kind": "cosine",
    "schedule.rate": None,
    "schedule.warm_up_steps": None,
    "schedule.decay_steps": 0,
    "schedule.floor": 0.0,
    "data.data": "",
    "data.split": "train",
    "data.columns": "auto",
    "data.loss": "assistant",
    "data.chat_template": "",
    "data.packing": "",
    "data.strict": False,
    "data.evaluation_fraction": 0.0,
    "data.evaluation_documents": 0,
    "data.evaluation_data": "",
    "data.evaluation_split": "",
    "data.trust_remote_code": False,
    "data.cache": "",
    "evaluation.every_steps": 0,
    "evaluation.over_steps": 0,
    "evaluation.ask": (),
    "saving.every_steps": 0,
    "saving.every_minutes": 30.0,
    "saving.keep_last": 2,
    "saving.keep_best": 0,
    "saving.on_failure": "stop",
    "saving.export": True,
    "saving.export_dtype": "",
    "logging.tensorboard": False,
    "logging.tracker": "",
    "logging.project": "megatrain",
    "logging.name": "",
}
"""the defaults of all fields: no foreign code is run, and the model is written at the end"""
BOUNDS: dict[str, tuple[float, float]] = {
    "training.steps": (0, 2**40),
    "training.epochs": (0, 2**20),
    "training.seed": (0, 2**32 - 1),
    "optimizer.weight_decay": (0, 1e38),
    "optimizer.adagc_warm_up": (0, 10**8),
    "optimizer.epsilon": (5e-324, 1),
    "schedule.rate": (0, 1e38),
    "schedule.warm_up_steps": (0, 2**40),
    "schedule.decay_steps": (0, 2**40),
    "schedule.floor": (0, 1),
    "data.evaluation_documents": (0, 2**40),
    "evaluation.every_steps": (0, 2**40),
    "evaluation.over_steps": (0, 2**40),
    "saving.every_steps": (0, 2**40),
    "saving.every_minutes": (0, 2**20),
    "saving.keep_last": (1, 2**40),
    "saving.keep_best": (0, 2**40),
}
"""the smallest and the largest value of each number"""


def test_a_change_of_a_default_changes_other_people_s_runs() -> None:
    assert {name: field.default for name, field in fields().items()} == DEFAULTS


@pytest.mark.parametrize("key", BOUNDS)
def test_numbers_are_accepted_within_their_bounds_only(key: str) -> None:
    def load(value: float) -> Config:
        steps = {"training.epochs": 1.0} if key == "training.steps" and not value else {}
        if key != "training.epochs" or not value:
            steps = {"training.steps": 10} | steps
        return Config.load(None, {**steps, "schedule.kind": "constant", key: value})

    section, _, field = key.partition(".")
    for bound, beyond in zip(BOUNDS[key], (-1, 1), strict=True):
        assert getattr(getattr(load(bound), section), field) == bound
        over = bound + beyond if isinstance(bound, int) else bound + beyond * max(bound, 1.0)
        with pytest.raises(UserError, match=re.escape(f"{key}: found {over!r}; allowed: ")):
            load(over)


@pytest.mark.parametrize(
    "section", ["training", "optimizer", "schedule", "data", "evaluation", "saving", "logging"]
)
def test_an_unknown_key_is_refused_with_the_known_keys_of_its_section(section: str) -> None:
    known = ", ".join(
        sorted(name.partition(".")[2] for name in fields() if name.startswith(f"{section}."))
    )
    with pytest.raises(
        UserError, match=f"config: {section}: found unknown key `unknown`; allowed: {known}; fix: "
    ):
        Config.load(None, {"training.steps": 10, f"{section}.unknown": 1})


def test_the_choices_of_each_field() -> None:
    words = {name: field.words for name, field in fields().items() if field.words}
    assert words == {
        "training.init": ("model", "random"),
        "schedule.kind": ("constant", "linear", "cosine", "wsd"),
        "data.columns": ("auto", "text", "prompt/completion", "messages", "alpaca", "sharegpt"),
        "data.loss": ("assistant", "last", "all"),
        "data.packing": ("documents", "plain", "none"),
        "saving.on_failure": ("stop", "go on"),
        "saving.export_dtype": ("bf16", "fp32"),
        "logging.tracker": ("wandb", "trackio"),
    }


@pytest.mark.parametrize(
    "ways",
    [
        {"evaluation_fraction": 0.1},
        {"evaluation_documents": 1},
        {"evaluation_data": "a"},
        {"evaluation_split": "test"},
    ],
)
def test_evaluation_data_is_named_in_one_way(ways: dict[str, Any]) -> None:
    DataOptions(data="a", **ways)
    for other in (
        {"evaluation_fraction": 0.2},
        {"evaluation_documents": 2},
        {"evaluation_data": "b"},
        {"evaluation_split": "dev"},
    ):
        if (ways.keys() | other.keys()) <= {
            "evaluation_data",
            "evaluation_split",
        } or ways.keys() == other.keys():
            DataOptions(data="a", **{**other, **ways})  # a split of other evaluation data
        else:
            with pytest.raises(
                UserError,
                match=(
                    "data: evaluation: found more than one of a fraction, a number of documents,"
                    " and a file or split"
                ),
            ):
                DataOptions(data="a", **ways, **other)


def test_the_cache_is_in_the_user_s_cache_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert DataOptions(cache="here").cache_folder == Path("here")
    monkeypatch.delenv("MEGATRAIN_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert DataOptions().cache_folder == tmp_path / "megatrain" / "tokens"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert DataOptions().cache_folder == Path.home() / ".cache" / "megatrain" / "tokens"
    monkeypatch.setenv("MEGATRAIN_CACHE", str(tmp_path))
    assert DataOptions().cache_folder == tmp_path / "tokens"


def test_a_unique_field_name_needs_no_section() -> None:
    assert full_name("rate") == full_name("schedule.rate") == "schedule.rate"
    with pytest.raises(
        UserError,
        match=(
            r"--set every_steps: found a field of several sections; allowed:"
            r" evaluation.every_steps, saving.every_steps"
        ),
    ):
        full_name("every_steps")
    with pytest.raises(UserError, match=r"--set learning_rate: found no field of this name"):
        full_name("learning_rate")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3e-4", 3e-4),
        ("10", 10),
        ("true", True),
        ("cosine", "cosine"),
        ('"10"', "10"),
        ("[0.9, 0.99]", [0.9, 0.99]),
        ("a b", "a b"),
        ("", ""),
    ],
)
def test_values_are_toml_and_words_need_no_quotes(text: str, value: Any) -> None:
    assert parse_value(text) == value
    assert type(parse_value(text)) is type(value)


def test_reading_a_config_loads_no_torch() -> None:
    program = (
        "import sys, megatrain.runtime.training.config, megatrain.runtime.training.callback;"
        " sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
