"""The page's text and tables about the training: loss, learning rate, gradient norm, evaluations,
data, and answers of the trained model.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from html import escape

from megatrain.experiments.run_report.compared_run import ComparedRun
from megatrain.experiments.run_report.tables import Cell, table
from megatrain.runtime.data.summary import DataSummary, read_summaries
from megatrain.runtime.training.answers import Answer, read_answers
from megatrain.runtime.training.learning_rate import format_rate
from megatrain.simulator.base.units import format_seconds

_MOST_EVALUATIONS = 20
"""The number of evaluations in the table. If there are more, this many are chosen evenly."""


def curves(run: ComparedRun) -> str:
    """Returns sentences on the loss, the learning rate and the gradient norm of the run."""
    record = run.record
    if not record.losses:
        return "<p class=note>No step was completed.</p>"
    mean = (
        f" The mean of the last {record.smoothing} steps is {record.final_loss:.4f}."
        if record.smoothing
        else ""
    )
    text = (
        f"Loss from {record.losses[0]:.4f} in step {record.steps[0]:,} to {record.losses[-1]:.4f}"
        f" in step {record.steps[-1]:,}.{mean} Learning rate at most"
        f" {format_rate(max(record.rates))}, {format_rate(record.rates[-1])} in the last step."
    )
    if norms := record.known_norms:
        step, largest = max(norms, key=lambda pair: pair[1])
        text += (
            f" Gradient norm before clipping: median {_norm([norm for _, norm in norms])}, largest"
            f" {largest:.3g} in step {step:,}."
        )
    return f"<p class=note>{text}</p>"


def _norm(norms: list[float]) -> str:
    return f"{statistics.median(norms):.3g}"


def evaluations(run: ComparedRun) -> str:
    """Returns the table of evaluations. If there are many, it has the first one, the last, the
    best, and some in between.
    """
    every = run.record.evaluations
    if not every:
        return ""
    best = min(every, key=lambda evaluation: evaluation.loss)
    chosen = {
        round(i * (len(every) - 1) / (_MOST_EVALUATIONS - 1)) for i in range(_MOST_EVALUATIONS)
    }
    shown = [
        evaluation
        for index, evaluation in enumerate(every)
        if len(every) <= _MOST_EVALUATIONS or index in chosen or evaluation is best
    ]
    note = (
        f"<p class=note>{len(shown)} of {len(every):,} evaluations.</p>"
        if len(shown) < len(every)
        else ""
    )
    head = ["after step", "loss", "perplexity", "tokens", "took", ""]
    rows: list[list[Cell]] = [
        [
            f"{each.step:,}",
            f"{each.loss:.4f}",
            "-" if each.perplexity is None else f"{each.perplexity:,.2f}",
            f"{each.tokens:,}",
            format_seconds(each.seconds),
            "best" if each is best else "",
        ]
        for each in shown
    ]
    return f"<div><h3>Evaluations</h3>{table(head, rows, left=(5,))}{note}</div>"


def data(run: ComparedRun) -> str:
    """Returns the table of the data: rows, documents and tokens, used and left out.

    It is empty for a run without `data.json`, whose batches did not come from files.
    """
    if not (found := read_summaries(run.folder)):
        return ""
    columns = list(found.values())
    rows: list[Sequence[Cell]] = []

    def add(name: str, cells: list[str]) -> None:
        if any(cell not in ("", "0") for cell in cells):
            rows.append([name, *cells])

    add("rows in the files", ["" if each.rows is None else f"{each.rows:,}" for each in columns])
    add("rows without text", [f"{each.empty:,}" for each in columns])
    add("rows left out, because they cannot be used", [f"{each.unusable:,}" for each in columns])
    add("documents", [f"{each.documents:,}" for each in columns])
    length = columns[0].sequence
    cut = [f"{each.cut:,} ({each.cut_tokens:,} tokens)" if each.cut else "0" for each in columns]
    add(f"documents cut at {length:,} tokens", cut)
    add(
        f"documents left out, whose answer begins after {length:,} tokens",
        [f"{each.left_out:,}" for each in columns],
    )
    add("tokens of an epoch", [f"{each.tokens:,}" for each in columns])
    add("tokens with loss", [f"{each.targets:,}, {_share(each)}" for each in columns])
    add(f"rows of {length:,} tokens", [f"{each.packed_rows:,}" for each in columns])
    add("padding", [f"{each.padding:.2%}".replace("%", " %") for each in columns])
    return f"<div><h3>Data</h3>{table(['', *found], rows)}</div>"


def samples(run: ComparedRun) -> str:
    """Returns the section with the answers of the run's models, if there are any."""
    answers = read_answers(run.folder)
    if not answers:
        return ""
    return (
        "<section><h2>Samples</h2><p class=note>Answers of the trained model. Each token is the"
        f" most likely one.</p><dl class=samples>{''.join(map(_sample, answers))}</dl></section>"
    )


def _sample(each: Answer) -> str:
    return (
        f"<dt>{escape(each.question)} (after step {each.step:,})</dt>"
        f"<dd>{escape(each.answer.strip()) or '(no text)'}</dd>"
    )


def _share(each: DataSummary) -> str:
    return f"{100 * each.targets / max(each.tokens, 1):.1f} %"
