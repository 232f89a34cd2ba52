"""The text of the page around the figures: question, method, findings, errors and robustness."""

from __future__ import annotations

import math
import statistics
import textwrap
from collections.abc import Iterable

from megatrain.paper_figures.beyond_the_paper import robustness
from megatrain.paper_figures.common.results import Results
from megatrain.paper_figures.common.table import Drawn, TableRow

QUESTION = """# The paper's figures, reproduced

## Question

MegaTrain (arXiv 2604.05091) trains language models of up to 120 billion parameters on one GPU, with
all state in host memory, and reports 1.84 times the throughput of DeepSpeed ZeRO-3. Which of its
figures follow from what it describes, and from the code that it published?
"""
METHOD = """## Method

* **The paper** is read as others transcribed it. Its values are marked `++` (two readers agree),
  `+` (one reader) or `?` (doubtful). Of its machines, only the H200 was available
  here.
* **Three kinds of predictions** are shown next to each value. The simulator makes them from the
  library's machines (datasheets and measurements by others; the H200 is measured):
  * *MegaTrain's code 80d3012* is the published code as it runs, before 17 April 2026 (commit
    5cf47ac), when each layer got a second, pinned copy. *919520f* is the code with these copies, in
    Figure 4 and in one measured star.
  * *Paper's schedule, 12 B* is the pipeline that the paper describes with the state that it
    describes: bf16 weights and gradients and fp32 moments, 12 bytes per parameter. *Paper's, fp32
    master* is the same with exact masters, as our runtime executes it (policy `double_buffer`): 14
    bytes. Both keep a recomputed layer's activations, so a layer runs forward twice and not three
    times, and take the first of K = 4, 2, 1 that fits.
  * *Ours* is our planner's best plan for as many tokens per step.
* **Assumptions** are stated once for each machine in `experiments/published/settings.toml`. A value
  that an assumption was chosen by is an *input*: it is grey in the pictures and is left out of
  every mean. No efficiency is tuned.
* **Measurements** are of this project, on H200 machines, and are drawn as stars.
* **Pictures**: points of the paper are black, hollow if doubtful, with an arrow if they are lower
  bounds; bars of the paper are hatched. Numbers below an axis are sequences per step. Each picture
  has a CSV file with every value, its workload, its mark, and signed deviations.

`megatrain figures --out DIR` (`make figures`) makes this page from stored results and simulates
nothing. `megatrain figures --rerun` runs the simulations again.
"""
UNKNOWN = (
    "the batches of ZeRO-3, FSDP and Gemini: one free number per row, which explains nearly every"
    " speed of them and tests nothing",
    "the sequence length of Figures 1, 5, 6, 7 and of Tables 8 and 9, and the width x1.0 of Figure"
    " 6",
    "every processor: DeepSpeed's CPU Adam on the GH200's Arm cores decides the order of ZeRO-3 and"
    " MegaTrain there if their batches differ",
    "speeds at 72B and 120B, which the paper says ran: no number was found",
    "how runs beyond the host's memory went on, and how many threads packed a layer",
    "accuracy after fine-tuning: neither models nor MetaMathQA are available here",
    "512K tokens: the published code has no chunked MLP, and neither has this runtime",
)
CLASSES = (
    ("all", ""),
    ("sure, workload stated", "sure, workload stated"),
    ("sure, workload assumed", "sure, workload assumed"),
    ("one reader", "one reader"),
    ("doubtful", "doubtful"),
)


def introduction(made: dict[str, Drawn], results: Results) -> str:
    """Returns everything above the figures, in Markdown."""
    parts = [
        QUESTION,
        METHOD,
        "## What holds\n",
        _list(_holds(made)),
        "## What does not hold\n",
        _list(_fails(made)),
        "## What cannot be known\n",
        _list(UNKNOWN),
        "## How large the errors are\n",
        _wrapped(
            "Errors of all published values that a policy predicts, one row per experiment, without"
            " inputs and bounds. The symmetric error is exp(mean |ln(predicted / published)|) - 1,"
            " the same for twice and for half. The policies were written with our measurements at"
            " hand, so the row of our measurements is no test of them."
        ),
        errors(results) + "\n",
        _wrapped(
            "`python -m megatrain.experiments.validate_published` prints every row, and the batch"
            " that each baseline's speed implies. [Stored"
            " result](../experiments/results/published/README.md)."
        ),
        "## Robust or fragile\n",
        _wrapped(
            "Each conclusion, predicted again with one input changed at a time. `megatrain figures"
            " robustness --rerun` makes this table."
        ),
        robustness.table(results) + "\n",
        "## Figures\n",
    ]
    return "\n".join(parts)


