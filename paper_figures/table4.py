"""Table 4: the ablation: the paper's at 14B on a GH200, and ours there and on an H200."""

from __future__ import annotations

import textwrap
from typing import Any

import msgspec
from matplotlib.patches import Patch

from megatrain.paper_figures import style
from megatrain.paper_figures.bars import Group, bars
from megatrain.paper_figures.results import Answer, Record, Results
from megatrain.paper_figures.table import Drawn, Row, rows_of

OURS = ("full", "no overlapped update", "no residency", "no compile", "no chunked loss")
MODELLED = OURS[3:]
"""on the H200 predicted from layers measured alone, and from formulas"""
WHY = {
    "no overlapped update": "AdamW on the host begins where backward ends, and the GPU waits for it",
    "no residency": "all state crosses PCIe, which takes longer than the forward that hides it",
    "no compile": "an eager step follows from layers that were timed alone, and its peak from formulas",
    "no chunked loss": "the peak's formula has an eager head's 12 bytes a logit, while a compiled head fuses cast, softmax and loss and writes the logits' gradient over them, "
    "2 bytes a logit; for memory that nothing used, the plan recomputed the 12 layers that full stores",
}  # fmt: skip
"""what each of ours says, measured"""
PALE = "#9bd6c3"
FULL = "h200-qwen2.5-7b-batches/32x1024.json"
SHORT = {
    "14b, full": "full",
    "14b, no double buffering": "no double\nbuffering",
    "14b, no slab pool": "no slab\npool",
    "14b, checkpoint interval 1": "K = 1\n(batch 64)",
}


class Data(msgspec.Struct, frozen=True, kw_only=True):
    """What `experiments/figures/table4.py` leaves."""

    rows: list[Record]
    compiled_share: float
    """of an eager layer's time, on the GH200"""
    gh200: dict[str, Answer]
    h200: dict[str, Answer]


def draw(results: Results) -> Drawn:
    data, date = results.typed("table4", Data)
    speeds = [record for record in data.rows if record.quantity == "tflops"]
    figure, (left, right) = style.canvas(style.PAGE, 3.2, ncols=2, width_ratios=(1, 1.15))
    style.plain(left, "the paper's ablation, 14B, GH200", "", "TFLOPS (6N)")
    bars(left, [Group(SHORT[record.item], [
        ("megatrain_code", record.paper, record.sure, record.code.value if record.code else None, True),
        ("paper_schedule", None, "none", record.paper_schedule.tflops if record.paper_schedule and record.paper_schedule.fits else None, True),
    ]) for record in speeds])  # fmt: skip
    found = {name: _measured(results, name) for name in OURS}
    stars = _own(right, data, found)
    entries = [*style.bar_handles(("megatrain_code", "paper_schedule")), Patch(facecolor=PALE, edgecolor=style.INK, linewidth=0.4, label="ours, 14B, GH200")]
    entries += [Patch(facecolor=style.LOOKS["ours"].colour, edgecolor=style.INK, linewidth=0.4, hatch=hatch, label=f"ours, 7B, H200{text}") for hatch, text in (("", ""), ("....", ", modelled"))]  # fmt: skip
    style.legend(figure, [*entries, *style.handles((), paper=False, stars=True)], 4)
    made = f"Predictions of {date}: the library's GH200, an H200's measured costs. Measured {results.benchmark(FULL)['date']} on one H200, 32 x 1024: {', '.join(stars)}."
    style.footer(figure, textwrap.fill(made, 135))
    return _told(data, found, figure, made)


def _measured(results: Results, name: str) -> dict[str, Any] | None:
    """Our system's record of the stored benchmark of 7B, 32 x 1024 on an H200; None where nobody has run it yet, or it failed."""
    file = results.benchmark(FULL) if name == "full" else results.measured(f"table4-{name.replace(' ', '-')}")
    return None if file is None else next((system for system in file["systems"] if system["system"] == "ours" and not system["failure"]), None)


