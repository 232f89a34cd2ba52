"""Beyond the paper: predicted against measured, for every stored case."""

from __future__ import annotations

import statistics
from typing import NamedTuple

from megatrain.paper_figures import style
from megatrain.paper_figures.results import Results
from megatrain.paper_figures.table import Drawn, Row

RUNS = ("h200-qwen2.5-3b", "h200-qwen2.5-7b-whole", "h200-qwen2.5-7b-24GiB")
BENCHMARK = "h200-x2-qwen2.5-7b-peers/benchmark.json"
BAND = 0.03
KINDS = {
    "our runs: step": ("#009E73", "D"),
    "our runs: an op kind": ("#56B4E9", "."),
    "others' steps, parts": ("#D55E00", "^"),
    "a layer": ("#CC79A7", "v"),
    "device, host memory": ("#0072B2", "s"),
}


class Case(NamedTuple):
    """Seconds, or GiB."""

    item: str
    kind: str
    quantity: str
    predicted: float
    measured: float


def cases(results: Results) -> list[Case]:
    """Of stored runs, of the benchmark, and of what the validation predicts of other systems' runs on our H200 machines."""
    found = []
    for name in RUNS:
        run = results.run(name)
        found.append(Case(f"{name}: step", "our runs: step", "s", run.comparison["predicted_seconds"], run.comparison["measured_seconds"]))
        found += [
            Case(f"{name}: {kind['kind']}", "our runs: an op kind", "s", kind["predicted_seconds"], kind["measured_seconds"]) for kind in run.comparison["kinds"]
        ]  # fmt: skip
        if run.plan.prediction and "device_peak_bytes" in run.memory:
            found.append(
                Case(
                    f"{name}: device peak", "device, host memory", "GiB", run.plan.prediction.device_peak_bytes / 2**30, run.memory["device_peak_bytes"] / 2**30
                )
            )
    peers = results.benchmark(BENCHMARK)
    ours = next(system for system in peers["systems"] if system["system"] == "ours")
    found.append(Case("benchmark of 7B: step", "our runs: step", "s", peers["plan"]["prediction"]["step_seconds"], ours["step_seconds_median"]))
    groups = {"s": "others' steps, parts", "ms": "a layer", "GiB": "device, host memory"}
    for row in results.validation():
        if row["source"].startswith("paper") or not row["predicted"] or row["input"] or not row["setting"].startswith("h200-") or row["unit"] not in groups:
            continue
        scale = 1e-3 if row["unit"] == "ms" else 1.0
        found.append(
            Case(
                f"{row['item']}: {row['quantity']}",
                groups[row["unit"]],
                "GiB" if row["unit"] == "GiB" else "s",
                scale * float(row["predicted"]),
                scale * float(row["published"]),
            )
        )
    return [case for case in found if case.measured > 0 and case.predicted > 0]


def draw(results: Results) -> Drawn:
    found = cases(results)
    figure, (left, right) = style.canvas(style.PAGE, 3.4, ncols=2)
    for axes, quantity, title, low, high in ((left, "s", "time", 1e-3, 30), (right, "GiB", "memory", 5, 300)):
        style.plain(axes, title, f"measured ({quantity}, log scale)", f"predicted ({quantity}, log scale)")
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.fill_between(
            [low, high],
            [(1 - BAND) * low, (1 - BAND) * high],
            [(1 + BAND) * low, (1 + BAND) * high],
            color="#c4ccd4",
            linewidth=0,
            label="within 3 %",
            zorder=1,
        )
        for kind, (colour, marker) in KINDS.items():
            mine = [case for case in found if case.kind == kind and case.quantity == quantity]
            if mine:
                axes.plot(
                    [case.measured for case in mine],
                    [case.predicted for case in mine],
                    linestyle="none",
                    marker=marker,
                    color=colour,
                    markersize=4,
                    alpha=0.85,
                    label=kind,
                )
        axes.set_xlim(low, high)
        axes.set_ylim(low, high)
        axes.set_aspect("equal")
    entries = dict(zip(*reversed(left.get_legend_handles_labels()), strict=True)) | dict(zip(*reversed(right.get_legend_handles_labels()), strict=True))
    style.legend(figure, list(entries.values()), 3)
    made = f"{len(found)} cases, all measured on H200 machines on {results.run(RUNS[0]).date}; predictions as stored."
    style.footer(figure, made)
    rows = [
        Row(
            item=case.item,
            quantity=case.kind,
            unit=case.quantity,
            ours=case.predicted,
            measured=case.measured,
            note=f"{case.predicted / case.measured - 1:+.1%}",
        )
        for case in found
    ]
    errors = {kind: [abs(case.predicted / case.measured - 1) for case in found if case.kind == kind] for kind in KINDS}
    inside = sum(abs(case.predicted / case.measured - 1) <= BAND for case in found)
    text = ", ".join(f"{kind} {statistics.median(values):.1%}" for kind, values in errors.items() if values)
    return Drawn(
        figure, rows, "Beyond the paper: predicted against measured",
        claim="None: the paper predicts nothing.",
        finding=f"Of {len(found)} cases {inside} are within 3 %; median error: {text}. Whole steps of ours are within {max(errors['our runs: step']):.1%}; what is far off are kinds that share the GPU with a layer's (update, norm) and take little time.",
        made=made,
    )  # fmt: skip
