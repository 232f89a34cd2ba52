"""Computes the loss on evaluation data, during a training or for the model of a finished run."""

from __future__ import annotations

import itertools
import shlex
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import msgspec
import torch

from megatrain.runtime.batch import IGNORED, Batch
from megatrain.runtime.data.corpus.corpus import Corpus
from megatrain.runtime.data.opening import describe_packing, read_data
from megatrain.runtime.data.rows.sources import EVALUATION_SPLITS
from megatrain.runtime.execution.executor import Executor
from megatrain.runtime.execution.preflight import preflight
from megatrain.runtime.files.exported_models import model_to_evaluate
from megatrain.runtime.files.model_files import folder_weights
from megatrain.runtime.files.model_folder import CHAT_TEMPLATE
from megatrain.runtime.layers.functional_layers import config_of
from megatrain.runtime.machine import default_device, device_bytes, host_bytes, make_deterministic
from megatrain.runtime.memory.fitting import refuse_what_does_not_fit
from megatrain.runtime.ranks import Ranks
from megatrain.runtime.training.callback import EvaluationResult
from megatrain.runtime.training.config import Config
from megatrain.runtime.training.opening import EvaluationSource, find_model, packing_of
from megatrain.simulator.base.errors import UserError
from megatrain.simulator.base.units import counted
from megatrain.simulator.hardware.machine import is_calibrated
from megatrain.simulator.schedule.arithmetic import own_micro_batches
from megatrain.simulator.schedule.plan import Plan

SAME_DATA = "give all ranks the same data; on several hosts, each reads its own copy"
"""What a user can do if the data of ranks differs."""


def evaluate(
    executor: Executor,
    batches: Iterable[Batch],
    *,
    number: int = 0,
    over_steps: int = 0,
    stop: Callable[[], bool] = lambda: False,
) -> EvaluationResult | None:
    """Returns the loss of the executor's weights on `batches`, a mean over all labelled tokens. As
    many micro-batches are evaluated at a time as an optimizer step has.

    Args:
        executor: executes the evaluation. With several GPUs, every rank must call this function.
        batches: all micro-batches. With several GPUs, each rank computes a part of them.
        number: the number of the last step, for the result.
        over_steps: the maximum number of such groups of micro-batches, or 0 for all.
        stop: called before each group. If it returns True, the result is None.

    Raises UserError if no position of `batches` has a label.
    """
    parts, left = [], iter(batches)
    accumulation = executor.plan.workload.accumulation
    places = own_micro_batches(executor.plan, executor.rank)
    while group := list(itertools.islice(left, accumulation)):
        if stop():
            return None
        empty = group[0]._replace(labels=torch.full_like(group[0].labels, IGNORED))
        group += [empty] * (accumulation - len(group))
        parts.append(executor.evaluate([group[place] for place in places]))
        if len(parts) == over_steps:
            break
    tokens = sum(part.labelled for part in parts)
    if not tokens:
        raise _unlabelled(len(parts), over_steps)
    loss = sum(part.loss * part.labelled for part in parts) / tokens
    return EvaluationResult(
        number=number, loss=loss, tokens=tokens, seconds=sum(part.seconds for part in parts)
    )


def _unlabelled(groups: int, over_steps: int) -> UserError:
    """Returns the error of evaluation data whose first `groups` of micro-batches have no label."""
    return UserError(
        "evaluation data",
        found=f"{counted(groups, 'group')} of micro-batches, without a position that has a label",
        allowed="at least one label other than -100",
        fix=f"use data with labels{', or a larger over_steps' if over_steps else ''}; a method"
        " batches() of your own must return all micro-batches anew in each call",
    )


def checked_batches(held_out: EvaluationSource, executor: Executor) -> Iterable[Batch]:
    """Returns all micro-batches of `held_out`, of which the first have been checked. Called before
    the first step, so that a mistake costs no step. The result is for the first evaluation, so no
    micro-batch is lost if `batches` returns parts of one stream.

    Raises UserError if the first micro-batches cannot be evaluated, or if there are none.
    """
    batches, where = held_out.batches(), "evaluation data"
    if not isinstance(batches, Iterable):
        raise UserError(
            where,
            found=f"a {type(batches).__name__} from batches()",
            allowed="an iterable of Batch(ids, labels)",
            fix="return all micro-batches anew in each call of batches()",
        )
    left, planned = iter(batches), executor.plan.micro_batches
    first = list(itertools.islice(left, planned))
    if not first:
        raise _unlabelled(0, 0)
    try:
        executor.check(first + first[-1:] * (planned - len(first)))
    except UserError as error:
        raise UserError(
            error.where.replace("data", where, 1),
            found=error.found,
            allowed=error.allowed,
            fix=error.fix,
        ) from None
    return itertools.chain(first, left)


