"""Prints a table of the model families that are supported, for the installed transformers.

    python -m megatrain.experiments.families

A family is supported if it passes `tests/runtime/test_families.py`. The test compares the loss and
all gradients of a tiny random model with transformers' whole model. Relative differences are at
most 1e-5 in fp32 and 2e-2 in bf16. The model's folder is read, trained and written again. The costs
are compared with the activations that autograd saves and with PyTorch's FLOP counter.
"""

from __future__ import annotations

import sys
from collections import defaultdict

from megatrain.experiments.cli.program import run_without_options
from megatrain.simulator.model.families import FAMILIES, INSIDE, NOT_YET, REFUSED


def table(causal: list[str]) -> str:
    """Returns a Markdown table that groups families by support or the reason for refusal.

    Args:
        causal: the `model_type`s for which transformers has a causal language model.
    """
    refused: dict[str, list[str]] = defaultdict(list)
    for family in causal:
        if family not in FAMILIES and family not in INSIDE:
            refused[REFUSED.get(family, NOT_YET)].append(family)
    rows = [
        (f"**supported**, {len(FAMILIES)}", sorted(FAMILIES)),
        ("**supported**, the language model inside", sorted(INSIDE)),
        *(
            (f"refused: {reason}", sorted(families))
            for reason, families in sorted(refused.items(), key=lambda entry: -len(entry[1]))
        ),
    ]
    return "\n".join(
        [
            "| | families (`model_type`) |",
            "|---|---|",
            *(f"| {reason} | {', '.join(families)} |" for reason, families in rows),
        ]
    )


def main() -> int:
    """Prints the table for the installed version of transformers, and returns the exit status."""
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    causal = list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    print(
        f"Of the {len(causal)} `model_type`s for which transformers {transformers.__version__} has"
        f" a causal language model:\n\n{table(causal)}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(run_without_options("python -m megatrain.experiments.families", __doc__, main))
