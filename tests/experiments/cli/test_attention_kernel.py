"""Tests of `--attention`: a given kernel is kept, and a chosen one is the same in all verbs."""

from __future__ import annotations

import argparse
import json
import shlex
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from short_model import SHORT, checked, out

from megatrain.experiments.cli import main as cli
from megatrain.experiments.cli.training import prepare
from megatrain.runtime.layers import attention
from megatrain.runtime.training.config import Config, TrainingSettings
from megatrain.simulator.base.errors import UserError
from megatrain.simulator.hardware.machine import HardwareSpec
from megatrain.simulator.model.specs import ModelSpec
from megatrain.simulator.model.workload import Workload
from megatrain.simulator.planner.attention_kernel import kernel_gain
from megatrain.simulator.schedule.plan import Plan
from megatrain.simulator.verdict import advice, alternatives

MODEL = ("config.json", "--hardware", "h200")
WORK = ("--batch", "2", "--seq", "16384", "--plain-packing")
NOTE = "attention kernel cudnn was chosen: layers compute"
H200 = HardwareSpec.load("h200")

pytestmark = pytest.mark.usefixtures("short_config")


def planned(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[Plan, str]:
    """Returns the plan that `plan` writes and loads again, and the printed text."""
    printed = out(capsys, "plan", *MODEL, *words, "--out", "plan.toml")
    return Plan.load(Path("plan.toml")), " ".join(printed.split())


def test_check_and_plan_choose_the_same_kernel_and_say_its_gain(
    capsys: pytest.CaptureFixture[str],
) -> None:
    verdict = checked(capsys, *MODEL, *WORK)
    assert verdict["workload"]["attention"] == "cudnn"
    assert verdict["kernel_chosen"]
    work = Workload(batch=2, sequence=16384, attention="cudnn", short_recompute=True)
    assert verdict["kernel_gain"] == pytest.approx(kernel_gain(SHORT, H200, work))
    plan, printed = planned(capsys, *WORK)
    assert msgspec.to_builtins(plan.workload) == verdict["workload"]
    assert plan.prediction
    assert plan.prediction.step_seconds == verdict["step_seconds"]
    assert 'attention = "cudnn"' in Path("plan.toml").read_text()
    said = f"{NOTE} {verdict['kernel_gain']:.0%} faster than predicted without --attention"
    for text in (printed, " ".join(out(capsys, "check", *MODEL, *WORK).split())):
        assert said in text
        assert "--deterministic needs --attention flash" in text


@pytest.mark.parametrize("words", [(), ("--tokens-per-step", "65536"), ("--accumulation", "3")])
def test_the_next_command_writes_the_plan_of_the_verdict(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...]
) -> None:
    asked = ("--seq", "16384", "--plain-packing", *words)
    verdict = checked(capsys, *MODEL, *asked)
    assert verdict["workload"]["attention"] == "cudnn"
    printed = out(capsys, "check", *MODEL, *asked)
    joined = " ".join(line.strip().removesuffix("\\").strip() for line in printed.splitlines())
    out(capsys, "plan", *shlex.split(joined.partition("megatrain plan ")[2].partition(" #")[0]))
    plan = Plan.load(Path("plan.toml"))
    assert msgspec.to_builtins(plan.workload) == verdict["workload"]
    assert plan.prediction
    assert plan.prediction.step_seconds == verdict["step_seconds"]
    assert "--attention cudnn" in joined.partition("megatrain train ")[2].partition("#")[0]


def test_a_kernel_that_is_named_is_kept(capsys: pytest.CaptureFixture[str]) -> None:
    for kernel in ("flash", "cudnn", "flash4"):
        words = (*WORK, "--attention", kernel)
        verdict = checked(capsys, *MODEL, *words)
        assert (verdict["workload"]["attention"], verdict["kernel_chosen"]) == (kernel, False)
        assert verdict["kernel_gain"] is None
        plan, printed = planned(capsys, *words)
        assert plan.workload.attention == kernel
        assert "was chosen" not in printed


