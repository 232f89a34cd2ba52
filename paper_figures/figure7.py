"""Figure 7: an A100 PCIe of 80 GB, against Gemini and ZeRO-3."""

from __future__ import annotations

from megatrain.paper_figures import style
from megatrain.paper_figures.bars import Bar, Group, bars
from megatrain.paper_figures.results import Record, Results
from megatrain.paper_figures.table import Drawn, rows_of, value_of

MODELS = {"qwen2.5-7b": "7B", "qwen2.5-14b": "14B", "qwen2.5-32b": "32B"}


def groups(records: list[Record], models: dict[str, str]) -> list[Group]:
    """Told and predicted speeds of each model's systems, for bars."""
    made = []
    for model, label in models.items():
        mine = {record.system: record for record in records if record.model == model and record.quantity in ("tflops", "runs")}
        bars_of: list[Bar] = []
        for system in [name for name in ("megatrain_code", "zero3_offload", "gemini") if name in mine]:
            record = mine[system]
            predicted = record.code.value if record.code and record.code.fits and record.quantity == "tflops" else None
            bars_of.append((system, record.paper if record.quantity == "tflops" else None, record.sure, predicted, record.code is not None))
        own = mine["megatrain_code"]
        for name, answer in (("paper_schedule", own.paper_schedule), ("ours", own.ours)):
            bars_of.append((name, None, "none", value_of(answer, "tflops", 1), True))
        made.append(Group(label, bars_of))
    return made


def draw(results: Results) -> Drawn:
    records, date = results.typed("figure7", list[Record])
    figure, axes = style.canvas(style.COLUMN, 3.0)
    style.plain(axes, "A100 PCIe, 80 GB", "model size (parameters)", "TFLOPS (6N)")
    bars(axes, groups(records, MODELS))
    style.legend(figure, style.bar_handles(("megatrain_code", "zero3_offload", "gemini", "paper_schedule", "ours")), 2)
    made = f"Predictions of {date}, library's A100; nothing measured."
    style.footer(figure, made)
    rows = rows_of(records)
    found = {row.item: row for row in rows}
    big, zero3 = found["MegaTrain 14b on an A100"], found["ZeRO-3 14b on an A100"]
    return Drawn(
        figure, rows, "Figure 7: A100 PCIe",
        claim=f"At 14B on an A100 MegaTrain's {big.paper:g} TFLOPS are 12.2 times ZeRO-3's {zero3.paper:g}, and at 32B only MegaTrain runs.",
        finding=f"The published code is predicted at {big.published_code:.0f}, and that ZeRO-3 does not fit at 32B is right; ZeRO-3 at 14B is predicted at {zero3.published_code:.0f} with a batch that fills the device, so a factor of twelve is one of batch and settings, which are not told, rather than of the schedule. "
        f"Ours is predicted at {big.ours:.0f}; for Gemini there is no policy.",
        made=made,
    )  # fmt: skip
