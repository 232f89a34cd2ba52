"""Train a model on text, or execute a plan, and write a run folder.

For a model, the command first makes a plan: it chooses sequence and batch from the lengths of the
data, and the fastest plan from a calibration of this machine.

A field of the config can be set in three ways: in a TOML file (--config), with --set FIELD=VALUE,
or with its own option. An option overrides --set, which overrides the file.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import shlex
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from megatrain.experiments.cli import file_arguments, options
from megatrain.experiments.cli.program import path_error
from megatrain.experiments.cli.training import prepare, upload
from megatrain.experiments.cli.training.preconditions import check_training
from megatrain.experiments.cli.training.several_gpus import ranks_of
from megatrain.runtime.training.callback import Callback
from megatrain.runtime.training.config import Config, Field, fields, full_name, parse_value
from megatrain.runtime.training.learning_rate import format_rate
from megatrain.runtime.training.stopped_run import how_it_stopped, last_checkpoint, no_checkpoint
from megatrain.simulator.base.errors import RunError, UserError

if TYPE_CHECKING:
    from megatrain.runtime.ranks import Ranks
    from megatrain.runtime.training.run_lock import RunLock
    from megatrain.runtime.training.training_run import TrainingRun


def _rate(text: str) -> float:
    """Returns the learning rate in `text`. Raises UserError for other text. This is the `type` of
    an argument.
    """
    try:
        return options.real("--lr")(text)
    except UserError as error:
        raise UserError(
            error.where, found=error.found, allowed=error.allowed, fix="write it like --lr 1e-5"
        ) from None


OPTIONS: dict[str, dict[str, Any]] = {
    "training.steps": {"type": options.whole("--steps", 0), "metavar": "N"},
    "training.epochs": {"type": options.real("--epochs", 1e-6)},
    "training.seed": {"type": options.whole("--seed", 0, 2**32 - 1)},
    "training.init": {"choices": ("model", "random")},
    "training.deterministic": {"action": "store_true"},
    "optimizer.weight_decay": {"type": options.real("--weight-decay")},
    "optimizer.max_norm": {"type": options.real("--max-norm", 1e-6)},
    "optimizer.adagc_factor": {"type": options.real("--adagc-factor")},
    "optimizer.adagc_decay": {"type": options.real("--adagc-decay")},
    "optimizer.adagc_warm_up": {"type": options.whole("--adagc-warm-up", 0)},
    "optimizer.betas": {"metavar": "[B1,B2]"},
    "optimizer.groups": {"metavar": "[{match=PATTERN,...},...]"},
    "schedule.rate": {"type": _rate, "metavar": "RATE"},
    "schedule.warm_up_steps": {"type": options.whole("--warm-up-steps", 0), "metavar": "N"},
    "data.data": {"metavar": "PATH[:WEIGHT]", "nargs": "+"},
    "data.split": {"metavar": "NAME"},
    "data.chat_template": {"metavar": "FILE"},
    "data.strict": {"action": "store_true"},
    "data.trust_remote_code": {"action": "store_true"},
    "data.evaluation_fraction": {"type": options.real("--evaluation-fraction")},
    "data.evaluation_documents": {"type": options.whole("--evaluation-documents", 0)},
    "data.evaluation_data": {"metavar": "PATH"},
    "data.evaluation_split": {"metavar": "NAME"},
    "data.cache": {"metavar": "FOLDER"},
    "evaluation.every_steps": {"type": options.whole("--evaluate-every", 0)},
    "evaluation.ask": {
        "type": options.text("--ask", "Who are you?"),
        "action": "append",
        "metavar": "TEXT",
    },
    "saving.every_steps": {"type": options.whole("--save-every", 0)},
    "saving.every_minutes": {"type": options.real("--save-every-minutes")},
    "saving.export": {"action": "store_false"},
}
"""Field of the config -> arguments of `add_argument` that cannot be derived from the field."""
_NAMES = {
    "schedule.kind": "--schedule",
    "schedule.rate": "--lr",
    "data.cache": "--data-cache",
    "evaluation.every_steps": "--evaluate-every",
    "evaluation.over_steps": "--evaluate-over",
    "saving.every_steps": "--save-every",
    "saving.every_minutes": "--save-every-minutes",
    "saving.export": "--no-export",
    "logging.name": "--run-name",
}
"""Field of the config -> its option, where this is not the field's name with hyphens."""
_EARLIER = {
    "--rate": "schedule.rate",
    "--warm-up": "schedule.warm_up_steps",
    "--eval-fraction": "data.evaluation_fraction",
    "--eval-documents": "data.evaluation_documents",
    "--eval-data": "data.evaluation_data",
    "--eval-split": "data.evaluation_split",
    "--eval-every": "evaluation.every_steps",
}
"""Former name of an option, still accepted -> its field."""
_PATHS = ("data.data", "data.evaluation_data", "data.cache", "data.chat_template")
"""Fields that contain paths."""


