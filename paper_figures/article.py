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

* **The paper's values** are taken from transcriptions by others. They are marked `++` (two readers
  agree), `+` (one reader) or `?` (doubtful). Only the H200 of the paper's machines was available
  here.
* **Three kinds of predictions** are shown next to each value. The simulator makes them from the
  library's machines (datasheets and measurements by others; the H200 is measured):
  * *MegaTrain's code* is predicted in two published versions. *80d3012* is from before 17 April
    2026. *919520f*, of 18 April, also has a second, pinned copy of each layer. It is in Figure 4
    and in one measured star.
  * *Paper's schedule, 12 B* is the pipeline and the state that the paper describes: bf16 weights
    and gradients and fp32 moments, 12 bytes per parameter. *Paper's, fp32 master* is this pipeline
    with exact masters, as our runtime executes it (policy `double_buffer`): 14 bytes. Both keep the
    activations of a recomputed layer, so a layer runs forward twice instead of three times. Both
    use the first checkpoint interval K of 4, 2 and 1 that fits.
  * *Ours* is our planner's best plan for the same number of tokens per step.
* **Assumptions** are stated once for each machine in `experiments/published/settings.toml`. A value
  by which an assumption was chosen is an *input*. An example is that 120B fits into 1.5 TB, because
  1.5 TB is read as 1,649 GB for this reason. Inputs are grey in the pictures and left out of every
  mean. No efficiency is tuned.
* **Measurements** were made by this project on H200 machines. They are stars in the pictures.
* **Pictures**: the paper's points are black. They are hollow if doubtful, and have an arrow if they
  are lower bounds. The paper's bars are hatched. Numbers below an axis are sequences per step. Each
  picture has a CSV file with every value, its workload, its mark, and signed deviations.

