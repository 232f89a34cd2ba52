"""Tests of the table of model families.

Every causal language model of the installed transformers is in it once.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from megatrain.experiments.families import main
from megatrain.simulator.base.errors import UserError
from megatrain.simulator.model.families import (
    CANNOT_SEPARATE_DOCUMENTS,
    FAMILIES,
    REFUSED,
    UNDESCRIBED,
)
from megatrain.simulator.model.specs import ModelSpec

CAUSAL = set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def test_every_family_is_there_once(capsys: pytest.CaptureFixture[str]) -> None:
    main()
    rows = [
        line.split(" | ") for line in capsys.readouterr().out.splitlines() if line.startswith("| ")
    ][1:]
    named = [family for row in rows for family in row[1].removesuffix(" |").split(", ")]
    assert sorted(named) == sorted(CAUSAL | FAMILIES.keys())
    assert rows[0][0] == f"| **supported**, {len(FAMILIES)}"


def test_the_page_on_the_command_line_counts_them() -> None:
    page = " ".join(Path("docs/cli.md").read_text().split())
    said = (
        f"{len(FAMILIES)} of the {len(CAUSAL)} causal language models in transformers are predicted"
    )
    assert said in page
    *others, last = sorted(CANNOT_SEPARATE_DOCUMENTS)
    assert f"cannot be kept apart in {', '.join(others)} and {last}." in page


def test_refused_families_are_in_transformers_and_not_described_here() -> None:
    assert set(REFUSED) <= CAUSAL
    assert not REFUSED.keys() & FAMILIES.keys()
    assert FAMILIES.keys() <= CAUSAL


@pytest.mark.parametrize("family", sorted(CAUSAL - FAMILIES.keys()))
def test_a_refusal_names_the_family_before_anything_is_loaded(family: str) -> None:
    reason = REFUSED.get(family, "which transformers has, but which is not described here yet")
    with pytest.raises(
        UserError,
        match=(
            rf"model_type: found '{family}', {reason}; allowed: one of {len(FAMILIES)} families, "
        ),
    ) as error:
        ModelSpec.from_config({"model_type": family, "hidden_size": 64}, "config.json")
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 350


def test_every_family_that_is_neither_described_nor_refused_is_listed_as_such() -> None:
    assert CAUSAL - FAMILIES.keys() - REFUSED.keys() == UNDESCRIBED


@pytest.mark.parametrize(
    ("name", "fix"),
    [
        ("lama", "did you mean llama"),
        ("Qwen3", "did you mean qwen3, "),
        ("nonsense", "check model_type in config.json"),
    ],
)
def test_a_misspelt_family_has_another_error(name: str, fix: str) -> None:
    with pytest.raises(
        UserError,
        match=rf"model_type: found '{name}', an unknown model_type; allowed: .*; fix: {fix}",
    ):
        ModelSpec.from_config({"model_type": name, "hidden_size": 64}, "config.json")


@pytest.mark.parametrize("value", [None, 7, ["llama"]])
def test_no_model_type_gives_a_one_line_error(value: object) -> None:
    with pytest.raises(
        UserError,
        match=r"model_type: found .*; fix: give a model folder whose config\.json has a model_type",
    ):
        ModelSpec.from_config({"model_type": value, "hidden_size": 64}, "config.json")
