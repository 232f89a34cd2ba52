"""Figure 6: speed by width, 28 layers on a GH200. The simulation takes about 12 s.

The paper does not report the width x1.0. `rows` have the width that validate_published assumes,
half of 7B's. `bases` has predictions for other widths x1.0. Their MLP grows with the width as in
7B, the vocabulary is 7B's, and heads have 128 elements. The number of key-value heads is the
largest divisor of the number of heads that is at most a seventh of it.
"""

from __future__ import annotations

from typing import Any

from megatrain.experiments.paper_data.published_vs_ours import published, published_vs_ours
from megatrain.experiments.validation.predict import predict
from megatrain.experiments.validation.rows import PublishedRow, load_settings

BASES = (1024, 1280, 1536, 1792, 2048, 2560, 3584)
_FFN = 18944 / 3584
_SHAPE = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")


def shape(base: int, factor: float) -> dict[str, str]:
    """Returns the keys of config.json for a width of `factor` times `base`.

    >>> shape(1792, 3.5)
    {'hidden_size': '6272', 'intermediate_size': '33152', 'num_attention_heads': '49',
    'num_key_value_heads': '7'}
    """
    heads = round(base * factor / 128)
    kv_heads = max(count for count in range(1, max(heads // 7, 1) + 1) if heads % count == 0)
    return dict(
        zip(
            _SHAPE, map(str, (128 * heads, round(_FFN * heads) * 128, heads, kv_heads)), strict=True
        )
    )


def factor(row: PublishedRow) -> float:
    """Returns the row's width as a multiple of x1.0."""
    return float(row.item.rpartition("x")[2])


def simulate() -> Any:
    """Returns the data of `Figure6Data` in paper_figures."""
    rows = published("paper Figure 6")
    settings, bases = load_settings(), []
    for base in BASES:
        for row in rows:
            changed = PublishedRow(
                **{
                    field: getattr(row, field)
                    for field in row.__struct_fields__
                    if field != "changes"
                },
                changes=shape(base, factor(row)),
            )
            found = predict(changed, settings[row.setting])
            if found:
                bases.append(
                    {
                        "base": base,
                        "item": row.item,
                        "factor": factor(row),
                        "system": row.policy,
                        "quantity": row.quantity,
                        "paper": row.value,
                        "predicted": found.value,
                        "fits": found.fits,
                        "batch": found.batch,
                        "parameters": changed.spec().parameters,
                    }
                )
    return {
        "rows": [
            {**record, "factor": factor(row)}
            for row, record in zip(rows, published_vs_ours(rows), strict=True)
        ],
        "bases": bases,
    }
