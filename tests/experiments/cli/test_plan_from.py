"""Tests of `megatrain plan --from PLAN --set KEY=VALUE`, which changes knobs and predicts again.

Others test the names of models and machines in written plans.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest

from megatrain.simulator.policies import verified
from megatrain.simulator.schedule.plan import Plan

FROM = ("plan", "--from", "plan.toml", "--out", "new.toml")


@pytest.mark.usefixtures("workplace")
def test_a_knob_is_changed_and_the_plan_predicted_again(command: Any) -> None:
    before = Plan.load(Path("plan.toml"))
    outcome = command(*FROM, "--set", "checkpoint_interval=2", "--set", "chunk_bytes=64KiB")
    assert (outcome.status, outcome.err) == (0, "")
    after = Plan.load(Path("new.toml"))
    assert (after.knobs.checkpoint_interval, after.knobs.chunk_bytes) == (2, 2**16)
    assert before.prediction
    assert after.prediction
    assert after.prediction != before.prediction
    assert after.digest == verified(after).digest != before.digest
    first, _, _ = outcome.out.partition("\n")
    assert first.startswith("step ")
    assert first.endswith(" in plan.toml")
    assert "tokens" not in first
    changed = {"knobs", "digest", "prediction"}
    kept = [name for name in Plan.__struct_fields__ if name not in changed]
    assert all(getattr(after, name) == getattr(before, name) for name in kept)


@pytest.mark.usefixtures("workplace")
def test_a_policy_and_a_placement_are_changed(command: Any) -> None:
    words = ("--set", "policy=overlapped", "--set", "weights=e,0-1", "--set", "seq=8")
    outcome = command(*FROM, *words)
    assert outcome.status == 0
    tokens, before = re.findall(r"of (\d+) tokens, [\d,]+ tokens/s", outcome.out)
    assert (int(tokens), int(before)) == (2 * 8, 2 * 16)
    plan = Plan.load(Path("new.toml"))
    assert (plan.policy, plan.knobs.placement.weights) == ("overlapped", "e,0-1")
    assert plan.workload.sequence == 8


@pytest.mark.usefixtures("workplace")
def test_plan_from_repairs_a_plan_edited_by_hand(command: Any) -> None:
    text = Path("plan.toml").read_text()
    interval = "checkpoint_interval = 1"
    assert interval in text
    Path("plan.toml").write_text(text.replace(interval, "checkpoint_interval = 2"))
    assert "`megatrain plan --from PLAN --out NEW`" in command("simulate", "plan.toml").err
    assert command(*FROM).status == 0
    assert command("simulate", "new.toml").status == 0


@pytest.mark.usefixtures("workplace")
def test_a_limit_beyond_the_machine_is_refused_and_the_fix_works(command: Any) -> None:
    text, limit = Path("plan.toml").read_text(), 2**50
    edited = re.sub(r"(?m)^device_limit_bytes = .*$", f"device_limit_bytes = {limit}", text)
    Path("plan.toml").write_text(edited)
    refused = command(*FROM)
    assert refused.status == 2
    assert "plan.toml: device_limit_bytes: found 1024.00 TiB" in refused.err
    (fix,) = re.findall(r"fix: write (--set \S+), or less", refused.err)
    assert command(*FROM, *fix.split()).status == 0
    assert Plan.load(Path("new.toml")).device_limit_bytes < limit


def test_paths_in_the_plan_are_relative_to_the_new_one(workplace: Path, command: Any) -> None:
    from megatrain.simulator.hardware import machine

    shutil.copy(machine.library()["l40s"], "here.toml")
    words = ("--batch", 2, "--seq", 16, "--loss-chunk", 16)
    command("plan", "tiny", "--hardware", "here.toml", *words, "--out", "plan.toml")
    (workplace / "below").mkdir()
    assert command("plan", "--from", "plan.toml", "--out", "below/new.toml").status == 0
    plan = Plan.load(workplace / "below" / "new.toml")
    assert (plan.source, plan.hardware) == ("../tiny", "../here.toml")
    assert command("simulate", "below/new.toml").status == 0


@pytest.mark.parametrize(
    ("words", "found", "fix"),
    [
        (("--set", "checkpoint_intervall=1"), "'checkpoint_intervall'", "checkpoint_interval?"),
        (("--set", "checkpoint_interval=two"), "'two'", "another value"),
        (("--set", "checkpoint_interval=0"), "0", "set checkpoint_interval = 1"),
        (("--set", "checkpoint_interval"), "'checkpoint_interval'", "checkpoint_interval=1"),
        (("--set", "weights_ahead=1"), "policy double_buffer does not read", "another policy"),
        (("--set", "rebuild_outputs=1"), "policy double_buffer does not read", "another policy"),
        (("--set", "policy=overlapped", "--set", "rebuild_outputs=2"), "2", "rebuild_outputs = 1"),
        (("--set", "weights=e"), "policy double_buffer does not read", "another policy"),
        (
            ("--set", "policy=overlapped", "--set", "exchange_bytes=1MiB"),
            "policy overlapped does not read with one GPU",
            "leave it out",
        ),
        (("--set", "device_memory=1000TiB"), "1000.00 TiB", "write --set device_memory="),
        (("--set", "weight_slots=4097"), "4097", "set weight_slots = 2"),
        (("--batch", 3), "--batch as well", "--set KEY=VALUE"),
        (("--hardware", "h200"), "--hardware as well", "--set KEY=VALUE"),
        (("tiny",), "MODEL as well", "--set KEY=VALUE"),
        (("--set", "batch=1", "seq=8"), "seq=8 without --set", "write --set seq=8"),
    ],
)
def test_invalid_changes_give_one_line_errors(
    words: tuple[object, ...], found: str, fix: str, workplace: Path, command: Any
) -> None:
    outcome = command(*FROM, *words)
    assert outcome.status == 2
    line, _, shown = outcome.err.rpartition("; fix: ")
    assert found in line
    assert fix in shown
    assert outcome.err.count("\n") == 1
    assert not (workplace / "new.toml").exists()


@pytest.mark.usefixtures("workplace")
def test_a_change_that_does_not_fit_has_its_own_status(command: Any) -> None:
    outcome = command(*FROM, "--set", "device_memory=1KiB")
    assert outcome.status == 3
    assert "no plan that fits" in outcome.err
    assert not Path("new.toml").exists()


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ((), "no MODEL, --hardware"),
        (("tiny",), "no --hardware"),
        (("tiny", "--hardware", "h200", "--set", "batch=1"), "--set without --from"),
    ],
)
@pytest.mark.usefixtures("workplace")
def test_without_from_a_model_and_a_machine_are_needed(
    words: tuple[str, ...], found: str, command: Any
) -> None:
    outcome = command("plan", *words, "--out", "new.toml")
    assert outcome.status == 2
    assert outcome.err.startswith(f"megatrain: plan: found {found}; ")


@pytest.mark.usefixtures("workplace")
def test_a_plan_has_the_library_s_names_and_the_hub_s(command: Any) -> None:
    """A hub name is not replaced, because the weights are on the hub."""
    words = ("--hardware", "RTX 4090", "--policy", "resident", "--batch", 1, "--seq", 16)
    names = {"Qwen3 0.6B": "qwen3-0.6b", "Qwen/Qwen3-0.6B": "Qwen/Qwen3-0.6B"}
    plans = []
    for written, kept in names.items():
        assert command("plan", written, *words, "--out", "new plan.toml").status == 0
        plans.append(Plan.load(Path("new plan.toml")))
        assert (plans[-1].source, plans[-1].hardware) == (kept, "rtx4090")
    assert msgspec.structs.replace(plans[0], source="") == msgspec.structs.replace(
        plans[1], source=""
    )


@pytest.mark.usefixtures("workplace")
def test_a_name_with_a_blank_is_printed_in_quotes(command: Any) -> None:
    outcome = command("plan", "--from", "plan.toml", "--out", "new plan.toml")
    assert "\nwrote 'new plan.toml': " in outcome.out


@pytest.mark.usefixtures("workplace")
def test_a_plan_for_several_gpus_is_predicted_and_trained_by_ranks_only(command: Any) -> None:
    """`simulate` describes each rank, and `train` refuses the plan before it reads anything."""
    words = ("--set", "policy=overlapped", "--set", "accumulation=2")
    outcome = command(*FROM, *words, "--set", "gpus=2")
    assert (outcome.status, outcome.err) == (0, "")
    assert "2 GPUs of" in outcome.out
    first, _, _ = outcome.out.partition("\n")
    assert re.search(r" 64 tokens, [\d,]+ tokens/s on 2 GPUs; it was .* tokens/s on 1 GPU", first)
    plan = Plan.load(Path("new.toml"))
    assert (plan.gpus, plan.digest) == (2, verified(plan).digest)
    simulated = command("simulate", "new.toml")
    assert simulated.status == 0
    assert "lane exchange" in simulated.out
    assert "policy overlapped, 2 GPUs, schedule " in simulated.out
    assert simulated.out.count("each GPU") == 3
    assert "evaluation" in simulated.out
    Path("x.txt").write_text("some text. " * 100)
    refused = command("train", "new.toml", "--data", "x.txt", "--steps", "1", "--out", "run")
    assert refused.status == 2
    error = "ranks: found 1; allowed: 2, the GPUs of the plan; fix: start the command with"
    assert error in refused.err
    kept = ("--set", "weights=all", "--set", "moments=0", "--set", "placement.gradients=h")
    moved = command("plan", "--from", "new.toml", "--out", "kept.toml", *kept)
    assert (moved.status, moved.err) == (0, "")
    plan = Plan.load(Path("kept.toml"))
    held = {buffer.pool for buffer in verified(plan).buffers if buffer.sharded}
    assert held >= {f"device.{name}" for name in ("weights", "moments", "gradients")}
    on_host = command("plan", "--from", "new.toml", "--out", "no.toml", "--set", "host_updated=0")
    assert on_host.status == 2
    assert "plan for 2 GPUs: knobs.placement: host_updated: found 0" in on_host.err
    one = command("plan", "--from", "kept.toml", "--out", "one.toml", "--set", "gpus=1")
    assert one.status == 0
    assert Plan.load(Path("one.toml")).gpus == 1
    wrong = command(*FROM, *words, "--set", "gpus=3")
    assert "plan: gpus: found 3" in wrong.err


@pytest.mark.usefixtures("workplace")
def test_the_ranks_of_a_host_divide_its_memory(command: Any) -> None:
    """The limit of a plan is that of each rank, so it changes with the number of ranks."""
    words = ("policy=overlapped", "accumulation=4", "host_updated=", "host_memory=8GiB")
    source, limits = "plan.toml", list[int]()
    more = (("gpus=4",), ("hosts=2", "network=50"), ("gpus=1", "hosts=1"))
    for number, changes in enumerate((words, *more, ("host_memory=6GiB", "gpus=4"))):
        out, sets = f"{number}.toml", [word for each in changes for word in ("--set", each)]
        outcome = command("plan", "--from", source, "--out", out, *sets)
        assert (outcome.status, outcome.err) == (0, "")
        limits.append(Plan.load(Path(out)).host_limit_bytes)
        source = out
    assert limits == [2**33, 2**31, 2**32, 2**33, 6 * 2**28]


@pytest.mark.usefixtures("workplace")
def test_a_rank_s_part_of_the_host_s_memory_is_not_exceeded(command: Any) -> None:
    words = ("policy=overlapped", "accumulation=2", "host_updated=", "gpus=2", "host_memory=1MiB")
    outcome = command(*FROM, *(word for each in words for word in ("--set", each)))
    assert outcome.status == 3
    assert "and 512.00 KiB of host memory" in outcome.err


@pytest.mark.usefixtures("workplace")
def test_sums_of_groups_of_micro_batches_are_planned_for_one_gpu(command: Any) -> None:
    words = ("policy=overlapped", "accumulation=4", "sum_group=2", "micro_batch_group=2")
    outcome = command(*FROM, *(word for each in words for word in ("--set", each)))
    assert (outcome.status, outcome.err) == (0, "")
    plan = Plan.load(Path("new.toml"))
    assert (plan.gpus, plan.workload.sum_group) == (1, 2)
    assert plan.digest == verified(plan).digest


def test_plan_writes_a_plan_for_several_gpus(command: Any, tmp_path: Path) -> None:
    out = tmp_path / "plan.toml"
    words = ("--hardware", "h200", "--batch", "1", "--gpus", "2", "--host-memory", "1TiB")
    outcome = command("plan", "qwen2.5-7b", *words, "--out", out)
    assert (outcome.status, outcome.err) == (0, "")
    assert "on 2 GPUs" in " ".join(outcome.out.split())
    plan = Plan.load(out)
    assert (plan.gpus, plan.policy, plan.workload.accumulation) == (2, "overlapped", 2)
    refused = command("plan", "qwen2.5-7b", *words, "--optimizer", "muon", "--out", out)
    assert refused.status == 2
    assert "plan for 2 GPUs: workload: optimizer: found muon" in refused.err


@pytest.mark.usefixtures("workplace")
def test_gradients_are_set_in_the_workload(command: Any) -> None:
    words = ("policy=overlapped", "gradients=8bit", "placement.gradients=0")
    outcome = command(*FROM, *(word for each in words for word in ("--set", each)))
    assert (outcome.status, outcome.err) == (0, "")
    plan = Plan.load(Path("new.toml"))
    assert (plan.workload.gradients, plan.knobs.placement.gradients) == ("8bit", "0")
