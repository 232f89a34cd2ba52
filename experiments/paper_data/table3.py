"""Table 3: one small fine-tuning job, trained in five ways. It is not the paper's job, because
MetaMathQA and the paper's models are not available here. The job takes about 3 min.

A Qwen2-style model of 0.1 M parameters is trained on the sources of Python's email package. It is
then fine-tuned on the text of Python's help topics (English prose) at a learning rate of 1e-5. The
five ways are plain PyTorch with fp32 masters (`Plain`), this runtime under three plans, and bf16
weights alone with fp32 moments, as in the published code. The last 16 KiB of the text are held out
for the loss and the share of correctly predicted bytes.
"""

from __future__ import annotations

import hashlib
import platform
import sysconfig
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from megatrain.runtime.batch import Batch
from megatrain.runtime.data.corpus.corpus import Corpus
from megatrain.runtime.data.documents import Documents
from megatrain.runtime.execution.executor import Executor, lane_threads
from megatrain.runtime.files.model_files import hub_name, random_weights
from megatrain.runtime.layers.functional_layers import config_of
from megatrain.runtime.optimizer.adamw import (
    AdamW,
    clip_coefficient,
    round_to_bf16,
    rounded_sqrt,
    sum_of_squares,
)
from megatrain.simulator import policies
from megatrain.simulator.memory.account import WITHOUT_ACTIVATIONS, account
from megatrain.simulator.model.specs import ModelSpec
from megatrain.simulator.model.workload import Workload
from megatrain.simulator.schedule.plan import Knobs, Placement, Plan

MODEL = ModelSpec.from_config(
    {
        "model_type": "qwen2",
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "intermediate_size": 192,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 320,
        "tie_word_embeddings": False,
    },
    "table3",
    "byte-100k",
)
WORK = Workload(batch=4, sequence=64, loss_chunk=256)
BEFORE, STEPS, EVERY = 400, 240, 60
HELD = 2**14
"""Bytes of held-out text."""
RATE_BEFORE, RATE = 1e-3, 1e-5
SETTINGS = AdamW()
PLANS = {
    "double_buffer": ("double_buffer", Knobs(checkpoint_interval=2, chunk_bytes=2**17)),
    "overlapped, all streams": ("overlapped", Knobs(chunk_bytes=2**16)),
    "overlapped, half resident": (
        "overlapped",
        Knobs(
            chunk_bytes=2**18,
            placement=Placement(
                weights="e,0", master_low="e", moments="0", gradients="0-1", saved_activations="1"
            ),
        ),
    ),
}
Masters = Mapping[str, Mapping[str, torch.Tensor]]
"""fp32 weights by layer and tensor name."""
Run = Iterator[tuple[float, Callable[[], Masters]]]
"""Yields the loss of each step and a function that returns its weights."""


