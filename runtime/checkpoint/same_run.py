"""Compares a run with a checkpoint that it is to continue from, without importing PyTorch."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from megatrain.runtime.checkpoint.manifest import TOKENIZER, Manifest
from megatrain.runtime.optimizer.settings import AdamW
from megatrain.simulator.base.errors import UserError
from megatrain.simulator.base.plugins import digest
from megatrain.simulator.model.optimizer import ADAMW, find
from megatrain.simulator.model.specs import ModelSpec
from megatrain.simulator.schedule.plan import Plan

INIT = "training.init"
"""The setting of the initial weights, which checkpoints of earlier versions do not have."""


CODE = "plan_code"
"""The folder in a run folder with the files of the plan's policy, optimizer and cost model."""
FILE = "file"
"""The key of the digest of the optimizer's file in `Manifest.optimizer`. Checkpoints of earlier
versions, and those of optimizers that are in no file, do not have it."""


def description(optimizer: AdamW, name: str = ADAMW) -> dict[str, Any]:
    """Returns the hyperparameters of `optimizer`, as a manifest stores them. `name` is the name of
    the optimizer in the workload. If it is a file, the digest of its content is added.
    """
    found = {"name": type(optimizer).__name__, **msgspec.to_builtins(optimizer)}
    return {**found, FILE: digest("optimizer", name)} if name.endswith(".py") else found


def refuse_other_run(
    manifest: Manifest,
    plan: Plan,
    optimizer: AdamW,
    settings: Mapping[str, Any],
    folder: Path,
    *,
    known: bool = True,
    tokenizer: str | None = None,
) -> None:
    """Raises UserError if the checkpoint belongs to another run. The error names all differences.

    A run whose learning rate depends on the number of steps may become longer, but not shorter.

    Args:
        manifest: manifest of the checkpoint.
        plan: plan of the run.
        optimizer: hyperparameters of the run's optimizer.
        settings: settings of the run.
        folder: folder of the checkpoint, for the error message.
        known: whether `settings` are complete. If not, only the settings that it contains are
            compared.
        tokenizer: digest of the run's tokenizer, empty if it has none, or None if it is not known.
            The error says whether it changed.
    """
    model = plan.model
    pairs: list[tuple[str, Any, Any]] = [
        (f"model.{key}", was, now) for key, was, now in _differences(manifest.model, model)
    ]
    pairs.append(("model", _tensor_names(manifest.model.stack), _tensor_names(model.stack)))
    before = {INIT: settings.get(INIT)} | {
        key: value for key, value in manifest.run.settings.items() if known or key in settings
    }
    if is_longer(before, settings):
        before["training.steps"] = settings["training.steps"]
    work = plan.workload.same_bits
    # a hyperparameter that is newer than the checkpoint had its default
    hyperparameters = description(AdamW()) | manifest.optimizer
    described = description(optimizer, work.optimizer)
    stored, present = hyperparameters.pop(FILE, None), described.pop(FILE, None)
    first, second = manifest.workload.optimizer, work.optimizer
    if first.endswith(".py") and second.endswith(".py"):
        find(second)  # raises an error of its own if there is no such file
        if stored and stored != present:
            raise UserError(
                f"optimizer {second}",
                found="another content than that with which the checkpoint was trained",
                allowed="the same optimizer",
                fix="continue with `megatrain train --resume RUN` alone, which uses the copy of the"
                " optimizer in the run's folder, or start a new run",
            )
        copied = CODE in Path(second).parts and Path(first).name == Path(second).name
        if stored or copied:
            # A run's folder has a copy of the file, so its path says little.
            work = msgspec.structs.replace(work, optimizer=first)
    for prefix, was, now in (
        ("workload", manifest.workload.same_bits, work),
        ("optimizer", hyperparameters, described),
        ("settings", before, dict(settings)),
    ):
        old, new = (_plain(values) for values in (was, now))
        pairs += [
            (f"{prefix}.{key}", old.get(key), new.get(key))
            for key in sorted(old.keys() | new.keys())
        ]
    differing = [(name, was, now) for name, was, now in pairs if was != now]
    if [name for name, *_ in differing] == ["settings.training.steps"]:
        ((_, was, now),) = differing
        if isinstance(was, int) and isinstance(now, int):
            raise UserError(
                str(folder),
                found=f"{was} steps",
                allowed=f"at least {was} steps, not {now}: the learning rate depends on the number"
                " of steps, so a run can become longer, but not shorter",
                fix=f"leave out --steps, or pass at least {was}",
            )
    if differing:
        other_data = any(name == "settings.data.digest" for name, *_ in differing)
        why = f"; {_why_other_data(manifest, tokenizer)}" if other_data else ""
        changes = "".join(
            f" --set {_assigned(name.removeprefix('workload.'), was)}"
            for name, was, _ in differing
            if name.startswith("workload.")
        )
        how = f" (`megatrain plan --from PLAN{changes} --out NEW`)" if changes else ""
        raise UserError(
            str(folder),
            found=", ".join(
                f"{name.removeprefix('settings.')} {_short(was)} in the checkpoint and"
                f" {_short(now)} in this run"
                for name, was, now in differing
            )
            + why,
            allowed="the same in both",
            fix=f"resume with the settings of the checkpoint{how}, or start a new run from its"
            " weights (`megatrain export`)",
        )


def _why_other_data(manifest: Manifest, tokenizer: str | None) -> str:
    """Returns why the digest of the data may differ from that in the checkpoint. It is a digest of
    the tokens.
    """
    before = manifest.run.progress.get(TOKENIZER)
    if before is None or tokenizer is None:  # None for a checkpoint of an earlier version
        return "either the data or the tokenizer changed"
    if before == tokenizer:
        return "the tokenizer is the same, so the data or the chat template changed"
    return f"the tokenizer {'changed' if tokenizer else 'is gone'}"


def _differences(first: ModelSpec, second: ModelSpec) -> list[tuple[str, Any, Any]]:
    """Returns what `model_config.differences` returns. Equal models have no difference, which is
    found without importing transformers.
    """
    if first == second:
        return []
    from megatrain.runtime.layers.model_config import differences

    return [tuple(difference) for difference in differences(first, second)]


def is_longer(before: Mapping[str, Any], settings: Mapping[str, Any]) -> bool:
    """Returns whether `settings` have more steps than `before`. Only runs whose learning rate
    depends on the number of steps have this setting.
    """
    was, now = before.get("training.steps"), settings.get("training.steps")
    return isinstance(was, int) and isinstance(now, int) and now > was


def _tensor_names(stack: Mapping[str, Any]) -> list[str]:
    return [
        f"{layer.name}.{tensor.name}{list(tensor.shape)}"
        for layer in stack.values()
        for tensor in layer.tensors
    ]


def _plain(values: object) -> dict[str, Any]:
    """Returns `values` after encoding them as JSON and decoding them."""
    plain: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(values))
    return plain


def _assigned(name: str, value: object) -> str:
    """Returns `name=value` as a word of `megatrain plan --from PLAN --set`."""
    text = value if isinstance(value, str) else msgspec.json.encode(value).decode()
    return shlex.quote(f"{name}={text}")


def _short(value: object) -> str:
    return str(value)[:60]
