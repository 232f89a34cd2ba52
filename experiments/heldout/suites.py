"""Suites: the calibrated workloads, and the cases that are held out of the calibration.

`refuse_grid` checks that no case has the batch and sequence of a point of the calibration's grid.
The most useful cases come first, in case a run is cut off. Models have few layers: a layer costs as
much as in the whole model, and registering their memory takes less time.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import msgspec

from megatrain.runtime.calibration import presets
from megatrain.simulator.base.errors import UserError
from megatrain.simulator.hardware.cost_table import CostTable
from megatrain.simulator.model.specs import ModelSpec
from megatrain.simulator.model.workload import Workload

ALTERNATIVES = {
    "overlapped": (
        "nothing stays",
        "host updates",
        "one slot",
        "half stays",
        "offloaded_inputs",
        "small copies",
    ),
    "k_buffer": ("four slots", "blocks of two", "blocks of four", "small copies"),
}
"""Policy -> changes to its best plan. The planner's choice is compared with these variants."""
NEARBY = (
    "one layer less",
    "one layer less, no host updates",
    "one layer less, half of host updates",
    "one layer less, three slots",
    "one layer less, inputs stay",
    "half stays",
    "one slot",
    "two slots",
    "one gradient slot",
    "small copies",
    "large copies",
    "blocks of two",
)
"""Changes to the best plan of `overlapped`. Most of them change its step time by a few per cent."""
POLICIES = ("overlapped", "k_buffer", "double_buffer", "sequential")
BEST = "best"
"""The policy of a case that takes the planner's choice among all policies that can be executed."""


class HeldoutCase(NamedTuple):
    """One plan to predict and to execute."""

    model: str
    """The model's name in the suite."""
    batch: int
    """Sequences in a micro-batch."""
    sequence: int
    """Tokens in a sequence."""
    policy: str
    """A policy's name, or BEST."""
    device_cap: int | None = None
    """Device memory in bytes. None for the whole device."""
    accumulation: int = 1
    """Micro-batches in a step."""
    variant: str = ""
    """The change to the policy's best plan, a key of `VARIANTS` in `variants.py`."""
    compiled: bool = False
    """Whether layers run through torch.compile."""

    @property
    def name(self) -> str:
        """The case's name: model, workload, cap, policy, variant, and `compiled`."""
        cap = f"{self.device_cap / 2**30:g}GiB" if self.device_cap else "whole"
        return (
            f"{self.model}/{self.accumulation}x{self.batch}x{self.sequence}/{cap}/{self.policy}"
            + (f"/{self.variant}" if self.variant else "")
            + ("/compiled" if self.compiled else "")
        )


class Suite(NamedTuple):
    """One calibration and its cases."""

    models: dict[str, ModelSpec]
    """Models by name. The machine's rates are measured with the first one."""
    base: Workload
    """The first calibrated workload. Its other fields hold for every case."""
    grid: tuple[tuple[int, int], ...]
    """(batch, sequence) of the calibrated points in addition to the base."""
    cases: tuple[HeldoutCase, ...]
    """The cases, the most useful first."""
    host_bytes: int | None = None
    """Host memory that plans may use. None for the machine's own value."""
    device_bytes: int | None = None
    """Device memory that plans may use. None for the machine's own value."""
    calibrated: tuple[str, ...] = ()
    """The models that are calibrated, if not all. The layers of the others are not measured."""
    library: str = ""
    """The library's machine from whose rates every case is predicted. Nothing is calibrated then.
    Empty to calibrate."""
    chooses_loss_chunk: bool = False
    """Whether the planner chooses the loss chunk of each case. Otherwise it is that of `base`."""

    def workload(self, case: HeldoutCase) -> Workload:
        """Returns the workload of a case."""
        work = self._at(case.batch, case.sequence, case.accumulation)
        return msgspec.structs.replace(work, compiled=work.compiled or case.compiled)

    def measured(self) -> dict[str, ModelSpec]:
        """Returns the models that are calibrated, by name."""
        if self.library:
            return {}
        return {name: self.models[name] for name in self.calibrated or self.models}

    def points(self) -> list[Workload]:
        """Returns the workloads of the grid."""
        return [self._at(batch, sequence) for batch, sequence in self.grid]

    def _at(self, batch: int, sequence: int, accumulation: int = 1) -> Workload:
        base = self.base
        return Workload(
            batch=batch,
            sequence=sequence,
            accumulation=accumulation,
            dtype=base.dtype,
            loss_chunk=base.loss_chunk,
            compiled=base.compiled,
            no_dropout=base.no_dropout,
        )