def same_batches(batches: Iterable[Batch], accumulation: int, ranks: Ranks) -> Iterator[Batch]:
    """Yields `batches` of this rank, in groups of `accumulation`. Every rank must consume them at
    the same time.

    Otherwise ranks with different data would compute a loss of no data at all, or wait for each
    other for ever. Raises UserError on every rank if a group differs between ranks, or if a rank
    has more groups than another.
    """
    left, number = iter(batches), 0
    while True:
        number += 1
        group = list(itertools.islice(left, accumulation))
        found = f"group {number} of micro-batches: {_checksum(group)}" if group else "no more data"
        ranks.agree({"evaluation data": found}, SAME_DATA)
        if not group:
            return
        yield from group


def _checksum(group: Sequence[Batch]) -> str:
    """Returns a checksum of the tensors of micro-batches, as text."""
    value = 0
    for batch in group:
        for tensor in batch:
            if isinstance(tensor, torch.Tensor):
                value = zlib.crc32(tensor.detach().cpu().contiguous().numpy().tobytes(), value)
    return f"{value:08x}"


def evaluate_run(
    run: Path,
    data: tuple[str, ...],
    *,
    model: str | None = None,
    split: str = "",
    cache: str | None = None,
    device: torch.device | None = None,
    on_note: Callable[[str], None] = lambda _: None,
) -> EvaluationResult:
    """Returns the loss on `data` of the model that a run exported.

    The run's plan is executed, and the data is read with the settings of the run. This takes as
    much memory as the training.

    Args:
        run: the folder of the run.
        data: files and folders, each as `PATH` or `PATH:WEIGHT`.
        model: the folder or hub name of other weights for the run's plan, or None for the model
            that the run exported last.
        split: the split of the data. If empty, it is the first of validation, test and train that
            exists.
        cache: the folder for tokenized data, or None for the folder of the run's config.
        device: the device to compute on, or None for the default device.
        on_note: called with lines for the user.

    Raises UserError if `run` has no exported model, or if plan, model or data cannot be used.
    """
    plan, config = Plan.load(run / "plan.toml"), Config.load(run / "config.toml")
    if plan.gpus > 1:
        raise UserError(
            str(run),
            found=f"a run on {plan.gpus} GPUs",
            allowed="a run on one GPU",
            fix="use a run on one GPU with the model of this one, `megatrain eval RUN --model"
            f" {shlex.quote(str(run / 'model'))} --data DATA`, or train with --evaluation-data",
        )
    source = model or model_to_evaluate(run)
    device = device or default_device()
    deterministic = config.training.deterministic
    schedule = preflight(plan, config.optimizer, device, deterministic=deterministic)
    refuse_what_does_not_fit(
        plan,
        schedule,
        # As in Trainer, because a virtual machine may report less memory than it can grow to.
        host_bytes=None if is_calibrated(run / plan.hardware) else host_bytes(),
        device_bytes=device_bytes(device),
        on_cpu=device.type != "cuda",
    )
    folder = find_model(str(source), plan.model, needed=True)
    assert folder is not None, "a model that is needed is found or refused"
    template = run / CHAT_TEMPLATE
    options = msgspec.structs.replace(
        config.data,
        data=data,
        packing=packing_of(config.data, plan),
        chat_template=str(template) if template.is_file() else "",
        cache=config.data.cache if cache is None else cache,
    )
    splits = (split,) if split else EVALUATION_SPLITS
    read, _ = read_data(options, folder, plan.model.vocabulary, on_note, splits=splits)
    corpus = Corpus(
        read.documents,
        plan.workload,
        seed=None,
        packing=options.packing or "documents",
        where=f"data {', '.join(data)}",
    )
    on_note(f"evaluation: {describe_packing(corpus, plan.workload.sequence, len(read.documents))}")
    if deterministic:
        make_deterministic()
    with Executor(
        plan, config_of(plan.model), config.optimizer, device, schedule=schedule
    ) as executor:
        with folder_weights(folder) as weights:
            executor.state.load(weights)
        result = evaluate(executor, corpus.batches())
    assert result is not None, "nothing stops this evaluation"
    return result
