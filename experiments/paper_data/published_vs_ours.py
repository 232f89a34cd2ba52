"""Joins a published row with the prediction for the published system, and with the predictions of
`answers.py` for the same model, machine and tokens.

The prediction for the published system is made by `validation.predict`, as in `validate_published`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import msgspec

from megatrain.experiments.paper_data.answers import (
    PredictedStep,
    ours,
    paper_schedule,
    stated_format,
)
from megatrain.experiments.validation.predict import implied_batch, predict
from megatrain.experiments.validation.rows import PublishedRow, Setting, load_rows, load_settings
from megatrain.simulator.model.specs import ModelSpec
from megatrain.simulator.model.workload import Workload

CODE = "megatrain_code"


def published(source: str) -> list[PublishedRow]:
    """Returns the stored rows of one figure or table of the paper, such as `paper Figure 5`."""
    return [row for row in load_rows() if row.source == source]


def unpublished(
    item: str,
    setting: str,
    policy: str,
    model: str,
    quantity: str = "tflops",
    unit: str = "TFLOPS",
    **fields: Any,
) -> PublishedRow:
    """Returns a row for a point that the paper does not report, with `fields` of `PublishedRow`. It
    can be predicted like a published row.
    """
    row = PublishedRow(
        item=item,
        setting=setting,
        policy=policy,
        model=model,
        changes={},
        batch=None,
        sequence=None,
        quantity=quantity,
        unit=unit,
        value=None,
        sure="?",
        used=False,
        source="",
        note="",
    )
    return msgspec.structs.replace(row, **fields)


def published_vs_ours(
    rows: Iterable[PublishedRow], *, compiled: bool = False
) -> list[dict[str, Any]]:
    """Returns each row as plain data, with the fields of `BenchmarkRecord` in paper_figures. `code`
    is the prediction for the system's own code. Rows of baselines without a stated batch have
    `implied`, the batch that their speed implies. Rows of MegaTrain have `paper_stated`,
    `paper_schedule` and `ours`. With `compiled`, `ours` has compiled layers and short recomputes,
    as plans of the commands have with `--compile`.
    """
    settings = load_settings()
    return [_compared(row, settings[row.setting], compiled) for row in rows]


def _compared(row: PublishedRow, setting: Setting, compiled: bool) -> dict[str, Any]:
    """Returns a row with the predictions for it. A prediction is None if it does not apply."""
    model, found = row.spec(), predict(row, setting)
    record: dict[str, Any] = {
        "item": row.item,
        "source": row.source,
        "setting": row.setting,
        "machine": setting.machine().name,
        "system": row.policy or row.item.split()[0].lower(),
        "model": row.model,
        "changes": row.changes,
        "layers": model.layers,
        "parameters": model.parameters,
        "active_parameters": model.active_parameters,
        "quantity": row.quantity,
        "unit": row.unit,
        "paper": row.value,
        "sure": row.sure if row.source else "",
        "bound": row.bound,
        "used": row.used,
        "repeats": row.repeats,
        "note": row.note,
        "code": None,
        "implied": None,
        "paper_stated": None,
        "paper_schedule": None,
        "ours": None,
    }
    if row.source and (implied := implied_batch(row, setting)):
        record["implied"] = {"batch": implied.batch, "value": implied.value}
    if found:
        record["code"] = {
            "value": found.value,
            "fits": found.fits,
            "batch": found.batch,
            "sequence": found.sequence,
        }
    if row.policy == CODE and found and not row.ablation:
        changes = tuple(sorted(row.changes.items()))
        for name in ("paper_stated", "paper_schedule", "ours"):
            record[name] = msgspec.to_builtins(
                _answer(
                    name, row.model, changes, row.setting, found.batch, found.sequence, compiled
                )
            )
    return record


@functools.cache
def _answer(
    name: str,
    model: str,
    changes: tuple[tuple[str, str], ...],
    setting: str,
    batch: int,
    sequence: int,
    compiled: bool,
) -> PredictedStep:
    spec, hardware = _model(model, changes), load_settings()[setting].machine()
    if name == "ours":
        work = Workload(batch=batch, sequence=sequence, compiled=compiled, short_recompute=compiled)
        return ours(spec, hardware, work)
    if name == "paper_stated":
        with stated_format() as state:
            return paper_schedule(spec, hardware, batch, sequence, state=state)
    return paper_schedule(spec, hardware, batch, sequence)


def _model(name: str, changes: tuple[tuple[str, str], ...]) -> ModelSpec:
    return unpublished("", "", "", name, changes=dict(changes)).spec()