@pytest.mark.parametrize(
    "words",
    [
        ("--batch", "2", "--seq", "16384"),  # documents
        (*WORK, "--dtype", "fp32"),
        (*WORK, "--hardware", "rtx4090", "--batch", "1"),
        (*WORK, "--policy", "zero3_offload"),
    ],
    ids=["documents", "dtype", "machine", "other system"],
)
def test_a_workload_without_a_choice_names_no_kernel(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...]
) -> None:
    verdict = checked(capsys, *MODEL, *words)
    assert (verdict["workload"]["attention"], verdict["kernel_gain"]) == (None, None)
    plan, printed = planned(capsys, *words)
    assert plan.workload.attention is None
    assert "was chosen" not in printed


@pytest.mark.parametrize("kernel", ["flash", "cudnn", "flash4"])
def test_a_kernel_that_cannot_compute_the_model_is_refused(
    capsys: pytest.CaptureFixture[str], kernel: str
) -> None:
    """`train` would refuse the plan on every device."""
    words = ("gemma-2-9b", "--hardware", "h200", "--attention", kernel)
    for verb in (["check", *words], ["plan", *words, "--out", "plan.toml"]):
        assert cli.main(verb) == 2
        assert capsys.readouterr().err.endswith(
            f"--attention: found {kernel} for a gemma2 model; allowed: full causal attention in"
            " every layer, in the families llama, mistral, qwen2, qwen3; fix: leave --attention"
            " out\n"
        )
    assert not Path("plan.toml").exists()


