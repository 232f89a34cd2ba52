"""Tests of `megatrain train`: its config, the run folder and the summary at the end.

The config comes from a file, `--set` and options.
"""

from __future__ import annotations

import importlib.util
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from tiny_families import config_of as tiny_config

from megatrain.experiments.cli import main as cli
from megatrain.experiments.cli import options
from megatrain.experiments.commands import train
from megatrain.runtime.training.config import Config, fields

CONFIG = """
[training]
steps = 6
seed = 5

[optimizer]
weight_decay = 0.1

[[optimizer.groups]]
match = "*o_proj*"
weight_decay = 0.0

[schedule]
kind = "cosine"
rate = 1e-4
warm_up_steps = 2

[data]
data = "corpus"
evaluation_data = "corpus/one.txt"

[evaluation]
every_steps = 3
over_steps = 2
"""


@pytest.mark.usefixtures("workplace", "with_pictures")
def test_options_win_over_set_and_set_over_the_file(command: Any) -> None:
    Path("train.toml").write_text(CONFIG)
    words = ("train", "plan.toml", "--config", "train.toml", "--out", "run", "--device", "cpu")
    outcome = command(
        *words,
        "--set",
        "rate=2e-3",
        "--set",
        "seed=6",
        "--seed",
        "7",
        "--schedule.floor",
        "0.5",
        *(("--set", "tensorboard=true") if importlib.util.find_spec("tensorboard") else ()),
    )
    assert (outcome.status, outcome.err) == (0, "")
    run = Path("run")
    config = Config.load(run / "config.toml")
    assert (
        config.training.seed,
        config.schedule.rate,
        config.schedule.floor,
        config.schedule.kind,
    ) == (7, 2e-3, 0.5, "cosine")
    assert config.optimizer.groups[0].match == "*o_proj*"
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps, evaluations = (
        [row for row in rows if ("evaluation_loss" in row) == wanted] for wanted in (False, True)
    )
    assert [row["rate"] for row in steps] == pytest.approx(
        [config.schedule.at(number, 6) for number in range(1, 7)]
    )
    assert [row["step"] for row in evaluations] == [3, 6]
    last = evaluations[-1]
    said = (
        f"evaluation loss {last['evaluation_loss']:.4f}, perplexity {last['perplexity']:,.2f}, over"
        f" {last['tokens']:,} tokens after step 6"
    )
    assert said in outcome.out
    names = {path.name for path in run.iterdir()}
    board = {"tensorboard"} if importlib.util.find_spec("tensorboard") else set()
    assert {
        "plan.toml",
        "config.toml",
        "checkpoints",
        "environment.json",
        "data.json",
        "metrics.jsonl",
        "models.json",
        "measured.json",
        "memory.json",
        "loss.png",
        "model",
    } | board == names
    assert (run / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert command("compare", "run").status == 0, "compare skips the rows of evaluations"


@pytest.mark.usefixtures("workplace")
def test_runs_that_evaluate_other_parts_of_the_same_text_are_told_apart(command: Any) -> None:
    Path("text.txt").write_text("the first text\n" * 50)
    words = ("--data", "text.txt", "--steps", 1, "--device", "cpu", "--no-export")
    for fraction in (0.1, 0.3):
        kept = ("--evaluation-fraction", fraction, "--out", f"run-{fraction}")
        assert command("train", "plan.toml", *words, *kept).status == 0
    found = command("compare", "run-0.1", "run-0.3").out
    assert len(set(re.findall(r"text\.txt \(\w+, 1 document, [\d,]+ tokens\)", found))) == 4
    line = next(line for line in found.splitlines() if line.startswith("evaluation loss, last"))
    assert "%" not in line
    assert "Evaluation losses on different evaluation data are not comparable." in found


@pytest.mark.usefixtures("workplace")
def test_runs_on_data_of_the_same_name_are_told_apart_by_its_content(command: Any) -> None:
    data = ("--data", "text.txt", "--evaluation-data", "held-out.txt")
    words = ("--steps", 1, "--device", "cpu", "--no-export")
    for run, text in (("one", "first"), ("two", "other"), ("three", "first")):
        Path("text.txt").write_text(f"the {text} text\n" * 20)
        Path("held-out.txt").write_text(f"the {text} text that is kept\n" * 20)
        assert command("train", "plan.toml", *data, *words, "--out", run).status == 0
    found = command("compare", "one", "two")
    for name in (r"text\.txt", r"held-out\.txt"):
        named = re.findall(rf"{name} \([\w-]+, 1 document, [\d,]+ tokens\)", found.out)
        assert len(set(named)) == len(named) == 2
    assert "Evaluation losses on different evaluation data are not comparable" in found.out
    assert ".txt" not in command("compare", "one", "three").out


@pytest.mark.usefixtures("workplace")
def test_a_run_s_config_makes_the_same_run(command: Any) -> None:
    words = ("--device", "cpu", "--no-export", "--out")
    assert (
        command(
            "train",
            "plan.toml",
            "--data",
            "corpus",
            "--steps",
            3,
            "--set",
            "kind=linear",
            "--warm-up",
            1,
            *words,
            "first",
        ).status
        == 0
    )
    assert (
        command("train", "first/plan.toml", "--config", "first/config.toml", *words, "again").status
        == 0
    )
    losses = [
        [
            json.loads(line)["loss"]
            for line in (Path(name) / "metrics.jsonl").read_text().splitlines()
        ]
        for name in ("first", "again")
    ]
    assert losses[0] == losses[1]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ("--set", "learning_rate=1"),
            (
                r"--set learning_rate: found no field of this name; allowed: a field .*;"
                r" fix: did you mean "
            ),
        ),
        (
            ("--set", "every_steps=1"),
            (
                r"--set every_steps: found a field of several sections; allowed:"
                r" evaluation.every_steps, saving.every_steps"
            ),
        ),
        (
            ("--set", "rate"),
            r"--set: found 'rate'; allowed: FIELD=VALUE; fix: write it like --set rate=3e-4",
        ),
        (("--set", "rate=fast"), r"config: schedule.rate: found `str`; allowed: `float`"),
        (
            ("--schedule.kind", "cosin"),
            r"--schedule: found 'cosin'; allowed: 'constant', 'linear', 'cosine', 'wsd'",
        ),
        (
            ("--set", "warm_up_steps=10"),
            (
                r"config: schedule: warm_up_steps: found 10, and 1 of decay, in a training of 2;"
                r" allowed: at most 1 with kind cosine"
            ),
        ),
        (("--config", "gone.toml"), r"gone.toml: found no such file"),
        (
            ("--config", "plan.toml"),
            r"plan.toml: top level: found unknown key `.*`; allowed: data, evaluation, ",
        ),
        (
            ("--data", ""),
            (
                r"train: found no --data; allowed: --data PATH, or data in \[data\] of a"
                r" --config file"
            ),
        ),
        (
            ("--set", 'groups=[{match = "*nrom*"}]'),
            (
                r"optimizer: groups: match: found '\*nrom\*'; allowed: a pattern of the model's"
                r" tensors"
            ),
        ),
        (
            ("--logging.tracker", "trackio"),
            (
                r"logging: tracker: trackio: found no package trackio; allowed: an installed"
                r" package; fix: pip install trackio"
            ),
        ),
        (
            ("--logging.tensorboard",),
            (
                r"--tensorboard: found no package tensorboard; allowed: an installed"
                r" package; fix: pip install tensorboard, or leave --tensorboard out\n"
            ),
        ),
        (("--eval-data", "gone"), r"data .*gone: found no such file or folder"),
        (
            ("--eval-data", "corpus", "--eval-fraction", "0.1"),
            (
                r"config: data: evaluation: found more than one of a fraction, a number of "
                r"documents,"
                r" and a file or split"
            ),
        ),
        (("--columns", "csv"), r"--columns: found 'csv'; allowed: 'auto', 'text', "),
        (
            ("--from-step", "2"),
            (
                r"train: found --from-step without --resume; allowed: MODEL --out RUN,"
                r" PLAN --out RUN, or --resume RUN"
            ),
        ),
        (("--resume", "run"), r"train: --out, --resume: found both"),
    ],
)
def test_a_mistake_in_the_config_gives_a_one_line_error_and_leaves_nothing(
    words: tuple[str, ...],
    message: str,
    workplace: Path,
    command: Any,
    files_in: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from megatrain.runtime.training import trackers

    monkeypatch.setattr(trackers.importlib.util, "find_spec", lambda _: None)
    before = files_in(workplace)
    outcome = command(
        "train",
        "plan.toml",
        "--data",
        "corpus",
        "--steps",
        "2",
        "--device",
        "cpu",
        "--out",
        "new",
        *words,
    )
    assert (outcome.status, outcome.out) == (2, "")
    assert re.match(rf"megatrain: {message}", outcome.err), outcome.err
    assert outcome.err.count("\n") == 1
    assert files_in(workplace) == before


@pytest.mark.usefixtures("workplace")
def test_a_plan_without_a_number_of_steps_is_trained_for_one_epoch(command: Any) -> None:
    Path("short.txt").write_text("a few words " * 20)
    outcome = command(
        "train", "plan.toml", "--data", "short.txt", "--device", "cpu", "--out", "new"
    )
    assert (outcome.status, outcome.err) == (0, "")
    assert "1.00 epochs" in outcome.out


@pytest.mark.usefixtures("workplace")
@pytest.mark.parametrize(
    ("option", "value", "rest"),
    [
        ("--schedule", "foo", "found 'foo'; allowed: 'constant', 'linear', 'cosine', 'wsd'"),
        ("--loss", "most", "found 'most'; allowed: 'assistant', 'last', 'all'"),
        ("--evaluation-fraction", "2", "found 2.0; allowed: a number < 1.0"),
        ("--tracker", "paper", "found 'paper'; allowed: '', 'wandb', 'trackio'"),
    ],
)
def test_a_wrong_value_of_an_option_is_named_by_the_option(
    command: Any, option: str, value: str, rest: str
) -> None:
    words = ("train", "plan.toml", "--data", "corpus", "--steps", "1", "--out", "new")
    outcome = command(*words, option, value)
    fix = f"correct this value, or leave {option} out for the default"
    assert outcome.err == f"megatrain: {option}: {rest}; fix: {fix}\n"


@pytest.mark.usefixtures("workplace")
def test_epochs_are_steps_of_the_data(command: Any) -> None:
    words = ("train", "plan.toml", "--data", "corpus", "--device", "cpu", "--lr", "2e-5")
    outcome = command(*words, "--epochs", "0.02", "--save-every", 1, "--out", "run")
    assert (outcome.status, outcome.err) == (0, "")
    config = Config.load(Path("run/config.toml"))
    said = re.search(r"([\d.]+) steps an epoch; (\d+) steps are 0.02 epochs\n", outcome.out)
    assert said is not None
    assert config.training.steps == int(said[2]) == math.ceil(0.02 * float(said[1]))
    assert config.training.epochs == 0
    assert config.schedule.rate == 2e-5
    assert len(Path("run/metrics.jsonl").read_text().splitlines()) == config.training.steps
    again = command("train", "--resume", "run", "--epochs", "0.01", "--device", "cpu")
    assert "steps are done already" in again.err


def test_a_flag_needs_no_value() -> None:
    for words in (("--logging.tensorboard",), ("--logging.tensorboard", "true")):
        args = cli.parse(["train", "plan.toml", "--out", "run", *words])
        assert vars(args)["logging.tensorboard"] is True
        assert args.plan == Path("plan.toml")


@pytest.mark.usefixtures("workplace")
def test_an_earlier_name_of_the_rate_is_still_accepted(command: Any) -> None:
    words = ("train", "plan.toml", "--data", "corpus", "--device", "cpu", "--steps", 1)
    assert command(*words, "--rate", "3e-5", "--out", "run").status == 0
    assert Config.load(Path("run/config.toml")).schedule.rate == 3e-5


@pytest.mark.usefixtures("workplace")
def test_a_chat_model_is_trained_and_exported_with_its_tokenizer(
    command: Any, make_tokenizer: Any
) -> None:
    make_tokenizer(Path("tiny"))
    turns = [
        {"role": role, "content": f"{role} says something"} for role in ("user", "assistant") * 2
    ]
    lines = [json.dumps({"messages": turns}) for _ in range(40)]
    Path("chat.jsonl").write_text("\n".join([*lines[:3], "{broken", *lines[3:]]))
    words = (
        "train",
        "plan.toml",
        "--data",
        "chat.jsonl",
        "--loss",
        "last",
        "--eval-documents",
        4,
        "--data-cache",
        "cache",
        "--steps",
        3,
        "--device",
        "cpu",
    )
    words = (*words, "--packing", "plain")  # a conversation is longer than a row
    outcome = command(*words, "--out", "run")
    assert (outcome.status, outcome.err) == (0, "")
    assert (
        "recognized: messages, chat template of the tokenizer, loss on the last assistant turn"
        in outcome.out
    )
    assert (
        f"1 bad row left out, the first of each kind: {Path('chat.jsonl').resolve()}:4: invalid"
        " JSON" in outcome.out
    )
    assert "training: 36 documents, " in outcome.out
    assert "evaluation: 4 documents, " in outcome.out
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained("run/model")
    answer = len(tokenizer("assistant says something<e>")["input_ids"])
    assert re.search(
        rf"evaluation loss [\d.]+, perplexity [\d.,]+, over {4 * answer} tokens after step 3",
        outcome.out,
    )
    assert len(list(Path("cache").iterdir())) == 1
    strict = command(*words, "--strict", "--out", "another")
    assert re.match(r"megatrain: bad row .*chat.jsonl:4: found invalid JSON", strict.err), (
        strict.err
    )


@pytest.mark.usefixtures("workplace")
@pytest.mark.parametrize(
    ("words", "documents", "packing"),
    [
        ((), True, "documents"),
        (("--documents",), True, "documents"),
        (("--plain-packing",), False, "plain"),
    ],
)
def test_documents_are_kept_apart_unless_plain_packing_is_given(
    command: Any, words: tuple[str, ...], documents: bool, packing: str
) -> None:
    """Documents in a row do not attend to each other unless --plain-packing is given.

    A plan that keeps documents apart can also be trained with plain packing. A plan for plain
    packing cannot be trained with documents kept apart.
    """
    work = ("--policy", "double_buffer", "--batch", 2, "--seq", 16, "--dtype", "fp32")
    outcome = command("plan", "tiny", "--hardware", "h200", *work, *words, "--out", "made.toml")
    assert (outcome.status, outcome.err) == (0, "")
    assert ("documents: in fp32 a mask keeps them apart" in outcome.out) is documents
    assert ("documents = true" in Path("made.toml").read_text()) is documents
    train = ("train", "made.toml", "--data", "corpus", "--steps", 2, "--device", "cpu")
    assert f"packing {packing}, " in command(*train, "--out", "run").out
    assert "packing plain, " in command(*train, "--packing", "plain", "--out", "another").out
    refused = command(*train, "--packing", "documents", "--out", "third")
    assert (
        refused.err == ""
        if documents
        else ("--packing: found documents; allowed: plain, since the plan attends over whole rows")
        in refused.err
    )


@pytest.mark.usefixtures("workplace")
def test_a_model_that_cannot_keep_documents_apart_is_planned_without_documents_and_a_note(
    command: Any,
) -> None:
    config = tiny_config("llama4_text", floor_scale=16).to_dict()
    Path("next").mkdir()
    Path("next/config.json").write_text(json.dumps(config))
    words = (
        "plan",
        "next",
        "--hardware",
        "h200",
        "--policy",
        "resident",
        "--batch",
        2,
        "--seq",
        16,
        "--out",
        "next.toml",
    )
    reason = "llama4_text, which scales queries by their place in a row of 16 tokens or more"
    refused = command(*words, "--documents")
    assert refused.status == 2
    assert re.match(
        rf"megatrain: --documents: found {reason}; allowed: .*; fix: use --plain-packing\n$",
        refused.err,
    )
    outcome = command(*words)
    assert outcome.status == 0
    assert outcome.err == f"rows are packed without borders between documents: {reason}\n"
    assert "documents" not in Path("next.toml").read_text()
    cudnn = command(
        "check", "tiny", "--hardware", "h200", "--policy", "resident", "--attention", "cudnn"
    )
    assert (
        cudnn.err
        == "rows are packed without borders between documents: --attention cudnn, which does"
        " not support document lengths\n"
    )


@pytest.mark.usefixtures("workplace")
def test_several_files_with_weights_are_trained_on_and_resumed(command: Any) -> None:
    given = ("--data", "corpus/one.txt:0.5", "corpus/two.py", "--save-every", 1, "--device", "cpu")
    outcome = command("train", "plan.toml", *given, "--steps", 1, "--out", "run", "--no-export")
    assert (outcome.status, outcome.err) == (0, "")
    paths = tuple(f"{Path.cwd()}/corpus/{name}" for name in ("one.txt:0.5", "two.py"))
    assert Config.load(Path("run/config.toml")).data.data == paths
    outcome = command("train", "--resume", "run", "--steps", 2, "--device", "cpu")
    assert (outcome.status, outcome.err) == (0, "")
    one, two = (path.partition(":")[0] for path in paths)
    outcome = command(
        "train", "--resume", "run", "--steps", 3, "--device", "cpu", "--data", one, two
    )
    assert outcome.status == 2
    assert "data.digest" in outcome.err


@pytest.mark.usefixtures("workplace")
@pytest.mark.parametrize("value", ["data=[]", "data=[1, 2]"])
def test_a_list_of_data_that_has_no_paths_is_refused(command: Any, value: str) -> None:
    outcome = command("train", "plan.toml", "--out", "run", "--steps", "1", "--set", value)
    assert outcome.status == 2
    assert "data" in outcome.err
    assert outcome.err.count("\n") == 1


def test_an_option_is_named_like_its_field_or_its_help_names_the_field() -> None:
    parser = options.OneLineParser(prog="megatrain train")
    train.describe(parser)
    for key in fields():
        option = train.option_of(key)
        action = parser._option_string_actions[option]
        own = f"--{key.partition('.')[2].replace('_', '-')}"
        assert action.dest == key
        assert option == own or f"[{key} in a config file]" in str(action.help)
        assert action.metavar != "VALUE"


@pytest.mark.parametrize(
    ("option", "key", "value"),
    [
        ("--rate", "schedule.rate", 0.5),
        ("--schedule.rate", "schedule.rate", 0.5),
        ("--warm-up", "schedule.warm_up_steps", 3),
        ("--eval-fraction", "data.evaluation_fraction", 0.5),
        ("--data.evaluation_fraction", "data.evaluation_fraction", 0.5),
        ("--eval-every", "evaluation.every_steps", 3),
        ("--evaluation.every_steps", "evaluation.every_steps", 3),
        ("--schedule.kind", "schedule.kind", "wsd"),
        ("--logging.project", "logging.project", "5"),
    ],
)
def test_earlier_names_and_names_of_fields_are_accepted(
    option: str, key: str, value: object
) -> None:
    given = cli.parse(["train", "tiny", "--out", "run", option, str(value)])
    assert vars(given)[key] == value
    assert vars(cli.parse(["train", "t", train.option_of(key), str(value)]))[key] == value


@pytest.mark.parametrize(
    ("words", "steps", "epochs"),
    [
        (["--steps", "0"], 0, 1.0),
        (["--steps", "0", "--epochs", "2"], 0, 2.0),
        (["--config", "two.toml", "--steps", "0"], 0, 2.0),
        (["--config", "two.toml", "--steps", "5"], 5, 0.0),
    ],
)
def test_no_steps_are_as_many_as_the_epochs_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], steps: int, epochs: float
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("two.toml").write_text("[training]\nepochs = 2\n")
    training = train.config_of(cli.parse(["train", "plan.toml", "--data", "x", *words])).training
    assert (training.steps, training.epochs) == (steps, epochs)