class Plain:
    """Trains with plain PyTorch: transformers' whole model in bf16, one autograd graph, clipping by
    the norm of all gradients, and AdamW on the masters.

    It rounds the same values as the runtime: each gradient to bf16, and a master to bf16 for the
    forward pass. Squares are summed in the runtime's order, which includes each tensor's padding.
    With `rounded`, masters are bf16 too, so the part of an update that rounding removes is lost.
    """

    def __init__(
        self, masters: Masters, *, rounded: bool = False, model: ModelSpec = MODEL
    ) -> None:
        self.rounded, self.spec = rounded, model
        self.masters = {
            layer: {name: tensor.clone() for name, tensor in tensors.items()}
            for layer, tensors in masters.items()
        }
        self.moments = {
            layer: {name: tensor.new_zeros(2, *tensor.shape) for name, tensor in tensors.items()}
            for layer, tensors in masters.items()
        }
        with next(iter(next(iter(masters.values())).values())).device:
            self.model: Any = AutoModelForCausalLM.from_config(
                config_of(model), dtype=torch.bfloat16
            ).train()

    def step(self, batch: Batch, rate: float, number: int) -> float:
        """Runs step `number`, counted from 1, with the learning rate `rate`. Returns its loss."""
        read_masters(self.model, self.masters)
        table = self.model.get_input_embeddings().weight
        # The gradients of a token that occurs several times are summed in fp32.
        ids, labels = batch.ids.to(table.device), batch.labels.to(table.device).flatten()
        rows = torch.nn.functional.embedding(ids, table.float()).to(table.dtype)
        logits = self.model(inputs_embeds=rows).logits.float().flatten(0, 1)
        loss = torch.nn.functional.cross_entropy(logits, labels, reduction="sum")
        (loss / labels.numel()).backward()
        gradients = {
            layer.name: {
                tensor.name: self.model.get_parameter(hub_name(layer.name, tensor.name)).grad
                for tensor in layer.tensors
            }
            for layer in self.spec.stack.values()
        }
        self.model.zero_grad()
        sums = [
            sum_of_squares(
                torch.cat(
                    [
                        torch.nn.functional.pad(
                            gradients[layer.name][tensor.name].flatten(),
                            (0, tensor.padded - tensor.elements),
                        )
                        for tensor in layer.tensors
                    ]
                )
            )
            for layer in self.spec.stack.values()
        ]
        factor, _ = clip_coefficient(sums, SETTINGS.max_norm)
        for layer, tensors in gradients.items():
            for name, gradient in tensors.items():
                master, moments = self.masters[layer][name], self.moments[layer][name]
                self._update(master, moments, gradient.float() * factor, rate, number)
        return float(loss.detach() / labels.numel())

    def _update(
        self,
        master: torch.Tensor,
        moments: torch.Tensor,
        gradient: torch.Tensor,
        rate: float,
        number: int,
    ) -> None:
        (first, second), (beta1, beta2) = moments, SETTINGS.betas
        first.copy_(first * beta1 + gradient * (1 - beta1))
        second.copy_(second * beta2 + gradient * gradient * (1 - beta2))
        root = rounded_sqrt(second) * (1 - beta2**number) ** -0.5 + SETTINGS.epsilon
        master -= first * (rate / (1 - beta1**number)) / root
        if self.rounded:
            master.copy_(round_to_bf16(master))


@torch.no_grad()
def read_masters(model: Any, masters: Masters) -> None:
    """Sets the weights of `model` to `masters`, rounded to bf16."""
    for layer, tensors in masters.items():
        for name, tensor in tensors.items():
            model.get_parameter(hub_name(layer, name)).copy_(round_to_bf16(tensor))


def texts() -> tuple[Documents, Documents, Documents, str]:
    """Returns the documents for pre-training, for fine-tuning and for evaluation, with bytes as
    tokens, and a digest of all of them.
    """
    library = Path(sysconfig.get_paths()["stdlib"])
    code = b"".join(path.read_bytes() for path in sorted((library / "email").glob("*.py")))
    prose = (library / "pydoc_data" / "topics.py").read_bytes()
    return *split_text(code, prose), hashlib.sha256(code + prose).hexdigest()[:16]


def split_text(code: bytes, prose: bytes) -> tuple[Documents, Documents, Documents]:
    """Returns the documents for pre-training, for fine-tuning and for evaluation, with bytes as
    tokens. The last `HELD` bytes of `prose` are held out.
    """
    first, second, held = (
        Documents(
            tokens=np.frombuffer(text, dtype=np.uint8).astype(np.uint16),
            begins=np.array([0]),
            ends=np.array([len(text)]),
        )
        for text in (code, prose[:-HELD], prose[-HELD:])
    )
    return first, second, held


def plan_with(policy: str, knobs: Knobs) -> Plan:
    """Returns a plan for the CPU. Its memory limits are exactly the memory that it needs."""
    plan = Plan(
        policy=policy,
        hardware="cpu",
        source="",
        device_limit_bytes=1,
        host_limit_bytes=1,
        model=MODEL,
        workload=WORK,
        knobs=knobs,
    )
    schedule = policies.lower(plan)
    need = account(schedule, 1, 1, WITHOUT_ACTIVATIONS, 0)
    return msgspec.structs.replace(
        plan,
        digest=schedule.digest,
        device_limit_bytes=need.device_peak_bytes,
        host_limit_bytes=max(need.host_peak_bytes, 1),
    )


def plain(trainer: Plain, corpus: Corpus, steps: int, rate: float) -> Run:
    """Trains with plain PyTorch for `steps` steps at the learning rate `rate`."""
    for number in range(1, steps + 1):
        yield trainer.step(corpus.step(number)[0], rate, number), lambda: trainer.masters


