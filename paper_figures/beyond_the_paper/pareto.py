"""Beyond the paper: a sweep of schedules, and its Pareto front of speed and device memory."""

from __future__ import annotations

import msgspec

from megatrain.paper_figures.beyond_the_paper.regimes import HOST, measured_plans
from megatrain.paper_figures.common import style
from megatrain.paper_figures.common.results import Results, StoredAnswer
from megatrain.paper_figures.common.table import Drawn, TableRow

LOOKS = {
    "sequential": ("#5b6670", "x"),
    "double_buffer": ("#E69F00", "s"),
    "k_buffer": ("#0072B2", "o"),
    "overlapped": ("#009E73", "D"),
    "resident": ("#CC79A7", "^"),
}


class Swept(StoredAnswer, frozen=True, kw_only=True):
    """One plan of the sweep."""

    weight_slots: int
    """Buffers on the device for weights of layers."""
    gradient_staging: int
    """Staging buffers for gradients in host memory."""


class Sweep(msgspec.Struct, frozen=True, kw_only=True):
    """The data that `experiments/paper_data/pareto.py` stores."""

    model: str
    """A model of the library."""
    machine: str
    """A machine of the library."""
    host_gib: float
    """Host memory in GiB."""
    plans: list[Swept]
    """All plans of the sweep."""


def front(plans: list[Swept]) -> list[Swept]:
    """Returns the plans that no other plan beats in both memory and speed, by ascending memory."""
    kept: list[Swept] = []
    for plan in sorted(plans, key=lambda plan: (plan.device_gib, -plan.tokens_per_s)):
        if not kept or plan.tokens_per_s > kept[-1].tokens_per_s:
            kept.append(plan)
    return kept


def draw(results: Results) -> Drawn:
    sweep, date = results.typed("pareto", Sweep)
    figure, axes = style.canvas(style.COLUMN, 3.2)
    style.plain(
        axes, f"{sweep.model}, 32 x 1024 tokens, H200", "device memory (GiB)", "tokens per second"
    )
    for policy, (colour, marker) in LOOKS.items():
        mine = [plan for plan in sweep.plans if plan.policy == policy]
        if mine:
            axes.plot(
                [plan.device_gib for plan in mine],
                [plan.tokens_per_s for plan in mine],
                linestyle="none",
                marker=marker,
                color=colour,
                markersize=3.5,
                label=policy,
                alpha=0.8,
            )
    best = front(sweep.plans)
    axes.step(
        [plan.device_gib for plan in best],
        [plan.tokens_per_s for plan in best],
        where="post",
        color="black",
        linewidth=0.9,
        label="Pareto front",
        zorder=1,
    )
    tokens = sweep.plans[0].batch * sweep.plans[0].accumulation * sweep.plans[0].sequence
    measured = [plan for plan in measured_plans(results) if plan.tokens == tokens]
    style.measured(
        axes,
        [plan.device_gib for plan in measured],
        [plan.tokens_per_s for plan in measured],
        "ours",
    )
    axes.set_ylim(0, 1.12 * best[-1].tokens_per_s)
    axes.set_xlim(0, 145)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    entries = [*axes.get_legend_handles_labels()[0], *style.handles((), paper=False, stars=True)]
    style.legend(figure, entries, 3)
    rows = [
        TableRow(
            item=(
                f"{plan.policy}, {plan.weight_slots} slots, {plan.gradient_staging} staging"
                f" buffers, K {plan.interval}, {plan.device_gib:.1f} GiB"
            ),
            quantity="tokens_per_s",
            unit="tokens/s",
            ours=plan.tokens_per_s,
            note="on the front" if plan in best else "",
        )
        for plan in sweep.plans
    ]
    rows += [
        TableRow(
            item=f"overlapped, {plan.device_gib:.1f} GiB, measured with 16 cores",
            quantity="tokens_per_s",
            unit="tokens/s",
            ours=plan.predicted,
            measured=plan.tokens_per_s,
            note="planned and predicted for 16 cores and 116 GiB of host memory",
        )
        for plan in measured
    ]
    errors = [plan.error for plan in measured]
    streamed = [plan for plan in best if plan.policy in ("double_buffer", "k_buffer", "sequential")]
    by_host = [plan for plan in best if plan.regime in HOST]
    papers = max(
        (plan for plan in sweep.plans if plan.policy == "double_buffer"),
        key=lambda plan: plan.tokens_per_s,
    )
    at_40 = max(
        (plan for plan in best if plan.device_gib <= 40), key=lambda plan: plan.tokens_per_s
    )
    return Drawn(
        figure,
        rows,
        "Beyond the paper: a sweep's Pareto front",
        claim="None: the paper shows one point, two buffers and K = 4.",
        finding=(
            f"{len(best)} of {len(sweep.plans)} plans are on the front. {len(streamed)} of these"
            f" run the whole optimizer on the host after backward, and {len(by_host)} run part of"
            " it there during the next forward pass. Two buffers reach"
            f" {papers.tokens_per_s:,.0f} tokens/s in {papers.device_gib:.0f} GiB. The fastest"
            f" plan in up to 40 GiB ({at_40.policy}) reaches {at_40.tokens_per_s:,.0f}."
            f" More memory gains little: {best[-1].device_gib:.0f} GiB are"
            f" {best[-1].tokens_per_s / at_40.tokens_per_s:.2f} times as fast as 40."
            f" For {len(measured)} limits of memory, plans were made for a host with 16 cores and"
            " 116 GiB, and measured: their step times were predicted with errors of"
            f" {min(errors):+.1%} to {max(errors):+.1%}."
        ),
        caption=(
            f"Predictions of {date}, library's H200 (64 cores, 512 GiB), eager layers. Measured"
            f" {' and '.join(sorted({plan.date for plan in measured}))} on one H200 with 16 cores"
            " and 116 GiB of host memory for the plan."
        ),
        caption_columns=62,
    )
