"""Makes the plan of `megatrain train MODEL`.

It reads the lengths of the data, calibrates this machine, chooses sequence and batch, and prints
the verdict. Without it, the user would run `megatrain calibrate` and `megatrain plan`.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from megatrain.experiments.cli import file_arguments, options
from megatrain.experiments.cli.training.preconditions import check_inputs, refuse_missing_weights
from megatrain.experiments.cli.verdict import layout
from megatrain.experiments.cli.verdict.layout import fitted
from megatrain.runtime.files.model_source import hub_name
from megatrain.runtime.training.config import Config
from megatrain.simulator.base.errors import DoesNotFit, UserError
from megatrain.simulator.base.units import format_bytes, format_count, format_seconds
from megatrain.simulator.model.state_format import ANY, EXACT

if TYPE_CHECKING:
    import torch

    from megatrain.runtime.data.documents import Documents
    from megatrain.simulator.hardware.machine import HardwareSpec
    from megatrain.simulator.model.specs import ModelSpec
    from megatrain.simulator.model.workload import Workload
    from megatrain.simulator.planner.search import Choice

_SAME_MEMORY = 0.03
"""The largest relative difference of free device memory that is ignored."""
_CHOSEN = {
    "--seq": "tokens per sequence (default: covers 99 %% of the documents)",
    "--batch": "sequences per micro-batch (default: the fastest)",
    "--accumulation": "micro-batches per optimizer step (default: the fastest)",
    "--dtype": "dtype that layers compute in (default: bf16 on a GPU, fp32 on a CPU)",
    "--tokens-per-step": "tokens per optimizer step, in whole sequences; rounded to them only if"
    " --seq is chosen (default: 32768, or fewer if an epoch would have less than 20 steps)",
    "--policy": "a scheduling policy, a .py file that defines one, or `best` for the fastest"
    " (default)",
}
"""Option that `train` chooses if it is not given -> its help."""


def describe(parser: argparse.ArgumentParser) -> None:
    """Adds the options for planning a model. They are for `train MODEL` only."""
    first = len(parser._actions)
    group = parser.add_argument_group("plan, for `train MODEL`")
    group.add_argument(
        "--hardware",
        metavar="H",
        help="a file written by `megatrain calibrate`, or a name in the library (default: this"
        " machine, which is measured once and then kept in ~/.cache/megatrain)",
    )
    group.add_argument(
        "--recalibrate",
        action="store_true",
        help="measure this machine again, although it was calibrated before",
    )
    options.add_limits(parser)
    options.add_policy(parser)
    options.add_step_tokens(parser)
    options.add_document_length(parser, "computed from the data")
    options.add_workload(parser, loss_chunk=None)
    parser.set_defaults(batch=None, seq=None, accumulation=None, dtype=None)
    added = parser._actions[first:]
    for action in added:
        action.help = _CHOSEN.get(action.option_strings[0], action.help)
    parser.set_defaults(plan_actions=added)


def names_model(args: argparse.Namespace) -> bool:
    """Returns whether the first argument is a model, for which a plan must be made.

    Raises UserError for a model with --resume, and for options of planning with a plan. If
    --resume names no run, the error says this instead.
    """
    first: Path | None = args.plan
    model = first is not None and (
        os.path.isdir(first)
        or first.suffix == ".json"
        or not (first.suffix == ".toml" or os.path.exists(first))
    )
    if model and args.resume is not None:
        fix = f"check the path, and leave {first} out; or start a new run, without --resume"
        file_arguments.refuse_no_run(args.resume, fix)
        raise UserError(
            "train --resume",
            found=f"a model, {first}",
            allowed="a plan's file, or nothing for the plan of the run",
            fix="leave it out",
        )
    if not model and (given := options.given(args.plan_actions, args)):
        raise UserError(
            f"train: {given[0]}",
            found="a plan, which has this already" if first else "--resume, which has a plan",
            allowed="`train MODEL`, which makes a plan",
            fix="leave it out, or make another plan with `megatrain plan`",
        )
    return model


def refuse_missing_model(args: argparse.Namespace) -> None:
    """Raises UserError if the model or the plan that the first argument names does not exist.

    The hub is not asked for a model. This check comes first, because other errors may follow from a
    wrong name.
    """
    from megatrain.simulator.model.specs import ModelSpec

    if args.plan is None:
        return
    if not names_model(args):
        file_arguments.plan_of(args.plan)
    elif not hub_name(str(args.plan)):
        ModelSpec.load(str(args.plan))


def check(args: argparse.Namespace, config: Config) -> None:
    """Checks the model, the data and the options without loading torch.

    Raises UserError if the model has no weights to begin with, if the data does not exist, or if
    options contradict each other.
    """
    from megatrain.runtime.layers.supported import refuse_multimodal, refuse_unsupported
    from megatrain.simulator.hardware.machine import HardwareSpec
    from megatrain.simulator.model.attention_kernel import is_deterministic
    from megatrain.simulator.model.specs import ModelSpec

    if None not in (args.tokens_per_step, args.batch, args.accumulation):
        raise UserError(
            "--tokens-per-step",
            found="--batch and --accumulation as well",
            allowed="at most two of the three",
            fix="leave one out",
        )
    if config.training.deterministic and not is_deterministic(args.attention):
        raise UserError(
            "--attention",
            found=f"{args.attention} in deterministic mode, although its backward is not"
            " deterministic",
            allowed="flash, or no --attention",
            fix="leave --attention out, or train without --deterministic",
        )
    if args.hardware:
        HardwareSpec.load(args.hardware)
        if args.recalibrate:
            raise UserError(
                "--recalibrate",
                found="--hardware as well",
                allowed="one of the two",
                fix="leave one out",
            )
    name, folder = str(args.plan), os.path.isdir(args.plan)
    if not hub_name(name):
        model = ModelSpec.load(name)
        if not args.no_dropout:
            refuse_unsupported(model)
        if folder:
            refuse_multimodal(Path(name), model)
        _refuse_workload(args, model)
    weightless = args.model is None and not (folder or hub_name(name))
    if config.training.init == "model" and weightless:
        raise UserError(
            f"model {name}",
            found="a config without weights",
            allowed="a folder with weights, or --init random",
            fix="name a folder with weights or the model on the hub, like org/name, or pass --init"
            " random to begin with random weights",
        )
    refuse_missing_weights(args.model)
    check_inputs(args.model or name, config)


def _refuse_workload(args: argparse.Namespace, model: ModelSpec) -> None:
    """Raises UserError if the options of the workload contradict each other, or if the optimizer or
    the policy does not exist.
    """
    from megatrain.simulator import policies
    from megatrain.simulator.model import optimizer

    _workload(args, model, args.dtype or "bf16")
    if args.seq and args.tokens_per_step:
        _refuse_broken_step(args, args.tokens_per_step)
    optimizer.find(args.optimizer)
    if args.policy not in ("best", "all"):
        policies.find(args.policy)


def _workload(args: argparse.Namespace, model: ModelSpec, dtype: str) -> Workload:
    """Returns the workload of the options, with `dtype` and the smallest size that they allow.

    Raises UserError if the options contradict each other.
    """
    complete = options.replaced(
        args,
        batch=args.batch or 1,
        seq=args.seq or 1,
        accumulation=args.accumulation or 1,
        dtype=dtype,
        state=EXACT if args.state == ANY else args.state,
    )
    return options.workload(complete, model, quiet=True)


def _refuse_kernel(args: argparse.Namespace, model: ModelSpec, device: torch.device) -> None:
    """Raises UserError if `device` cannot run the kernel of `--attention`."""
    from megatrain.runtime.layers.attention import kernel_of

    try:
        kernel_of(model, _workload(args, model, args.dtype or _dtype(args, device)), device)
    except UserError as error:
        raise UserError(
            "--attention", found=error.found, allowed=error.allowed, fix=error.fix
        ) from None


def _refuse_broken_step(args: argparse.Namespace, tokens: int) -> None:
    """Raises UserError unless `tokens` are a step of whole sequences of `args.seq` tokens, and of
    whole micro-batches if `args.batch` or `args.accumulation` is given.
    """
    from megatrain.simulator.model.workload import Workload
    from megatrain.simulator.planner.batch_splits import splits

    splits(Workload(batch=1, sequence=args.seq), tokens)  # refuses broken sequences, as `check`
    option, count = ("--batch", args.batch) if args.batch else ("--accumulation", args.accumulation)
    unit = (count or 1) * args.seq
    # Gradients in 8 bits cannot be accumulated over micro-batches.
    single = bool(args.batch) and args.gradients != "exact"
    if tokens == unit or not (single or tokens % unit):
        return
    steps = f"{args.batch} x {args.seq} tokens" if args.batch else f"{unit} tokens"
    raise UserError(
        "--tokens-per-step",
        found=tokens,
        allowed=f"{unit}, one micro-batch of {steps}, because of --gradients {args.gradients}"
        if single
        else f"whole micro-batches, so a multiple of {steps}",
        fix=f"use {unit if single else max(round(tokens / unit), 1) * unit}, or change {option}",
    )


@contextlib.contextmanager
def plan_file(args: argparse.Namespace, config: Config) -> Iterator[Path]:
    """Makes a plan for a model, its data and this machine. Yields its file in a temporary folder.

    Prints the choices and the verdict. Raises DoesNotFit if no plan fits in memory.
    """
    import msgspec

    from megatrain.experiments.cli.verdict import from_options
    from megatrain.experiments.cli.without_garbage_collection import without_garbage_collection
    from megatrain.experiments.files.hardware_file import write_hardware
    from megatrain.runtime.files.model_files import folder_weights
    from megatrain.runtime.files.model_folder import model_folder
    from megatrain.runtime.layers.supported import refuse_unsupported
    from megatrain.simulator.hardware.machine import HardwareSpec
    from megatrain.simulator.model.specs import ModelSpec

    device, name = options.device(args), str(args.plan)
    asked = options.replaced(args, model=str(model_folder(name)) if hub_name(name) else name)
    asked.policy = "best" if args.policy == "all" else args.policy
    model = ModelSpec.load(asked.model)
    weights = args.model or asked.model  # the tokenizer is there, too
    if config.training.init == "model":
        with folder_weights(model_folder(weights)):  # reports a damaged file before calibrating
            pass
    if args.attention:  # refused here, before the data is read and the machine is measured
        _refuse_kernel(asked, model, device)
    documents = _documents(weights, config, model)
    # The choices from the data and the calibration do not depend on the state format.
    asked.state = EXACT if args.state == ANY else args.state
    choice = _choose(asked, config, model, documents, device)
    refuse_unsupported(model, choice.workload)
    file = _hardware(args, model, choice.workload, device)
    hardware = measured = HardwareSpec.load(file)
    if not (args.hardware or args.device_memory):
        hardware = with_free_memory(measured, device)
    source = os.path.abspath(name) if os.path.exists(name) else name
    asked.state = args.state
    with without_garbage_collection():
        asked = from_options.with_fitting_state(asked, hardware, model)
        asked = _with_attention_kernel(asked, hardware, model, config, device)
        asked = from_options.with_fitting_piece(asked, hardware, model)
        asked = from_options.with_loss_chunk(asked, hardware, model)
        best = from_options.choices(asked, hardware, source, file)[0]
    _show(best, hardware, choice.steps(config), kernel_chosen=args.attention is None)
    if not best.feasible:
        raise _does_not_fit(best, hardware, splits=args.tokens_per_step is None)
    if args.hardware and (warning := other_machine(hardware, device)):
        print(fitted(warning), flush=True)
    with tempfile.TemporaryDirectory(prefix="megatrain-") as place:
        plan = best.plan
        if hardware != measured:  # a limit above the machine's memory would be refused later
            write_hardware(Path(place) / "hardware.toml", hardware, "megatrain train")
            plan = msgspec.structs.replace(plan, hardware=str(Path(place) / "hardware.toml"))
        plan.save(Path(place) / "plan.toml")
        yield Path(place) / "plan.toml"


class _Choice(NamedTuple):
    """The choices that were made from the data."""

    workload: Workload
    """The workload, with a batch and an accumulation of 1."""
    rows: int
    """The number of rows in an epoch."""
    step_rows: int
    """The number of rows in an optimizer step."""

    def steps(self, config: Config) -> int:
        """Returns the number of optimizer steps of the training."""
        if config.training.steps:
            return config.training.steps
        return max(1, math.ceil(round(config.training.epochs * self.rows / self.step_rows, 6)))


def _choose(
    asked: argparse.Namespace,
    config: Config,
    model: ModelSpec,
    documents: Documents,
    device: torch.device,
) -> _Choice:
    """Chooses dtype, sequence, and the rows of a step, and stores them in `asked`.

    Prints the choices. Raises UserError if the data has fewer rows than a step.
    """
    from megatrain.experiments.cli.training.row_choice import (
        chosen_rows,
        chosen_sequence,
        described,
    )
    from megatrain.runtime.data.corpus.corpus import Corpus
    from megatrain.simulator.model.attention_masks import document_tokens

    where, limit, lengths = (
        f"data {', '.join(config.data.paths)}",
        model.longest_row,
        documents.lengths,
    )
    asked.dtype = asked.dtype or _dtype(asked, device)
    asked.seq = asked.seq or chosen_sequence(lengths, whole=documents.whole, limit=limit)
    if limit and asked.seq > limit:
        print(f"warning: --seq {asked.seq:,} is above the model's own limit of {limit:,} tokens")
    batch, accumulation = asked.batch, asked.accumulation
    asked.batch = asked.accumulation = 1
    workload = options.workload(asked, model)
    asked.documents = workload.documents
    packing = config.data.packing or ("documents" if workload.documents else "plain")
    corpus = Corpus(documents, workload, seed=config.training.seed, packing=packing, where=where)
    rows = corpus.rows
    if workload.documents:
        asked.document_length = asked.document_length or corpus.document_length
    tokens = asked.tokens_per_step
    if tokens and tokens < asked.seq:
        _refuse_broken_step(asked, tokens)
    step_rows = max(round(tokens / asked.seq), 1) if tokens else chosen_rows(rows, asked.seq)
    if batch or accumulation:
        asked.batch = batch or max(step_rows // accumulation, 1)
        # Gradients in 8 bits cannot be accumulated over micro-batches.
        most = 1 if asked.gradients != "exact" else max(step_rows // asked.batch, 1)
        asked.accumulation = accumulation or most
        asked.tokens_per_step, step_rows = None, asked.batch * asked.accumulation
    else:
        asked.tokens_per_step = step_rows * asked.seq
    if tokens and tokens != (used := step_rows * asked.seq):  # only if the sequence was chosen
        print(fitted(f"--tokens-per-step: asked {tokens:,}, uses {used:,}, in whole sequences"))
    if step_rows > rows:
        raise UserError(
            where,
            found=f"{rows:,} rows of {asked.seq:,} tokens",
            allowed=f"at least the {step_rows:,} rows of one step",
            fix="give more data, or fewer tokens a step with --tokens-per-step",
        )
    cuts = documents.whole and packing != "plain"
    steps = f"{rows / step_rows:,.1f}".removesuffix(".0")
    print(fitted(f"documents: {described(lengths, asked.seq, cuts=cuts)}"))
    if length := document_tokens(model, options.workload(asked, model, quiet=True)):
        line = (
            f"attention is predicted for documents of {length:,} tokens, the mean over all tokens"
        )
        print(fitted(line))
    print(f"{step_rows:,} x {asked.seq:,} tokens a step, {steps} steps an epoch", flush=True)
    return _Choice(workload, rows, step_rows)


def _documents(source: str, config: Config, model: ModelSpec) -> Documents:
    """Returns the training documents, tokenized with the tokenizer of `source`, if it is a folder
    or a name on the hub.
    """
    from megatrain.runtime.data.opening import training_documents
    from megatrain.runtime.files.model_folder import model_folder

    print(fitted(f"reading data {', '.join(config.data.paths)}"), flush=True)
    folder = model_folder(source) if os.path.isdir(source) or hub_name(source) else None
    return training_documents(config.data, folder, model.vocabulary, seed=config.training.seed)


def _dtype(asked: argparse.Namespace, device: torch.device) -> str:
    """Returns the usual dtype of a device. If `--hardware` has no rate for it, returns the first
    dtype that has one.
    """
    from megatrain.simulator.hardware.machine import HardwareSpec

    default = "bf16" if device.type == "cuda" else "fp32"
    if not asked.hardware:
        return default
    return options.usual_dtype(HardwareSpec.load(asked.hardware), default)


def _hardware(
    args: argparse.Namespace, model: ModelSpec, workload: Workload, device: torch.device
) -> str:
    """Returns the machine's name for the plan: a name in the library, or the absolute path of a
    hardware file. Calibrates this machine if `--hardware` is not given and the cache is empty.
    """
    if args.hardware:
        return os.path.abspath(args.hardware) if os.path.exists(args.hardware) else args.hardware
    import msgspec

    from megatrain.experiments.cli.training.calibration_cache import calibration
    from megatrain.runtime.layers.attention import with_kernel_for_sinks

    # Costs with pieces of tokens and groups of heads are derived from costs without.
    measured = msgspec.structs.replace(workload, token_piece=None, head_groups=None)
    file = calibration(
        model,
        with_kernel_for_sinks(measured, [model], device),
        device,
        device_bytes=args.device_memory,
        host_bytes=args.host_memory,
        again=args.recalibrate,
    )
    return os.path.abspath(file)


def with_free_memory(hardware: HardwareSpec, device: torch.device) -> HardwareSpec:
    """Returns `hardware`, a calibration of this machine, with the device memory that is free now.

    Another program may use a part of a GPU's memory now, or may have used it when the machine was
    measured. A difference of less than 3 % is ignored. The code that this process has loaded takes
    some memory, too, and plans leave 4 % free.
    """
    import msgspec

    from megatrain.runtime.machine import usable_device_bytes

    if device.type != "cuda":
        return hardware
    free, before = usable_device_bytes(device), hardware.device_bytes
    if abs(free - before) < _SAME_MEMORY * before:
        return hardware
    print(
        fitted(
            f"note: {format_bytes(free)} of VRAM are free for plans now, and"
            f" {format_bytes(before)} were when this machine was measured: other programs use"
            f" {'more' if free < before else 'less'} of it"
        ),
        flush=True,
    )
    return msgspec.structs.replace(hardware, device_bytes=free)


def _with_attention_kernel(
    asked: argparse.Namespace,
    hardware: HardwareSpec,
    model: ModelSpec,
    config: Config,
    device: torch.device,
) -> argparse.Namespace:
    """Returns `asked` with the attention kernel that the planner chooses, if `--attention` is not
    given and `device` is a GPU that has this kernel.
    """
    from megatrain.experiments.cli.verdict import from_options
    from megatrain.runtime.layers.attention import kernel_of

    chosen = from_options.with_attention_kernel(
        asked, hardware, model, deterministic=config.training.deterministic
    )
    if chosen.attention == asked.attention:
        return asked
    try:
        kernel_of(model, options.workload(chosen, model, quiet=True), device)
    except UserError:
        return asked
    return chosen


def _show(best: Choice, hardware: HardwareSpec, steps: int, *, kernel_chosen: bool = False) -> None:
    """Prints the verdict on a training of `steps` steps, which layers are not compiled, the
    attention kernel if it was chosen, and whether layers or some ops were not measured.
    """
    from megatrain.experiments.cli.verdict import text as verdict_text
    from megatrain.experiments.cli.verdict.text import step_tokens
    from megatrain.simulator.verdict.verdict import summarize

    verdict = summarize(best, hardware, kernel_chosen=kernel_chosen)
    work = verdict.workload
    shape = f"{step_tokens(work)} a step, {work.precision}"
    subject = f"{verdict.model} ({format_count(verdict.parameters)} parameters)"
    fits = "fits" if best.feasible else "does not fit"
    machine = hardware.title or hardware.name.replace("this-machine", "this machine")
    print(fitted(f"{fits} {machine}: {subject}, {shape}"))
    if best.feasible:
        seconds = verdict.step_seconds
        print(
            fitted(
                f"speed: {layout.speed(verdict.tokens_per_second)} tokens/s,"
                f" {format_seconds(seconds)} a step (policy {verdict.policy})"
            )
        )
    without_gpu = options.measured_without_gpu(hardware)
    sizes = [
        f"{format_bytes(peak)} of {format_bytes(limit)} {place}"
        for place, peak, limit in (
            (
                "RAM in place of VRAM" if without_gpu else "VRAM",
                verdict.device_peak_bytes,
                verdict.device_limit_bytes,
            ),
            (
                "other RAM" if without_gpu else "RAM",
                verdict.host_peak_bytes,
                verdict.host_limit_bytes,
            ),
        )
    ]
    print(fitted(f"memory: {', '.join(sizes)}"))
    if best.feasible:
        plural = "s" if steps > 1 else ""
        print(
            fitted(
                f"time: {planned_time(steps * seconds)} for {steps:,} step{plural}, without"
                " compilation, evaluations, checkpoints and the export"
            ),
            flush=True,
        )
    if verdict.eager:
        print(f"note: {verdict.eager}", flush=True)
    if kernel := verdict_text.kernel(verdict):
        print(fitted(f"note: {kernel}"), flush=True)
    if note := options.unmeasured_layers(hardware, best.plan.model):
        print(fitted(f"note: {note}"))
    elif verdict.calibrated and verdict.extrapolated:
        print(fitted(f"note: {verdict_text.NOT_MEASURED}, so the step time is less certain"))


def other_machine(hardware: HardwareSpec, device: torch.device) -> str:
    """Returns a warning that `device` is not that of the planned machine, or an empty text.

    A calibration is known by the name of the device that was measured, and a datasheet by the names
    that the driver reports. A datasheet without such names may be that of any GPU, but of no CPU.
    """
    from megatrain.runtime.machine import describe

    here = str(describe(device)["device"])
    known = (hardware.costs.measured_on,) if hardware.costs else hardware.gpu_names
    if device.type == "cpu":  # the end of the name was another one in earlier versions
        here, _, _ = here.rpartition(", ")
        known = tuple(name.rpartition(", ")[0] for name in known)
    if here in known or (device.type == "cuda" and not known):
        return ""
    on_cpu = " without a GPU" if device.type == "cpu" else ""
    return (
        f"warning: the plan is for another machine, {hardware.title or hardware.name}; speed and"
        f" memory may differ here, on {here}{on_cpu}"
    )


def planned_time(seconds: float) -> str:
    """Returns the predicted time of a training as text."""
    from megatrain.runtime.training.progress import format_duration

    return format_duration(seconds) if seconds >= 1 else "less than 1 s"


def _does_not_fit(best: Choice, hardware: HardwareSpec, *, splits: bool) -> DoesNotFit:
    """Returns the error for a model that no plan fits. Its fix is never another machine, because
    `train` runs on this one.

    With `splits`, a fix that names a micro-batch also names the number of micro-batches. Without
    it, `train` would choose another number, which may need more memory.
    """
    import msgspec

    from megatrain.experiments.cli.verdict import text as verdict_text
    from megatrain.simulator.verdict.verdict import explain

    verdict = explain(best, hardware)
    possible = [entry for entry in verdict.advice if "hardware" not in entry.options]
    if splits:
        count = {"accumulation": str(best.plan.workload.accumulation)}
        possible = [
            msgspec.structs.replace(entry, options=entry.options | count)
            if "batch" in entry.options
            else entry
            for entry in possible
        ]
    verdict = msgspec.structs.replace(verdict, advice=tuple(possible))
    return DoesNotFit(
        f"model {best.plan.model.name}",
        found="no plan that fits; nothing was written",
        allowed=verdict_text.limits(verdict),
        fix=verdict_text.remedy(verdict),
    )
