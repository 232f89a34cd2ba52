"""Tests of the reasons for a plan: its runner-up, the gain of one more GiB, and when not to stream.

Reasons are the same in every process.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from short_model import shortened
from small_model import SMALL

from megatrain.experiments.cli.verdict import text as verdict_text
from megatrain.simulator import policies
from megatrain.simulator.base.errors import UserError
from megatrain.simulator.costs import cost_model
from megatrain.simulator.hardware.machine import HardwareSpec
from megatrain.simulator.model.specs import ModelSpec
from megatrain.simulator.model.workload import Workload
from megatrain.simulator.planner.assessment import Choice, assess
from megatrain.simulator.planner.batch_splits import best_split, splits
from megatrain.simulator.planner.placement_search import PlacementSearch
from megatrain.simulator.planner.search import _least_seconds, candidates, search
from megatrain.simulator.verdict.marginal_memory import GIB, MarginalMemory, one_more_gib
from megatrain.simulator.verdict.verdict import explain, judge

pytestmark = pytest.mark.usefixtures("without_libraries")

H200 = HardwareSpec.load("h200")
WORK = Workload(batch=32, sequence=1024)
HALF = ModelSpec.load("qwen2.5-0.5b")


def flat(text: str) -> str:
    """The text without its line breaks and columns."""
    return " ".join(text.split())


def chosen(work: Workload = WORK, **more: Any) -> Choice:
    return candidates(SMALL, H200, work, **more)[0]


def marginal_memory(choice: Choice) -> dict[str, MarginalMemory]:
    plan = choice.plan
    return {
        marginal.place: marginal
        for marginal in one_more_gib(choice, H200, cost_model(H200, plan.model, plan.workload))
    }


def test_a_model_that_fits_is_not_streamed_and_the_reason_says_so() -> None:
    choice = candidates(HALF, H200, Workload(batch=4, sequence=1024))[0]
    assert not any(op.lane in ("h2d", "d2h") for op in policies.lower(choice.plan).ops)
    verdict = explain(choice, H200, advise=False)
    assert not verdict.streams
    assert "; everything stays on the GPU, nothing is copied" in flat(verdict_text.text(verdict))
    why = flat(verdict_text.text(verdict, why=True))
    assert "Plan policy overlapped: do not stream, everything stays on the device, " in why
    assert {marginal.gain for marginal in verdict.one_more_gib} == {0.0}
    streamed = explain(
        candidates(HALF, H200, Workload(batch=4, sequence=1024), device_limit=4 * GIB)[0],
        H200,
        advise=False,
    )
    assert streamed.streams
    assert "nothing is copied" not in flat(verdict_text.text(streamed, why=True))


def test_the_runner_up_is_another_plan_and_not_faster() -> None:
    choice = chosen(device_limit=8 * GIB)
    second = choice.runner_up
    assert second is not None
    assert second.knobs is not None
    assert second.knobs != choice.plan.knobs
    assert second.step_seconds >= choice.step_seconds
    plan = msgspec.structs.replace(choice.plan, policy=second.policy, knobs=second.knobs)
    played = assess(plan, cost_model(H200, SMALL, WORK))
    assert played.feasible
    assert played.step_seconds == pytest.approx(second.step_seconds, rel=0.001)
    text = flat(verdict_text.text(explain(choice, H200, advise=False), why=True))
    assert f"Second policy {second.policy}, " in text


def test_with_many_micro_batches_the_engine_s_time_decides_which_plan_is_second() -> None:
    """The search itself times only two micro-batches."""
    work = Workload(batch=4, sequence=512, accumulation=6)
    choice = PlacementSearch(
        chosen(work, device_limit=7 * GIB).plan, cost_model(H200, SMALL, work)
    ).best()
    second = choice.runner_up
    assert second is not None
    plan = msgspec.structs.replace(choice.plan, knobs=second.knobs)
    played = assess(plan, cost_model(H200, SMALL, work))
    assert played.step_seconds == second.step_seconds
    assert second.step_seconds >= choice.step_seconds


def test_policies_that_recompute_are_not_searched_where_saving_is_faster() -> None:
    """Policies that recompute many micro-batches are not searched if saving activations is faster.

    The bound is the compute of all micro-batches, not of two.
    """
    work = Workload(batch=8, sequence=256, accumulation=32)
    found = candidates(SMALL, H200, work, device_limit=20 * GIB)
    assert {choice.plan.policy for choice in found} == {"overlapped", "resident"}
    assert _least_seconds("k_buffer", found[0], H200) > found[0].step_seconds


def test_another_policy_may_come_second() -> None:
    found = candidates(
        SMALL,
        H200,
        WORK,
        device_limit=8 * GIB,
        policies=["double_buffer", "k_buffer", "sequential", "zero3_offload"],
    )
    second = found[0].runner_up
    assert second is not None
    assert (second.policy, second.step_seconds) == min(
        (choice.plan.policy, choice.step_seconds)
        for choice in found[1:]
        if choice.plan.policy in ("double_buffer", "k_buffer")
    )


@pytest.mark.parametrize(
    "work",
    [
        WORK,
        Workload(batch=4, sequence=512),
        Workload(batch=2, sequence=256, accumulation=2, clipping="none"),
        Workload(batch=32, sequence=1024, accumulation=2),
        Workload(batch=2, sequence=256, accumulation=7),
        Workload(batch=32, sequence=1024, accumulation=5, clipping="layer"),
    ],
)
def test_a_policy_that_is_not_searched_could_not_have_been_faster(work: Workload) -> None:
    """The bound that excludes a policy is not above the policy's best step."""
    best = chosen(work, device_limit=8 * GIB)
    searched = search(SMALL, H200, work, policies=["k_buffer"])[0]
    bound = _least_seconds("k_buffer", best, H200)
    assert 0 < bound <= searched.step_seconds
    second = best.runner_up
    assert second is None or not second.at_least or second.step_seconds == bound


