"""Tables 8 and 9: an A6000 and an RTX 3090, and the cards that readers asked about."""

from __future__ import annotations

from typing import Any

import msgspec
from matplotlib.patches import Patch

from megatrain.paper_figures.common import style
from megatrain.paper_figures.common.bars import bars
from megatrain.paper_figures.common.results import BenchmarkRecord, Results, StoredAnswer
from megatrain.paper_figures.common.table import Drawn, TableRow, rows_of
from megatrain.paper_figures.figure7 import BATCHES_NAMED, groups

MODELS = {"qwen2.5-3b": "3B", "qwen2.5-7b": "7B", "qwen2.5-14b": "14B"}
CARDS = {
    "rtx3080-10gb": "RTX 3080\n10 GB",
    "rtx4090": "RTX 4090\n24 GB",
    "ryzen-ai-max-395-128gb": "Ryzen AI\nMax",
    "apple-m4-max": "M4 Max",
    "apple-m3-ultra": "M3 Ultra",
}
LOOKS = {
    "qwen2.5-3b": ("#56B4E9", ""),
    "qwen2.5-7b": ("#009E73", "////"),
    "qwen2.5-14b": ("#E69F00", "...."),
}


class Reader(msgspec.Struct, frozen=True, kw_only=True):
    """A model on a card that readers asked about."""

    card: str
    """A machine of the library."""
    model: str
    """A model of the library."""
    host_gib: float
    """Host memory in GiB."""
    unified: bool
    """Whether device and host share one memory."""
    ours: StoredAnswer
    """The prediction for our best plan."""


class Tables89Data(msgspec.Struct, frozen=True, kw_only=True):
    """The data that `experiments/paper_data/tables8_9.py` stores."""

    rows: list[BenchmarkRecord]
    """The paper's rows."""
    readers: list[Reader]
    """Our plans for the readers' cards."""


def draw(results: Results) -> Drawn:
    data, date = results.typed("tables8_9", Tables89Data)
    figure, axes = style.canvas(style.PAGE, 5.8, nrows=2, ncols=2)
    for panel, source, title in zip(
        axes[0],
        ("paper Table 8", "paper Table 9"),
        ("RTX A6000, 48 GB", "RTX 3090, 24 GB"),
        strict=True,
    ):
        style.plain(panel, title, BATCHES_NAMED, "TFLOPS (6N)")
        bars(panel, groups([record for record in data.rows if record.source == source], MODELS))
    both = axes[1, 0].get_gridspec()
    for panel in axes[1]:
        panel.remove()
    _readers(figure.add_subplot(both[1, :]), data.readers)
    style.legend(
        figure,
        style.bar_handles(
            ("megatrain_code", "zero3_offload", "paper_stated", "paper_schedule", "ours"),
            doubtful=True,
        ),
        4,
    )
    caption = (
        f"Predictions of {date} from the library's cards; nothing was measured. Upper panels:"
        " sequences of 8,192 (assumed), host of 251 GiB. Lower panel: 4 x 1,024 tokens per step."
    )
    return _drawn(data, figure, caption)


def _readers(axes: Any, readers: list[Reader]) -> None:
    """Draws our speeds on readers' cards."""
    style.plain(axes, "ours, best plan on readers' cards", "", "tokens per second (log scale)")
    axes.set_yscale("log")
    axes.set_ylim(20, 6000)
    axes.set_yticks([30, 100, 300, 1000, 3000], ["30", "100", "300", "1,000", "3,000"])
    axes.minorticks_off()
    machines = list(dict.fromkeys((entry.card, entry.host_gib) for entry in readers))
    for index, machine in enumerate(machines):
        for place, model in enumerate(MODELS):
            reader = next(
                entry
                for entry in readers
                if (entry.card, entry.host_gib) == machine and entry.model == model
            )
            x, (colour, hatch) = index + 0.27 * (place - 1), LOOKS[model]
            if reader.ours.fits:
                speed = reader.ours.tokens_per_s
                axes.bar(
                    x, speed, 0.25, color=colour, hatch=hatch, edgecolor=style.INK, linewidth=0.4
                )
                axes.text(x, speed * 1.06, f"{speed:,.0f}", fontsize=7, ha="center", va="bottom")
            else:
                axes.text(
                    x,
                    22,
                    "does not fit",
                    fontsize=7,
                    ha="center",
                    va="bottom",
                    rotation=90,
                    color=style.MUTED,
                )
    unified = {entry.card for entry in readers if entry.unified}
    labels = [
        f"{CARDS[card]}\n{'shared' if card in unified else 'host'} {gib:.0f} GiB"
        for card, gib in machines
    ]
    axes.set_xticks(range(len(machines)), labels)
    axes.tick_params(axis="x", length=0)
    axes.legend(
        handles=[
            Patch(
                facecolor=colour,
                hatch=hatch,
                edgecolor=style.INK,
                linewidth=0.4,
                label=MODELS[model],
            )
            for model, (colour, hatch) in LOOKS.items()
        ],
        loc="upper right",
        ncols=3,
        handlelength=1.4,
    )