def refuse_grid(suite: Suite, cases: Iterable[HeldoutCase], table: CostTable | None = None) -> None:
    """Raises UserError for a case whose layer shapes and workload were calibrated, as a point of
    the suite's grid or of `table`.
    """
    measured = {
        f"{model.shape}/{point.shape}"
        for model in suite.measured().values()
        for point in (suite.base, *suite.points())
    }
    measured |= {shape for shapes in (table.compute.values() if table else ()) for shape in shapes}
    for case in cases:
        if f"{suite.models[case.model].shape}/{suite.workload(case).shape}" in measured:
            raise UserError(
                f"case {case.name}",
                found="a point of the calibration's grid",
                allowed="a workload that is not calibrated",
                fix="change its batch or sequence",
            )


def _h200() -> Suite:
    """Returns the suite for an H200: three models with the head counts of Llama, Qwen2.5 and Qwen3,
    4k to 128k tokens per step, and sequences of 1,024 to 4,096 tokens.
    """
    models = {
        "llama-3.2-3b-8": ModelSpec.load("llama-3.2-3b").with_layers(8),
        "qwen2.5-3b-10": ModelSpec.load("qwen2.5-3b").with_layers(10),
        "qwen3-4b-8": ModelSpec.load("qwen3-4b").with_layers(8),
    }
    cap = 16 * 2**30
    first, second, last = models
    cases = (
        # These cases compare the order of the policies, and the planner's choice.
        *(
            HeldoutCase(model, 16, 1024, policy, cap)
            for model in models
            for policy in (BEST, *POLICIES)
        ),
        *(HeldoutCase(model, 1, 4096, BEST, cap) for model in models),
        HeldoutCase(first, 8, 1024, BEST, cap, 4),
        HeldoutCase(second, 32, 4096, BEST),
        # The planner could have chosen these plans instead.
        *(
            HeldoutCase(model, 16, 1024, policy, cap, variant=variant)
            for model in models
            for policy, variants in ALTERNATIVES.items()
            for variant in variants
        ),
        # The cases above cover every target, in case the machine's time runs out. The next ones
        # have few tokens, an odd number of loss chunks, and many tokens on the whole device.
        *(
            HeldoutCase(model, 4, 1024, policy, cap)
            for model in models
            for policy in ("overlapped", "k_buffer", "sequential")
        ),
        *(HeldoutCase(model, 5, 1024, BEST, cap) for model in models),
        *(HeldoutCase(model, 16, 1024, "resident") for model in models),
        *(HeldoutCase(model, 8, 1024, BEST, cap, 4) for model in (second, last)),
        *(HeldoutCase(model, 32, 4096, BEST) for model in (first, last)),
        HeldoutCase(last, 4, 4096, "overlapped", cap, 4),
        HeldoutCase(first, 40, 3072, BEST),
    )
    grid = ((1, 2048), (3, 2048), (6, 2048), (24, 2048), (72, 2048), (48, 512), (3, 8192))
    return Suite(models, Workload(batch=12, sequence=2048, loss_chunk=2048), grid, cases)


_FAMILIES = {
    "qwen2.5-7b": 4,
    "gemma-2-9b": 4,
    "gpt-oss-20b": 4,
    "llama-3.1-8b": 4,
    "qwen3-30b-a3b": 4,
    "mistral-7b": 4,
    "qwen3-8b": 4,
    "gemma-3-4b": 6,
    "phi-4": 4,
    "mixtral-8x7b": 2,
    "olmo-2-7b": 4,
    "olmoe-1b-7b": 4,
    "granite-3.1-2b": 4,
    "glm-4-9b": 4,
    "command-r7b": 4,
    "starcoder2-7b": 4,
    "pythia-6.9b": 4,
    "phi-2": 4,
    "smollm3-3b": 4,
    "deepseek-v3": 3,
    "qwen3-next-80b-a3b": 4,
}
"""Model -> the number of layers that it is cut to, because one H200 with 128 GiB of host memory
must train it. The first three layers of deepseek-v3 are dense."""