def test_advice_that_the_model_refuses_is_left_out() -> None:
    """Layers with linear attention cannot be compiled if they compute pieces of tokens."""
    model = ModelSpec.load("qwen3-next-80b-a3b").with_layers(4)
    work = Workload(batch=1, sequence=4096, token_piece=2048)
    verdict = judge(model, H200, work)
    assert verdict.feasible
    assert not any("compile" in entry.options for entry in verdict.advice)
    compiled = msgspec.structs.replace(work, compiled=True)
    with pytest.raises(UserError, match="fix: leave out --compile or --token-piece"):
        search(model, H200, compiled, policies=["overlapped"])


@pytest.mark.parametrize("limit", [5.5, 7, 9])
def test_one_more_gib_of_device_memory_gains_what_a_new_search_finds(limit: float) -> None:
    before = int(limit * GIB)
    choice = chosen(device_limit=before)
    marginal = marginal_memory(choice)["device"]
    again = chosen(device_limit=before + GIB, policies=[choice.plan.policy])
    assert marginal.gain > 0.003
    assert marginal.gain == pytest.approx(choice.step_seconds / again.step_seconds - 1, abs=0.005)
    assert marginal.knobs is not None
    wider = msgspec.structs.replace(
        choice.plan, knobs=marginal.knobs, device_limit_bytes=before + GIB
    )
    assert assess(wider, cost_model(H200, SMALL, WORK)).feasible
    text = flat(verdict_text.text(explain(choice, H200, advise=False), why=True))
    assert "one more GiB of device memory: +" in text
    assert ", with the same policy" in text  # `Faster` may name a gain of another policy


def test_one_more_gib_of_host_memory_helps_only_where_the_host_is_full() -> None:
    roomy = chosen(device_limit=7 * GIB)
    assert (marginal_memory(roomy)["host"].gain, marginal_memory(roomy)["host"].knobs) == (
        0.0,
        None,
    )
    host = 15 * GIB // 2
    tight = chosen(device_limit=7 * GIB, host_limit=host)
    marginal = marginal_memory(tight)["host"]
    assert tight.feasible
    assert marginal.gain > 0.05
    assert marginal.knobs is not None
    wider = msgspec.structs.replace(tight.plan, knobs=marginal.knobs, host_limit_bytes=host + GIB)
    assert assess(wider, cost_model(H200, SMALL, WORK)).feasible
    again = chosen(device_limit=7 * GIB, host_limit=host + GIB)
    assert marginal.gain == pytest.approx(tight.step_seconds / again.step_seconds - 1, abs=0.005)


def test_one_more_gib_of_host_memory_gains_by_plans_that_need_it() -> None:
    """One GiB more holds what the host needs to update all streamed layers."""
    model, machine = HALF.with_layers(8), HardwareSpec.load("rtx4090")
    work = Workload(batch=1, sequence=512, clipping="none", loss_chunk=512)

    def best(host_limit: int) -> Choice:
        return candidates(
            model,
            machine,
            work,
            policies=["overlapped"],
            device_limit=round(1.8 * GIB),
            host_limit=host_limit,
        )[0]

    tight, roomy = best(3 * GIB), best(4 * GIB)
    _, host = one_more_gib(tight, machine, cost_model(machine, model, work))
    assert host.place == "host"
    assert host.gain == pytest.approx(tight.step_seconds / roomy.step_seconds - 1, abs=0.1)
    assert host.gain > 0.3


def test_one_more_gib_of_device_memory_saves_activations_where_nothing_is_copied() -> None:
    """With a slow link and one core, all state stays on the device, and layers are recomputed."""
    slow = msgspec.structs.replace(
        HardwareSpec.load("rtx4090"), h2d_gb_per_s=3.0, d2h_gb_per_s=3.0
    ).with_cores(1)
    work = Workload(batch=1, sequence=4096)

    def best(gib: int) -> Choice:
        return candidates(
            HALF, slow, work, policies=["overlapped"], device_limit=gib * GIB, host_limit=100 * GIB
        )[0]

    tight, roomy = best(13), best(14)
    assert not tight.streams
    device, host = one_more_gib(tight, slow, cost_model(slow, HALF, work))
    assert device.gain == pytest.approx(tight.step_seconds / roomy.step_seconds - 1)
    assert device.gain > 0.03
    assert host.gain == 0


