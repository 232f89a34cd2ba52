"""Tests that names in various spellings find the library's entry.

Other names are refused, and the error names similar ones.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from megatrain.simulator import policies
from megatrain.simulator.base.errors import UserError
from megatrain.simulator.base.names import alike, is_path, meant
from megatrain.simulator.hardware import machine
from megatrain.simulator.hardware.machine import HardwareSpec
from megatrain.simulator.model import specs
from megatrain.simulator.model.specs import ModelSpec

MODELS = {
    "qwen2.5-14B": "qwen2.5-14b",
    "qwen25-14b": "qwen2.5-14b",
    "Qwen2_5 14b": "qwen2.5-14b",
    "Qwen/Qwen2.5-14B-Instruct": "qwen2.5-14b",
    "Qwen/Qwen3-4B-Base": "qwen3-4b",
    "meta-llama/Llama-3.1-70B": "llama-3.1-70b",
    "meta-llama/Meta-Llama-3.1-70B-Instruct": "llama-3.1-70b",
    "meta-llama/Llama-2-7b-chat-hf": "llama-2-7b",
    "google/gemma-2-9b-it/": "gemma-2-9b",
    "llama 3.1 8b": "llama-3.1-8b",
    "gpt_oss-20B": "gpt-oss-20b",
}
MACHINES = {
    "H200": "h200",
    "nvidia h200": "h200",
    "rtx-4090": "rtx4090",
    "4090": "rtx4090",
    "RTX 4090": "rtx4090",
    "NVIDIA GeForce RTX 4090": "rtx4090",
    "RTX A6000": "a6000",
    "rtx pro 6000": "rtx-pro-6000",
    "A100-80GB-SXM": "a100-80-sxm",
    "GH200 96GB": "gh200-96",
    "M3 Ultra": "apple-m3-ultra",
    "AMD Instinct MI300X": "mi300x",
    "dgx_spark": "dgx-spark",
    "NVIDIA GB10": "dgx-spark",
    "gb10": "dgx-spark",
    "NVIDIA GH200 480GB": "gh200-96",
    "NVIDIA H100 80GB HBM3": "h100-sxm",
    "h100 80gb hbm3": "h100-sxm",
}


@pytest.mark.parametrize("written", MODELS)
def test_a_model_as_people_write_it(written: str) -> None:
    assert ModelSpec.load(written).name == MODELS[written]


@pytest.mark.parametrize("written", MACHINES)
def test_a_machine_as_people_write_it(written: str) -> None:
    assert HardwareSpec.load(written).name == MACHINES[written]


@pytest.mark.parametrize(
    "library", [specs.library(), machine.library()], ids=["models", "machines"]
)
def test_every_entry_is_found_by_any_spelling_of_its_name(library: dict[str, Path]) -> None:
    """No spelling finds another entry."""
    for name in library:
        for written in (name, name.upper(), name.replace("-", "_"), name.replace("-", " ")):
            others = [each for each in library if each != name]
            assert meant(written, library) == name
            assert meant(written, others) is None


def test_every_name_of_a_gpu_finds_its_machine() -> None:
    """In any case, and without the vendor."""
    for name in machine.library():
        for gpu in HardwareSpec.load(name).gpu_names:
            for written in (gpu, gpu.lower(), gpu.removeprefix("NVIDIA ")):
                assert machine.hardware_name(written) == name


def test_a_name_of_two_entries_means_neither() -> None:
    others = {"NVIDIA GPU-1": "a", "GPU 1": "a", "gpu_2": "a", "gpu 2": "b"}
    assert meant("gpu1", ["a", "b"], others) == "a"
    assert meant("gpu2", ["a", "b"], others) is None
    assert alike("gpu2", ["a", "b"], others=others) == ["a", "b"]


@pytest.mark.parametrize("written", ["qwen2-57b", "qwen2.5-1.45b", "qwen257b"])
def test_digits_that_are_grouped_differently_name_another_model(written: str) -> None:
    assert meant(written, specs.library()) is None


@pytest.mark.parametrize(
    ("written", "fix"),
    [
        ("h100", "did you mean h100-pcie or h100-sxm?"),
        ("A100", "did you mean a100-40, a100-80-pcie or a100-80-sxm?"),
        ("rtx4091", "did you mean rtx4090?"),
        ("4090 laptop", "did you mean rtx4090?"),
        ("NVIDIA GH200", "did you mean gh200-144 or gh200-96?"),
        ("rtx pro 6000 blackwell", "did you mean rtx-pro-6000?"),
        ("rtx 6000 ada", "check the path or the name"),
        ("abacus", "check the path or the name"),
    ],
)
def test_an_ambiguous_or_unknown_machine_is_refused(written: str, fix: str) -> None:
    with pytest.raises(UserError) as raised:
        HardwareSpec.load(written)
    assert raised.value.fix.startswith(fix)
    assert "`megatrain list hardware`" in str(raised.value)
    assert len(str(raised.value)) < 300


@pytest.mark.parametrize(
    ("written", "fix"),
    [
        ("mistralai/Mistral-7B-Instruct-v0.3", "did you mean mistral-7b?"),
        ("qwen2.5-9b", "did you mean qwen2.5-7b, "),
        ("llama-3.2", "did you mean llama-3.2-1b or llama-3.2-3b?"),
        ("./gone", "check the path or the name"),
    ],
)
def test_an_ambiguous_or_unknown_model_is_refused(written: str, fix: str) -> None:
    with pytest.raises(UserError) as raised:
        ModelSpec.load(written)
    assert raised.value.fix.startswith(fix)
    assert "`megatrain list models`" in str(raised.value)
    assert len(str(raised.value)) < 300


def test_an_unknown_policy_is_refused_with_one_that_resembles_it() -> None:
    with pytest.raises(UserError, match=r"`megatrain list policies`.*did you mean k_buffer\?"):
        policies.find("kbufer")


@pytest.mark.parametrize(
    ("written", "found"),
    [
        ("--learning-rate", ["--rate"]),
        ("--sequence", ["--seq"]),
        ("--bacth", ["--batch"]),
        ("--x", []),
    ],
)
def test_options_that_resemble_a_given_one(written: str, found: list[str]) -> None:
    """The options are contained in the text, begin the text, are spelled similarly, or are none."""
    assert alike(written, ["--rate", "--seq", "--batch", "--steps"]) == found


@pytest.mark.parametrize(
    ("written", "known", "found"),
    [
        ("ba", "batch", False),
        ("bat", "batch", True),
        ("seq", "longest-seq", False),
        ("rate", "learning-rate", True),
    ],
)
def test_a_beginning_has_three_letters_and_a_part_four(
    written: str, known: str, found: bool
) -> None:
    """Fewer letters are in most names by chance."""
    assert alike(written, [known]) == ([known] if found else [])


def test_names_that_differ_only_in_their_variant_are_listed_once() -> None:
    known = ["qwen2.5-7b", "qwen2.5-7b-instruct"]
    assert alike("qwem2.5-7b", known) == known


def test_a_path_is_preferred_to_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("h200").write_bytes(machine.library()["l40s"].read_bytes())
    Path("qwen2.5-7b").mkdir()
    Path("qwen2.5-7b", "config.json").write_bytes(specs.library()["phi-2"].read_bytes())
    assert HardwareSpec.load("h200").name == "l40s"
    assert ModelSpec.load("qwen2.5-7b").family == "phi"


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("qwen2.5-7b", False),
        ("Qwen/Qwen2.5-7B", False),
        ("./qwen2.5-7b", True),
        ("/qwen2.5-7b", True),
        ("~/qwen2.5-7b", True),
        ("there/qwen2.5-7b", True),
        ("there", True),
    ],
)
def test_a_path_is_no_name(
    text: str, path: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "there").mkdir()
    monkeypatch.chdir(tmp_path)
    assert is_path(text) == path
    if path:
        with pytest.raises(UserError, match=r"without config\.json|no such folder"):
            ModelSpec.load(text)


def test_a_run_given_as_a_model_is_refused_with_the_path_of_its_model(tmp_path: Path) -> None:
    (tmp_path / "run1" / "model").mkdir(parents=True)
    (tmp_path / "run1" / "model" / "config.json").write_text("{}")
    with pytest.raises(UserError, match=r"fix: name .*/run1/model, which has it$"):
        ModelSpec.load(str(tmp_path / "run1"))
