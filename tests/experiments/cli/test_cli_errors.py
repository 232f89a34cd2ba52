"""Tests of the error messages of the command line.

Every mistake ends the command with status 2 and one line: the value found, the allowed values and
the fix. Nothing is written. A failure after training has begun has status 1.
"""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from megatrain.experiments.cli import file_arguments
from megatrain.experiments.run_report import pictures
from megatrain.runtime.files import model_files
from megatrain.runtime.training.metrics_file import MetricsFile
from megatrain.simulator.base.errors import UserError
from megatrain.simulator.hardware.machine import HardwareSpec
from megatrain.simulator.schedule.plan import Plan
from megatrain.simulator.schedule.timeline import Timeline

CHECK = ("check", "qwen2.5-7b", "--hardware", "h200")
PLAN = ("plan", "tiny", "--hardware", "h200", "--out", "new.toml")
TRAIN = (
    "train",
    "plan.toml",
    "--data",
    "corpus",
    "--steps",
    "2",
    "--device",
    "cpu",
    "--out",
    "new",
)
CALIBRATE = (
    "calibrate",
    "tiny",
    "--batch",
    "2",
    "--seq",
    "16",
    "--device",
    "cpu",
    "--out",
    "new.toml",
)
SEVERAL = ("calibrate", "--several", "h200", "--device", "cpu", "--out", "new.toml")
PLAN_FROM = ("plan", "--from", "plan.toml", "--out", "new.toml")
LONG = "a" * 300


def edited(name: str, *changes: tuple[str, str]) -> Callable[[], None]:
    """Returns a function that replaces text in a file and asserts that the text is there."""

    def edit() -> None:
        text = Path(name).read_text()
        for old, new in changes:
            assert old in text, f"{name} has no {old!r}"
            text = text.replace(old, new)
        Path(name).write_text(text)

    return edit


def written(name: str, content: bytes | str) -> Callable[[], None]:
    def write() -> None:
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_bytes(content if isinstance(content, bytes) else content.encode())

    return write


def hardware(*changes: tuple[str, str]) -> Callable[[], None]:
    """Returns a function that writes an edited copy of the library's h200 to hw.toml."""

    def edit() -> None:
        library = (
            Path(sys.modules[HardwareSpec.__module__].__file__ or "").parents[1]
            / "library"
            / "hardware"
            / "h200.toml"
        )
        shutil.copyfile(library, "hw.toml")
        edited("hw.toml", *changes)()

    return edit


