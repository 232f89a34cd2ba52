"""Tests of preflight, which checks a model before anything is allocated.

It compares the model's tensors with those of transformers' model, and runs one layer of each kind
without memory.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaMLP
from whole_models import model_of

from megatrain.experiments.cli.main import main
from megatrain.runtime.execution.executor import Executor
from megatrain.runtime.execution.preflight import preflight
from megatrain.runtime.layers.embedding_and_head import EmbeddingAndHead
from megatrain.runtime.layers.functional_layers import config_of
from megatrain.runtime.layers.meta_model import meta_model
from megatrain.runtime.layers.model_config import full_config
from megatrain.runtime.layers.transformers_model import refuse_unlike_transformers
from megatrain.runtime.optimizer.settings import AdamW
from megatrain.simulator.base.errors import UserError
from megatrain.simulator.model.families import FAMILIES, Part
from megatrain.simulator.model.families.config import ModelConfig
from megatrain.simulator.model.specs import ModelSpec
from megatrain.simulator.schedule.plan import Plan


@pytest.mark.parametrize(
    ("family", "part", "message"),
    [
        (
            "llama",
            Part(tensors=(("self_attn.extra.weight", (3, 4)),)),
            (
                r"tensor model\.layers\.0\.self_attn\.extra\.weight: found shape \(3, 4\) in the"
                r" plan; allowed: no such tensor"
            ),
        ),
        (
            "gpt2",
            Part(tensors=(("ln_1.weight", (5,)),)),
            (
                r"tensor transformer\.h\.0\.ln_1\.weight: found shape \(5,\) in the plan; allowed:"
                r" shape \(64,\), as in transformers' model"
            ),
        ),
    ],
)
def test_a_tensor_that_transformers_does_not_have_is_named(
    monkeypatch: pytest.MonkeyPatch, family: str, part: Part, message: str
) -> None:
    usual = FAMILIES[family]
    monkeypatch.setitem(
        FAMILIES._loaded,
        family,
        msgspec.structs.replace(usual, layer=lambda c, kind: (*usual.layer(c, kind), part)),
    )
    with pytest.raises(UserError, match=message) as caught:
        refuse_unlike_transformers(model_of(family, initializer_factor=2.0))
    assert "\n" not in str(caught.value)


def test_a_tensor_that_the_description_lacks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = FAMILIES["llama"]
    monkeypatch.setitem(
        FAMILIES._loaded,
        "llama",
        msgspec.structs.replace(usual, layer=lambda c, kind: usual.layer(c, kind)[1:]),
    )
    with pytest.raises(
        UserError,
        match=(
            r"tensor model\.layers\.0\.self_attn\.q_proj\.weight: found no such tensor in the plan;"
            r" allowed: shape \(64, 64\)"
        ),
    ):
        refuse_unlike_transformers(model_of("llama", initializer_factor=3.0))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"rope_scaling": {"rope_type": "of tomorrow"}},
            r"model small: config: found KeyError: 'of tomorrow'",
        ),
        (
            {"head_dim": 7},
            (
                r"model small: config: found \w+: .*; allowed: values that transformers accepts;"
                r" fix: correct config\.json"
            ),
        ),
    ],
)
def test_a_model_that_transformers_cannot_run_gives_a_one_line_error(
    make_model: Callable[..., ModelSpec], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message) as caught:
        refuse_unlike_transformers(make_model(**changes))
    assert "\n" not in str(caught.value)


def test_a_layer_that_fails_gives_a_one_line_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its tensors are those of the plan, and the parts before and after the layers can run."""

    def fail(*_: object) -> None:
        raise ValueError("no such\nactivation")

    monkeypatch.setattr(LlamaMLP, "forward", fail)
    with pytest.raises(
        UserError, match=r"model llama: config: found ValueError: no such activation; allowed: a"
    ):
        refuse_unlike_transformers(model_of("llama", initializer_factor=5.0))


def test_a_config_that_transformers_cannot_write_gives_a_one_line_error(
    make_model: Callable[..., ModelSpec],
) -> None:
    """A config that transformers reads but cannot write gives a one-line error.

    A damaged checkpoint may have such a config, because its unknown keys are not dropped.
    """
    model = make_model()
    damaged = msgspec.structs.replace(model, config={**model.config, "quantization_config": True})
    with pytest.raises(UserError, match=r"model small: config: found AttributeError: .*to_dict"):
        full_config(damaged)


