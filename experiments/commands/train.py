"""Executes a plan: trains a model on text, and leaves a run folder.

Every field of the config may stand in a TOML file (--config), as `--set FIELD=VALUE`, or as an option of its own; the later ones win in this order.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from megatrain.experiments import options
from megatrain.runtime.training.config import Config, fields, full_name, parse_value
from megatrain.simulator.errors import UserError

if TYPE_CHECKING:
    from megatrain.runtime.training.run_lock import RunLock

SHORT: dict[str, tuple[str, dict[str, Any]]] = {
    "training.steps": ("--steps", {"type": options.whole("--steps")}),
    "training.seed": ("--seed", {"type": options.whole("--seed", 0, 2**32 - 1)}),
    "training.init": ("--init", {"choices": ("model", "random")}),
    "training.deterministic": ("--deterministic", {"action": "store_true"}),
    "optimizer.weight_decay": ("--weight-decay", {"type": options.real("--weight-decay")}),
    "optimizer.max_norm": ("--max-norm", {"type": options.real("--max-norm", 1e-6)}),
    "schedule.rate": ("--rate", {"type": options.real("--rate")}),
    "schedule.warm_up_steps": ("--warm-up", {"type": options.whole("--warm-up", 0)}),
    "data.data": ("--data", {"metavar": "PATH"}),
    "data.split": ("--split", {}),
    "data.columns": ("--columns", {}),
    "data.loss": ("--loss", {}),
    "data.chat_template": ("--chat-template", {"metavar": "FILE"}),
    "data.packing": ("--packing", {}),
    "data.strict": ("--strict", {"action": "store_true"}),
    "data.trust_remote_code": ("--trust-remote-code", {"action": "store_true"}),
    "data.evaluation_fraction": ("--eval-fraction", {"type": options.real("--eval-fraction")}),
    "data.evaluation_documents": ("--eval-documents", {"type": options.whole("--eval-documents", 0)}),
    "data.evaluation_data": ("--eval-data", {"metavar": "PATH"}),
    "data.evaluation_split": ("--eval-split", {}),
    "data.cache": ("--data-cache", {"metavar": "FOLDER"}),
    "evaluation.every_steps": ("--eval-every", {"type": options.whole("--eval-every", 0)}),
    "saving.every_steps": ("--save-every", {"type": options.whole("--save-every", 0)}),
    "saving.export": ("--no-export", {"action": "store_false"}),
}
"""the fields that have a short option"""
_PATHS = ("data.data", "data.evaluation_data", "data.cache", "data.chat_template")


def describe(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("plan", type=Path, nargs="?", metavar="PLAN", help="a plan written by `megatrain plan`; with --resume it may be left out")
    parser.add_argument("--out", type=Path, metavar="RUN", help="a new folder for plan, config, metrics, checkpoints, timeline, pictures and model")
    parser.add_argument("--resume", type=Path, metavar="RUN", help="go on with this run, in its folder, with its plan and its config, up to --steps")
    parser.add_argument("--from-step", type=options.whole("--from-step"), metavar="N", help="with --resume: from this checkpoint, not from the newest")
    parser.add_argument("--model", metavar="SOURCE", help="a Hugging Face folder, or a name on the hub, instead of the plan's")
    parser.add_argument("--config", type=Path, metavar="FILE", help="TOML with the sections below; a run folder's config.toml is one")
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE", help="set any field, e.g. rate=3e-4 or evaluation.every_steps=100")
    options.add_device(parser)
    groups: dict[str, Any] = {}
    for key, field in fields().items():
        section = key.partition(".")[0]
        if section not in groups:
            groups[section] = parser.add_argument_group(f"[{section}]")
        option, given = SHORT.get(key, (f"--{key}", {"type": parse_value}))
        if "action" not in given and "choices" not in given:
            given = {"metavar": f"{{{','.join(field.words)}}}" if field.words else "VALUE", **given}
        no_default = "action" in given or field.default in (msgspec.NODEFAULT, "", ())
        text = f"{'do not ' if option == '--no-export' else ''}{field.meaning}{'' if no_default else f' (default {_shown(field.default)})'}"
        groups[section].add_argument(option, dest=key, default=None, help=text.replace("%", "%%"), **given)


def _shown(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value).strip("()")


def config_of(args: argparse.Namespace) -> Config:
    """Of the file, or of the run that is resumed, what --set says, and the options. Raises UserError for anything in it that cannot be."""
    overrides: dict[str, Any] = {}
    for text in args.set:
        key, equals, value = text.partition("=")
        if not equals:
            raise UserError("--set", found=repr(text), allowed="FIELD=VALUE", fix="write it like --set rate=3e-4")
        overrides[full_name(key.strip())] = parse_value(value.strip())
    overrides |= {key: vars(args)[key] for key in fields() if vars(args)[key] is not None}
    # as they are seen from everywhere: the run may be resumed from another folder
    overrides |= {key: os.path.abspath(value) for key in _PATHS if isinstance(value := overrides.get(key), str) and value}
    file = args.config or (args.resume and args.resume / "config.toml")
    if file is None and "training.steps" not in overrides:
        raise UserError("megatrain train", found="no --steps", allowed="--steps VALUE, or steps in [training] of a --config file", fix="say how many")
    config = Config.load(file, overrides)
    if not config.data.data:
        raise UserError("megatrain train", found="no --data", allowed="--data PATH, or data in [data] of a --config file", fix="name a file or a folder")
    return config


def places(args: argparse.Namespace) -> tuple[Path, Path]:
    """The plan, and the run's folder. Raises UserError where options contradict each other."""
    if (args.out is None) == (args.resume is None):
        found = "neither" if args.out is None else "both"
        raise UserError("megatrain train: --out, --resume", found=found, allowed="--out for a new run, --resume to go on with one", fix="name one of them")
    if args.resume is None and (args.plan is None or args.from_step):
        found = "no PLAN" if args.plan is None else "--from-step without --resume"
        raise UserError("megatrain train", found=found, allowed="PLAN --out RUN, or --resume RUN", fix="name a plan, or the run to resume")
    if args.resume is not None and not (args.resume / "config.toml").is_file():
        raise UserError(str(args.resume), found="no config.toml", allowed="the folder of a run that has begun", fix="start it with --out")
    return args.plan or args.resume / "plan.toml", args.out or args.resume


