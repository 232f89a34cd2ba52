"""Command-line options that several commands share, and the functions that interpret them.

Slow imports are inside the functions, because `--help` must answer at once.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, get_args

from megatrain.simulator.base.errors import UserError
from megatrain.simulator.base.names import suggestion
from megatrain.simulator.base.units import format_bytes, parse_bytes, parse_count
from megatrain.simulator.model.attention_masks import documents_obstacle
from megatrain.simulator.model.state_format import ANY, EXACT, FORMATS
from megatrain.simulator.model.workload import Clipping, Gradients, Kernel, Scaling

if TYPE_CHECKING:
    import torch

    from megatrain.simulator.hardware.machine import HardwareSpec
    from megatrain.simulator.model.specs import ModelSpec
    from megatrain.simulator.model.workload import Workload


_MISTAKES: dict[str, tuple[str, str]] = {
    r"argument (?P<where>\S+): expected one argument": ("no value", "one value"),
    r"argument (?P<where>\S+): expected at least one argument": ("no value", "one or more values"),
    r"argument (?P<where>\S+): ignored explicit argument (?P<found>.*)": (
        "the value {found}",
        "the option alone",
    ),
    r"argument (?P<where>\S+): not allowed with argument (?P<found>.*)": (
        "{found} as well",
        "one of the two",
    ),
}
"""A message of argparse -> what was found, and what is allowed."""
_FOREIGN_NAMES = {"--learning-rate": "--lr", "--batch-size": "--batch", "--output-dir": "--out"}
"""Name of an option in other training programs -> its name here."""
_GPU_DRIVERS = ("/dev/nvidiactl", "/proc/driver/nvidia", "/dev/dxg", "/dev/kfd", "/dev/nvhost-gpu")
"""Files that GPU drivers make: NVIDIA (the first two), Windows Subsystem for Linux, AMD and Jetson.
A machine with a usable GPU has at least one of them."""
BF16 = "bf16"
"""The default of `--dtype`."""
FP8 = "fp8"
"""The value of `--dtype` for bf16 layers with fp8 matrix products."""
LOSS_CHUNK = 1024
"""The default of `--loss-chunk` in tokens, for commands that do not choose a loss chunk."""
PLANNED_BATCH = 32
"""The default of `--batch`, for commands that do not choose a micro-batch."""
_ADVERTISED_RATIO = 1.1
"""The largest ratio of a GPU's advertised memory to the memory that programs can use."""