def test_one_more_gib_of_host_memory_holds_attention_outputs() -> None:
    """The host holds all state and all layer inputs already."""
    model, machine = ModelSpec.load("llama-3.2-1b"), HardwareSpec.load("gh200-96")
    work = Workload(batch=1, sequence=131072, token_piece=2048)

    def best(gib: int) -> Choice:
        return candidates(
            model,
            machine,
            work,
            policies=["overlapped"],
            device_limit=18 * GIB,
            host_limit=gib * GIB,
        )[0]

    tight, roomy = best(25), best(26)
    _, host = one_more_gib(tight, machine, cost_model(machine, model, work))
    assert roomy.plan.placed("offloaded_attention")
    assert roomy.plan.placed("saved_attention") > tight.plan.placed("saved_attention")
    assert host.gain == pytest.approx(tight.step_seconds / roomy.step_seconds - 1)
    assert host.gain > 0.01


def test_a_policy_of_fixed_places_is_searched_again_only_where_memory_is_short() -> None:
    """A policy without placements gains nothing by one more GiB if its memory is not short."""
    choice = candidates(SMALL, H200, WORK, device_limit=round(6.3 * GIB), policies=["k_buffer"])[0]
    assert choice.feasible
    assert marginal_memory(choice)["host"].knobs is None
    roomy = candidates(SMALL, H200, WORK, policies=["k_buffer"])[0]
    assert all(marginal.knobs is None for marginal in marginal_memory(roomy).values())


@pytest.mark.parametrize(
    ("limit", "tokens"), [(12, 16384), pytest.param(7, 32768, marks=pytest.mark.nightly)]
)
def test_the_split_of_a_step_s_tokens_is_within_2_percent_of_the_fastest(
    limit: int, tokens: int
) -> None:
    """The chosen split of a step's tokens into micro-batches is within 2 % of the fastest."""
    work = Workload(batch=1, sequence=1024)
    found = best_split(SMALL, H200, work, tokens, device_limit=limit * GIB)[0]
    assert found.plan.workload.step_tokens == tokens
    every = [
        choice
        for split in splits(work, tokens)
        if (choice := chosen(split, device_limit=limit * GIB)).feasible
    ]
    assert len(every) > 2
    assert found.step_seconds <= 1.02 * min(choice.step_seconds for choice in every)


def test_a_plan_for_many_micro_batches_differs_from_one_for_two() -> None:
    """A plan for many micro-batches differs from a plan for two.

    The update runs once a step, so with many micro-batches saved activations are worth more than
    resident state.
    """
    work = Workload(batch=1, sequence=1024, accumulation=64)
    many = chosen(work, device_limit=7 * GIB)
    few = chosen(msgspec.structs.replace(work, accumulation=2), device_limit=7 * GIB)
    like_two = assess(
        msgspec.structs.replace(few.plan, workload=work), cost_model(H200, SMALL, work)
    )
    assert many.plan.knobs.placement.saved_activations != few.plan.knobs.placement.saved_activations
    assert many.step_seconds < 0.9 * like_two.step_seconds


@pytest.mark.parametrize("policy", ["k_buffer", "resident"])
def test_the_tokens_are_split_for_a_policy_of_fixed_places_too(policy: str) -> None:
    found = best_split(
        SMALL,
        H200,
        Workload(batch=1, sequence=1024),
        32768,
        device_limit=12 * GIB if policy == "resident" else 5 * GIB,
        policies=[policy],
    )[0]
    assert found.plan.policy == policy
    assert found.plan.workload.step_tokens == 32768


def test_a_number_of_tokens_that_is_not_whole_sequences_is_refused() -> None:
    with pytest.raises(UserError, match="use 33792"):
        splits(Workload(batch=1, sequence=1024), 33_500)


def test_two_processes_with_other_hash_seeds_write_the_same_plan(tmp_path: Path) -> None:
    model = str(tmp_path / shortened("qwen2.5-0.5b", 8, tmp_path))
    for seed in ("1", "2"):
        words = [sys.executable, "-m", "megatrain.experiments.cli", "plan", model]
        words += ["--hardware", "h200", "--device-memory", "6GiB"]
        words += ["--tokens-per-step", "32768", "--out", str(tmp_path / f"{seed}.toml")]
        done = subprocess.run(
            words,
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        )
        (tmp_path / f"{seed}.txt").write_text(done.stdout.replace(f"{seed}.toml", "plan.toml"))
    assert (tmp_path / "1.toml").read_bytes() == (tmp_path / "2.toml").read_bytes()
    assert (tmp_path / "1.txt").read_text() == (tmp_path / "2.txt").read_text()


@pytest.mark.nightly  # smaller models are asked above
@pytest.mark.parametrize("step_tokens", [32768, 131072])
def test_a_plan_of_14_billion_says_why(step_tokens: int) -> None:
    model = ModelSpec.load("qwen2.5-14b")
    choice = best_split(model, H200, Workload(batch=1, sequence=1024), step_tokens)[0]
    verdict = explain(choice, H200)
    assert (verdict.runner_up is not None, len(verdict.one_more_gib)) == (True, 2)