def run(args: argparse.Namespace) -> int:
    plan_file, folder = places(args)
    config = config_of(args)

    from megatrain.runtime.training.run_lock import RunLock

    lock = RunLock(folder)
    if args.resume is None:
        lock.refuse_taken()
    if not os.path.exists(folder):
        options.check_writable(folder)
    with lock:  # before anything that takes long is imported or done
        return _run(args, plan_file, lock, config)


def _run(args: argparse.Namespace, plan_file: Path, lock: RunLock, config: Config) -> int:
    from megatrain.experiments.pictures import draw_loss, read_record
    from megatrain.experiments.progress import ProgressBars
    from megatrain.runtime.training.trainer import Trainer
    from megatrain.simulator.plan import Plan

    folder = lock.folder
    parameters = Plan.load(plan_file).model.parameters
    bars = ProgressBars(parameters, config.training.steps)
    resume: Literal["newest"] | int | None = None if args.resume is None else args.from_step or "newest"
    trainer = Trainer(plan_file, args.model, None, config, out=lock, resume=resume, callbacks=[bars], device=options.device(args))
    try:
        fitted = trainer.fit()
    except FloatingPointError as error:
        raise UserError(
            f"training, {folder}", found=str(error).partition(";")[0], allowed="finite numbers",
            fix=f"lower --rate {config.schedule.rate:g}, or look at the data",
        ) from None  # fmt: skip
    finally:
        bars.close()
    record = read_record(folder)
    if losses := record.losses:
        draw_loss(folder, record, trainer.plan)
        few = min(20, -(-len(losses) // 2))
        print(f"loss {sum(losses[:few]) / few:.3f} over the first {few} steps, {sum(losses[-few:]) / few:.3f} over the last {few}")
    if fitted.evaluation is not None:
        found = fitted.evaluation
        print(f"evaluation loss {found.loss:.4f}, perplexity {found.perplexity:,.2f}, over {found.tokens:,} tokens after step {found.number}")
    if fitted.stopped:
        print(f"stopped after step {fitted.steps}: {fitted.stopped}")
    print(f"wrote {folder}; see `megatrain compare {folder}` and `megatrain report {folder}`")
    return 0