def describe(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "plan",
        type=Path,
        nargs="?",
        metavar="MODEL|PLAN",
        help="a model or a plan; not needed with --resume. A model is a Hugging Face folder, a name"
        " on the hub or, with --init random, a name in the library. A plan is a file written by"
        " `megatrain plan`",
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="RUN",
        help="a new folder for plan, config, metrics, checkpoints, timeline, pictures and model"
        " (default MODEL-run in the current folder, with a number if there is one)",
    )
    parser.add_argument(
        "--resume",
        type=Path,
        metavar="RUN",
        help="continue this run in its folder, with its plan and config, up to --steps",
    )
    parser.add_argument(
        "--from-step",
        type=options.whole("--from-step"),
        metavar="N",
        help="with --resume: the checkpoint to start from (default: the newest)",
    )
    parser.add_argument(
        "--from-scratch",
        action="store_true",
        help="with --resume: begin a run that has no checkpoint again at step 1",
    )
    parser.add_argument(
        "--adapt",
        action="store_true",
        help="plan again from the first measured steps, and continue under the better plan, with"
        " the same bits",
    )
    parser.add_argument(
        "--model",
        metavar="SOURCE",
        help="a Hugging Face folder or a name on the hub (default: the plan's model)",
    )
    parser.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help="TOML file with the sections below, such as the config.toml of a run folder",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="FIELD=VALUE",
        help="set a field of the config, e.g. lr=2e-5 or saving.every_steps=100",
    )
    upload.describe(parser)
    options.add_device(parser)
    prepare.describe(parser)
    groups: dict[str, Any] = {}
    for key, field in fields().items():
        section, _, name = key.partition(".")
        if section not in groups:
            groups[section] = parser.add_argument_group(f"[{section}]")
        arguments = _arguments(key, field)
        no_default = (
            key in ("training.steps", "training.epochs")  # one of the two replaces the default
            or "action" in arguments
            or field.default in (msgspec.NODEFAULT, None, "", ())
        )
        option = option_of(key)
        negation = "do not " if option == "--no-export" else ""
        default = "" if no_default else f" (default {_shown(field.default)})"
        other = "" if option == f"--{name.replace('_', '-')}" else f" [{key} in a config file]"
        text = f"{negation}{field.meaning}{default}{other}"
        groups[section].add_argument(
            option, dest=key, default=None, help=text.replace("%", "%%"), **arguments
        )
        hidden: dict[str, Any] = {"dest": key, "default": None, "help": argparse.SUPPRESS}
        if arguments.get("action", "append") != "append":
            arguments = {"type": parse_value, "nargs": "?", "const": True}
        hidden |= {name: value for name, value in arguments.items() if name != "metavar"}
        earlier = [option for option, field_name in _EARLIER.items() if field_name == key]
        parser.add_argument(f"--{key}", *earlier, **hidden)