def _own(axes: Any, data: Data, found: dict[str, dict[str, Any] | None]) -> list[str]:
    """Two bars a case: 14B on the GH200, 7B on the H200; a star where it was measured. Returns what was."""
    style.plain(axes, "ours, without one thing", "", "TFLOPS (6N)")
    stars = []
    for index, name in enumerate(OURS):
        for offset, answer, colour in ((-0.2, data.gh200[name], PALE), (0.2, data.h200[name], style.LOOKS["ours"].colour)):
            if not answer.fits:
                axes.text(index + offset, 8, "×", ha="center", va="bottom")
                continue
            axes.bar(
                index + offset, answer.tflops, 0.38, color=colour, edgecolor=style.INK, linewidth=0.4, hatch="...." if offset > 0 and name in MODELLED else ""
            )
            axes.text(index + offset, 12, f"{answer.tflops:.0f}", rotation=90, fontsize=7, ha="center", va="bottom", bbox=style.PLATE)
        if record := found[name]:
            style.measured(axes, [index + 0.2], [record["tflops_6n"]], "ours")
            stars.append(name)
        else:
            axes.text(index + 0.2, 95, "not measured", fontsize=7, ha="center", va="bottom", rotation=90, bbox=style.PLATE)
    axes.set_xlim(-0.6, len(OURS) - 0.4)
    axes.set_ylim(0, 640)
    axes.set_xticks(range(len(OURS)), [name.replace(" ", "\n") for name in OURS])
    axes.tick_params(axis="x", length=0)
    return stars


def _told(data: Data, found: dict[str, dict[str, Any] | None], figure: Any, made: str) -> Drawn:
    rows = rows_of(data.rows)
    for where, answers in (("14B, GH200", data.gh200), ("7B, H200", data.h200)):
        for name in OURS:
            answer, record = answers[name], found[name] if answers is data.h200 else None
            speed, peak = (record["tflops_6n"], record["device_peak_bytes"] / 2**30) if record else (None, None)
            note = "modelled" if name in MODELLED or answers is data.gh200 else "calibrated"
            misfit, item = "" if answer.fits else "ours", f"ours, {where}: {name}"
            rows.append(
                Row(item=item, quantity="tflops", unit="TFLOPS", ours=answer.tflops if answer.fits else None, measured=speed, does_not_fit=misfit, note=note)
            )
            if record:
                steady = f"{note}; measured: median of {record['steady_steps']} steps"
                rows.append(Row(item=item, quantity="step_s", unit="s", ours=answer.step_s, measured=record["step_seconds_median"], note=steady))
            rows.append(Row(item=item, quantity="device_gib", unit="GiB", ours=answer.device_gib, measured=peak, note=note))
    told = {(row.item, row.quantity): row for row in rows}
    full, single = told["14b, full", "tflops"], told["14b, no double buffering", "tflops"]
    seconds = 6 * data.rows[0].parameters * 96 * 1024 / 1e12 * (1 / (single.paper or 1) - 1 / (full.paper or 1))
    single_interval = told["14b, checkpoint interval 1", "tflops"]
    elsewhere = ", ".join(f"{data.gh200[name].tflops / data.gh200['full'].tflops - 1:+.0%} with {name}" for name in OURS[1:])
    return Drawn(
        figure, rows, "Table 4: ablation",
        claim=f"Without double buffering 14B falls from {full.paper:g} to {single.paper:g} TFLOPS, without the slab pool to 257.55, with K = 1 to 240.45 at batch 64.",
        finding=f"Full is predicted at {full.published_code:.0f} and K = 1 at {single_interval.published_code:.0f}, but one buffer costs nothing by copies ({single.published_code:.0f}): all copies of a step take 0.25 s over NVLink-C2C, so the {seconds:.0f} s lost are something else; packing each layer on one host thread would take that long. "
        f"Ours on an H200 (PCIe). {' '.join(_case(name, data.h200, found) for name in OURS)} On a GH200, whose link and processor are fast, ours is predicted to change by {elsewhere}, with compiled layers modelled to take {data.compiled_share:.0%} of eager ones' time, which no other figure here does.",
        made=made,
    )  # fmt: skip


def _case(name: str, answers: dict[str, Answer], found: dict[str, dict[str, Any] | None]) -> str:
    """A sentence on one of ours on the H200: predicted, measured, and what that says."""
    answer, record, base = answers[name], found[name], found["full"]
    predicted = f"{name.capitalize()}: {answer.step_s:.3f} s predicted" + (
        "" if name == "full" else f" ({answer.tflops / answers['full'].tflops - 1:+.0%} TFLOPS)"
    )
    if not record:
        return f"{predicted}, not measured."
    change = f" ({record['tflops_6n'] / base['tflops_6n'] - 1:+.0%})" if base and name != "full" else ""
    peaks = f"device peak {answer.device_gib:.1f} and {record['device_peak_bytes'] / 2**30:.1f} GiB"
    return f"{predicted}, {record['step_seconds_median']:.3f} measured{change}, {peaks}{f'; {WHY[name]}' if name in WHY else ''}."