def test_an_embedding_that_is_normalised_is_refused_where_the_description_lacks_its_norm(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A family whose description lacks the norm of its embedding is refused.

    NanoChat's norm has no weight, so comparing tensors would not find it.
    """
    monkeypatch.setitem(
        FAMILIES._loaded,
        "nanochat",
        msgspec.structs.replace(FAMILIES["nanochat"], embedding_norm=""),
    )
    message = (
        r"model_type: found nanochat, whose first layer's input is not linear in the embedding's"
        r" rows; allowed: a model that only scales its embedding .*; fix: use"
    )
    with pytest.raises(UserError, match=message) as caught:
        refuse_unlike_transformers(model_of("nanochat", initializer_factor=4.0))
    assert "\n" not in str(caught.value)


def test_a_model_that_does_not_call_its_layers_is_refused_in_one_line() -> None:
    whole = meta_model(config_of(model_of("llama")), torch.float32, torch.device("cpu"))
    whole.model.forward = lambda **_: None
    with pytest.raises(
        UserError,
        match=(
            r"model_type: found llama, whose forward does not call its last decoder layer; allowed:"
            r" .*; fix: use"
        ),
    ) as caught:
        EmbeddingAndHead(whole, 64, torch.float32, torch.device("cpu"))
    assert "\n" not in str(caught.value)


def test_arguments_of_every_layer_are_made_before_anything_is_allocated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A list in the config that is too short for the last layer is refused.

    This comes before anything is allocated, even if the family's description does not check the
    length.
    """
    with pytest.raises(
        UserError,
        match=(
            r"layer_rope_theta: found 3 entries; allowed: num_hidden_layers = 4 entries; fix:"
            r" correct config\.json"
        ),
    ):
        model_of("granite_swa", layer_rope_theta=[0.0, 10000.0, 0.0])
    monkeypatch.setattr(
        ModelConfig,
        "each_layer",
        lambda self, key, *_: self.config.get(key) if key == "layer_types" else None,
    )
    with pytest.raises(
        UserError,
        match=(
            r"model granite_swa: config: found IndexError: list index out of range; allowed: a"
            r" model that .*; fix: correct"
        ),
    ) as caught:
        refuse_unlike_transformers(model_of("granite_swa", layer_rope_theta=[0.0, 10000.0, 0.0]))
    assert "\n" not in str(caught.value)


ONCE = dict.fromkeys(
    (
        "refuse_unsupported",
        "refuse_attention",
        "executable",
        "refuse_optimizer",
        "refuse_unlike_transformers",
    ),
    1,
)


def counted(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts the calls of each refusal from all modules."""
    calls: Counter[str] = Counter()
    for name in ONCE:
        function = getattr(sys.modules[preflight.__module__], name)

        def call(*given: Any, name: str = name, function: Any = function, **options: Any) -> Any:
            calls[name] += 1
            return function(*given, **options)

        for module in [each for key, each in sys.modules.items() if key.startswith("megatrain.")]:
            if getattr(module, name, None) is function:
                monkeypatch.setattr(module, name, call)
    return calls


def test_every_refusal_runs_once_from_the_command_to_the_first_step(
    executable: Callable[..., Plan], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = executable(vocabulary=300, dtype="fp32")
    AutoModelForCausalLM.from_config(config_of(plan.model)).save_pretrained(tmp_path / "small")
    plan.save(tmp_path / "plan.toml")
    (tmp_path / "text.txt").write_text("a line of text\n" * 200)
    calls, seen = counted(monkeypatch), list[Counter[str]]()
    step = Executor.step

    def first_step(self: Executor, *given: Any, **options: Any) -> Any:
        seen.append(Counter(calls))
        return step(self, *given, **options)

    monkeypatch.setattr(Executor, "step", first_step)
    words = [str(tmp_path / "plan.toml"), "--data", str(tmp_path / "text.txt"), "--steps", "1"]
    assert main(["train", *words, "--out", str(tmp_path / "run"), "--device", "cpu"]) == 0
    # The command checks these two before it loads PyTorch.
    assert seen == [ONCE | {"refuse_unsupported": 2, "executable": 2}]


def test_every_refusal_runs_once_where_an_executor_is_made_directly(
    executable: Callable[..., Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, calls = executable(), counted(monkeypatch)
    with Executor(plan, config_of(plan.model), AdamW(), torch.device("cpu")):
        assert calls == ONCE


def test_a_deterministic_run_is_refused_a_nondeterministic_kernel(
    executable: Callable[..., Plan],
) -> None:
    """A deterministic run is refused a kernel that is not deterministic.

    The process is not yet in deterministic mode at this time.
    """
    plan = executable(attention="cudnn")
    with pytest.raises(UserError, match="workload: attention: found cudnn in deterministic mode"):
        preflight(plan, AdamW(), torch.device("cpu"), deterministic=True)