class OneLineParser(argparse.ArgumentParser):
    """Parser that reports a mistake as a one-line UserError instead of printing the usage."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Returns the options and the unknown words of `args` or, if None, of `sys.argv`.

        Unlike in argparse, a word such as `-24GiB` after an option is the value of that option, so
        the error says what is wrong with the value. argparse would treat it as another option.
        """
        self._words: list[str] = []
        for word in sys.argv[1:] if args is None else args:
            if re.fullmatch(r"--[^=]+=--", word):  # Python 3.11 takes this for an empty list
                self.error(f"argument {word[:-3]}: expected one argument")
            if re.match(r"-\.?\d", word) and re.fullmatch("--[^=]+", (self._words or [""])[-1]):
                self._words[-1] += f"={word}"
            else:
                self._words.append(word)
        return super().parse_known_args(self._words, namespace)

    def error(self, message: str) -> NoReturn:
        """Raises UserError for the mistake that argparse describes in `message`."""
        for pattern, texts in _MISTAKES.items():
            if match := re.fullmatch(pattern, message):
                found, allowed = (text.format(**match.groupdict()) for text in texts)
                self._refuse(match["where"], found, allowed)
        if match := re.fullmatch(
            r"argument (\S+): invalid choice: (.*) \(choose from (.*)\)", message
        ):
            choices = match[3].replace("'", "")
            similar = suggestion(match[2].strip("'"), choices.split(", "), "")
            self._refuse(match[1], match[2], choices, similar)
        if match := re.fullmatch(r"ambiguous option: (\S+) could match (.*)", message):
            prefix = match[1].partition("=")[0]
            meant = [name for name in self._shown() if name.startswith(prefix)]
            allowed = ", ".join(meant) or match[2]
            similar = suggestion(prefix, meant, "")
            self._refuse(prefix, "the beginning of several options", allowed, similar)
        if match := re.fullmatch(r"unrecognized arguments: (.*)", message):
            self.refuse_unknown(match[1].split(" "))
        if match := re.fullmatch(r"the following arguments are required: (.*)", message):
            if unknown := [word for word in self._words if self._is_unknown(word)]:
                self.refuse_unknown(unknown)  # it may be the missing option, misspelt
            self._refuse(self._name, f"no {match[1]}", self._needed())
        self._refuse(self._name, message, "what the help says")

    def refuse_unknown(self, words: Sequence[str]) -> NoReturn:
        """Raises UserError for words that are neither an option nor a value of one."""
        option = next((word for word in words if word.startswith("-")), None)
        if option is None:
            fix = "put a name with blanks in quotes."
            self._refuse(self._name, " ".join(words), "options and their values", fix)
        shown, name = self._shown(), option.partition("=")[0]
        own_name = _FOREIGN_NAMES.get(name)
        similar = f"did you mean {own_name}?" if own_name in shown else suggestion(name, shown, "")
        self._refuse(self._name, option, f"an option of `{self.prog}`", similar)

    @property
    def _name(self) -> str:
        """The verb alone, because every error already begins with `megatrain`."""
        return "command" if self.prog == "megatrain" else self.prog.removeprefix("megatrain ")

    def _needed(self) -> str:
        """Returns the command with its required arguments only, such as `megatrain sweep MODEL
        --hardware H --out DIR`, and the words that a positional argument may be.
        """
        words, choices = [self.prog], ""
        for action in self._actions:
            if action.required:
                name = str(action.metavar or action.dest.upper())
                words.append(" ".join([*action.option_strings[:1], name]))
                if action.choices and not action.option_strings:
                    choices += f", where {name} is one of {', '.join(map(str, action.choices))}"
        return " ".join(words) + choices

    def _shown(self) -> list[str]:
        """Returns the options that the help shows."""
        return [
            name
            for action in self._actions
            for name in action.option_strings
            if action.help != argparse.SUPPRESS
        ]

    def _options(self) -> list[str]:
        return [option for action in self._actions for option in action.option_strings]

    def _is_unknown(self, word: str) -> bool:
        """Returns whether `word` begins with `--` and neither is nor abbreviates an option."""
        name = word.partition("=")[0]
        return name.startswith("--") and not any(
            option.startswith(name) for option in self._options()
        )

    def _refuse(self, where: str, found: str, allowed: str, fix: str = "") -> NoReturn:
        help_text = f"see `{self.prog} --help`"
        raise UserError(
            where, found=found, allowed=allowed, fix=f"{fix} Or {help_text}" if fix else help_text
        )


_ABOVE_ZERO = 1e-6
"""A least value that stands for every number above 0."""


def number(kind: type, least: float, text: str, name: str, most: float = math.inf) -> int | float:
    """Returns `text` as an int or float, according to `kind`, from `least` to `most` inclusive.

    Raises UserError, which names the option `name`, for any other text.
    """
    try:
        value = kind(text)
    except ValueError:
        value = None
    if value is None or not abs(value) < math.inf or not least <= value <= most:
        allowed = f"a {'whole ' if kind is int else ''}number " + (
            "above 0"
            if 0 < least <= _ABOVE_ZERO
            else f">= {least:g}"
            if most == math.inf
            else f"from {least:g} to {most}"
        )
        like = f"write it like {name} {max(least, 1):g}"
        otherwise = f"{like}, or leave {name} out for the default"
        raise UserError(
            name, found=repr(text), allowed=allowed, fix=like if kind is int else otherwise
        )
    checked: int | float = value
    return checked


def whole(name: str, least: int = 1, most: float = math.inf) -> Callable[[str], int | float]:
    """Returns an argparse type for an integer from `least` to `most`."""
    return lambda text: number(int, least, text, name, most)


def real(name: str, least: float = 0.0) -> Callable[[str], int | float]:
    """Returns an argparse type for a finite float of at least `least`."""
    return lambda text: number(float, least, text, name)