def own(plan: Plan, start: Masters, corpus: Corpus) -> Run:
    """Trains with this project's runtime from the weights `start`, for STEPS steps at RATE."""
    threads = dict.fromkeys(lane_threads(torch.device("cpu")), 1)
    with Executor(
        plan, config_of(MODEL), SETTINGS, torch.device("cpu"), threads=threads
    ) as executor:
        executor.state.load(lambda layer, name, shape: start[layer][name].view(shape))

        def masters() -> Masters:
            return {layer.name: executor.state.masters(layer) for layer in MODEL.stack.values()}

        for number in range(1, STEPS + 1):
            yield executor.step(corpus.step(number), rate=RATE, number=number).loss, masters


@torch.no_grad()
def evaluate(judge: PreTrainedModel, masters: Masters, held: Corpus) -> tuple[float, float]:
    """Returns the loss on the held-out text in nats per byte and the share of correctly predicted
    bytes. `judge` is the model that is evaluated, with the weights rounded to bf16.
    """
    read_masters(judge, masters)
    losses, right = [], []
    for number in range(1, held.rows // len(held.step(1)[0].ids) + 1):
        batch: Batch = held.step(number)[0]
        ids, labels = batch.ids.to(judge.device), batch.labels.to(judge.device).flatten()
        logits = judge(ids).logits.float().flatten(0, 1)
        losses.append(float(torch.nn.functional.cross_entropy(logits, labels)))
        right.append(float((logits.argmax(-1) == labels).float().mean()))
    return float(np.mean(losses)), float(np.mean(right))


def followed(
    run: Run, judge: PreTrainedModel, held: Corpus, start: Masters
) -> tuple[dict[str, Any], str]:
    """Trains by iterating over `run`. Returns the loss of every step with the evaluations, and a
    digest of the last evaluated weights.
    """
    losses, evaluations = [], [(0, *evaluate(judge, start, held))]
    for number, (loss, masters) in enumerate(run, 1):
        losses.append(loss)
        if number % EVERY == 0:
            evaluations.append((number, *evaluate(judge, masters(), held)))
            last = masters()
            bits = hashlib.sha256(
                b"".join(
                    tensor.contiguous().numpy().tobytes()
                    for tensors in last.values()
                    for tensor in tensors.values()
                )
            ).hexdigest()
    return {"losses": losses, "evaluations": evaluations}, bits[:16]


@contextmanager
def one_thread() -> Iterator[None]:
    """Runs PyTorch on one thread within the `with` block, because the order of additions in a
    matrix product depends on the number of threads.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def simulate() -> Any:
    """Returns the data of `Job` in paper_figures."""
    before, after, held_out, digest = texts()
    with one_thread():
        corpora = [
            Corpus(text, WORK, seed=0, packing="plain") for text in (before, after, held_out)
        ]
        weights = random_weights(0)
        start: Masters = {
            layer.name: {t.name: weights(layer.name, t.name, t.shape) for t in layer.tensors}
            for layer in MODEL.stack.values()
        }
        for _, masters in plain(Plain(start), corpora[0], BEFORE, RATE_BEFORE):
            trained = masters
        # Fine-tuning starts from bf16 weights, as from a published checkpoint.
        start = {
            layer: {name: round_to_bf16(tensor).float() for name, tensor in tensors.items()}
            for layer, tensors in trained().items()
        }
        judge = AutoModelForCausalLM.from_config(config_of(MODEL), dtype=torch.bfloat16).eval()
        runs = {
            "plain PyTorch, fp32 masters": plain(Plain(start), corpora[1], STEPS, RATE),
            **{
                f"ours, {name}": own(plan_with(*chosen), start, corpora[1])
                for name, chosen in PLANS.items()
            },
            "bf16 weights alone": plain(Plain(start, rounded=True), corpora[1], STEPS, RATE),
        }
        found = {name: followed(run, judge, corpora[2], start) for name, run in runs.items()}
    return {
        "parameters": MODEL.parameters,
        "batch": WORK.batch,
        "sequence": WORK.sequence,
        "steps": STEPS,
        "rate": RATE,
        "steps_before": BEFORE,
        "text": (
            f"Python {platform.python_version()}'s email package, then its help topics; sha256"
            f" {digest}"
        ),
        "torch": str(torch.__version__),
        "machine": f"CPU, {platform.machine()}, one thread",
        "runs": {name: {**data, "weights_digest": bits} for name, (data, bits) in found.items()},
    }