def _drawn(data: Tables89Data, figure: Any, caption: str) -> Drawn:
    """Returns the figure with its rows and texts."""
    rows = rows_of(data.rows)
    for reader in data.readers:
        found = reader.ours
        note = (
            f"policy {found.policy}, {found.accumulation} x {found.batch} x {found.sequence}"
            f" tokens, host of {reader.host_gib:.0f} GiB"
        )
        speed = found.tokens_per_s if found.fits else None
        rows.append(
            TableRow(
                item=f"{reader.model} on {reader.card}, {reader.host_gib:.0f} GiB",
                quantity="tokens_per_s",
                unit="tokens/s",
                ours=speed,
                does_not_fit="" if found.fits else "ours",
                note=note,
            )
        )
    reported = [
        record
        for record in data.rows
        if record.quantity == "tflops" and record.system == "megatrain_code"
    ]
    a6000 = next(
        record
        for record in reported
        if record.source == "paper Table 8" and record.model == "qwen2.5-14b"
    )
    rtx = next(
        record
        for record in reported
        if record.source == "paper Table 9" and record.model == "qwen2.5-14b"
    )
    largest = {
        card: [
            MODELS[entry.model]
            for entry in data.readers
            if entry.card == card and entry.ours.fits and entry.host_gib == host
        ]
        for card, host in {entry.card: entry.host_gib for entry in reversed(data.readers)}.items()
    }
    fourteen = max(
        (
            entry
            for entry in data.readers
            if entry.card == "rtx4090" and entry.model == "qwen2.5-14b"
        ),
        key=lambda entry: entry.host_gib,
    )
    errors = [
        record.code.value / record.paper - 1 for record in reported if record.code and record.paper
    ]
    peers = [
        record.code.value / record.paper - 1
        for record in data.rows
        if record.system == "zero3_offload"
        and record.source == "paper Table 9"
        and record.quantity == "tflops"
        and record.code
        and record.paper
    ]
    return Drawn(
        figure,
        rows,
        "Tables 8 and 9: workstation and consumer cards",
        claim=(
            f"14B trains on one A6000 at {a6000.paper:g} TFLOPS and on one RTX 3090 at"
            f" {rtx.paper:g}, where ZeRO-3 is out of memory, with 7 to 8 bytes of host memory per"
            " parameter (12.4 for 3B on the A6000)."
        ),
        finding=(
            "With sequences of 8,192 tokens, chosen by the stated device memory, MegaTrain's code"
            f" is predicted {-max(errors):.0%} to {-min(errors):.0%} too slow. ZeRO-3 ran one"
            " sequence on both cards and was limited by the host; its prediction is within"
            f" {max(abs(error) for error in peers):.0%} on the RTX 3090. The stated host memory is"
            " less than fp32 moments need, so bf16 moments (PyTorch's AdamW) were assumed. So it is"
            " no finding that these fit. Among the readers' machines, the RTX 3080 can train"
            f" {_names(largest['rtx3080-10gb'])}. The RTX 4090 can train"
            f" {_names(largest['rtx4090'])}, and 14B at {fourteen.ours.tokens_per_s:,.0f} tokens/s"
            f" with {fourteen.host_gib:.0f} GiB of host memory. The Ryzen can train"
            f" {_names(largest['ryzen-ai-max-395-128gb'])}, an M4 Max"
            f" {_names(largest['apple-m4-max'])}, and an M3 Ultra"
            f" {_names(largest['apple-m3-ultra'])}."
        ),
        caption=caption,
    )


def _names(models: list[str]) -> str:
    *others, last = models or ["none of the three"]
    return f"{', '.join(others)} and {last}" if others else last