def readable(where: str, read: Callable[[], str]) -> str:
    """Returns the text that `read` returns.

    Raises UserError, which names `where`, if the text has bytes that are not UTF-8. Python either
    refuses to decode such bytes, or represents them by characters that cannot be encoded.
    """
    try:
        text = read()
        text.encode()
    except (UnicodeDecodeError, UnicodeEncodeError) as error:
        around = error.object[max(error.start - 20, 0) : error.end]
        raise UserError(
            where,
            found=f"bytes that are not UTF-8, {around!a}",
            allowed="text in UTF-8",
            fix="write it in UTF-8, in a terminal or a shell whose locale is UTF-8, like C.UTF-8",
        ) from None
    return text


def text(name: str, example: str) -> Callable[[str], str]:
    """Returns a function that reads a text that is not empty. It is the `type` of an argument.

    Its UserError names the option `name`, and shows it with the text `example`.
    """

    def read(given: str) -> str:
        if not given:
            raise UserError(
                name, found="no text", allowed="a text", fix=f'write {name} "{example}"'
            )
        return readable(name, lambda: given)

    return read


def size(name: str) -> Callable[[str], int]:
    """Returns an argparse type for a size in bytes, written like 24GiB."""
    return lambda text: parse_bytes(text, name)


def assignments(texts: Sequence[str], form: str, example: str) -> Iterator[tuple[str, str]]:
    """Yields the name and the value of each of `texts`, which were given with `--set`.

    Raises UserError for a text without an equals sign. The error shows `form`, such as `KEY=VALUE`,
    and `example`.
    """
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            fix = f"write it like --set {example}"
            raise UserError("--set", found=repr(text), allowed=form, fix=fix)
        yield name.strip(), value.strip()


def replaced(args: argparse.Namespace, **values: object) -> argparse.Namespace:
    """Returns a copy of `args` in which the options of `values` have new values."""
    return argparse.Namespace(**{**vars(args), **values})


def count(name: str) -> Callable[[str], int]:
    """Returns an argparse type for a count, written like 300M."""
    return lambda text: parse_count(text, name)


def add_limits(parser: argparse.ArgumentParser) -> None:
    """Adds the options `--device-memory` and `--host-memory`."""
    parser.add_argument(
        "--device-memory",
        type=size("--device-memory"),
        metavar="SIZE",
        help="maximum GPU memory to use, e.g. 24GiB",
    )
    parser.add_argument(
        "--host-memory",
        type=size("--host-memory"),
        metavar="SIZE",
        help=(
            "maximum host memory to use, e.g. 480GiB (default: that of the machine, without what"
            " the system and the process take)"
        ),
    )


def add_hardware(parser: argparse.ArgumentParser, without: str = "") -> None:
    """Adds the option `--hardware` and the options of `add_limits`.

    `without` says in the help what happens without `--hardware`. If it is empty, the option is
    required.
    """
    parser.add_argument(
        "--hardware",
        required=not without,
        metavar="H",
        help="a TOML file written by `megatrain calibrate`, or a name in the library, e.g. h200"
        + (f" ({without})" if without else ""),
    )
    add_limits(parser)


def device_limit(
    limit: int | None,
    hardware: HardwareSpec,
    name: str = "--device-memory",
    fix: str = "leave it out to use all of it",
) -> int | None:
    """Returns the device memory to use, in bytes, for `limit`, the value of the option `name`. An
    error says how to `fix` it.

    The advertised memory of a GPU is more than programs can use. A limit of up to 1.1 times the
    machine's device memory therefore means all of it. Raises UserError for a larger limit. Without
    a limit, returns None.
    """
    if limit is None:
        return None
    if limit > _ADVERTISED_RATIO * hardware.device_bytes:
        raise UserError(
            name,
            found=format_bytes(limit),
            allowed=f"at most {format_bytes(hardware.device_bytes)}, which is what programs can use"
            f" of the GPU memory of {hardware.title or hardware.name}",
            fix=fix,
        )
    return min(limit, hardware.device_bytes)


