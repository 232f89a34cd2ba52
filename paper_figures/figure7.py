"""Figure 7: an A100 PCIe with 80 GB, compared with Gemini and ZeRO-3."""

from __future__ import annotations

from megatrain.paper_figures.common import style
from megatrain.paper_figures.common.bars import Bar, BarGroup, bars
from megatrain.paper_figures.common.results import BenchmarkRecord, Results
from megatrain.paper_figures.common.table import Drawn, rows_of, value_of

BATCHES_NAMED = "model size; sequences per step:\nMegaTrain's code, ours; ZeRO-3"
MODELS = {"qwen2.5-7b": "7B", "qwen2.5-14b": "14B", "qwen2.5-32b": "32B"}


def groups(records: list[BenchmarkRecord], models: dict[str, str]) -> list[BarGroup]:
    """Returns a group of bars for each model, with the paper's and the predicted TFLOPS of each
    system. `models` maps names of the library to labels.
    """
    bar_groups = []
    for model, label in models.items():
        mine = {
            record.system: record
            for record in records
            if record.model == model and record.quantity in ("tflops", "runs")
        }
        bars_of: list[Bar] = []
        for system in [
            name for name in ("megatrain_code", "zero3_offload", "gemini") if name in mine
        ]:
            record = mine[system]
            predicted = (
                record.code.value
                if record.code and record.code.fits and record.quantity == "tflops"
                else None
            )
            bars_of.append(
                (
                    system,
                    record.paper if record.quantity == "tflops" else None,
                    record.sure,
                    predicted,
                    record.code is not None,
                )
            )
        own = mine["megatrain_code"]
        for name, answer in (
            ("paper_stated", own.paper_stated),
            ("paper_schedule", own.paper_schedule),
            ("ours", own.ours),
        ):
            bars_of.append((name, None, "none", value_of(answer, "tflops", 1), True))
        batches = [
            str(mine[system].code.batch)  # type: ignore[union-attr]
            for system in ("megatrain_code", "zero3_offload")
            if system in mine and mine[system].code
        ]
        bar_groups.append(BarGroup("\n".join([label, *batches]), bars_of))
    return bar_groups


def draw(results: Results) -> Drawn:
    records, date = results.typed("figure7", list[BenchmarkRecord])
    figure, axes = style.canvas(style.COLUMN, 3.7)
    style.plain(axes, "A100 PCIe, 80 GB", BATCHES_NAMED, "TFLOPS (6N)")
    bars(axes, groups(records, MODELS))
    style.legend(
        figure,
        style.bar_handles(
            ("megatrain_code", "zero3_offload", "gemini", "paper_stated", "paper_schedule", "ours")
        ),
        2,
    )
    rows = rows_of(records)
    found = {row.item: row for row in rows}
    implied = next(
        record.implied
        for record in records
        if record.item == "ZeRO-3 14b on an A100" and record.implied
    )
    big, zero3 = found["MegaTrain 14b on an A100"], found["ZeRO-3 14b on an A100"]
    return Drawn(
        figure,
        rows,
        "Figure 7: A100 PCIe",
        claim=(
            f"At 14B on an A100 MegaTrain's {big.paper:g} TFLOPS are 12.2 times ZeRO-3's"
            f" {zero3.paper:g}, and at 32B only MegaTrain runs."
        ),
        finding=(
            f"MegaTrain's code is predicted at {big.published_code:.0f} TFLOPS. ZeRO-3 at 14B is"
            f" predicted at {zero3.published_code:.0f} with a batch that fills the device and at"
            f" {implied.value:.0f} with a batch of {implied.batch}. So the factor of twelve comes"
            " from the batch and from settings that the paper does not report. A batch of 1 alone"
            f" makes it {(big.published_code or 0) / implied.value:.1f}. Ours is predicted at"
            f" {big.ours:.0f}. The assumed host memory was chosen such that 32B runs with the code"
            " and not with ZeRO-3. There is no policy for Gemini."
        ),
        caption=(
            f"Predictions of {date}, library's A100, sequences of 1,024, largest batches; nothing"
            " was measured."
        ),
        caption_columns=62,
    )
