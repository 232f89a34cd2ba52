"""Tests of routers that draw random numbers to choose experts or as noise in their input.

Every plan draws the same numbers, and so does transformers with a generator of the same seed. An
evaluation draws none.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from whole_models import drawn, model_of, scale_of, token_losses, whole_model

from megatrain.runtime.batch import Batch
from megatrain.runtime.layers.functional_layers import config_of
from megatrain.runtime.layers.layer_draws import LayerDraws, seed_of
from megatrain.runtime.layers.supported import refuse_unsupported
from megatrain.runtime.training.config import Config
from megatrain.runtime.training.trainer import Trainer
from megatrain.simulator.base.errors import UserError
from megatrain.simulator.model.specs import ModelSpec
from megatrain.simulator.model.workload import Workload
from megatrain.simulator.schedule.plan import Placement, Plan

LIMITS = {"device_limit_bytes": 2**30, "host_limit_bytes": 2**30, "chunk_bytes": 2**20}


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_every_plan_draws_the_same(
    executable: Callable[..., Plan], session: Callable[..., Any], dtype: str
) -> None:
    """Losses and weights have the same bits under every plan, and other bits with another seed.

    Layers are recomputed, saved, or have their weights in slots.
    """
    plans = [
        executable(policy, model=model_of("phimoe"), accumulation=2, dtype=dtype, **LIMITS, **knobs)
        for policy, knobs in (
            ("resident", {}),
            ("overlapped", {"placement": Placement(saved_activations="0,2")}),
            ("overlapped", {"checkpoint_interval": 2}),
        )
    ]
    found = []
    for plan in plans:
        with session(plan, seed=7) as running:
            found.append(running.bits())
    assert found[0] == found[1] == found[2]
    with session(plans[0], seed=8) as running:
        assert running.bits().results != found[0].results


def test_each_step_has_its_own_random_numbers_and_repeats_them(run: Callable[..., Any]) -> None:
    with run(model_of("phimoe"), accumulation=2) as running:
        batches = drawn(running.plan)
        before = torch.get_rng_state()
        first, second, again = (
            running.executor.step(batches, rate=0.0, number=number).loss for number in (1, 2, 1)
        )
        assert first == again != second
        assert torch.equal(torch.get_rng_state(), before), "others draw what they would have drawn"


def test_random_numbers_follow_the_seed_of_the_run_also_after_a_resume(
    executable: Callable[..., Plan], tmp_path: Path
) -> None:
    plan = executable("resident", model=model_of("phimoe"), dtype="fp32", **LIMITS)
    whole_model(plan, config_of(plan.model)).save_pretrained(tmp_path / "model")

    class Rows:
        def step(self, number: int) -> list[Batch]:
            return drawn(plan)

    def weights(out: str, seed: int, steps: int, resume: Literal["newest"] | None = None) -> bytes:
        config = Config.load(
            None,
            {
                "training.steps": steps,
                "training.seed": seed,
                "schedule.kind": "constant",
                "saving.every_steps": 1,
                "saving.export": False,
            },
        )
        Trainer(
            plan,
            tmp_path / "model",
            Rows(),
            config,
            out=tmp_path / out,
            resume=resume,
            progress=False,
            device=torch.device("cpu"),
        ).fit()
        (newest,) = sorted((tmp_path / out / "checkpoints").glob(f"*{steps}"))
        return (newest / "state-00001.safetensors").read_bytes()

    whole, other = weights("whole", 1, 2), weights("other", 2, 2)
    weights("resumed", 1, 1)
    assert weights("resumed", 1, 2, "newest") == whole != other


def test_an_evaluation_draws_nothing_as_in_transformers(run: Callable[..., Any]) -> None:
    with run(model_of("phimoe")) as running:
        batches = drawn(running.plan)
        model = whole_model(running.plan, config_of(running.plan.model)).eval()
        with torch.no_grad():
            losses = [token_losses(model(batch.ids).logits, batch.labels) for batch in batches]
        for _ in range(2):
            found = running.executor.evaluate(batches).loss
            assert found == pytest.approx(float(sum(losses)) * scale_of(batches), rel=1e-5)
            trained = running.executor.step(batches, rate=0.0, number=1).loss
            assert trained != pytest.approx(found, rel=1e-4), "a step after it draws again"


def test_the_generator_gets_its_state_back_after_a_failure() -> None:
    draws, before = LayerDraws(torch.device("cpu"), 5), torch.get_rng_state()
    draws.step = 3
    with draws.seeded("1", 2):
        assert torch.initial_seed() == seed_of(5, 3, 2, "1")

    def fails() -> None:
        with draws.seeded("1", 2):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    assert torch.equal(torch.get_rng_state(), before)


def test_draws_of_run_step_micro_batch_and_layer_differ() -> None:
    seeds = {
        seed_of(run, step, micro, str(layer))
        for run in range(10)
        for step in range(10)
        for micro in range(10)
        for layer in range(10)
    }
    assert len(seeds) > 9_990


def test_jitter_noise_does_not_count_as_dropout() -> None:
    model = model_of("phimoe", router_jitter_noise=0.01, input_jitter_noise=0.02)
    refuse_unsupported(model, Workload(batch=2, sequence=16, no_dropout=True))
    refuse_unsupported(model, Workload(batch=2, sequence=16))
    config = config_of(model)
    assert (config.router_jitter_noise, config.input_jitter_noise) == (0.01, 0.02)
    with pytest.raises(UserError, match=r"attention_dropout: found 0\.1; allowed: 0; fix: make"):
        refuse_unsupported(model_of("phimoe", attention_dropout=0.1))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_local_experts": 1, "num_experts_per_tok": 1}, "num_local_experts: found 1; allowed"),
        (
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}},
            "rope_parameters: found .*; allowed: a rope_type of default or longrope",
        ),
    ],
)
def test_invalid_noise_is_refused_by_its_key(changes: dict[str, Any], message: str) -> None:
    config = {**model_of("phimoe").config, **changes}
    with pytest.raises(UserError, match=message):
        ModelSpec.from_config(config, "config.json")