def host_limit(limit: int | None, hardware: HardwareSpec) -> int | None:
    """Returns the host memory to use, in bytes, for `limit`, the value of `--host-memory`.

    Raises UserError if a machine with one memory for CPU and GPU has less. `device_limit` explains
    the factor of 1.1. Other machines may have more host memory than their file says.
    """
    if limit is None or not hardware.unified or limit <= _ADVERTISED_RATIO * hardware.host_bytes:
        return limit
    raise UserError(
        "--host-memory",
        found=format_bytes(limit),
        allowed=f"at most {format_bytes(hardware.memory_limits()[1])}, which is what programs can"
        f" use of the one memory of {hardware.title or hardware.name}",
        fix="leave it out to use all of it",
    )


def add_workload(
    parser: argparse.ArgumentParser,
    *,
    batch: int | None = PLANNED_BATCH,
    batch_help: str = "",
    loss_chunk: int | None = LOSS_CHUNK,
    dtype: str | None = BF16,
    any_state: bool = True,
) -> None:
    """Adds the options from which `workload` makes a Workload.

    `batch` is the default of `--batch`. With None, the command finds a batch that fits, or what
    `batch_help` says.
    `loss_chunk` is the default of `--loss-chunk`. With None, the command chooses a loss chunk.
    `dtype` is the default of `--dtype`. With None, the command calls `with_dtype`.
    `any_state` says whether the command finds a format that fits for `--state any`.
    """
    group = parser.add_argument_group("workload")
    group.add_argument(
        "--batch",
        type=whole("--batch"),
        default=batch,
        help="sequences per micro-batch (default:"
        f" {batch_help or batch or 'the largest up to 32 that fits'})",
    )
    group.add_argument(
        "--seq", type=whole("--seq"), default=1024, help="tokens per sequence (default 1024)"
    )
    group.add_argument(
        "--accumulation",
        type=whole("--accumulation"),
        default=1,
        help="micro-batches per optimizer step (default 1)",
    )
    group.add_argument(
        "--dtype",
        choices=(BF16, "fp32", FP8),
        default=dtype,
        help="dtype that layers compute in (default bf16"
        + ("" if dtype else ", or fp32 if the machine has no rate for bf16")
        + "); fp8 is bf16 with the matrix products of decoder layers in fp8",
    )
    group.add_argument(
        "--fp8-scaling",
        choices=get_args(Scaling),
        help="with --dtype fp8: one scale for each row of an operand (`rowwise`, default), or one"
        " for the whole operand (`tensorwise`)",
    )
    group.add_argument(
        "--clipping",
        choices=get_args(Clipping),
        default="global",
        help=(
            "how gradients are clipped: by the norm of all gradients (`global`, default), by the"
            " norm of each layer (`layer`), by the size of each tensor's update as in StableAdamW"
            " (`update`), by the moving norm of each tensor as in AdaGC (`adagc`), or not at all"
            " (`none`)"
        ),
    )
    group.add_argument(
        "--optimizer",
        default="adamw",
        metavar="NAME",
        help=(
            "`adamw` (default); `muon`, which orthogonalises the updates of the decoder layers'"
            " matrices; an installed optimizer; or a .py file that defines one"
        ),
    )
    group.add_argument(
        "--state",
        choices=(*FORMATS, ANY) if any_state else tuple(FORMATS),
        default=EXACT,
        help="format of master weights and moments: "
        + "; ".join(
            f"`{state.name}`{' (default)' if state.name == EXACT else ''}, {state.what}"
            for state in FORMATS.values()
        )
        + (f"; `{ANY}`, the first of these formats with which the model fits" if any_state else ""),
    )
    group.add_argument(
        "--gradients",
        choices=get_args(Gradients),
        default="exact",
        help=(
            "how gradients are stored while they wait for the norm of all gradients: `exact`"
            " (default), or `8bit`"
        ),
    )
    group.add_argument(
        "--attention",
        choices=get_args(Kernel),
        help="attention kernel; kernels round differently (default: flash attention if rows hold"
        " several documents; otherwise chosen by the machine's rates, or by PyTorch)",
    )
    group.add_argument(
        "--loss-chunk",
        type=whole("--loss-chunk"),
        default=loss_chunk,
        help="number of tokens whose logits exist at one time (default:"
        f" {loss_chunk or 'the planner chooses'})",
    )
    group.add_argument(
        "--head-groups",
        type=whole("--head-groups"),
        metavar="N",
        help="compute attention for one of N groups of key-value heads at a time, with less memory"
        " for long contexts (default: all heads at once)",
    )
    group.add_argument(
        "--token-piece",
        type=whole("--token-piece"),
        metavar="N",
        help="number of tokens that the MLP or the experts of a layer compute at one time, for long"
        " contexts (default: all; `check`, `plan` and `train MODEL` choose a number if the model"
        " does not fit otherwise, or if a long sequence is faster with it)",
    )
    group.add_argument(
        "--compile",
        action="store_true",
        help=(
            "compile layers with torch.compile: faster and with smaller activations, but rounded"
            " differently from eager layers"
        ),
    )
    group.add_argument(
        "--no-dropout",
        action="store_true",
        help=(
            "train without dropout although the model's config has it; the exported config keeps"
            " it. Without this option such a model is refused"
        ),
    )
    packing = group.add_mutually_exclusive_group()
    packing.add_argument(
        "--documents",
        action="store_true",
        default=None,
        help=(
            "rows hold several documents, and attention stays within each document (default if the"
            " model supports it)"
        ),
    )
    packing.add_argument(
        "--plain-packing",
        dest="documents",
        action="store_false",
        help="treat each row as one text, whose attention crosses the borders of documents",
    )


