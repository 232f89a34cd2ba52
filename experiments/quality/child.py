"""Trains one run of a comparison in its own process: `python -m
megatrain.experiments.quality.child DIR SPEC FIRST_SEED`.

DIR is the folder of the whole comparison, SPEC is a `RunSpec` as JSON, and FIRST_SEED is the least
seed of the comparison. `runs/NAME.json` is written at the end. After SIGTERM the run saves a
checkpoint, and the next process continues from it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shutil
import statistics
import sys
import time
from pathlib import Path

import msgspec
import numpy as np
import torch

from megatrain.experiments.cli.program import run_program
from megatrain.experiments.quality import text
from megatrain.experiments.quality.rows import LOSSES, Movement, QualityRow, RunSpec
from megatrain.experiments.quality.variant import workload_of
from megatrain.runtime.data.opening import open_data
from megatrain.runtime.data.options import DataOptions
from megatrain.runtime.machine import default_device, describe, device_bytes, host_bytes
from megatrain.runtime.optimizer.settings import AdamW
from megatrain.runtime.training.callback import Callback, Step
from megatrain.runtime.training.config import Config, EvaluationSettings, Saving, TrainingSettings
from megatrain.runtime.training.evaluating import evaluate
from megatrain.runtime.training.learning_rate import LearningRate
from megatrain.runtime.training.trainer import Trainer
from megatrain.runtime.training.training_run import TrainingRun
from megatrain.runtime.warm_up import WARM_UP_STEPS
from megatrain.simulator import policies
from megatrain.simulator.base.files import write_json
from megatrain.simulator.model.specs import ModelSpec
from megatrain.simulator.model.workload import Workload
from megatrain.simulator.schedule.plan import Knobs, Placement, Plan

SAMPLED = 2**18
"""The largest number of master weights whose change in a fine-tuning is stored."""


def base_name(spec: RunSpec, first_seed: int) -> str:
    """Returns the name of the run from whose weights a fine-tuning starts."""
    return msgspec.structs.replace(spec, part="training", variant="exact", seed=first_seed).name


def plan_of(spec: RunSpec, data: Path, device: torch.device) -> Plan:
    """Returns the plan of a run, in which everything stays on the device and nothing is recomputed.

    Gradients in 8 bits are only for gradients that are stored on the host, so a run with them keeps
    its state there.

    Raises UserError if the workload cannot have the variant's fields.
    """
    workload = workload_of(spec.variant, spec.settings)
    plan = Plan(
        policy="resident" if workload.gradients == "exact" else "overlapped",
        hardware="",
        source=str(data.resolve()),
        device_limit_bytes=device_bytes(device) // spec.parallel,
        host_limit_bytes=host_bytes(),
        model=ModelSpec.load(str(data / "config.json")),
        workload=workload,
        knobs=Knobs(placement=Placement(saved_activations="all")),
    )
    return msgspec.structs.replace(plan, digest=policies.lower(plan).digest)


def config_of(spec: RunSpec, data: Path) -> Config:
    """Returns the settings of a run that its plan does not contain."""
    shared, steps = spec.settings, spec.settings.steps_of(spec.part)
    fresh = spec.part == "training"
    export = fresh and spec.variant == "exact"
    return Config(
        training=TrainingSettings(steps=steps, seed=spec.seed, init="random" if fresh else "model"),
        optimizer=AdamW(weight_decay=shared.weight_decay),
        schedule=(
            LearningRate(kind="cosine", rate=shared.rate)
            if fresh
            else LearningRate(kind="constant", rate=shared.fine_tune_rate, warm_up_steps=0)
        ),
        data=data_options(data),
        evaluation=EvaluationSettings(every_steps=max(1, steps // shared.evaluations)),
        saving=Saving(every_minutes=0.0, export=export, export_dtype="fp32" if export else ""),
    )


def data_options(data: Path) -> DataOptions:
    """Returns the options for the data in the folder `data`. Documents are packed without borders,
    so every row is full and all shapes are equal.
    """
    return DataOptions(
        data=str(data / text.TRAINING),
        evaluation_data=str(data / text.HELD_OUT_FILE),
        packing="plain",
        cache=str(data / "tokens"),
    )


def tokenize(spec: RunSpec, data: Path) -> None:
    """Tokenizes the text into the cache, from which all runs read it.

    Raises UserError if the text does not fill one step.
    """
    model, shared = ModelSpec.load(str(data / "config.json")), spec.settings
    work = Workload(batch=shared.batch, sequence=shared.sequence)
    open_data(data_options(data), work, data, model.vocabulary)


class _Recorder(Callback):
    """Measures how long the run takes and, in a fine-tuning, how far the weights move."""

    def __init__(self, spec: RunSpec, sample: Path) -> None:
        self._spec, self._sample = spec, sample
        self._first: list[torch.Tensor] = []
        self._ends: list[float] = []
        self.begin = time.monotonic()
        self.seconds = 0.0
        self.movement: Movement | None = None
        self.epoch_tokens = 0

    def on_start(self, trainer: TrainingRun) -> None:
        self.epoch_tokens = trainer.data_summaries["training"].tokens
        self.begin = time.monotonic()
        if self._spec.part == "fine-tune":
            self._first = self._masters(trainer)

    def on_step(self, trainer: TrainingRun, step: Step) -> None:
        self._ends.append(time.monotonic())

    @property
    def interval(self) -> float:
        """Median time between the ends of two steps in seconds; 0 if there were none."""
        between = [after - before for before, after in itertools.pairwise(self._ends)]
        return statistics.median(between) if between else 0.0

    def on_end(self, trainer: TrainingRun, error: BaseException | None) -> None:
        self.seconds = time.monotonic() - self.begin
        if error is None and self._first:
            self._compare(self._masters(trainer))

    def _masters(self, trainer: TrainingRun) -> list[torch.Tensor]:
        """Returns all fp32 master weights, one tensor [n] for each layer, on the CPU."""
        return [
            torch.cat([master.flatten() for master in trainer.state.masters(layer).values()]).cpu()
            for layer in trainer.plan.model.stack.values()
        ]

    def _compare(self, last: list[torch.Tensor]) -> None:
        """Sets `movement`, and stores the changes of at most SAMPLED weights."""
        changes = [after - before for before, after in zip(self._first, last, strict=True)]
        distance, norm = (
            sum(float(tensor.double().square().sum()) for tensor in tensors) ** 0.5
            for tensors in (changes, self._first)
        )
        count = sum(change.numel() for change in changes)
        moved = sum(int(change.count_nonzero()) for change in changes)
        self.movement = Movement(distance=distance, relative=distance / norm, changed=moved / count)
        # With an odd stride, no column of a matrix is sampled more often than others.
        every = -(-count // SAMPLED) | 1
        np.save(self._sample, torch.cat(changes)[::every].numpy())


class _FirstEvaluation(Callback):
    """Evaluates the weights from which a fine-tuning starts."""

    def __init__(self) -> None:
        self.loss: float | None = None

    def on_start(self, trainer: TrainingRun) -> None:
        corpus = open_data(
            trainer.config.data,
            trainer.plan.workload,
            trainer.folder,
            trainer.plan.model.vocabulary,
        )[1]
        assert corpus is not None, "the options name evaluation data"
        found = evaluate(trainer.executor, corpus.batches())
        self.loss = None if found is None else found.loss


def run(folder: Path, spec: RunSpec, first_seed: int) -> None:
    """Trains or continues the run, and writes its row.

    Args:
        folder: the folder of the comparison.
        spec: the run.
        first_seed: the least seed of the comparison, whose `exact` run fine-tunings start from.
    """
    device = torch.device("cpu") if spec.device == "cpu" else default_device()
    data, out = folder / "data", folder / "runs" / spec.name
    config = config_of(spec, data)
    plan, source = plan_of(spec, data, device), data
    if spec.part == "fine-tune":
        source = folder / "runs" / base_name(spec, first_seed) / "model"
    recorder, begun = _Recorder(spec, out.with_suffix(".npy")), _FirstEvaluation()
    resumes = spec.part == "training" and any(out.glob("checkpoints/*"))
    if not resumes:
        # Without a checkpoint there is nothing to continue. A fine-tuning starts again, because it
        # is short and the change of weights is measured from its first weights.
        shutil.rmtree(out, ignore_errors=True)
    fitted = Trainer(
        plan,
        model=source,
        config=config,
        out=out,
        resume="newest" if resumes else None,
        callbacks=[recorder, *([begun] if spec.part == "fine-tune" else [])],
        progress=False,
        device=device,
    ).fit()
    assert fitted.evaluation is not None, "a run ends with an evaluation"
    row = row_of(spec, (out / "metrics.jsonl").read_text().splitlines())
    before = () if begun.loss is None else ((0, begun.loss),)
    row = msgspec.structs.replace(
        row,
        held_out=(*before, *row.held_out),
        parameters=plan.model.parameters,
        epoch_tokens=recorder.epoch_tokens,
        interval_seconds=round(recorder.interval, 6),
        seconds=round(recorder.seconds, 3),
        movement=recorder.movement,
        machine=describe(device),
    )
    write_json(out.with_suffix(".json"), row)


def row_of(spec: RunSpec, lines: list[str]) -> QualityRow:
    """Returns the row of a run's `metrics.jsonl`, which has a line for each step and evaluation."""
    records = [json.loads(line) for line in lines]
    steps = [record for record in records if "loss" in record]
    evaluations = [record for record in records if "evaluation_loss" in record]
    means = [
        (steps[first + LOSSES - 1]["step"], statistics.fmean(step["loss"] for step in group))
        for first in range(0, len(steps) - LOSSES + 1, LOSSES)
        for group in [steps[first : first + LOSSES]]
    ] or [(steps[-1]["step"], statistics.fmean(step["loss"] for step in steps))]
    return QualityRow(
        spec=spec,
        tokens=len(steps) * spec.settings.step_tokens,
        held_out_tokens=evaluations[-1]["tokens"],
        training=tuple((step, round(loss, 6)) for step, loss in means),
        held_out=tuple((record["step"], record["evaluation_loss"]) for record in evaluations),
        step_seconds=statistics.median(step["seconds"] for step in steps[WARM_UP_STEPS:] or steps),
    )


def main() -> int:
    """Trains the run that the command's arguments name, and returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="the folder of the comparison")
    parser.add_argument("spec", help="the run, a RunSpec as JSON")
    parser.add_argument("first_seed", type=int, help="the least seed of the comparison")
    args = parser.parse_args()

    def work() -> int:
        run(args.folder, msgspec.json.decode(args.spec, type=RunSpec), args.first_seed)
        return 0

    return run_program("quality", work)


if __name__ == "__main__":
    sys.exit(main())
