"""Tests of learning rates: after the warm-up they are those of transformers.

The warm-up is one step ahead of transformers, so the first step has a rate above zero.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import get_scheduler

from megatrain.runtime.training.learning_rate import LearningRate
from megatrain.simulator.base.errors import UserError

STEPS, WARM_UP, DECAY = 50, 7, 13
FLOOR = {
    "cosine_with_min_lr": {"min_lr_rate": 0.1},
    "warmup_stable_decay": {"num_decay_steps": DECAY, "decay_type": "linear", "min_lr_ratio": 0.1},
}


def theirs(name: str) -> list[float]:
    """Returns the rate of each step under transformers' schedule."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=3e-4)
    schedule: Any = get_scheduler(
        name,
        optimizer,
        num_warmup_steps=WARM_UP,
        num_training_steps=STEPS,
        scheduler_specific_kwargs=FLOOR.get(name),
    )
    rates = []
    for _ in range(STEPS):
        rates.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    return rates


@pytest.mark.parametrize(
    ("name", "ours"),
    [
        ("constant_with_warmup", {"kind": "constant"}),
        ("linear", {"kind": "linear"}),
        ("cosine", {"kind": "cosine"}),
        ("cosine_with_min_lr", {"kind": "cosine", "floor": 0.1}),
        ("warmup_stable_decay", {"kind": "wsd", "decay_steps": DECAY, "floor": 0.1}),
    ],
)
def test_rates_are_those_of_transformers(name: str, ours: dict[str, Any]) -> None:
    schedule = LearningRate(rate=3e-4, warm_up_steps=WARM_UP, **ours)
    rates, wanted = [schedule.at(number, STEPS) for number in range(1, STEPS + 1)], theirs(name)
    assert rates[WARM_UP:] == pytest.approx(wanted[WARM_UP:], rel=1e-12)
    assert len(set(rates)) > 3
    if name != "warmup_stable_decay":  # its warm-up begins at the floor
        assert rates[: WARM_UP - 1] == pytest.approx(wanted[1:WARM_UP], rel=1e-12)


def test_wsd_decays_in_a_tenth_of_the_steps_by_default() -> None:
    schedule = LearningRate(kind="wsd", rate=1.0, warm_up_steps=0)
    assert [schedule.at(number, 40) for number in (1, 36, 37, 38, 39, 40)] == [
        1.0,
        1.0,
        1.0,
        0.75,
        0.5,
        0.25,
    ]


@pytest.mark.parametrize("kind", ["constant", "linear", "cosine", "wsd"])
def test_the_first_step_has_a_rate_and_none_is_above_the_peak(kind: Any) -> None:
    for warm_up in (0, 1, 5):
        rates = [
            LearningRate(kind=kind, rate=2.0, warm_up_steps=warm_up).at(number, 10)
            for number in range(1, 11)
        ]
        assert rates[0] == 2.0 / max(warm_up, 1)
        assert max(rates) == 2.0
        assert min(rates) > 0


def test_a_warm_up_without_room_for_the_decay_is_refused() -> None:
    LearningRate(kind="constant", warm_up_steps=10).settled(5, pretrained=True)
    LearningRate(kind="cosine", warm_up_steps=4).settled(5, pretrained=True)
    with pytest.raises(
        UserError,
        match=(
            r"^schedule: warm_up_steps: found 5, and 1 of decay, in a training of 5; allowed: at"
            r" most 4 with kind cosine; fix: "
        ),
    ):
        LearningRate(kind="cosine", warm_up_steps=5).settled(5, pretrained=True)
    with pytest.raises(UserError, match=r"found 2, and 9 of decay, in a training of 10"):
        LearningRate(kind="wsd", warm_up_steps=2, decay_steps=9).settled(10, pretrained=True)


@pytest.mark.parametrize(
    ("steps", "pretrained", "said"),
    [
        (760, True, "1e-5, cosine, 23 warm-up steps"),
        (760, False, "3e-4, cosine, 23 warm-up steps"),
        (1, True, "1e-5, cosine, 0 warm-up steps"),
        (44, True, "1e-5, cosine, 1 warm-up step"),
    ],
)
def test_defaults_depend_on_the_weights_and_the_steps(
    steps: int, pretrained: bool, said: str
) -> None:
    schedule = LearningRate().settled(steps, pretrained=pretrained)
    assert str(schedule) == said
    assert schedule.settled(2 * steps, pretrained=not pretrained) == schedule
    assert max(schedule.at(number, steps) for number in range(1, steps + 1)) == schedule.rate


def test_settings_of_the_user_are_kept() -> None:
    schedule = LearningRate(kind="wsd", rate=0.0, warm_up_steps=0, decay_steps=5)
    assert schedule.settled(5, pretrained=True) == schedule
    whole_decay = LearningRate(kind="wsd", decay_steps=100).settled(100, pretrained=True)
    assert whole_decay.warm_up_steps == 0, "the default leaves room for the decay"