def given(actions: Iterable[argparse.Action], args: argparse.Namespace) -> list[str]:
    """Returns the options of `actions` that the user gave: those whose value in `args` is not the
    default. If several options set one value, the default is that of the first.
    """
    actions = list(actions)
    defaults = {action.dest: action.default for action in reversed(actions)}
    return [
        action.option_strings[0]
        for action in actions
        if (value := vars(args)[action.dest]) != defaults[action.dest]
        and action.const in (None, value)
    ]


def add_step_tokens(parser: argparse.ArgumentParser) -> None:
    """Adds the option `--tokens-per-step`."""
    text = "tokens per optimizer step; the fastest batch and accumulation are chosen for it"
    parser.add_argument(
        "--tokens-per-step", type=count("--tokens-per-step"), metavar="N", help=text
    )


def add_document_length(parser: argparse.ArgumentParser, default: str = "") -> None:
    """Adds the option `--document-length`. `default` says in words what is used without it."""
    parser.add_argument(
        "--document-length",
        type=whole("--document-length"),
        metavar="N",
        help="predict attention for rows of several documents of N tokens; if their lengths differ,"
        " the sum of the squared lengths divided by the sum of the lengths (default:"
        f" {default or 'each row is one document, which takes longest'})",
    )


def usual_dtype(hardware: HardwareSpec, usual: str = BF16) -> str:
    """Returns `usual`, or the other one of bf16 and fp32 if the machine has a rate for it and none
    for `usual`. A calibration has only the rate of the dtype that was measured.
    """
    known = [dtype for dtype in (usual, BF16, "fp32") if dtype in hardware.peak_tflops]
    return known[0] if known else usual


def with_dtype(
    args: argparse.Namespace, hardware: HardwareSpec, *, quiet: bool = False
) -> argparse.Namespace:
    """Returns `args` with the usual dtype of the machine if `--dtype` is not given. If it is not
    the default, a line on standard error says so, unless `quiet`.
    """
    if args.dtype:
        return args
    dtype = usual_dtype(hardware)
    if dtype != BF16 and not quiet:
        print(
            f"layers compute in {dtype}, because {hardware.name} has no rate for {BF16};"
            " --dtype chooses another dtype",
            file=sys.stderr,
        )
    return replaced(args, dtype=dtype)


