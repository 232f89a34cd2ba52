"""Executes a plan: trains a model on text, and leaves a run folder.

Every field of the config may stand in a TOML file (--config), as `--set FIELD=VALUE`, or as an option of its own; the later ones win in this order.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import msgspec

from megatrain.experiments import options
from megatrain.runtime.config import Config, fields, full_name, parse_value
from megatrain.simulator.errors import UserError

SHORT: dict[str, tuple[str, dict[str, Any]]] = {
    "training.steps": ("--steps", {"type": options.whole("--steps")}),
    "training.seed": ("--seed", {"type": options.whole("--seed", 0, 2**32 - 1)}),
    "training.init": ("--init", {"choices": ("model", "random")}),
    "training.deterministic": ("--deterministic", {"action": "store_true"}),
    "optimizer.weight_decay": ("--weight-decay", {"type": options.real("--weight-decay")}),
    "optimizer.max_norm": ("--max-norm", {"type": options.real("--max-norm", 1e-6)}),
    "schedule.rate": ("--rate", {"type": options.real("--rate")}),
    "schedule.warm_up_steps": ("--warm-up", {"type": options.whole("--warm-up", 0)}),
    "data.data": ("--data", {}),
    "saving.export": ("--no-export", {"action": "store_false"}),
}
"""the fields that have a short option"""


def describe(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("plan", type=Path, metavar="PLAN", help="a plan written by `megatrain plan`")
    parser.add_argument("--out", type=Path, required=True, metavar="RUN", help="a new folder for plan, config, metrics, timeline, pictures and model")
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
    """Of the file, what --set says, and the options. Raises UserError for anything in it that cannot be."""
    overrides: dict[str, Any] = {}
    for text in args.set:
        key, equals, value = text.partition("=")
        if not equals:
            raise UserError("--set", found=repr(text), allowed="FIELD=VALUE", fix="write it like --set rate=3e-4")
        overrides[full_name(key.strip())] = parse_value(value.strip())
    overrides |= {key: vars(args)[key] for key in fields() if vars(args)[key] is not None}
    if args.config is None and "training.steps" not in overrides:
        raise UserError("megatrain train", found="no --steps", allowed="--steps VALUE, or steps in [training] of a --config file", fix="say how many")
    config = Config.load(args.config, overrides)
    if not config.data.data:
        raise UserError("megatrain train", found="no --data", allowed="--data PATH, or data in [data] of a --config file", fix="name a text file or folder")
    return config


def run(args: argparse.Namespace) -> int:
    config = config_of(args)

    from megatrain.experiments.pictures import draw_loss, read_record
    from megatrain.experiments.progress import ProgressBars
    from megatrain.runtime.trainer import Trainer
    from megatrain.simulator.plan import Plan

    parameters = Plan.load(args.plan).model.parameters
    if not os.path.exists(args.out):
        options.check_writable(args.out)
    bars = ProgressBars(parameters, config.training.steps)
    trainer = Trainer(args.plan, None, config.data.data, config, out=args.out, callbacks=[bars], device=options.device(args))
    try:
        fitted = trainer.fit()
    except FloatingPointError as error:
        raise UserError(
            f"training, {args.out}", found=str(error).partition(";")[0], allowed="finite numbers",
            fix=f"lower --rate {config.schedule.rate:g}, or look at the data",
        ) from None  # fmt: skip
    finally:
        bars.close()
    if losses := bars.losses:
        draw_loss(args.out, read_record(args.out), trainer.plan)
        few = min(20, -(-len(losses) // 2))
        print(f"loss {sum(losses[:few]) / few:.3f} over the first {few} steps, {sum(losses[-few:]) / few:.3f} over the last {few}")
    if fitted.evaluation is not None:
        found = fitted.evaluation
        print(f"evaluation loss {found.loss:.4f}, perplexity {found.perplexity:,.2f}, over {found.tokens:,} tokens after step {found.number}")
    if fitted.stopped:
        print(f"stopped after step {fitted.steps}: {fitted.stopped}")
    print(f"wrote {args.out}; see `megatrain compare {args.out}`")
    return 0
