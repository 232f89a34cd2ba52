"""Computes the content of the page: the verdict of `megatrain check`, as text and as a picture."""

from __future__ import annotations

import argparse
import functools
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from megatrain.experiments.cli import options
from megatrain.experiments.cli.verdict import from_options, layout, policy_table
from megatrain.experiments.cli.verdict import text as sentences
from megatrain.experiments.cli.verdict.reasons import rates_source, reasons
from megatrain.experiments.cli.without_garbage_collection import without_garbage_collection
from megatrain.experiments.web.question import Question
from megatrain.experiments.web.timeline_data import timeline_data
from megatrain.simulator import policies as policy_library
from megatrain.simulator.base.errors import UserError
from megatrain.simulator.costs import cost_model
from megatrain.simulator.engine.discrete_event import play
from megatrain.simulator.planner.assessment import assess
from megatrain.simulator.plots.pictures import DATA_COLOURS
from megatrain.simulator.policies.policy import PolicyWarning
from megatrain.simulator.verdict.verdict import explored, summarize

if TYPE_CHECKING:
    from megatrain.simulator.hardware.machine import HardwareSpec
    from megatrain.simulator.model.specs import ModelSpec
    from megatrain.simulator.planner.search import Choice
    from megatrain.simulator.verdict.verdict import Verdict

TOKENS = 10**9
"""Tokens to train on in each verdict. The page scales the times to the number that the user asks
for."""
_ONE_LINE = 10**6
"""A width at which no text is wrapped."""


def answer(question: Question) -> Iterator[tuple[str, dict[str, Any] | None]]:
    """Yields four parts (name, data): `first`, `outlook`, `verdict` and `advice`.

    The first two take a fraction of a second. The part `first` is the verdict about a plan that is
    probably a few percent slower than the best. It is None if no such plan was found. The outlook
    has what is known before plans are searched, in the page's form, or it is None.

    The part `verdict` is about the best plan, and the advice is the same verdict with the gains of
    other plans. They and `first` have the verdict in the form of `check --json` and in the page's
    form. Raises UserError as `check` does.
    """
    args, model, hardware = question.arguments(), question.spec(), question.machine()
    args = options.with_dtype(args, hardware, quiet=True)
    args = argparse.Namespace(**{**vars(args), "tokens": TOKENS})
    source = _source(question, model)
    with without_garbage_collection():
        sized, chosen = from_options.with_fitting_size(args, hardware, model)
        described = functools.partial(
            from_options.described,
            sized,
            hardware=hardware,
            batch_chosen=chosen,
            chunk_chosen=args.loss_chunk is None,
            kernel_chosen=args.attention is None,
        )
        try:
            first = from_options.first_plan(sized, hardware, source, model)
        except UserError:  # the search raises it again, or leaves the policy out
            first = None
        yield (
            "first",
            _told(described(choice=first)) | {"timeline": _timeline(first, hardware)}
            if first
            else None,
        )
        fitted = from_options.with_loss_chunk(sized, hardware, model)
        known = from_options.outlook(fitted, hardware, source, model)
        yield (
            "outlook",
            _expected(from_options.outlook_verdict(fitted, known, hardware)) if known else None,
        )
        best = _best(fitted, known, question, model, hardware)
        verdict = described(choice=best)
        yield (
            "verdict",
            _told(verdict)
            | {
                "command": question.command(model, hardware),
                "config": {"_name_or_path": model.name, **model.config}
                if question.config
                else None,
                "machine": {"name": hardware.name, "host_bytes": hardware.host_bytes},
                "timeline": _timeline(best, hardware),
            },
        )
        yield "advice", _told(explored(verdict, best, hardware, from_options.policies(args.policy)))


def _expected(verdict: Verdict) -> dict[str, Any]:
    """Returns the outlook in the page's form."""
    texts = shown(verdict)
    names = ("answer", "sentence", "step_tokens", *(() if verdict.feasible else ("memory",)))
    most = {"speed": f"at most {texts['speed']}"} if verdict.feasible else {}
    return {"shown": {name: texts[name] for name in names} | most}


def _told(verdict: Verdict) -> dict[str, Any]:
    """Returns a verdict in the form of `check --json` and in the page's form."""
    return {"verdict": from_options.as_json(verdict), "shown": shown(verdict)}


def answer_by_policy(question: Question) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields one part, `policies`, with one row for each policy, the fastest first."""
    args, model, hardware = question.arguments(), question.spec(), question.machine()
    args = options.with_dtype(args, hardware, quiet=True)
    args.policy = "all"
    with without_garbage_collection():
        fitted, _ = _fitted(args, hardware, model)
        choices = _choices(fitted, question, model, hardware)
        verdicts = [summarize(choice, hardware) for choice in choices]
        yield (
            "policies",
            {
                "machine": verdicts[0].machine,
                "hardware": hardware.name,
                "rows": [_row(verdict) for verdict in verdicts],
            },
        )


def _fitted(
    args: argparse.Namespace, hardware: HardwareSpec, model: ModelSpec
) -> tuple[argparse.Namespace, bool]:
    """Returns the options of the verdict, and whether `check` chose the micro-batch.

    The options are `args` with `TOKENS` tokens to train on, and with the workload that `check`
    chooses.
    """
    args = argparse.Namespace(**{**vars(args), "tokens": TOKENS})
    return from_options.with_fitting_workload(args, hardware, model)


def _best(
    args: argparse.Namespace,
    known: Choice | None,
    question: Question,
    model: ModelSpec,
    hardware: HardwareSpec,
) -> Choice:
    """Returns the best plan. `known` is the outlook, or None."""
    if known and not known.feasible:  # a search would also find no plan that fits
        plan = known.plan
        return assess(plan, cost_model(hardware, plan.model, plan.workload))
    return _choices(args, question, model, hardware)[0]


def _source(question: Question, model: ModelSpec) -> str:
    """Returns the model's source as a plan states it."""
    return "config.json" if question.config else model.name