def workload(args: argparse.Namespace, model: ModelSpec, *, quiet: bool = False) -> Workload:
    """Returns the workload that the options describe, for `model`.

    If attention cannot stay within a document, the workload has no documents, and unless `quiet`, a
    line on standard error says why. Raises UserError if `--documents` was given in this case, for a
    kernel of `--attention` that cannot compute the model's attention, for `--fp8-scaling` without
    fp8, and for `--state any`, which the caller has to replace.
    """
    from megatrain.simulator.model.attention_kernel import obstacle as kernel_obstacle
    from megatrain.simulator.model.workload import Workload

    fp8 = args.dtype == FP8
    if args.fp8_scaling and not fp8:
        raise UserError(
            "--fp8-scaling",
            found=f"{args.fp8_scaling} with --dtype {args.dtype}",
            allowed=f"--dtype {FP8}",
            fix=f"use --dtype {FP8}, or leave out --fp8-scaling",
        )
    obstacle = _documents_obstacle(args, model) if args.documents is not False else None
    if obstacle and args.documents:
        raise UserError(
            "--documents",
            found=obstacle,
            allowed="a model and a kernel whose attention can stay within a document",
            fix="use --plain-packing",
        )
    if args.state == ANY:
        raise UserError(
            "--state",
            found=ANY,
            allowed=f"{', '.join(FORMATS)}; {ANY} for `check`, `plan` and `train MODEL`",
            fix="name a format",
        )
    if obstacle and not quiet:
        print(f"rows are packed without borders between documents: {obstacle}", file=sys.stderr)
    work = Workload(
        batch=args.batch,
        sequence=args.seq,
        accumulation=args.accumulation,
        dtype="bf16" if fp8 else args.dtype,
        fp8=(args.fp8_scaling or "rowwise") if fp8 else None,
        clipping=args.clipping,
        loss_chunk=args.loss_chunk or LOSS_CHUNK,
        token_piece=args.token_piece,
        head_groups=args.head_groups,
        compiled=args.compile,
        attention=args.attention,
        short_recompute=True,
        documents=args.documents is not False and not obstacle,
        document_length=vars(args).get("document_length"),
        no_dropout=args.no_dropout,
        optimizer=args.optimizer,
        state=args.state,
        gradients=args.gradients,
    )
    if work.document_length and not work.documents:
        raise UserError(
            "--document-length",
            found=f"{work.document_length}, and rows that are one text",
            allowed="rows of several documents, in which attention stays within each",
            fix="leave --document-length out",
        )
    if work.attention and (unable := kernel_obstacle(model, work, work.attention)):
        raise UserError(
            "--attention", found=unable.found, allowed=unable.allowed, fix="leave --attention out"
        )
    return work


def _documents_obstacle(args: argparse.Namespace, model: ModelSpec) -> str | None:
    """Returns the reason why attention cannot stay within a document, or None if it can."""
    from megatrain.simulator.model.attention_kernel import separates_documents

    return documents_obstacle(model, args.seq) or (
        None
        if separates_documents(args.attention)
        else f"--attention {args.attention}, which does not support document lengths"
    )


def add_policy(parser: argparse.ArgumentParser) -> None:
    """Adds the option `--policy`."""
    parser.add_argument(
        "--policy",
        default="best",
        metavar="NAME",
        help=(
            "a scheduling policy, a .py file that defines one, `best` for the fastest (default), or"
            " `all` to compare them (only for `check` and `sweep`)"
        ),
    )


def add_device(parser: argparse.ArgumentParser) -> None:
    """Adds the option `--device`."""
    parser.add_argument(
        "--device",
        choices=("auto", "cuda", "cpu"),
        default="auto",
        help="where to run: on the GPU, or on the CPU, with a part of the RAM in place of GPU"
        " memory (default: the GPU if there is one)",
    )


def note_on_cpu(device: torch.device) -> str:
    """Returns a line on what is called the device if the CPU computes, or an empty string."""
    from megatrain.runtime.host import WITHOUT_GPU

    return "" if device.type == "cuda" else f"{WITHOUT_GPU} and is called the device"


def measured_without_gpu(hardware: HardwareSpec) -> bool:
    """Returns whether `hardware` is a calibration of a machine without a GPU."""
    from megatrain.runtime.host import RAM_AS_DEVICE

    # Older files end in the second text.
    endings = (RAM_AS_DEVICE, "memory pool as device")
    return hardware.costs is not None and hardware.costs.measured_on.endswith(endings)


def machine_notes(hardware: HardwareSpec, model: ModelSpec) -> list[str]:
    """Returns notes for a verdict on `model`: that a part of the RAM stands in for GPU memory, and
    that the machine was calibrated without the layers of this model, if these are true. A cost
    model from outside the package may ignore the calibration.
    """
    from megatrain.runtime.host import WITHOUT_GPU

    found = [WITHOUT_GPU] if measured_without_gpu(hardware) else []
    return [*found, *filter(None, [unmeasured_layers(hardware, model)])]


