"""Command-line options that several commands share, and what they mean. Heavy imports stay inside: `--help` answers at once."""

from __future__ import annotations

import argparse
import math
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from megatrain.simulator.errors import UserError
from megatrain.simulator.units import parse_bytes, parse_count

if TYPE_CHECKING:
    import torch

    from megatrain.simulator.hardware import HardwareSpec
    from megatrain.simulator.specs import ModelSpec
    from megatrain.simulator.workload import Workload


class OneLineParser(argparse.ArgumentParser):
    """Says what is wrong in one line, as every other error of the command."""

    def error(self, message: str) -> NoReturn:
        where, found, allowed = self.prog, message, ", ".join(option for action in self._actions for option in action.option_strings)
        if match := re.fullmatch(r"argument (\S+): invalid choice: (.*) \(choose from (.*)\)", message):
            where, found, allowed = match[1], match[2], match[3].replace("'", "")
        elif match := re.fullmatch(r"the following arguments are required: (.*)", message):
            found, allowed = f"no {match[1]}", " ".join(self.format_usage().removeprefix("usage:").split())
        elif match := re.fullmatch(r"unrecognized arguments: (.*)", message):
            found = match[1]
        elif match := re.fullmatch(r"argument (\S+): expected one argument", message):
            where, found, allowed = match[1], "nothing after it", "one value"
        raise UserError(where, found=found, allowed=allowed, fix=f"see `{self.prog} --help`")


def number(kind: type, least: float, text: str, name: str, most: float = math.inf) -> int | float:
    """`text` as an int or float from `least` to `most`. Raises UserError otherwise."""
    try:
        value = kind(text)
    except ValueError:
        value = None
    if value is None or not abs(value) < math.inf or not least <= value <= most:
        allowed = f"a {'whole ' if kind is int else ''}number " + (f">= {least:g}" if most == math.inf else f"from {least:g} to {most}")
        raise UserError(name, found=repr(text), allowed=allowed, fix=f"write it like {name} {max(least, 1):g}")
    checked: int | float = value
    return checked


def whole(name: str, least: int = 1, most: float = math.inf) -> Callable[[str], int | float]:
    """An argparse type: a whole number from `least` to `most`."""
    return lambda text: number(int, least, text, name, most)


def real(name: str, least: float = 0.0) -> Callable[[str], int | float]:
    """An argparse type: a finite number of at least `least`."""
    return lambda text: number(float, least, text, name)


def size(name: str) -> Callable[[str], int]:
    """An argparse type: bytes, written like 24GiB."""
    return lambda text: parse_bytes(text, name)


def count(name: str) -> Callable[[str], int]:
    """An argparse type: a number of things, written like 300M."""
    return lambda text: parse_count(text, name)