def _choices(
    args: argparse.Namespace, question: Question, model: ModelSpec, hardware: HardwareSpec
) -> list[Choice]:
    """Returns the plans that `check` would find, the best first."""
    source = _source(question, model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PolicyWarning)
        return from_options.choices(args, hardware, source, hardware.name, model)


def _timeline(choice: Choice, hardware: HardwareSpec) -> dict[str, Any] | None:
    """Returns the simulated step, or None if the plan does not fit or has too many ops to draw."""
    if not choice.feasible:
        return None
    plan = choice.plan
    schedule = policy_library.lower(plan)
    costs = cost_model(hardware, plan.model, plan.workload)
    return timeline_data(schedule, play(schedule, costs))


def shown(verdict: Verdict) -> dict[str, Any]:
    """Returns a verdict in the page's form: texts and numbers in the command's words."""
    work = verdict.workload
    return {
        "answer": "YES" if verdict.feasible else "NO",
        "sentence": sentences.answer(verdict, sentences.where(verdict, "assumed")),
        "speed": layout.speed(verdict.tokens_per_second) if verdict.feasible else "",
        "spread": sentences.spread(verdict),
        "source": rates_source(verdict),
        "step": layout.seconds(verdict.step_seconds) if verdict.feasible else "",
        "step_tokens": sentences.step_tokens(work),
        "mfu": f"{verdict.mfu:.0%}" if verdict.mfu is not None and verdict.feasible else "",
        "memory": _memory(verdict),
        "waits": _waits(verdict),
        "stays": verdict.feasible and not verdict.streams and not verdict.unified,
        "notes": sentences.notes(verdict),
        "room": sentences.room(verdict),
        "advice": [
            dict(zip(("name", "gain", "speed", "note"), sentences.suggestion(entry), strict=True))
            | {"options": {"model": entry.model} if entry.model else entry.options}
            for entry in sentences.helpful(verdict)
        ],
        "reasons": [
            [line[: layout.LABEL].strip(), line[layout.LABEL :]]
            for line in reasons(verdict, _ONE_LINE)
        ],
    }


def _has_shares(verdict: Verdict) -> bool:
    return verdict.feasible and bool(verdict.step_shares)


def _memory(verdict: Verdict) -> list[dict[str, Any]]:
    """Returns the peak, the limit and the bytes by class of data for each place: device and host,
    or one unified memory.
    """
    places = [
        ("Memory" if verdict.unified else "VRAM", "device"),
        *([] if verdict.unified else [("RAM", "host")]),
    ]
    found = []
    for label, place in places:
        peak: int = getattr(verdict, f"{place}_peak_bytes")
        limit: int = getattr(verdict, f"{place}_limit_bytes")
        _, factor = layout.unit_of(peak)
        found.append(
            {
                "label": label,
                "peak": layout.size(peak),
                "limit": layout.size(limit),
                "peak_bytes": peak,
                "limit_bytes": limit,
                "too_little": layout.size(peak - limit) if peak > limit else "",
                "parts": [
                    {
                        "name": sentences.CLASS_NAMES[name],
                        "size": f"{size / factor:,.1f}",
                        "bytes": size,
                        "colour": DATA_COLOURS[name],
                    }
                    for name, size in verdict.classes[place].items()
                    if size >= 0.05 * factor
                ],
            }
        )
    return found


def _waits(verdict: Verdict) -> list[dict[str, Any]]:
    """Returns how the GPU spends a step, as shares of at least 0.5 %. Computing comes first."""
    if not _has_shares(verdict):
        return []
    names = {"compute": "GPU computes"} | {
        name: f"waits {text}" for name, text in sentences.WAITS.items()
    }
    return [
        {"name": names[name], "kind": name, "share": share}
        for name, share in sorted(
            verdict.step_shares.items(), key=lambda item: (item[0] != "compute", -item[1])
        )
        if share >= 0.005
    ]


def _row(verdict: Verdict) -> dict[str, Any]:
    """Returns a cell of the comparison: one machine and one policy."""
    return {
        "policy": verdict.policy,
        "feasible": verdict.feasible,
        "tokens_per_second": verdict.tokens_per_second,
        "speed": layout.speed(verdict.tokens_per_second) if verdict.feasible else "",
        "step": layout.seconds(verdict.step_seconds) if verdict.feasible else "",
        "batch": verdict.workload.batch,
        "lacks": "" if verdict.feasible else policy_table.lacking(verdict),
    }


KINDS = {"answer": answer, "compared": answer_by_policy}
"""Kind of job -> the function that yields its parts."""
