"""Suites: what is calibrated, and the cases that are held out of it.

Nothing is fitted to a case: none has the batch and sequence of a point of the grid, which `refuse_grid` checks. Cases stand in the order in which they are
worth most, so that a run that is cut off leaves the best part. Models are cut to few layers: a layer costs what it costs in the whole model, and memory is
registered sooner.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from megatrain.simulator.errors import UserError
from megatrain.simulator.hardware import CostTable
from megatrain.simulator.specs import ModelSpec
from megatrain.simulator.workload import Workload

ALTERNATIVES = {
    "overlapped": ("nothing stays", "host updates", "one slot", "half stays", "parked", "small copies"),
    "k_buffer": ("four slots", "blocks of two", "blocks of four", "small copies"),
}
"""policy -> what is changed in its best plan, so that the planner's choice has something to be compared with"""
POLICIES = ("overlapped", "k_buffer", "double_buffer", "sequential")
BEST = "best"
"""the planner's choice among all that the runtime executes"""


class Case(NamedTuple):
    """One plan to predict and to execute."""

    model: str
    batch: int
    sequence: int
    policy: str
    """a policy's name, or BEST"""
    device_cap: int | None = None
    """bytes; None for the whole device"""
    accumulation: int = 1
    variant: str = ""
    """what is changed in the best plan of the policy (`variants.py`)"""

    @property
    def name(self) -> str:
        cap = f"{self.device_cap / 2**30:g}GiB" if self.device_cap else "whole"
        return f"{self.model}/{self.accumulation}x{self.batch}x{self.sequence}/{cap}/{self.policy}" + (f"/{self.variant}" if self.variant else "")


class Suite(NamedTuple):
    """One calibration and its cases."""

    models: dict[str, ModelSpec]
    """the first one stands for the machine's rates"""
    base: Workload
    grid: tuple[tuple[int, int], ...]
    """(batch, sequence) besides the base"""
    cases: tuple[Case, ...]
    host_bytes: int | None = None
    """what plans may use; None for what the machine says"""
    device_bytes: int | None = None

    def workload(self, case: Case) -> Workload:
        return self._at(case.batch, case.sequence, case.accumulation)

    def points(self) -> list[Workload]:
        """Of the grid."""
        return [self._at(batch, sequence) for batch, sequence in self.grid]

    def _at(self, batch: int, sequence: int, accumulation: int = 1) -> Workload:
        base = self.base
        return Workload(batch=batch, sequence=sequence, accumulation=accumulation, dtype=base.dtype, loss_chunk=base.loss_chunk, compiled=base.compiled)


def refuse_grid(suite: Suite, cases: Iterable[Case], table: CostTable | None = None) -> None:
    """Raises UserError for a case that was, or is to be, calibrated on: whose layers under whose workload are a point of the grid."""
    measured = {f"{model.shape}/{point.shape}" for model in suite.models.values() for point in (suite.base, *suite.points())}
    measured |= {shape for shapes in (table.compute.values() if table else ()) for shape in shapes}
    for case in cases:
        if f"{suite.models[case.model].shape}/{suite.workload(case).shape}" in measured:
            raise UserError(
                f"case {case.name}", found="a point of the calibration's grid", allowed="what was not calibrated on", fix="change its batch or its sequence"
            )


def _h200() -> Suite:
    """Three shapes, one with the head counts of Llama, one of Qwen3; 4k to 128k tokens a step, sequences of 1,024 and 4,096."""
    models = {
        "llama-3.2-3b-8": ModelSpec.load("llama-3.2-3b").with_layers(8), "qwen2.5-3b-10": ModelSpec.load("qwen2.5-3b").with_layers(10),
        "qwen3-4b-8": ModelSpec.load("qwen3-4b").with_layers(8),
    }  # fmt: skip
    cap = 16 * 2**30
    first, second, last = models
    cases = [Case(model, 16, 1024, policy, cap) for model in models for policy in (BEST, *POLICIES)]  # their order, and the planner's choice
    cases += [Case(model, 1, 4096, BEST, cap) for model in models] + [Case(first, 8, 1024, BEST, cap, 4), Case(second, 32, 4096, BEST)]
    for model in models:  # what else the planner could have chosen
        cases += [Case(model, 16, 1024, policy, cap, variant=variant) for policy, variants in ALTERNATIVES.items() for variant in variants]
    # Every target has its cases by now, should the machine's time end. Few tokens, an odd number of chunks of the loss, many tokens on the whole device:
    cases += [Case(model, 4, 1024, policy, cap) for model in models for policy in ("overlapped", "k_buffer", "sequential")]
    cases += [Case(model, 5, 1024, BEST, cap) for model in models] + [Case(model, 16, 1024, "resident") for model in models]
    cases += [Case(model, 8, 1024, BEST, cap, 4) for model in (second, last)] + [Case(model, 32, 4096, BEST) for model in (first, last)]
    cases += [Case(last, 4, 4096, "overlapped", cap, 4), Case(first, 40, 3072, BEST)]
    grid = ((1, 2048), (3, 2048), (6, 2048), (24, 2048), (72, 2048), (48, 512), (3, 8192))
    return Suite(models, Workload(batch=12, sequence=2048, loss_chunk=2048), grid, tuple(cases))


def _tiny_model(name: str, **changes: object) -> ModelSpec:
    config = {
        "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
        "vocab_size": 320, "tie_word_embeddings": True, "rms_norm_eps": 1e-5,
    }  # fmt: skip
    return ModelSpec.from_config({**config, **changes}, name, name)


def _tiny() -> Suite:
    """To try the script itself, in half a minute on a CPU: what it says of accuracy means nothing."""
    models = {"tiny": _tiny_model("tiny"), "tiny-heads": _tiny_model("tiny-heads", num_attention_heads=8, num_key_value_heads=4)}
    cases = [Case("tiny", 4, 16, policy) for policy in (BEST, *POLICIES)]
    cases += [Case("tiny", 4, 16, "overlapped", variant=variant) for variant in ("one slot", "nothing stays")]
    cases += [Case("tiny-heads", 3, 16, "k_buffer", 2**27, accumulation=2), Case("tiny-heads", 2, 24, BEST)]
    base = Workload(batch=2, sequence=16, loss_chunk=32, dtype="fp32")
    return Suite(models, base, ((8, 16), (2, 32)), tuple(cases), host_bytes=2**32, device_bytes=2**31)


def suite(name: str) -> Suite:
    """`h200` or `tiny`. Raises UserError for another name."""
    made = {"h200": _h200, "tiny": _tiny}
    if name not in made:
        raise UserError("--suite", found=repr(name), allowed=", ".join(made), fix="name one of these")
    return made[name]()
