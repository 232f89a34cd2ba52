"""Which decoder families are supported: `python -m megatrain.experiments.families` prints the table, for the transformers that is installed.

Supported means that `tests/runtime/test_families.py` holds: loss and every gradient of a tiny random model are those of transformers' whole model (fp32 1e-5,
bf16 2e-2 relative), its folder is read, trained and written again, and every cost is compared with what autograd and PyTorch's counter say.
"""

from __future__ import annotations

from collections import defaultdict

from megatrain.simulator.families import FAMILIES, INSIDE, NOT_YET, REFUSED


def table(causal: list[str]) -> str:
    """Markdown, of the `model_type`s that transformers has a causal language model for."""
    refused: dict[str, list[str]] = defaultdict(list)
    for family in causal:
        if family not in FAMILIES and family not in INSIDE:
            refused[REFUSED.get(family, NOT_YET)].append(family)
    rows = [(f"**supported**, {len(FAMILIES)}", sorted(FAMILIES)), ("**supported**, the language model inside", sorted(INSIDE))]
    rows += [(f"refused: {reason}", sorted(families)) for reason, families in sorted(refused.items(), key=lambda entry: -len(entry[1]))]
    return "\n".join(["| | families (`model_type`) |", "|---|---|", *(f"| {reason} | {', '.join(families)} |" for reason, families in rows)])


def main() -> None:
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    causal = list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    print(f"Of the {len(causal)} `model_type`s for which transformers {transformers.__version__} has a causal language model:\n\n{table(causal)}")


if __name__ == "__main__":
    main()