def option_of(key: str) -> str:
    """Returns the option that sets a field of the config. `key` is `SECTION.FIELD`."""
    return _NAMES.get(key) or f"--{key.partition('.')[2].replace('_', '-')}"


def _arguments(key: str, field: Field) -> dict[str, Any]:
    """Returns the arguments of `add_argument` for a field of the config."""
    arguments: dict[str, Any] = OPTIONS.get(key, {})
    if "action" in arguments or "choices" in arguments:
        return arguments
    if field.words:
        return {"metavar": f"{{{','.join(field.words)}}}", **arguments}
    if isinstance(field.default, bool):
        return {"metavar": "{true,false}", "type": parse_value, "nargs": "?", "const": True}
    kinds: dict[type, str] = {int: "N", float: "NUMBER", str: "NAME"}
    default: dict[str, Any] = {"metavar": kinds.get(type(field.default), "VALUE")}
    if not isinstance(field.default, str):
        default["type"] = parse_value
    return {**default, **arguments}


def _shown(value: object) -> str:
    """Returns the text of a default value in the help."""
    return str(value).lower() if isinstance(value, bool) else str(value).strip("()")


def _field(name: str) -> str:
    """Returns the field, as `SECTION.FIELD`, that `name` means.

    `name` is a field with or without its section, or an option without its leading hyphens.
    """
    option = f"--{name.replace('_', '-')}"
    named = {option_of(key): key for key in _NAMES if key != "saving.export"} | _EARLIER
    return named[option] if option in named else full_name(name)


def _absolute(path: str) -> str:
    """Returns `path` as an absolute path, unless it is the name of a data set on the hub."""
    from megatrain.runtime.data.rows.sources import hub_data, weighted_path

    return path if hub_data(weighted_path(path).path) else os.path.abspath(path)


def config_of(args: argparse.Namespace) -> Config:
    """Returns the config of the resumed run or the defaults, changed by `--config`, `--set` and the
    options, in this order.

    A new run without a number of steps or epochs has one epoch.

    Raises UserError for an unknown field, a value that its field does not allow, and a missing
    `--data`.
    """
    overrides: dict[str, Any] = {}
    for key, value in options.assignments(args.set, "FIELD=VALUE", "rate=3e-4"):
        field = _field(key)
        if field not in _PATHS:  # names of files that are not UTF-8 have an error of their own
            options.readable(f"--set {key}", partial(str, value))
        overrides[field] = parse_value(value)
    overrides |= {key: vars(args)[key] for key in fields() if vars(args)[key] is not None}
    # Paths are stored as absolute, because the run may be resumed from another folder.
    for key in _PATHS:
        if isinstance(path := overrides.get(key), str | list) and path:
            paths = [path] if isinstance(path, str) else path
            absolute = [
                _absolute(item) if isinstance(item, str) and item else item for item in paths
            ]
            overrides[key] = absolute[0] if len(absolute) == 1 else absolute
    before = args.resume and args.resume / "config.toml"
    counted = overrides.get("training.steps") or overrides.get("training.epochs")
    if not (args.config or before or counted):
        overrides["training.epochs"] = 1.0
    try:
        config = Config.load(args.config or before, overrides, base=args.config and before)
    except UserError as error:
        # A value that an option gave is named as the option.
        key = error.where.rpartition(": ")[2]
        if vars(args).get(key) is None or key not in fields():
            raise
        allowed = str(error.allowed).replace("`float`", "a number").replace("`int`", "a number")
        fix = f"correct this value, or leave {option_of(key)} out for the default"
        if key == "optimizer.betas":
            allowed = allowed.replace("`array` of length 2", "`array`")
            allowed = allowed.replace("`array`", "two numbers in brackets")
            fix = "write it like --betas [0.9,0.99]"
        raise UserError(option_of(key), found=error.found, allowed=allowed, fix=fix) from None
    if not config.data.data:
        raise UserError(
            "train",
            found="no --data",
            allowed="--data PATH, or data in [data] of a --config file",
            fix="name a file or a folder",
        )
    return config