FITTED = tuple(_FAMILIES)[::2]
"""The models to which the memory traffic of compute ops was fitted
(`simulator/costs/kernel_traffic.py`). The other models test it."""


def _families() -> Suite:
    """Returns the suite that tests predictions without a calibration: one model of each of 21
    families at its real width, predicted from the library's rates of an H200, with eager and with
    compiled layers.
    """
    whole = {name: ModelSpec.load(name) for name in _FAMILIES}
    models = {name: whole[name].with_layers(layers) for name, layers in _FAMILIES.items()}
    cases = (
        *(HeldoutCase(model, 16, 1024, BEST) for model in models),
        *(HeldoutCase(model, 16, 1024, BEST, compiled=True) for model in models),
        *(HeldoutCase(model, 2, 4096, BEST) for model in models),
        *(HeldoutCase(model, 2, 4096, BEST, compiled=True) for model in models),
    )
    base = Workload(batch=16, sequence=1024, loss_chunk=2048, no_dropout=True)
    return Suite(models, base, (), cases, library="h200", host_bytes=118 * 2**30)


def _default_set() -> Suite:
    """Returns the suite that tests the calibration that `megatrain calibrate --plain-packing` makes
    without a model: plans for its models, and for models of other families, whose layers it does
    not measure.
    """
    preset = presets.LARGE
    layers = {"qwen2.5-3b": 10, "llama-3.1-8b": 4, "qwen2.5-14b": 4}
    others = {
        "mistral-7b": 4,
        "gemma-2-9b": 4,
        "olmoe-1b-7b": 4,
        "starcoder2-7b": 4,
        "glm-4-9b": 4,
        "smollm3-3b": 8,
        "granite-3.1-2b": 8,
        "qwen3-30b-a3b": 4,
    }
    models = {
        name: ModelSpec.load(name).with_layers(count)
        for name, count in {**layers, **others}.items()
    }
    cap = 16 * 2**30
    first, second, third = preset.models
    cases = (
        *(HeldoutCase(model, 24, 1024, BEST, cap) for model in preset.models),
        *(HeldoutCase(model, 16, 1024, BEST) for model in others),
        *(HeldoutCase(model, 3, 4096, BEST) for model in models),
        *(HeldoutCase(model, 16, 1024, BEST, compiled=True) for model in ("mistral-7b", first)),
        HeldoutCase(second, 10, 1024, "k_buffer", cap),
        HeldoutCase(third, 10, 1024, "double_buffer", cap),
        HeldoutCase(first, 10, 1024, BEST, cap, 4),
        HeldoutCase(first, 24, 2048, BEST, cap, 8),
        HeldoutCase("olmoe-1b-7b", 16, 1024, BEST, compiled=True),
    )
    base = Workload(batch=preset.batch, sequence=preset.sequence, loss_chunk=2048, no_dropout=True)
    assert preset.grid is not None, "the preset names its grid"
    return Suite(models, base, preset.grid, cases, calibrated=preset.models)


def _compiled() -> Suite:
    """Returns the suite that tests calibrations of named models with compiled layers: a dense
    model, a mixture of experts, and one with linear attention, from 4k to 512k tokens per step.
    """
    dense, mixture, linear = "qwen2.5-7b", "olmoe-1b-7b", "qwen3-next-64-experts"
    few = {**ModelSpec.load("qwen3-next-80b-a3b").config, "num_experts": 64}
    models = {
        dense: ModelSpec.load(dense).with_layers(4),
        mixture: ModelSpec.load(mixture).with_layers(4),
        linear: ModelSpec.from_config(few, linear, linear).with_layers(4),
    }
    cap = 24 * 2**30
    cases = (
        *(HeldoutCase(model, 12, 1024, BEST, cap) for model in models),
        *(HeldoutCase(model, 1, 4096, BEST) for model in models),
        HeldoutCase(dense, 24, 1024, "overlapped", cap, variant="host updates"),
        HeldoutCase(dense, 1, 32768, BEST, cap),
        HeldoutCase(mixture, 8, 4096, BEST),
        HeldoutCase(dense, 24, 1024, BEST, cap, 3),
        HeldoutCase(mixture, 24, 1024, "k_buffer", cap),
        HeldoutCase(linear, 24, 1024, BEST),
        HeldoutCase(dense, 1, 131072, BEST),
        HeldoutCase(dense, 24, 1024, "double_buffer", cap),
        HeldoutCase(mixture, 12, 1024, "sequential", cap),
        HeldoutCase(dense, 32, 2048, BEST, None, 8),
    )
    base = Workload(batch=32, sequence=1024, loss_chunk=2048, compiled=True)
    grid = tuple((point.batch, point.sequence) for point in presets.usual_grid(base))
    return Suite(models, base, grid, cases, host_bytes=112 * 2**30)