def errors(results: Results) -> str:
    """Returns the errors by whose figures they are, as a table in Markdown."""
    lines = ["| whose figures | rows | mean | median | symmetric |", "|---|---|---|---|---|"]
    counted = [
        row
        for row in results.validation()
        if row["error"] and not row["input"] and not row["repeats"] and not row["bound"]
    ]
    known = sorted({row["origin"] for row in counted}, key=lambda name: (name != "the paper", name))
    for origin in known:
        for name, kind in CLASSES:
            mine = [
                float(row["predicted"]) / float(row["published"])
                for row in counted
                if row["origin"] == origin and kind in ("", row["class"])
            ]
            if mine and (origin == "the paper" or not kind):
                lines.append(_errors(f"{origin}: {name}", mine))
    return "\n".join(lines)


def _errors(name: str, shares: list[float]) -> str:
    absolute = [abs(share - 1) for share in shares]
    symmetric = math.expm1(statistics.fmean(abs(math.log(share)) for share in shares))
    return (
        f"| {name} | {len(shares)} | {statistics.fmean(absolute):.1%} |"
        f" {statistics.median(absolute):.1%} | {symmetric:.1%} |"
    )


def _row(made: dict[str, Drawn], figure: str, item: str, quantity: str) -> TableRow:
    return next(row for row in made[figure].rows if (row.item, row.quantity) == (item, quantity))


def _holds(made: dict[str, Drawn]) -> list[str]:
    full = _row(made, "table4", "14b, full", "tflops")
    short = _row(made, "table7", "7b, 1K", "step_s")
    eight = _row(made, "table7", "7b, 8K", "step_s")
    large = _row(made, "figure1", "gpt-oss-120b: host memory, of 1,500 or 1,649 GB", "host_gb")
    first, last = (
        _row(made, "figure5", f"code, {layers} layers: peak of the device", "device_gib")
        for layers in (28, 180)
    )
    star = _row(made, "ratio", "ours, qwen2.5-7b, on our H200, 32 sequences", "ratio")
    return [
        "MegaTrain's own speeds at short contexts: predicted"
        f" {full.deviation('published_code') or 0:+.0%} (14B), and in time"
        f" {short.deviation('published_code') or 0:+.0%} (7B, 1K) and"
        f" {eight.deviation('published_code') or 0:+.0%} (7B, 8K). (Tables 4 and 7)",
        "ZeRO-3 holds neither 32B on a GH200 nor 72B on an H200 with 1.5 TB. (Figure 1)",
        f"120B fits 1.5 TB with the paper's own account: {large.paper_stated or 0:,.0f} GB, in"
        " either reading of 1.5 TB. (Figure 4)",
        "Device memory grows little with depth: from 28 to 180 layers at 32 x 1,024 tokens it goes"
        f" from {first.published_code or 0:.1f} to {last.published_code or 0:.1f} GiB while the"
        " model grows 5.6 times. (Figure 5)",
        "The idea pays, with another schedule: ours, measured, is"
        f" {star.measured or 0:.2f} times as fast as ZeRO-3 at 7B with equal batches on an H200."
        " (The ratio)",
    ]


def _fails(made: dict[str, Drawn]) -> list[str]:
    equal = _row(
        made, "ratio", "megatrain_code, qwen2.5-14b, gh200-96, 96 sequences", "ratio"
    ).published_code
    unequal = _row(
        made, "ratio", "MegaTrain 14b with 96 sequences / ZeRO-3 with 4, GH200", "ratio"
    ).published_code
    code = _row(made, "ratio", "megatrain_code, qwen2.5-7b, on our H200, 32 sequences", "ratio")
    large = _row(made, "figure1", "gpt-oss-120b: host memory, of 1,500 or 1,649 GB", "host_gb")
    return [
        f"**1.84 times ZeRO-3.** With equal batches the code is predicted at {equal or 0:.2f} times"
        f" ZeRO-3's speed at best, and was measured at {code.measured or 0:.2f} (7B, 32 sequences,"
        f" H200). 96 sequences against 4 give {unequal or 0:.2f}, by the library's rate of CPU Adam"
        " on the GH200. (The ratio)",
        "**The collapse of the baselines** at 43 TFLOPS, and 12.2 times on an A100: a batch of 1"
        " explains most of both. (Figures 5 and 7)",
        "**Every transfer hidden.** The optimizer runs after backward while the GPU is idle."
        " (Figure 3)",
        "**Full precision.** The published code has bf16 weights and no fp32 master. (Table 3)",
        "**Attention for free.** 128K tokens in 26 s would exceed the chip's peak. (Table 7)",
        f"**120B with the code**, if 1.5 TB is 1,500 GB: it needs {large.published_code or 0:,.0f}"
        " GB. (Figure 4)",
        "**A second buffer** that gains 46 %: its copies take 0.25 s of the 15 s. (Table 4)",
    ]


def _list(entries: Iterable[str]) -> str:
    return (
        "\n".join(
            textwrap.fill(
                f"* {entry}",
                100,
                subsequent_indent="  ",
                break_on_hyphens=False,
                break_long_words=False,
            )
            for entry in entries
        )
        + "\n"
    )


def _wrapped(paragraph: str) -> str:
    return textwrap.fill(paragraph, 100, break_on_hyphens=False, break_long_words=False) + "\n"