def places(args: argparse.Namespace) -> tuple[Path, Path]:
    """Returns the paths of the plan and of the run's folder.

    Raises UserError if the options contradict each other.
    """
    if args.out is not None and args.resume is not None:
        raise UserError(
            "train: --out, --resume",
            found="both",
            allowed="--out for a new run, or --resume to continue one",
            fix="give one of the two",
        )
    alone = "--from-step" if args.from_step else "--from-scratch" if args.from_scratch else ""
    if args.resume is None and (args.plan is None or alone):
        found = "no MODEL" if args.plan is None else f"{alone} without --resume"
        raise UserError(
            "train",
            found=found,
            allowed="MODEL --out RUN, PLAN --out RUN, or --resume RUN",
            fix="name a model or a plan before the options, or the run to resume",
        )
    if args.from_step and args.from_scratch:
        raise UserError(
            "train",
            found="--from-step and --from-scratch",
            allowed="one of the two",
            fix="leave one out",
        )
    if args.resume is not None:
        fix = "check the path, or start a new run: `megatrain train MODEL --data DATA --out RUN`"
        file_arguments.refuse_no_run(args.resume, fix)
    from megatrain.runtime.checkpoint.stored_steps import steps_to_export

    saved = args.resume and args.resume / "checkpoints"
    if saved and not args.from_scratch and not (saved.is_dir() and any(saved.iterdir())):
        raise no_checkpoint(args.resume)  # the trainer also checks this, but after slow imports
    if args.from_step:
        steps_to_export(args.resume, args.from_step)
    return args.plan or args.resume / "plan.toml", args.out or args.resume or new_run(args.plan)


def new_run(model: Path) -> Path:
    """Returns the folder of a run without `--out`, such as `qwen2.5-7b-run` in the current folder.

    If it exists, its name has a number, such as `qwen2.5-7b-run-2`. Raises UserError if there may
    be several ranks, which could choose different folders.

    Args:
        model: the model or the plan, as in the command.
    """
    if "WORLD_SIZE" in os.environ:
        raise UserError(
            "train",
            found="no --out, and WORLD_SIZE, which torchrun sets",
            allowed="one folder for all ranks",
            fix="pass --out RUN",
        )
    name = model.stem if model.suffix in (".toml", ".json") else model.name.partition("@")[0]
    name = f"{name or 'model'}-run"
    names = itertools.chain([name], (f"{name}-{number}" for number in itertools.count(2)))
    return next(Path(each) for each in names if not os.path.lexists(each))


@contextlib.contextmanager
def _naming_options(args: argparse.Namespace) -> Iterator[None]:
    """Makes a UserError about a field of the config name its option, if the field was given so."""
    try:
        yield
    except UserError as error:
        key = error.where.removeprefix("config: ").replace(": ", ".")
        if key not in fields() or vars(args).get(key) is None:
            raise
        raise UserError(
            option_of(key), found=error.found, allowed=error.allowed, fix=error.fix
        ) from None


def run(args: argparse.Namespace) -> int:
    with _naming_options(args):
        return _checked_run(args)


def _checked_run(args: argparse.Namespace) -> int:
    """Checks the options, and trains."""
    from megatrain.runtime.training.unused_fields import refuse_unused
    from megatrain.simulator.schedule.plan import Plan

    prepare.refuse_missing_model(args)
    model = prepare.names_model(args)
    plan_file, folder = places(args)
    options.refuse_missing_gpu(args)
    config = config_of(args)
    if args.push_to_hub is not None and not config.saving.export:
        raise UserError(
            "--push-to-hub",
            found="no model to upload, because of --no-export or saving.export",
            allowed="a run that exports its model",
            fix="leave one of the two out",
        )
    if config.evaluation.ask and not config.saving.export:
        raise UserError(
            "--ask",
            found="no model to ask, because of --no-export or saving.export",
            allowed="a run that exports its model",
            fix="leave one of the two out, or pass --set ask=[]",
        )
    clipping = args.clipping if model else Plan.load(plan_file).workload.clipping
    refuse_unused(config, clipping, run=args.resume)
    if model:
        prepare.check(args, config)
    with ranks_of(args, None if model else plan_file, config) as ranks:
        if ranks is not None and not ranks.leads:
            from megatrain.runtime.training.run_lock import RunLock

            return _run(args, plan_file, RunLock(folder), config, ranks)
        return _lead(args, None if model else plan_file, folder, config, ranks)