def _choices() -> Suite:
    """Returns the suite that compares the planner's choice with the variants of `NEARBY` and with
    the policy `k_buffer`, for one model of the suite `h200`. Only this model is calibrated.
    """
    whole = _h200()
    model, cap = "qwen2.5-3b-10", 16 * 2**30
    cases = (
        HeldoutCase(model, 16, 1024, BEST, cap),
        *(HeldoutCase(model, 16, 1024, "overlapped", cap, variant=variant) for variant in NEARBY),
        HeldoutCase(model, 16, 1024, "k_buffer", cap),
    )
    return whole._replace(models={model: whole.models[model]}, grid=(), cases=cases)


def _figures() -> Suite:
    """Returns the suite that measures predictions of two figures of `paper_figures`, for the whole
    7B model on the library's H200: six plans of the Pareto front, and cells of the map of regimes.
    """
    model, gib = "qwen2.5-7b", 2**30
    front = (133, 92, 57, 42, 30, 18)
    cells = ((4, 133), (1, 133), (16, 133), (4, 96), (8, 64), (4, 24), (16, 24), (16, 48), (2, 12))
    cases = (
        *(HeldoutCase(model, 32, 1024, BEST, limit * gib) for limit in front),
        *(HeldoutCase(model, batch, 1024, BEST, limit * gib) for batch, limit in cells),
    )
    base = Workload(batch=32, sequence=1024)
    models = {model: ModelSpec.load(model)}
    return Suite(
        models, base, (), cases, library="h200", host_bytes=116 * gib, chooses_loss_chunk=True
    )


def _tiny_model(name: str, **changes: object) -> ModelSpec:
    config = {
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 320,
        "tie_word_embeddings": True,
        "rms_norm_eps": 1e-5,
    }
    return ModelSpec.from_config({**config, **changes}, name, name)


def _tiny() -> Suite:
    """Returns a suite to try the script on a CPU in half a minute. Its accuracy means nothing."""
    models = {
        "tiny": _tiny_model("tiny"),
        "tiny-heads": _tiny_model("tiny-heads", num_attention_heads=8, num_key_value_heads=4),
    }
    cases = (
        *(HeldoutCase("tiny", 4, 16, policy) for policy in (BEST, *POLICIES)),
        *(
            HeldoutCase("tiny", 4, 16, "overlapped", variant=variant)
            for variant in ("one slot", "nothing stays")
        ),
        HeldoutCase("tiny-heads", 3, 16, "k_buffer", 2**27, accumulation=2),
        HeldoutCase("tiny-heads", 2, 24, BEST),
    )
    base = Workload(batch=2, sequence=16, loss_chunk=32, dtype="fp32")
    return Suite(models, base, ((8, 16), (2, 32)), cases, host_bytes=2**32, device_bytes=2**31)


def suite(name: str) -> Suite:
    """Returns the suite of a name. Raises UserError for an unknown one."""
    suites = {
        "h200": _h200,
        "families": _families,
        "default-set": _default_set,
        "compiled": _compiled,
        "choices": _choices,
        "figures": _figures,
        "tiny": _tiny,
    }
    if name not in suites:
        raise UserError(
            "--suite", found=repr(name), allowed=", ".join(suites), fix="name one of these"
        )
    return suites[name]()
