"""Figure 3: the pipeline's timeline of one step: the paper's schedule simulated; ours simulated, above ours measured."""

from __future__ import annotations

import msgspec

from megatrain.paper_figures import style
from megatrain.paper_figures.lanes import draw_lanes, kind_handles, lanes_of
from megatrain.paper_figures.results import Results, Run
from megatrain.paper_figures.table import Drawn, Row
from megatrain.simulator.timeline import Timeline

PAPERS = "h200-qwen2.5-3b"
"""a run of the paper's schedule, for the table"""


class Data(msgspec.Struct, frozen=True, kw_only=True):
    """What `experiments/figures/figure3.py` leaves."""

    run: str
    interval: int
    device_gib: float
    host_gib: float
    timeline: Timeline


def draw(results: Results) -> Drawn:
    data, date = results.typed("figure3", Data)
    run, papers = results.run(data.run), results.run(PAPERS)
    work = run.plan.workload
    names = (f"paper's schedule (double_buffer, K = {data.interval}), simulated", f"ours ({run.plan.policy}), simulated", f"ours ({run.plan.policy}), measured")
    timelines = (data.timeline, run.predicted, run.measured)
    lanes, end = lanes_of(timelines), 1.02 * max(timeline.makespan_ns for timeline in timelines) / 1e9
    figure, axes = style.canvas(style.PAGE, 4.6, nrows=3, sharex=True)
    sizes = (data.device_gib, run.plan.prediction.device_peak_bytes / 2**30 if run.plan.prediction else 0.0, run.memory["device_peak_bytes"] / 2**30)
    for panel, name, timeline, size in zip(axes, names, timelines, sizes, strict=True):
        draw_lanes(panel, timeline, lanes, end)
        panel.set_title(f"{name}: {timeline.makespan_ns / 1e9:.2f} s, {size:.0f} GiB of the device")
    axes[-1].set_xlabel("time from the start of the step (s)")
    axes[1].set_ylabel("lane")
    style.legend(figure, kind_handles(timelines), 6)
    made = f"{run.plan.model.name}, {work.batch} x {work.sequence} tokens, {run.plan.device_limit_bytes / 2**30:.0f} GiB of one {run.where}; simulated {date}."
    style.footer(figure, made)
    rows = [
        Row(item="7B, 24 GiB: step of ours", quantity="step_s", unit="s", ours=run.predicted.makespan_ns / 1e9, measured=run.measured.makespan_ns / 1e9),
        Row(item="7B, 24 GiB: step of the paper's schedule", quantity="step_s", unit="s", paper_schedule=data.timeline.makespan_ns / 1e9,
            does_not_fit="" if data.device_gib <= run.plan.device_limit_bytes / 2**30 else "paper_schedule",
            note=f"needs {data.device_gib:.1f} GiB of the device and {data.host_gib:.1f} GiB of the host"),
        Row(item="3B: step of the paper's schedule", quantity="step_s", unit="s", paper_schedule=papers.predicted.makespan_ns / 1e9, measured=papers.measured.makespan_ns / 1e9),
        *_lanes(data.timeline, run),
    ]  # fmt: skip
    first = next(span.start_ns for span in data.timeline.spans if span.kind == "cpu_update") / 1e9
    still = (data.timeline.makespan_ns - data.timeline.busy_ns("compute")) / data.timeline.makespan_ns
    ours_still = (run.measured.makespan_ns - run.measured.busy_ns("compute")) / run.measured.makespan_ns
    return Drawn(
        figure, rows, "Figure 3: one step's pipeline",
        claim="Double buffering on separate streams hides every transfer behind compute.",
        finding=f"It does, until the backward pass is over: then the optimizer runs on the host with the GPU idle, from {first:.2f} s to {data.timeline.makespan_ns / 1e9:.2f} s, so compute stands still for {still:.0%} of the step. "
        f"Ours updates behind the next forward: compute stands still for {ours_still:.0%} of the measured step, which was predicted {run.comparison['error']:+.1%}.",
        made=made,
    )  # fmt: skip


def _lanes(papers: Timeline, run: Run) -> list[Row]:
    """How long each lane was busy."""
    return [
        Row(
            item=f"7B, 24 GiB: {lane} busy", quantity="busy_s", unit="s", paper_schedule=papers.busy_ns(lane) / 1e9, ours=run.predicted.busy_ns(lane) / 1e9,
            measured=run.measured.busy_ns(lane) / 1e9,
        )
        for lane in lanes_of((papers, run.predicted, run.measured))
    ]  # fmt: skip