def _lead(
    args: argparse.Namespace,
    plan_file: Path | None,
    folder: Path,
    config: Config,
    ranks: Ranks | None,
) -> int:
    """Locks the run's folder, makes a plan if `plan_file` is None, and trains.

    With several GPUs, only rank 0 calls this.
    """
    from megatrain.runtime.data.rows.sources import pinned
    from megatrain.runtime.training.run_lock import RunLock

    lock = RunLock(folder)
    if args.resume is None:
        lock.refuse_taken()
    if not os.path.exists(folder):
        file_arguments.check_writable(folder)
    if args.out is None and args.resume is None:
        print(f"run folder: {folder}", flush=True)
    with lock:  # taken before slow imports, so a second run is refused at once
        if args.resume is not None and not args.from_scratch:
            # This comes before the data's files are listed, which may take seconds.
            from megatrain.runtime.training.resumption import refuse_changed_run
            from megatrain.simulator.schedule.plan import Plan

            plan = Plan.load(plan_file or args.resume / "plan.toml")
            refuse_changed_run(args.resume, plan, config, args.from_step or "newest")
        if plan_file is not None:
            continues = args.resume is not None and not args.from_scratch
            check_training(plan_file, args.model, config, continues=continues)
        upload.check(args)
        # Planning, training and config.toml then use the same commit of data on the hub.
        config = msgspec.structs.replace(config, data=pinned(config.data))
        if plan_file is not None:
            return _run(args, plan_file, lock, config, ranks)
        with prepare.plan_file(args, config) as temporary_plan:
            return _run(args, temporary_plan, lock, config)


class _Begun(Callback):
    """Records that training has begun. A failure after that is not a mistake in the command."""

    begun = False

    def on_start(self, trainer: TrainingRun) -> None:
        self.begun = True


def _run(
    args: argparse.Namespace,
    plan_file: Path,
    lock: RunLock,
    config: Config,
    ranks: Ranks | None = None,
) -> int:
    """Calls `_train`. After training has begun, an error of the user, of a path, of the disk or of
    a checkpoint becomes a RunError, which says how the run can be continued.
    """
    start = _Begun()
    try:
        return _train(args, plan_file, lock, config, start, ranks)
    except (UserError, RunError, OSError) as error:
        from megatrain.runtime.checkpoint.checkpoint import CheckpointError
        from megatrain.runtime.training.trainer import WeightsNotFinite

        if isinstance(error, WeightsNotFinite):  # no step has changed anything
            raise
        if isinstance(error, RunError) and not isinstance(error, CheckpointError):
            raise
        shown = path_error(error) if isinstance(error, OSError) else error
        if shown is None or not start.begun:
            raise
        leads = ranks is None or ranks.leads
        kept = leads and (lock.folder / "config.toml").is_file()
        state = f"; the run {how_it_stopped(lock.folder)}" if kept else ""
        raise RunError(f"{shown}{state}") from None