def unmeasured_layers(hardware: HardwareSpec, model: ModelSpec) -> str:
    """Returns a note that the machine was calibrated without the layers of `model`, or an empty
    text if it was not calibrated, or with some of them.
    """
    table = None if hardware.cost_model else hardware.costs
    if table is None or any(table.workloads_of(layer.signature) for layer in model.decoders):
        return ""
    return (
        "the layers of this model were not measured on this machine; their times follow from the"
        " machine's rates. `megatrain calibrate MODEL` measures them"
    )


def refuse_missing_gpu(args: argparse.Namespace) -> None:
    """Raises UserError for `--device cuda` on a machine that has no GPU, without importing torch.

    `device` finds every other reason why a GPU cannot be used, after torch is imported.
    """
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") == ""
    if args.device == "cuda" and (hidden or not any(map(os.path.exists, _GPU_DRIVERS))):
        raise UserError(
            "--device",
            found="cuda, but " + ("CUDA_VISIBLE_DEVICES is empty" if hidden else "no GPU driver"),
            allowed="cuda on a machine with a GPU and its driver, cpu, or auto",
            fix="use --device auto",
        )


def device(args: argparse.Namespace) -> torch.device:
    """Returns the device that `--device` selects, and configures the CUDA allocator for it.

    With several ranks, each gets the GPU with its number. Raises UserError for `cuda` if torch has
    no CUDA device, or too few for all ranks.
    """
    import torch

    from megatrain.runtime.machine import default_device, grow_segments

    if args.device == "cuda" and not torch.cuda.is_available():
        raise UserError(
            "--device",
            found="cuda, but torch reports no CUDA device",
            allowed="cuda with a driver and a CUDA build of torch, cpu, or auto",
            fix="use --device auto",
        )
    grow_segments()
    return torch.device("cpu") if args.device == "cpu" else default_device()


def add_hosts(parser: argparse.ArgumentParser) -> None:
    """Adds the options `--hosts` and `--network`."""
    parser.add_argument(
        "--hosts",
        type=whole("--hosts"),
        default=1,
        metavar="H",
        help="hosts that have the N GPUs of --gpus, N / H each (default 1); --host-memory is then"
        " for each host",
    )
    parser.add_argument(
        "--network",
        type=real("--network", 0.001),
        metavar="GB/S",
        help="GB/s that each host receives from the other hosts, e.g. 50 for 400 Gbit/s (default:"
        " network_gb_per_s of the hardware file)",
    )


def refuse_network_of_one_host(args: argparse.Namespace) -> None:
    """Raises UserError for `--network` without several `--hosts`, because it has no effect."""
    if args.network is not None and args.hosts == 1:
        raise UserError(
            "--network",
            found=f"{args.network:g} and one host",
            allowed="a rate between several hosts",
            fix="add --hosts H, or leave --network out",
        )


def add_check(parser: argparse.ArgumentParser) -> None:
    """Adds the model and all options of `megatrain check`, which the page in a browser also has."""
    parser.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help="a Hugging Face folder, a config.json, or a name in the library, e.g. qwen2.5-7b"
        " (default: list what fits)",
    )
    add_hardware(parser, "default: this machine")
    add_policy(parser)
    parser.add_argument(
        "--cores",
        type=whole("--cores"),
        help="processor cores of the host (default: as in the hardware file); with fewer, the"
        " CPU optimizer is slower in proportion; with more, it is as fast, because DRAM limits it",
    )
    add_workload(parser, batch=None, loss_chunk=None, dtype=None)
    add_step_tokens(parser)
    add_document_length(parser)
    parser.add_argument(
        "--tokens",
        type=count("--tokens"),
        metavar="N",
        help="also report the time and the energy for training on N tokens, e.g. 1B",
    )
    parser.add_argument(
        "--gpus",
        type=whole("--gpus"),
        default=1,
        metavar="N",
        help="also report the speed of N GPUs; --batch and --accumulation are for each GPU",
    )
    add_hosts(parser)
    parser.add_argument(
        "--why",
        action="store_true",
        help="also print the plan and its placement, the runner-up, the gain from one more GiB, and"
        " the bounds of the step time",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