`megatrain figures --out DIR` (`make figures`) makes this page from stored results, without
simulations. `megatrain figures --rerun` runs the simulations again. With `--results NEW`, it stores
the results in a copy and leaves the stored ones as they are. The reference has an example of [a
figure with another machine](../docs/reference.md#a-figure-with-another-machine).
"""
UNKNOWN = (
    "the batches of ZeRO-3, FSDP and Gemini: a free batch for each row explains nearly every speed"
    " of these systems, so their rows test nothing",
    "the sequence length of Figures 1, 5, 6, 7 and of Tables 8 and 9, and the width x1.0 of Figure"
    " 6",
    "the processors: on a GH200, the speed of DeepSpeed's CPU Adam on Arm cores decides whether"
    " ZeRO-3 or MegaTrain is faster if their batches differ",
    "the speeds of 72B and 120B: the paper says that they ran, but no number was found",
    "how models ran that exceed the host's memory, and how many threads packed a layer",
    "accuracy after fine-tuning: neither models nor MetaMathQA are available here",
    "512K tokens: the published code has no chunked MLP",
)
CLASSES = (
    ("all", ""),
    ("sure, workload stated", "sure, workload stated"),
    ("sure, workload assumed", "sure, workload assumed"),
    ("one reader", "one reader"),
    ("doubtful", "doubtful"),
)


def introduction(figures: dict[str, Drawn], results: Results) -> str:
    """Returns the text above the figures, in Markdown. `figures` has all figures by name."""
    parts = [
        QUESTION,
        METHOD,
        "## What holds\n",
        _list(_holds(figures)),
        "## What does not hold\n",
        _list(_fails(figures)),
        "## What cannot be known\n",
        _list(UNKNOWN),
        "## How large the errors are\n",
        _wrapped(
            "The table has the errors of all published values that a policy predicts, without"
            " inputs and bounds. Each experiment counts once. The symmetric error is exp(mean"
            " |ln(predicted / published)|) - 1, which is the same for a prediction of twice and of"
            " half the value. The policies were written with our measurements known, so the row of"
            " our measurements does not test them."
        ),
        errors(results) + "\n",
        _wrapped(
            "`python -m megatrain.experiments.validate_published` prints every row, and the batch"
            " that each baseline's speed implies. [Stored"
            " result](../experiments/results/published/README.md)."
        ),
        "## Robust or fragile\n",
        _wrapped(
            "Each conclusion was predicted again with one input changed at a time. `megatrain"
            " figures robustness --rerun` makes this table."
        ),
        robustness.table(results) + "\n",
        "## Figures\n",
    ]
    return "\n".join(parts)


def errors(results: Results) -> str:
    """Returns the errors of the predictions by the source of the figures, as a Markdown table."""
    lines = ["| whose figures | rows | mean | median | symmetric |", "|---|---|---|---|---|"]
    counted = [
        row
        for row in results.validation()
        if row["error"] and not row["input"] and not row["repeats"] and not row["bound"]
    ]
    known = sorted({row["origin"] for row in counted}, key=lambda name: (name != "the paper", name))
    for origin in known:
        for name, kind in CLASSES:
            ratios = [
                float(row["predicted"]) / float(row["published"])
                for row in counted
                if row["origin"] == origin and kind in ("", row["class"])
            ]
            if ratios and (origin == "the paper" or not kind):
                lines.append(_errors(f"{origin}: {name}", ratios))
    return "\n".join(lines)


def _errors(name: str, ratios: list[float]) -> str:
    """Returns a row of the table. `ratios` are predicted / published."""
    absolute = [abs(ratio - 1) for ratio in ratios]
    symmetric = math.expm1(statistics.fmean(abs(math.log(ratio)) for ratio in ratios))
    return (
        f"| {name} | {len(ratios)} | {statistics.fmean(absolute):.1%} |"
        f" {statistics.median(absolute):.1%} | {symmetric:.1%} |"
    )


def _row(figures: dict[str, Drawn], figure: str, item: str, quantity: str) -> TableRow:
    return next(row for row in figures[figure].rows if (row.item, row.quantity) == (item, quantity))


def _holds(figures: dict[str, Drawn]) -> list[str]:
    full = _row(figures, "table4", "14b, full", "tflops")
    short = _row(figures, "table7", "7b, 1K", "step_s")
    eight = _row(figures, "table7", "7b, 8K", "step_s")
    large = _row(figures, "figure1", "gpt-oss-120b: host memory, of 1,500 or 1,649 GB", "host_gb")
    first, last = (
        _row(figures, "figure5", f"code, {layers} layers: peak of the device", "device_gib")
        for layers in (28, 180)
    )
    star = _row(figures, "ratio", "ours, qwen2.5-7b, on our H200, 32 sequences", "ratio")
    return [
        "MegaTrain's own numbers at short contexts. The errors of the predictions are"
        f" {full.deviation('published_code') or 0:+.0%} of the speed at 14B, and"
        f" {short.deviation('published_code') or 0:+.0%} (1K) and"
        f" {eight.deviation('published_code') or 0:+.0%} (8K) of the step time at 7B. (Tables 4 and"
        " 7)",
        "ZeRO-3 fits neither with 32B on a GH200 nor with 72B on an H200 with 1.5 TB. (Figure 1)",
        f"By the paper's own account, 120B takes {large.paper_stated or 0:,.0f} GB. This fits"
        " whether 1.5 TB means 1,500 or 1,649 GB. (Figure 4)",
        "Device memory grows little with depth: from 28 to 180 layers at 32 x 1,024 tokens it goes"
        f" from {first.published_code or 0:.1f} to {last.published_code or 0:.1f} GiB while the"
        " model grows 5.6 times. (Figure 5)",
        "The idea is faster than ZeRO-3 with another schedule: ours was measured at"
        f" {star.measured or 0:.2f} times ZeRO-3's speed, at 7B with equal batches on an H200. (The"
        " ratio)",
    ]


def _fails(figures: dict[str, Drawn]) -> list[str]:
    equal = _row(
        figures, "ratio", "megatrain_code, qwen2.5-14b, gh200-96, 96 sequences", "ratio"
    ).published_code
    unequal = _row(
        figures, "ratio", "MegaTrain 14b with 96 sequences / ZeRO-3 with 4, GH200", "ratio"
    ).published_code
    code = _row(figures, "ratio", "megatrain_code, qwen2.5-7b, on our H200, 32 sequences", "ratio")
    large = _row(figures, "figure1", "gpt-oss-120b: host memory, of 1,500 or 1,649 GB", "host_gb")
    full, single = (
        _row(figures, "table4", f"14b, {item}", "tflops")
        for item in ("full", "no double buffering")
    )
    return [
        f"**1.84 times ZeRO-3.** With equal batches, the code is predicted at {equal or 0:.2f}"
        f" times ZeRO-3's speed at best, and was measured at {code.measured or 0:.2f} (7B, 32"
        " sequences, H200). With 96 sequences for the code and 4 for ZeRO-3,"
        f" {unequal or 0:.2f} is predicted. The 4 is inferred from ZeRO-3's published speed, so"
        " this explains the claim and does not test it. It depends on the library's rate of CPU"
        " Adam on the GH200. (The ratio)",
        "**The collapse of the baselines** to 43 TFLOPS, and the factor of 12.2 on an A100. Batches"
        " of 1 to 3 explain most of both. (Figures 5 and 7)",
        "**Every transfer hidden.** The optimizer runs after backward while the GPU is idle."
        " (Figure 3)",
        "**Full precision.** The published code has bf16 weights and no fp32 master. (Table 3)",
        "**Attention for free.** 128K tokens in 26 s would exceed the chip's peak. (Table 7)",
        "**120B with the published code**, if 1.5 TB means 1,500 GB: it needs"
        f" {large.published_code or 0:,.0f} GB. (Figure 4)",
        f"**{(full.paper or 0) / (single.paper or 1) - 1:.0%} from a second buffer**"
        f" ({full.paper:g} / {single.paper:g} TFLOPS). Without it the paper loses 15 s, but all"
        " copies take 0.25 s. (Table 4)",
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