@pytest.mark.parametrize(
    "text", ["lr=0.5", "rate=0.5", "schedule.rate=0.5", "evaluate-every=3", "eval_fraction=0.5"]
)
def test_set_accepts_names_of_options_too(text: str) -> None:
    given = cli.parse(["train", "plan.toml", "--set", text, "--data", "x", "--steps", "9"])
    config = train.config_of(given)
    found = (config.schedule.rate, config.evaluation.every_steps, config.data.evaluation_fraction)
    assert found in ((0.5, 0, 0), (1e-5, 3, 0), (1e-5, 0, 0.5))


def test_rows_longer_than_the_model_s_own_limit_are_warned_of(
    workplace: Path, command: Any
) -> None:
    planned = command(
        "plan",
        "tiny",
        "--hardware",
        "h200",
        "--batch",
        1,
        "--seq",
        128,
        "--dtype",
        "fp32",
        "--policy",
        "resident",
        "--out",
        "long.toml",
    )
    assert planned.status == 0
    words = ("--data", workplace / "corpus", "--steps", 1, "--device", "cpu", "--out", "run")
    outcome = command("train", "long.toml", *words)
    assert (outcome.status, outcome.err) == (0, "")
    assert "warning: rows of 128 tokens are longer than the model's own limit of 64" in outcome.out