def _train(
    args: argparse.Namespace,
    plan_file: Path,
    lock: RunLock,
    config: Config,
    start: _Begun,
    ranks: Ranks | None,
) -> int:
    """Trains with the lock held, draws the loss, and prints a summary.

    With several GPUs, every rank calls this, and only rank 0 holds the lock, draws and prints.
    """
    from megatrain.experiments.cli.training.adaptation import Adaptation
    from megatrain.experiments.cli.training.progress import ProgressBars
    from megatrain.experiments.cli.training.step_comparison import (
        RangeWatch,
        StepComparison,
        predicted_seconds,
    )
    from megatrain.experiments.cli.verdict import layout
    from megatrain.experiments.run_report.pictures import draw_loss
    from megatrain.experiments.run_report.step_record import read_record
    from megatrain.runtime.files.exported_models import newest_model
    from megatrain.runtime.training.trainer import Trainer
    from megatrain.simulator.schedule.plan import Plan

    folder, leads = lock.folder, ranks is None or ranks.leads
    shown = leads and sys.stdout.isatty()
    bars = ProgressBars(Plan.load(plan_file).model.parameters) if shown else None
    recalibrates = prepare.names_model(args) and not args.hardware
    comparisons = [
        StepComparison(None if bars is None else bars.compared, recalibrates=recalibrates),
        RangeWatch(recalibrates=recalibrates),
    ]
    policies = [args.policy] if args.policy not in (None, "best", "all") else None
    resume: Literal["newest", "scratch"] | int | None = None
    if args.resume is not None:
        resume = "scratch" if args.from_scratch else args.from_step or "newest"
    trainer = Trainer(
        plan_file,
        args.model,
        None,
        config,
        out=lock,
        resume=resume,
        callbacks=[
            *([] if bars is None else [bars]),
            start,
            *(comparisons if leads else []),
            *([Adaptation(policies)] if args.adapt else []),
        ],
        progress=bars is None,
        device=options.device(args),
        ranks=ranks,
        predict=predicted_seconds,
    )
    try:
        fitted = trainer.fit()
    except FloatingPointError as error:
        rate = format_rate(trainer.config.schedule.rate or 0)
        mistake = UserError(
            f"training, {folder}",
            found=str(error).partition(";")[0],
            allowed="finite numbers",
            fix=f"lower --lr {rate}, or check the data, and train to another --out",
        )
        raise RunError(str(mistake)) from None
    except KeyboardInterrupt as error:
        if start.begun and leads:
            error.add_note(how_it_stopped(folder))
        raise
    finally:
        if bars is not None:
            bars.close()
    if not leads:
        return 0
    record = read_record(folder)
    if losses := record.losses:
        draw_loss(folder, record, trainer.plan)
        few = min(20, -(-len(losses) // 2))
        first = f"{few} steps" if few > 1 else "step"
        print(
            f"loss {sum(losses[:few]) / few:.3f} over the first {first},"
            f" {sum(losses[-few:]) / few:.3f} over the last {few if few > 1 else ''}".rstrip()
        )
    if fitted.evaluation is not None:
        final = fitted.evaluation
        print(
            f"evaluation loss {final.loss:.4f}, perplexity {final.perplexity:,.2f}, over"
            f" {final.tokens:,} tokens after step {final.number}"
        )
    if fitted.stopped:
        print(f"stopped after step {fitted.steps}: {fitted.stopped}")
    run, model = shlex.quote(str(folder)), newest_model(folder)
    if trainer.config.saving.export:
        print(f'trained model: AutoModelForCausalLM.from_pretrained("{model}")')
    elif last_checkpoint(folder):
        print(f"no model was exported; `megatrain export {run} --out MODEL` does it")
    see = f"see `megatrain compare {run}` and `megatrain report {run}`"
    print(layout.fitted(f"wrote {run}; {see}"), flush=True)
    if args.push_to_hub is not None:
        from megatrain.experiments.run_report.model_card import model_card

        card = model_card(folder, args.push_to_hub, base=args.model)
        assert model is not None, "a run that is to be uploaded exports its model"
        upload.upload(model, card, args, ["megatrain", "export", str(folder)])
    if questions := trainer.config.evaluation.ask:
        from megatrain.experiments.cli.training.answers import answer_questions

        answer_questions(folder, questions, args, seed=trainer.config.training.seed)
    return 0