def test_an_optional_kernel_is_advised_and_planned_only_if_it_is_named(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The advice keeps documents apart and names the package. Applying it gives its speed."""
    long = ("--batch", "1", "--seq", "65536")
    verdict = checked(capsys, *MODEL, *long)
    assert verdict["workload"]["attention"] is None
    (entry,) = (each for each in verdict["advice"] if "attention" in each["options"])
    assert entry["change"] == "--attention flash4"
    assert entry["note"] == "needs the package flash-attn-4, rounds differently"
    after = checked(capsys, *MODEL, *long, "--attention", "flash4")
    assert after["workload"]["documents"]
    gain = after["tokens_per_second"] / verdict["tokens_per_second"] - 1
    assert gain == pytest.approx(entry["gain"], abs=0.01)
    assert not any("attention" in each["options"] for each in after["advice"])
    plan, printed = planned(capsys, *long, "--attention", "flash4")
    assert (plan.workload.attention, plan.workload.documents) == ("flash4", True)
    assert "--attention" not in printed


def test_an_optional_kernel_is_refused_for_a_machine_without_a_rate_for_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = (MODEL[0], "--hardware", "a100-80-sxm", "--attention", "flash4")
    for verb in (["check", *words], ["plan", *words, "--out", "plan.toml"]):
        assert cli.main(verb) == 2
        assert capsys.readouterr().err == (
            "megatrain: hardware a100-80-sxm: attention: found no rate for flash4; allowed: a"
            " machine with [attention.flash4]: the library's Hopper GPUs, or a Hopper or Blackwell"
            " GPU that was calibrated with the package flash-attn-4 installed; fix: leave"
            " --attention out, or calibrate again with the package installed\n"
        )
    assert not Path("plan.toml").exists()


def test_the_list_of_models_and_the_table_of_policies_have_the_chosen_kernel(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(alternatives, "library_models", lambda: [SHORT])
    (listed,) = json.loads(out(capsys, "check", *MODEL[1:], *WORK, "--json"))["models"]
    expected = checked(capsys, *MODEL, *WORK)
    names = ("workload", "kernel_gain", "kernel_chosen")
    assert [listed[name] for name in names] == [expected[name] for name in names]
    table = checked(capsys, *MODEL, *WORK, "--policy", "all")["policies"]
    assert {row["workload"]["attention"] for row in table} == {"cudnn"}
    assert {row["kernel_gain"] for row in table} == {expected["kernel_gain"]}


@pytest.mark.parametrize(("words", "again"), [((), True), (("--attention", "cudnn"), False)])
def test_a_chosen_kernel_is_chosen_again_for_other_machines_and_models(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    words: tuple[str, ...],
    again: bool,
) -> None:
    asked: list[bool] = []

    def found(*_: Any, choose_kernel: bool, **__: Any) -> list[Any]:
        asked.append(choose_kernel)
        return []

    monkeypatch.setattr(advice, "alternatives", found)
    tight = ("--device-memory", "1GiB", "--host-memory", "1GiB")
    assert cli.main(["check", *MODEL, *WORK, *tight, *words]) == 3
    assert cli.main(["plan", *MODEL, *WORK, *tight, *words, "--out", "plan.toml"]) == 3
    capsys.readouterr()
    assert asked == [again, again]


def test_other_commands_name_no_kernel() -> None:
    for words in (
        ["sweep", "tiny", "--hardware", "h200", "--plain-packing", "--out", "x"],
        ["calibrate", "--plain-packing", "--out", "x"],
    ):
        assert cli.parse(words).attention is None


def test_a_changed_plan_keeps_its_kernel(capsys: pytest.CaptureFixture[str]) -> None:
    plan, _ = planned(capsys, *WORK)
    printed = out(
        capsys, "plan", "--from", "plan.toml", "--set", "checkpoint_interval=1", "--out", "new.toml"
    )
    assert Plan.load(Path("new.toml")).workload == plan.workload
    assert "was chosen" not in printed


def trained(
    monkeypatch: pytest.MonkeyPatch, *, has_kernel: bool = True, deterministic: bool = False
) -> argparse.Namespace:
    """Returns the options of `train MODEL` on a device that has every kernel or none."""

    def kernel_of(_: ModelSpec, work: Workload, __: torch.device) -> str:
        if has_kernel:
            return str(work.attention)
        raise UserError("workload: attention", found="none", allowed="one", fix="")

    monkeypatch.setattr(attention, "kernel_of", kernel_of)
    args = cli.parse(["train", *MODEL, "--data", "corpus", *WORK, "--out", "run"])
    args.dtype, args.accumulation = "bf16", 1
    config = Config(training=TrainingSettings(steps=1, deterministic=deterministic))
    return prepare._with_attention_kernel(args, H200, SHORT, config, torch.device("cuda"))


def test_train_chooses_a_kernel_that_its_device_has(monkeypatch: pytest.MonkeyPatch) -> None:
    assert trained(monkeypatch).attention == "cudnn"
    assert trained(monkeypatch, has_kernel=False).attention is None
    assert trained(monkeypatch, deterministic=True).attention is None


def test_train_refuses_a_kernel_that_is_not_deterministic_at_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Otherwise the machine would be measured and the plan searched before."""
    words = ("--data", "no such data", "--attention", "cudnn", "--deterministic", "--out", "run")
    assert cli.main(["train", *MODEL, *words]) == 2
    printed = capsys.readouterr()
    assert printed.err == (
        "megatrain: --attention: found cudnn in deterministic mode, although its backward is not"
        " deterministic; allowed: flash, or no --attention; fix: leave --attention out, or train"
        " without --deterministic\n"
    )
    assert not printed.out


def test_train_on_a_cpu_chooses_no_kernel() -> None:
    args = cli.parse(["train", *MODEL, "--data", "corpus", *WORK, "--out", "run"])
    args.dtype, args.accumulation = "bf16", 1
    config = Config(training=TrainingSettings(steps=1))
    found = prepare._with_attention_kernel(args, H200, SHORT, config, torch.device("cpu"))
    assert found.attention is None


@pytest.mark.parametrize("verb", [("check",), ("plan", "--out", "plan.toml")])
@pytest.mark.parametrize(
    ("machine", "kernel", "allowed"),
    [
        ("mi300x", "cudnn", "flash or PyTorch's choice"),
        ("ryzen-ai-max-395-128gb", "flash4", "flash or PyTorch's choice"),
        ("apple-m4-max", "flash", "PyTorch's choice"),
        ("apple-m3-ultra", "cudnn", "PyTorch's choice"),
    ],
)
def test_a_kernel_that_the_gpu_cannot_have_is_refused_in_one_line(
    capsys: pytest.CaptureFixture[str],
    verb: tuple[str, ...],
    machine: str,
    kernel: str,
    allowed: str,
) -> None:
    words = (MODEL[0], "--hardware", machine, "--plain-packing", "--attention", kernel)
    assert cli.main([*verb, *words]) == 2
    assert capsys.readouterr().err == (
        f"megatrain: hardware {machine}: attention_kernels: found no {kernel}; allowed: {allowed};"
        " fix: leave --attention out\n"
    )
    assert not Path("plan.toml").exists()


def test_flash_attention_is_accepted_for_a_gpu_of_amd(capsys: pytest.CaptureFixture[str]) -> None:
    words = (MODEL[0], "--hardware", "mi300x", "--attention", "flash", "--batch", "1")
    assert checked(capsys, *words)["workload"]["attention"] == "flash"
