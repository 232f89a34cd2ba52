"""Figure 3: the timeline of one step: the paper's schedule simulated, and ours simulated and
measured.
"""

from __future__ import annotations

import msgspec

from megatrain.paper_figures.common import style
from megatrain.paper_figures.common.lanes import draw_lanes, kind_handles, lanes_of
from megatrain.paper_figures.common.results import Results, StoredRun
from megatrain.paper_figures.common.table import Drawn, TableRow
from megatrain.simulator.schedule.timeline import Timeline

PAPERS = "h200-qwen2.5-3b"
"""A run of the paper's schedule, for the table."""
LATER = "h200-qwen2.5-7b-batches/24GiB-update.json"
"""A later measurement in the same memory."""


class Figure3Data(msgspec.Struct, frozen=True, kw_only=True):
    """The data that `experiments/paper_data/figure3.py` stores."""

    run: str
    """The folder of our run, whose model, workload and machine are simulated."""
    interval: int
    """The checkpoint interval K."""
    device_gib: float
    """Peak of device memory in GiB."""
    host_gib: float
    """Peak of host memory in GiB."""
    timeline: Timeline
    """The simulated step of the paper's schedule."""


def draw(results: Results) -> Drawn:
    data, date = results.typed("figure3", Figure3Data)
    run, papers = results.run(data.run), results.run(PAPERS)
    work = run.plan.workload
    names = (
        f"paper's schedule (double_buffer, fp32 master, K = {data.interval}), simulated",
        f"ours ({run.plan.policy}), simulated",
        f"ours ({run.plan.policy}), measured",
    )
    timelines = (data.timeline, run.predicted, run.measured)
    lanes, end = (
        lanes_of(timelines),
        1.02 * max(timeline.makespan_ns for timeline in timelines) / 1e9,
    )
    figure, axes = style.canvas(style.PAGE, 4.6, nrows=3, sharex=True)
    sizes = (
        data.device_gib,
        run.plan.prediction.device_peak_bytes / 2**30 if run.plan.prediction else 0.0,
        run.memory["device_peak_bytes"] / 2**30,
    )
    for panel, name, timeline, size in zip(axes, names, timelines, sizes, strict=True):
        draw_lanes(panel, timeline, lanes, end)
        panel.set_title(f"{name}: {timeline.makespan_ns / 1e9:.2f} s, {size:.0f} GiB of the device")
    axes[-1].set_xlabel("time from the start of the step (s)")
    axes[1].set_ylabel("lane")
    style.legend(figure, kind_handles(timelines), 6)
    fits = data.device_gib <= run.plan.device_limit_bytes / 2**30
    rows = [
        TableRow(
            item="7B, 24 GiB: step of ours",
            quantity="step_s",
            unit="s",
            ours=run.predicted.makespan_ns / 1e9,
            measured=run.measured.makespan_ns / 1e9,
        ),
        TableRow(
            item="7B, 24 GiB: step of the paper's schedule",
            quantity="step_s",
            unit="s",
            paper_schedule=data.timeline.makespan_ns / 1e9,
            does_not_fit="" if fits else "paper_schedule",
            note=(
                f"needs {data.device_gib:.1f} GiB of the device and {data.host_gib:.1f} GiB of the"
                " host"
            ),
        ),
        TableRow(
            item="3B: step of the paper's schedule",
            quantity="step_s",
            unit="s",
            paper_schedule=papers.predicted.makespan_ns / 1e9,
            measured=papers.measured.makespan_ns / 1e9,
        ),
        *_lanes(data.timeline, run),
    ]
    first = next(span.start_ns for span in data.timeline.spans if span.kind == "cpu_update") / 1e9
    idle = (
        data.timeline.makespan_ns - data.timeline.busy_ns("compute")
    ) / data.timeline.makespan_ns
    after = (data.timeline.makespan_ns / 1e9 - first) / (data.timeline.makespan_ns / 1e9)
    (system,) = [
        system for system in results.benchmark(LATER)["systems"] if system["system"] == "ours"
    ]
    later = system["step_seconds_median"]
    ours_idle = (
        run.measured.makespan_ns - run.measured.busy_ns("compute")
    ) / run.measured.makespan_ns
    return Drawn(
        figure,
        rows,
        "Figure 3: one step's pipeline",
        claim="Double buffering on separate streams hides every transfer behind compute.",
        finding=(
            "Transfers are hidden until the backward pass ends. Then the GPU is idle from"
            f" {first:.2f} s to {data.timeline.makespan_ns / 1e9:.2f} s while the optimizer runs on"
            f" the host. Compute is idle for {idle:.1%} of the step, and this phase is"
            f" {after / idle:.0%} of that time. Our schedule updates behind the next forward pass."
            f" Its compute is idle for {ours_idle:.0%} of the measured step, whose predicted time"
            f" has an error of {run.comparison['error']:+.1%}. A later plan of ours, which clips by"
            f" update, was measured at {later:.2f} s in the same memory."
        ),
        caption=(
            f"{run.plan.model.name}, {work.batch} x {work.sequence} tokens,"
            f" {run.plan.device_limit_bytes / 2**30:.0f} GiB of one {run.where}; simulated {date}."
        ),
    )


def _lanes(papers: Timeline, run: StoredRun) -> list[TableRow]:
    """Returns a row for each lane, with the seconds of a step in which it is busy."""
    return [
        TableRow(
            item=f"7B, 24 GiB: {lane} busy",
            quantity="busy_s",
            unit="s",
            paper_schedule=papers.busy_ns(lane) / 1e9,
            ours=run.predicted.busy_ns(lane) / 1e9,
            measured=run.measured.busy_ns(lane) / 1e9,
        )
        for lane in lanes_of((papers, run.predicted, run.measured))
    ]