def truncated(name: str) -> Callable[[], None]:
    return lambda: os.truncate(name, os.path.getsize(name) // 2)


def cut_short() -> None:
    """Cuts plan.toml in the middle of a line, as a full disk would."""
    Path("plan.toml").write_text(Path("plan.toml").read_text().partition("cab_size")[0])


def limited(**limits: int) -> Callable[[], None]:
    """Returns a function that changes the memory limits in plan.toml."""

    def edit() -> None:
        plan = Plan.load(Path("plan.toml"))
        edited(
            "plan.toml",
            *(
                (f"{field} = {getattr(plan, field)}", f"{field} = {limit}")
                for field, limit in limits.items()
            ),
        )()

    return edit


def nothing() -> None:
    pass


class Mistake(NamedTuple):
    """A command with a mistake, and what each part of its error message must contain."""

    words: tuple[str, ...]
    found: str
    allowed: str
    fix: str
    prepare: Callable[[], Any] = nothing
    status: int = 2


MISTAKES = {
    "no verb": Mistake((), "no VERB", "VERB is one of check, plan, simulate", "--help"),
    "no list": Mistake(("list",), "no WHAT", "WHAT is one of models, hardware", "list --help"),
    "unknown verb": Mistake(("chekc",), "'chekc'", "check, plan, simulate", "megatrain --help"),
    "unknown option": Mistake(
        (*CHECK, "--bacth", "3"), "--bacth", "megatrain check", "did you mean --batch?"
    ),
    "misspelt option that is needed": Mistake(
        ("check", "qwen2.5-7b", "--hardwre", "h200"),
        "--hardwre",
        "an option of `megatrain check`",
        "did you mean --hardware?",
    ),
    "name that lacks its quotes": Mistake(
        ("check", "qwen2.5-7b", "--hardware", "rtx", "4090"), "4090", "options", "in quotes"
    ),
    "abbreviation of several options": Mistake(
        (*CHECK, "--d", "3"), "several options", "--device-memory, --dtype", "--help"
    ),
    "abbreviation of an option and its fields": Mistake(
        (*TRAIN, "--dat", "x"), "several options", "--data, --data-cache", "did you mean --data"
    ),
    "option of other programs": Mistake(
        (*TRAIN, "--learning-rate", "1e-4"), "--learning-rate", "an option", "did you mean --lr?"
    ),
    "value of an option that has none": Mistake(
        (*CHECK, "--json=3"), "the value '3'", "the option alone", "--help"
    ),
    "negative size after a blank": Mistake(
        (*CHECK, "--device-memory", "-24GiB"), "'-24GiB'", "a positive size", "24GiB"
    ),
    "unknown field of the config": Mistake(
        (*TRAIN, "--set", "lrate=1"), "no field", "megatrain train --help", "did you mean rate?"
    ),
    "option without value": Mistake(
        (*CHECK, "--batch"), "no value", "one value", "megatrain check --help"
    ),
    "missing hardware option": Mistake(
        ("plan", "qwen2.5-7b", "--out", "new.toml"),
        "no --hardware",
        "--hardware H",
        "megatrain plan --help",
    ),
    "size without a unit": Mistake(
        (*CHECK, "--device-memory", "24"), "24, a number without a unit", "GiB (G)", "write 24GiB"
    ),
    "more device memory than there is": Mistake(
        (*CHECK, "--device-memory", "0.5TiB"),
        "512.00 GiB",
        "at most 133.70 GiB, which is what programs can use of the GPU memory of H200",
        "leave it out",
    ),
    "unknown dtype": Mistake((*CHECK, "--dtype", "fp16"), "'fp16'", "bf16, fp32", "--help"),
    "size that is none": Mistake((*CHECK, "--host-memory", "banana"), "'banana'", "GiB", "24GiB"),
    "negative size": Mistake(
        (*CHECK, "--device-memory=-3GiB"), "'-3GiB'", "a positive size", "24GiB"
    ),
    "negative batch": Mistake((*CHECK, "--batch", "-3"), "'-3'", ">= 1", "--batch 1"),
    "batch beyond reason": Mistake(
        (*CHECK, "--batch", "99999999999"), "99999999999", "1 to 1048576", "batch"
    ),
    "zero cores": Mistake((*CHECK, "--cores", "0"), "'0'", ">= 1", "--cores 1"),
    "steps that are no number": Mistake(
        (*TRAIN, "--steps", "1e3"), "'1e3'", "a whole number >= 0", "--steps 1"
    ),
    "rate that is no number": Mistake((*TRAIN, "--lr", "nan"), "'nan'", ">= 0", "--lr 1e-5"),
    "negative rate": Mistake((*TRAIN, "--lr", "-1"), "'-1'", ">= 0", "--lr 1e-5"),
    "negative rate by its other name": Mistake(
        (*TRAIN, "--rate", "-1"), "'-1'", ">= 0", "--lr 1e-5"
    ),
    "no epoch": Mistake((*TRAIN, "--epochs", "0"), "'0'", "above 0", "--epochs 1"),
    "steps and epochs": Mistake(
        (*TRAIN, "--steps", "5", "--epochs", "1"), "both steps and epochs", "one of", "set steps"
    ),
    "seed too large": Mistake(
        (*TRAIN, "--seed", str(10**30)), str(10**30), "4294967295", "--seed 1"
    ),
    "tokens that are no number": Mistake(
        (*CHECK, "--tokens", "x"), "'x'", "a positive number with k, M, B or T", "1B"
    ),
    "no GPU": Mistake((*CHECK, "--gpus", "0"), "'0'", "a whole number >= 1", "--gpus 1"),
    "more GPUs than a host has": Mistake((*CHECK, "--gpus", "64"), "64", "1 to 16", "--gpus 8"),
    "several GPUs for every policy": Mistake(
        (*CHECK, "--gpus", "2", "--policy", "all"),
        "2 with --policy all",
        "one policy, or best",
        "leave --gpus out",
    ),
    "several GPUs on a machine with one memory": Mistake(
        ("check", "qwen2.5-7b", "--hardware", "dgx-spark", "--gpus", "2"),
        "2",
        "one memory",
        "leave it out",
    ),
    "unknown policy": Mistake(
        (*CHECK, "--policy", "zigzag"), "'zigzag'", "megatrain list policies", "name one"
    ),
    "unknown model": Mistake(
        ("check", "qwen2.5-9b", "--hardware", "h200"),
        "no such folder, file or name",
        "megatrain list models",
        "did you mean qwen2.5-",
    ),
    "missing model folder": Mistake(
        ("plan", "./gone", "--hardware", "h200", "--out", "new.toml"),
        "no such folder",
        "Hugging Face",
        "check the path",
    ),
    "model name too long": Mistake(
        ("plan", LONG, "--hardware", "h200", "--out", "new.toml"),
        "no such folder",
        "Hugging Face",
        "check the path",
    ),
    "folder without config": Mistake(
        ("check", "corpus", "--hardware", "h200"),
        "a folder without config.json",
        "a Hugging Face model folder",
        "name the folder that has it",
    ),
    "unknown architecture": Mistake(
        ("check", "other", "--hardware", "h200"),
        "'gpt5'",
        "one of",
        "gpt2",
        written("other/config.json", '{"model_type": "gpt5"}'),
    ),
    "config that is not JSON": Mistake(
        ("check", "tiny", "--hardware", "h200"),
        "not JSON",
        "a JSON file",
        "again",
        truncated("tiny/config.json"),
    ),
    "host memory above the one memory of a machine": Mistake(
        ("check", "tiny", "--hardware", "apple-m4-max", "--host-memory", "256GiB"),
        "256.00 GiB",
        "at most 96.00 GiB, which is what programs can use of the one memory of Apple M4 Max",
        "leave it out",
    ),
    "hardware that is not TOML": Mistake(
        ("check", "tiny", "--hardware", "hw.toml"),
        "not TOML (Invalid value (at line 2, column 10))",
        "a TOML file",
        "correct the file",
        written("hw.toml", 'name = "mine"\nsource = \n'),
    ),
    "unknown hardware": Mistake(
        ("check", "tiny", "--hardware", "h100"), "no such file", "h200", "did you mean"
    ),
    "missing hardware file": Mistake(
        ("check", "tiny", "--hardware", "gone.toml"),
        "no such file",
        "readable",
        "name an existing file",
    ),
    "hardware name too long": Mistake(
        ("check", "tiny", "--hardware", LONG),
        "no such file or machine",
        "megatrain list hardware",
        "check the path",
    ),
    "hardware with an unknown key": Mistake(
        ("check", "tiny", "--hardware", "hw.toml"),
        "`h2d_gbps`",
        "h2d_gb_per_s",
        "remove",
        hardware(("h2d_gb_per_s", "h2d_gbps")),
    ),
    "hardware with negative bandwidth": Mistake(
        ("check", "tiny", "--hardware", "hw.toml"),
        "-55.4",
        "a positive number",
        "correct h2d_gb_per_s",
        hardware(("h2d_gb_per_s = 55.4", "h2d_gb_per_s = -55.4")),
    ),
    "nothing fits": Mistake(
        (*PLAN, "--device-memory", "1KiB"),
        "no plan that fits",
        "1.00 KiB of device memory",
        "--device-memory 225MiB would fit",
        status=3,
    ),
    "plan to a folder": Mistake(
        (*PLAN, "--out", "corpus"), "a folder", "a file", "name a file in it"
    ),
    "plan below a file": Mistake(
        (*PLAN, "--out", "plan.toml/new.toml"),
        "not a writable folder",
        "a path in a writable folder",
        "another path",
    ),
    "missing plan": Mistake(
        ("simulate", "gone.toml"), "no such file", "`megatrain plan` wrote", "check the path"
    ),
    "folder instead of a plan": Mistake(
        ("simulate", "corpus"), "a folder", "`megatrain plan` wrote", "name a plan"
    ),
    "folder of a model instead of a plan": Mistake(
        ("simulate", "tiny"),
        "the folder of a model",
        "a plan that",
        "`megatrain plan tiny --hardware H --out plan.toml`",
    ),
    "folder with a plan instead of a plan": Mistake(
        ("simulate", "."), "a folder with a plan in it", "a plan that", "name the plan, plan.toml"
    ),
    "model instead of a plan": Mistake(
        ("simulate", "tiny/config.json"), "a JSON file", "a plan that", "make a plan first"
    ),
    "hardware file instead of a plan": Mistake(
        ("train", "hw.toml", *TRAIN[2:]),
        "a hardware file",
        "a plan that",
        "--hardware hw.toml",
        hardware(),
    ),
    "no plan to change": Mistake(
        ("plan", "--from", "gone.toml", "--out", "new.toml"),
        "no such file",
        "`megatrain plan` wrote",
        "check the path",
    ),
    "no run to resume": Mistake(
        ("train", "--resume", "gone"), "no such folder", "a run that has started", "check the path"
    ),
    "file instead of a run": Mistake(
        ("train", "--resume", "plan.toml"), "a file, not a folder", "a run", "start a new run"
    ),
    "folder of a run instead of the run": Mistake(
        ("train", "--resume", "runs"),
        "a folder without config.toml",
        "a run that has started",
        "name the run, runs/first",
        written("runs/first/config.toml", ""),
    ),
    "binary plan": Mistake(
        ("simulate", "plan.toml"),
        "not utf-8",
        "readable text",
        "existing",
        written("plan.toml", b"\xff\xfe\x00\x81" * 64),
    ),
    "truncated plan": Mistake(
        ("simulate", "plan.toml"), "not TOML", "a TOML file", "again", cut_short
    ),
    "empty plan": Mistake(
        ("train", "plan.toml", *TRAIN[2:]),
        "no key `policy`",
        "digest",
        "add `policy`",
        written("plan.toml", ""),
    ),
    "wrong digest": Mistake(
        TRAIN,
        "'",
        "the digest of its schedule under policy double_buffer",
        "megatrain plan",
        edited("plan.toml", ('digest = "', 'digest = "0')),
    ),
    "another model than the digest's": Mistake(
        ("simulate", "plan.toml"),
        "'",
        "under policy",
        "megatrain plan",
        edited("plan.toml", ("layers = 4", "layers = 5")),
    ),
    "unknown key in a plan": Mistake(
        ("simulate", "plan.toml"),
        "`weight_slot`",
        "weight_slots",
        "remove `weight_slot`",
        edited("plan.toml", ("weight_slots", "weight_slot")),
    ),
    "wrong type in a plan": Mistake(
        ("simulate", "plan.toml"),
        "`str`",
        "`int`",
        "correct this value",
        edited("plan.toml", ("batch = 2", 'batch = "two"')),
    ),
    "plan of an unknown policy": Mistake(
        TRAIN,
        "'zigzag'",
        "megatrain list policies",
        "name one",
        edited("plan.toml", ('"double_buffer"', '"zigzag"')),
    ),
    "plan for missing hardware": Mistake(
        ("simulate", "plan.toml"),
        "gone.toml, but there is no file gone.toml",
        "`megatrain calibrate` wrote",
        "correct the path in the plan",
        edited("plan.toml", ('hardware = "h200"', 'hardware = "gone.toml"')),
    ),
    "device too small for the plan": Mistake(
        TRAIN,
        "the largest pool being device.",
        "9.77 KiB",
        "raise the limit by",
        limited(device_limit_bytes=10_000),
        status=3,
    ),
    "host too small for the plan": Mistake(
        TRAIN, "host.moments", "9.77 KiB", "raise the limit by", limited(host_limit_bytes=10_000), 3
    ),
    "model of the plan is gone": Mistake(
        TRAIN,
        "no such folder",
        "a Hugging Face model folder",
        "--init random",
        lambda: shutil.rmtree("tiny"),
    ),
    "weights are gone": Mistake(
        TRAIN,
        "no *.safetensors",
        "with its weights",
        "--init random",
        lambda: os.unlink("tiny/model.safetensors"),
    ),
    "weights are cut": Mistake(
        TRAIN,
        "cannot be read",
        "a whole safetensors file",
        "fetch or write the file again",
        truncated("tiny/model.safetensors"),
    ),
    "config of the plan's model is cut": Mistake(
        TRAIN, "not JSON", "a JSON file", "again", truncated("tiny/config.json")
    ),
    "model folder holds another model": Mistake(
        TRAIN,
        "hidden_size 64",
        "hidden_size 32",
        "megatrain plan",
        edited("tiny/config.json", ('"hidden_size": 32', '"hidden_size": 64')),
    ),
    "missing corpus": Mistake(
        (*TRAIN, "--data", "gone"), "no such file or folder", "*.py", "check the path"
    ),
    "empty corpus": Mistake(
        (*TRAIN, "--data", "empty.txt"),
        "an empty file",
        "files with data",
        "check how the file was written",
        written("empty.txt", ""),
    ),
    "too short a corpus": Mistake(
        (*TRAIN, "--data", "short.txt"),
        "2 tokens",
        "the 32 of one step",
        "more text",
        written("short.txt", "a"),
    ),
    "missing weights that are not needed": Mistake(
        (*TRAIN, "--init", "random", "--model", "gone"),
        "no such folder",
        "a Hugging Face model folder",
        "leave --model out",
    ),
    "text instead of a plan": Mistake(
        ("train", "readme.txt", *TRAIN[2:]),
        "another file",
        "a plan that",
        "the folder of a model",
        written("readme.txt", "hello world"),
    ),
    "corpus folder without text": Mistake(
        (*TRAIN, "--data", "tiny"), "a folder without data", "*.txt", "check the path"
    ),
    "corpus that is a device": Mistake(
        (*TRAIN, "--data", "/dev/zero"), "no such file", "a file or folder with", "check the path"
    ),
    "out folder taken": Mistake(
        (*TRAIN, "--out", "corpus"), "something there already", "a new or empty folder", "--out"
    ),
    "out is a file": Mistake(
        (*TRAIN, "--out", "plan.toml"), "something there already", "a new or empty folder", "--out"
    ),
    "out below a file": Mistake(
        (*TRAIN, "--out", "plan.toml/new"),
        "not a writable folder",
        "a path in a writable folder",
        "another path",
    ),
    "calibrate without a model": Mistake(
        ("calibrate", "gone", *CALIBRATE[2:]), "no such folder", "qwen2.5-7b", "check the path"
    ),
    "calibrate to a folder": Mistake(
        (*CALIBRATE, "--out", "corpus"), "a folder", "a file", "a file in it, like corpus/NAME.toml"
    ),
    "train on a file whose name is not UTF-8": Mistake(
        ("train", "plan.toml", "--set", "data.data=gon\udce9", "--out", "new"),
        "a name that is not UTF-8 text",
        "a name that config.toml can store",
        "rename it",
    ),
    "calibrate over an earlier file": Mistake(
        (*CALIBRATE, "--out", "hw.toml"),
        "a file there already",
        "no measurement is lost",
        "another one with --out, or remove",
        hardware(),
    ),
    "calibrate, shared over an earlier file": Mistake(
        (*CALIBRATE, "--share", "hw.toml"),
        "a file there already",
        "no measurement is lost",
        "another one with --share, or remove",
        hardware(),
    ),
    "plan over another file": Mistake(
        (*PLAN, "--out", "hw.toml"), "not a plan", "an earlier plan", "another file", hardware()
    ),
    "trace over another file": Mistake(
        ("simulate", "plan.toml", "--trace", "plan.toml"),
        "not a trace",
        "an earlier trace",
        "another file",
    ),
    "picture of another kind": Mistake(
        ("simulate", "plan.toml", "--picture", "timeline.pdf"), "'.pdf'", ".png", "NAME.png"
    ),
    "picture over another file": Mistake(
        ("simulate", "plan.toml", "--picture", "plan.toml"),
        "not a picture",
        "an earlier picture",
        "another file",
    ),
    "calibrate over no grid": Mistake(
        (*CALIBRATE, "--grid", "4by16"), "'4by16'", "BATCHxSEQUENCE", "--grid 4x1024"
    ),
    "calibrate over an empty batch": Mistake(
        (*CALIBRATE, "--grid", "0x16"), "0", "1 to 1048576", "set batch"
    ),
    "calibrate again, from nothing": Mistake(
        (*CALIBRATE, "--again", "gone.toml"),
        "no such file",
        "a readable text file",
        "name an existing file",
    ),
    "calibrate again, from a datasheet": Mistake(
        (*CALIBRATE, "--again", "h200"),
        "rates from a datasheet",
        "`megatrain calibrate` wrote",
        "leave --again out",
    ),
    "calibrate several, without torchrun": Mistake(
        SEVERAL, "1 rank", "2 to 16, one for each GPU", "torchrun --standalone --nproc-per-node 2"
    ),
    "calibrate several, with a model": Mistake(
        (*SEVERAL, "tiny"), "--several as well", "--out and --device only", "leave MODEL out"
    ),
    "calibrate several, with an option of one GPU": Mistake(
        (*SEVERAL, "--grid", "4x16"), "--several as well", "no layers", "leave --grid out"
    ),
    "calibrate several, with memory": Mistake(
        (*SEVERAL, "--host-memory", "1GiB"), "--several as well", "no layers", "--host-memory"
    ),
    "calibrate several, plain": Mistake(
        (*SEVERAL, "--plain-packing"), "--several as well", "no layers", "--plain-packing"
    ),
    "calibrate several of no machine": Mistake(
        (*SEVERAL, "--several", "h20000"), "no such file or machine", "such as h200", "h200"
    ),
    "calibrate several of one memory": Mistake(
        (*SEVERAL, "--several", "dgx-spark"),
        "one memory for CPU and GPU",
        "memory of their own",
        "leave --several out",
    ),
    "calibrate several over an earlier file": Mistake(
        (*SEVERAL, "--out", "hw.toml"),
        "a file there already",
        "no measurement is lost",
        "another one with --out, or remove",
        hardware(),
    ),
    "run that is missing": Mistake(
        ("compare", "gone"), "no such folder", "megatrain train", "check the path"
    ),
    "run that is none": Mistake(
        ("compare", "corpus"), "no measured.json", "megatrain train", "check the path"
    ),
    "run name too long": Mistake(
        ("compare", LONG), "no such folder", "megatrain train", "check the path"
    ),
}


def parts(line: str) -> tuple[str, str, str]:
    """Returns the texts after `found`, `allowed:` and `fix:` in an error message."""
    assert line.startswith("megatrain: "), line
    _, _, rest = line.partition(": found ")
    found, _, rest = rest.partition("; allowed: ")
    allowed, _, fix = rest.rpartition("; fix: ")
    assert found, line
    assert allowed, line
    assert fix, line
    return found, allowed, fix


def check_line(text: str, mistake: Mistake) -> None:
    assert text.count("\n") == 1, text
    assert text.endswith("\n"), text
    for part, expected in zip(
        parts(text), (mistake.found, mistake.allowed, mistake.fix), strict=True
    ):
        assert expected in part, f"{expected!r} is not in {part!r} of {text}"


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_gives_a_one_line_error_and_leaves_nothing(
    name: str, workplace: Path, command: Any, files_in: Any
) -> None:
    mistake = MISTAKES[name]
    mistake.prepare()
    before = files_in(workplace)
    outcome = command(*mistake.words)
    assert outcome.status == mistake.status
    check_line(outcome.err, mistake)
    if name == "nothing fits":
        assert outcome.out.startswith("NO ")
    elif name not in ("weights are cut", "weights are gone"):
        assert outcome.out == ""
    assert files_in(workplace) == before


@pytest.mark.parametrize(
    ("kind", "earlier"),
    [
        (file_arguments.PLAN_FILE, b'# A plan.\nformat = 1\npolicy = "resident"\n'),
        (file_arguments.TRACE_FILE, b'{"displayTimeUnit":"ms","traceEvents":[]}'),
        (file_arguments.PAGE_FILE, b"<!doctype html>\n"),
        (file_arguments.PICTURE_FILE, b"\x89PNG\r\n"),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_only_a_file_of_the_same_kind_is_replaced(
    kind: tuple[str, str, bytes], earlier: bytes, tmp_path: Path
) -> None:
    file = tmp_path / "file"
    file_arguments.check_replaceable(file, kind)
    for content in (earlier, b""):
        file.write_bytes(content)
        file_arguments.check_replaceable(file, kind)
    file.write_bytes(b"name = 'a hardware file'\n")
    with pytest.raises(UserError, match=f"found a file that is not a {kind[0]}"):
        file_arguments.check_replaceable(file, kind)


@pytest.mark.parametrize("words", [("simulate", "plan.toml"), TRAIN, PLAN_FROM], ids=" ".join)
@pytest.mark.parametrize(
    "change",
    [
        ('digest = "', 'digest = "0'),
        ('"double_buffer"', '"zigzag"'),
        ("weight_slots = 2", "weight_slots = 0"),
        ("batch = 2", 'batch = "two"'),
        ("format = 1", "format = 2"),
    ],
    ids=lambda change: str(change[1]),
)
@pytest.mark.usefixtures("workplace")
def test_a_mistake_in_a_plan_names_its_file(
    words: tuple[str, ...], change: tuple[str, str], command: Any
) -> None:
    edited("plan.toml", change)()
    outcome = command(*words)
    if words == PLAN_FROM and "digest" in change[0]:
        assert outcome.status == 0  # the command writes the right digest
    else:
        assert outcome.status == 2
        assert outcome.err.startswith("megatrain: plan.toml: ")
        assert outcome.err.count("plan.toml") == 1


@pytest.mark.parametrize(
    "name",
    [
        "unknown verb",
        "wrong digest",
        *(
            pytest.param(name, marks=pytest.mark.nightly)
            for name in (
                "size that is none",
                "truncated plan",
                "device too small for the plan",
                "missing corpus",
            )
        ),
    ],
)
def test_a_mistake_in_a_process_of_its_own(name: str, workplace: Path, files_in: Any) -> None:
    mistake = MISTAKES[name]
    mistake.prepare()
    before = files_in(workplace)
    done = subprocess.run(
        [sys.executable, "-m", "megatrain.experiments.cli", *mistake.words],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == mistake.status
    check_line(done.stderr, mistake)
    assert done.stdout == ""
    assert files_in(workplace) == before


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_a_corpus_that_may_not_be_read(workplace: Path, command: Any) -> None:
    (workplace / "secret.txt").write_text("x" * 1000)
    (workplace / "secret.txt").chmod(0)
    outcome = command(*TRAIN, "--data", "secret.txt")
    assert outcome.status == 2
    check_line(outcome.err, Mistake((), "permission denied", "a readable text file", "permissions"))
    assert not (workplace / "new").exists()


def test_a_corpus_that_cannot_be_read(
    workplace: Path, command: Any, monkeypatch: pytest.MonkeyPatch, files_in: Any
) -> None:
    opened = Path.open

    def refuse(path: Path, *given: Any, **named: Any) -> Any:
        if path.parent.name == "corpus":
            raise PermissionError(13, "Permission denied", str(path))
        return opened(path, *given, **named)

    before = files_in(workplace)
    with monkeypatch.context() as patched:
        patched.setattr(Path, "open", refuse)
        outcome = command(*TRAIN)
    assert outcome.status == 2
    check_line(outcome.err, Mistake((), "permission denied", "a readable text file", "permissions"))
    assert "corpus/one.txt" in outcome.err
    assert files_in(workplace) == before


def of_another_schedule(run: Path) -> None:
    measured = Timeline.load(run / "measured.json")
    Timeline(name="measured", digest="0123456789abcdef", spans=measured.spans).save(
        run / "measured.json"
    )


def without_a_span(run: Path) -> None:
    measured = Timeline.load(run / "measured.json")
    Timeline(name="measured", digest=measured.digest, spans=measured.spans[:-1]).save(
        run / "measured.json"
    )


BROKEN_RUNS: dict[str, tuple[Callable[[Path], object], str, str, str]] = {
    "measured.json of another schedule": (
        of_another_schedule,
        "0123456789abcdef",
        "a timeline of schedule",
        "train again",
    ),
    "measured.json without a span": (without_a_span, "span", "timeline of", "again"),
    "measured.json is cut": (
        lambda run: os.truncate(run / "measured.json", 50),
        "not JSON",
        "a JSON file",
        "again",
    ),
    "no plan": (lambda run: os.unlink(run / "plan.toml"), "no such file", "readable", "existing"),
    "no environment": (
        lambda run: os.unlink(run / "environment.json"),
        "no such file",
        "readable",
        "existing",
    ),
    "other environment": (
        lambda run: (run / "environment.json").write_text("[]"),
        "other content",
        "megatrain train",
        "train again",
    ),
    "metrics are cut": (
        lambda run: os.truncate(run / "metrics.jsonl", 30),
        "other content",
        "megatrain train",
        "train again",
    ),
    "other memory": (
        lambda run: (run / "memory.json").write_text("{}"),
        "other content",
        "megatrain train",
        "train again",
    ),
}


@pytest.mark.parametrize("name", BROKEN_RUNS)
@pytest.mark.parametrize("options", [(), ("--json",)], ids=["text", "json"])
def test_a_broken_run_gives_a_one_line_error_and_nothing_is_written(
    name: str, options: tuple[str, ...], finished: Path, tmp_path: Path, command: Any, files_in: Any
) -> None:
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    breaks, found, allowed, fix = BROKEN_RUNS[name]
    breaks(run)
    before = files_in(run)
    outcome = command("compare", run, *options)
    assert outcome.status == 2
    check_line(outcome.err, Mistake((), found, allowed, fix))
    assert outcome.out == ""
    assert files_in(run) == before


@pytest.mark.parametrize(
    "option", [("--lr", "1e30"), ("--weight-decay", "1e30")], ids=lambda option: option[0]
)
def test_a_training_that_diverges_says_so(
    option: tuple[str, str], workplace: Path, command: Any
) -> None:
    outcome = command(*TRAIN, "--steps", "5", *option)
    assert outcome.status == 1
    check_line(outcome.err, Mistake((), "nan", "finite numbers", "lower --lr"))
    assert not (workplace / "new" / "model").exists()
    again = command(*TRAIN, "--steps", "5", *option)
    assert "continue it with `megatrain train --resume new --from-scratch`" in again.err
    assert again.status == 2


def test_weights_that_are_not_finite_are_a_mistake_in_a_file(
    workplace: Path, command: Any, files_in: Any
) -> None:
    """The first step finds them, but it has changed nothing, so no training has begun."""
    file = workplace / "tiny" / "model.safetensors"
    tensors = load_file(file)
    tensors["model.norm.weight"][0] = torch.nan
    save_file(tensors, file, metadata={"format": "pt"})
    before = files_in(workplace)
    outcome = command(*TRAIN)
    assert outcome.status == 2
    check_line(
        outcome.err, Mistake((), "infinity or NaN in model.norm.weight", "finite numbers", "fetch")
    )
    assert "; the run" not in outcome.err
    assert files_in(workplace) == before


@pytest.mark.parametrize("option", [(), ("--model", "tiny/config.json")])
def test_a_plan_made_from_a_config_needs_the_folder_with_the_weights(
    option: tuple[str, ...], workplace: Path, command: Any, files_in: Any
) -> None:
    if not option:
        path = workplace / "plan.toml"
        msgspec.structs.replace(Plan.load(path), source="tiny/config.json").save(path)
    before = files_in(workplace)
    outcome = command(*TRAIN, *option)
    assert outcome.status == 2
    assert "model tiny/config.json: found a file, not the folder" in outcome.err
    check_line(
        outcome.err,
        Mistake((), "a file, not the folder with the weights", "a Hugging", "such as tiny if"),
    )
    assert ("; if it is the `source` of a plan, pass --model or" in outcome.err) == (not option)
    assert files_in(workplace) == before


def metrics_are_full(patched: pytest.MonkeyPatch) -> None:
    """Makes writing the first line of the metrics fail, after the first step."""
    append = MetricsFile.append

    def full(self: MetricsFile, row: dict[str, object]) -> None:
        self.path = Path("/dev/full")
        append(self, row)

    patched.setattr(MetricsFile, "append", full)


def picture_is_full(patched: pytest.MonkeyPatch) -> None:
    """Makes writing the picture of the loss fail, after the last step."""

    def fail(path: Path, *_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    patched.setattr(pictures, "loss_png", fail)


def model_is_full(patched: pytest.MonkeyPatch) -> None:
    """Makes writing the trained model fail, after the last checkpoint."""

    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    patched.setattr(model_files, "_write", fail)


def folder_is_full(patched: pytest.MonkeyPatch) -> None:
    """Makes creating the run folder fail, before the training begins."""

    def fail(path: Path, *_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    patched.setattr(Path, "mkdir", fail)


@pytest.mark.usefixtures("workplace", "with_pictures")
@pytest.mark.parametrize(
    ("fill", "status", "kept"),
    [
        (folder_is_full, 2, ""),
        (metrics_are_full, 1, "; the run stopped after step 1; saved; continue with: megatrain"),
        (picture_is_full, 1, "; the run stopped after step 2; saved; continue with: megatrain"),
        (model_is_full, 1, "; the run stopped after step 2; saved; continue with: megatrain"),
    ],
)
def test_a_full_disk_after_training_has_begun_is_a_failed_training(
    fill: Callable[[pytest.MonkeyPatch], None],
    status: int,
    kept: str,
    command: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with monkeypatch.context() as patched:
        fill(patched)
        outcome = command(*TRAIN)
    assert outcome.status == status
    check_line(outcome.err, Mistake((), "no space left on device", "a ", ""))
    assert kept in outcome.err
    assert "errno" not in outcome.err.lower()
    if kept:
        assert command("train", "--resume", "new").status == 0


@pytest.mark.usefixtures("workplace")
def test_a_measured_machine_cannot_be_given_more_cores(command: Any) -> None:
    hardware()()
    with open("hw.toml", "a") as file:
        file.write('\n[costs]\nmeasured_on = "here"\ndate = "today"\ncurves = {}\ncompute = {}\n')
    outcome = command("check", "tiny", "--hardware", "hw.toml", "--cores", "64")
    assert outcome.status == 2
    check_line(outcome.err, Mistake((), "64", "16", "calibrate on the other machine"))


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (file_arguments.PLAN_FILE, "NAME.toml"),
        (file_arguments.TRACE_FILE, "NAME.json"),
        (file_arguments.PAGE_FILE, "NAME.html"),
        (file_arguments.PICTURE_FILE, "NAME.png"),
    ],
)
def test_a_folder_instead_of_a_file_is_refused_with_a_name_that_fits(
    tmp_path: Path, kind: tuple[str, str, bytes], name: str
) -> None:
    with pytest.raises(UserError, match=f"fix: name a file in it, like .*/{name}$"):
        file_arguments.check_replaceable(tmp_path, kind)


@pytest.mark.parametrize(
    "words", [("check",), ("plan", "--out", "x.toml")], ids=lambda each: each[0]
)
def test_a_length_of_documents_needs_rows_of_several(words: tuple[str, ...], command: Any) -> None:
    machine = ("--hardware", "h200", "--batch", 1)
    options = ("--document-length", 500, "--plain-packing")
    outcome = command(words[0], "qwen2.5-0.5b", *machine, *options, *words[1:])
    assert outcome.status == 2
    assert outcome.err == (
        "megatrain: --document-length: found 500, and rows that are one text; allowed: rows of"
        " several documents, in which attention stays within each; fix: leave --document-length"
        " out\n"
    )