def add_limits(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device-memory", type=size("--device-memory"), metavar="SIZE", help="use at most this much device memory, e.g. 24GiB")
    parser.add_argument("--host-memory", type=size("--host-memory"), metavar="SIZE", help="use at most this much host memory, e.g. 512GiB")


def add_hardware(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--hardware", required=True, metavar="H", help="a calibrated TOML file, or a name in the library, e.g. h200")
    add_limits(parser)


def add_workload(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("workload")
    group.add_argument("--batch", type=whole("--batch"), default=32, help="sequences per micro-batch (default 32)")
    group.add_argument("--seq", type=whole("--seq"), default=1024, help="tokens per sequence (default 1024)")
    group.add_argument("--accumulation", type=whole("--accumulation"), default=1, help="micro-batches per optimizer step (default 1)")
    group.add_argument("--dtype", choices=("bf16", "fp32"), default="bf16", help="what layers compute in; masters are fp32 always (default bf16)")
    group.add_argument(
        "--clipping",
        choices=("global", "layer", "update", "none"),
        default="global",
        help="clip gradients by the norm over all (default), or each layer's by its own, or tensors' updates as StableAdamW does",
    )
    group.add_argument("--attention", choices=("flash", "cudnn"), help="the attention kernel; each rounds otherwise (default: the one that PyTorch picks)")
    group.add_argument("--loss-chunk", type=whole("--loss-chunk"), default=1024, help="tokens whose logits exist at one time (default 1024)")
    group.add_argument("--compile", action="store_true", help="layers through torch.compile: faster, less activations, rounds otherwise than eager layers")
    group.add_argument(
        "--no-dropout", action="store_true", help="train without the dropout that the model's config asks for, which exported configs keep; else it is refused"
    )
    packing = group.add_mutually_exclusive_group()
    packing.add_argument(
        "--documents", action="store_true", default=None, help="rows hold several documents, and attention stays inside each (default where the model can)"
    )
    packing.add_argument("--plain-packing", dest="documents", action="store_false", help="rows are one text without borders: attention sees over them")


def add_step_tokens(parser: argparse.ArgumentParser) -> None:
    text = "tokens of an optimizer step: batch and accumulation are chosen, instead of given"
    parser.add_argument("--tokens-per-step", type=count("--tokens-per-step"), metavar="N", help=text)


def workload(args: argparse.Namespace, model: ModelSpec) -> Workload:
    """What the options say, for `model`. Raises UserError where documents are asked for and nothing keeps them apart; unasked, it says so on stderr."""
    from megatrain.simulator.workload import Workload

    obstacle = _against_documents(args, model) if args.documents is not False else None
    if obstacle and args.documents:
        raise UserError("--documents", found=obstacle, allowed="attention that can stay inside a document", fix="use --plain-packing")
    if obstacle:
        print(f"rows are packed without borders between documents: {obstacle}", file=sys.stderr)
    return Workload(
        batch=args.batch, sequence=args.seq, accumulation=args.accumulation, dtype=args.dtype, clipping=args.clipping, loss_chunk=args.loss_chunk,
        compiled=args.compile, attention=args.attention, documents=args.documents is not False and not obstacle,
        no_dropout=args.no_dropout,
    )  # fmt: skip


def _against_documents(args: argparse.Namespace, model: ModelSpec) -> str | None:
    """Why this model's attention cannot stay inside a document."""
    return model.against_documents(args.seq) or ("--attention cudnn, which takes no lengths of documents" if args.attention == "cudnn" else None)


def add_policy(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--policy", default="best", metavar="NAME", help="a scheduling policy, the path of a .py file that defines one, `best` (default), or for check `all`"
    )


def add_device(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--device", choices=("auto", "cuda", "cpu"), default="auto", help="where to run: CUDA, or a capped pool in RAM (default: CUDA where there is one)"
    )


def device(args: argparse.Namespace) -> torch.device:
    import torch

    from megatrain.runtime.machine import default_device, grow_segments

    if args.device == "cuda" and not torch.cuda.is_available():
        raise UserError(
            "--device", found="cuda, which torch does not see", allowed="cuda with a driver and a CUDA build of torch, cpu, or auto", fix="use --device auto"
        )
    grow_segments()
    return torch.device("cpu") if args.device == "cpu" else default_device()


def relative(path: Path, base: Path) -> str:
    """`path` as seen from the folder `base`, so that a folder with a plan can be moved as a whole."""
    return os.path.relpath(path.resolve(), base.resolve())


def hardware_of(plan_path: Path, name: str) -> HardwareSpec:
    """The hardware that a plan names: a file relative to the plan, or a name in the library."""
    from megatrain.simulator.hardware import HardwareSpec

    beside = plan_path.parent / name
    return HardwareSpec.load(str(beside) if beside.suffix == ".toml" or os.path.isfile(beside) else name)


def check_writable(path: Path) -> None:
    """Refuses, before long work, a file or a new folder that could not be written after it. Raises UserError."""
    from megatrain.simulator.files import refuse_special

    refuse_special(path)
    parent = next(folder for folder in (path.absolute().parent, *path.absolute().parents) if os.path.exists(folder))
    if os.path.isdir(path):
        raise UserError(str(path), found="a folder", allowed="a file to write", fix=f"name a file in it, like {path / 'NAME.toml'}")
    if not (os.path.isdir(parent) and os.access(parent, os.W_OK | os.X_OK)):
        raise UserError(str(path), found=f"{parent}, where nothing can be written", allowed="a name in a folder that can be written", fix="name another place")
