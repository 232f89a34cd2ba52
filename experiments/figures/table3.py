"""Table 3: one real small fine-tuning job, trained six ways. Not the paper's: MetaMathQA and its models cannot be had here. Some 3 min.

A Qwen2-style model of 0.1 M parameters is trained on the sources of Python's email package, then fine-tuned on the text of Python's help topics (English
prose) at the learning rate of 1e-5: plain PyTorch with fp32 masters (`runtime/reference.py`), this runtime under three plans, and bf16 weights alone
with fp32 moments, as in the published code. The last 16 KiB of the text are held out: its loss, and the share of next bytes that are guessed right.
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
from megatrain.runtime.data import Corpus
from megatrain.runtime.data.documents import Documents
from megatrain.runtime.executor import Executor, lane_threads
from megatrain.runtime.files.model_files import hub_name, random_weights
from megatrain.runtime.layers.templates import config_of
from megatrain.runtime.optimizer import AdamW, round_to_bf16
from megatrain.runtime.reference import Masters, Reference
from megatrain.simulator import policies
from megatrain.simulator.memory import account
from megatrain.simulator.plan import Knobs, Placement, Plan
from megatrain.simulator.specs import ModelSpec
from megatrain.simulator.workload import Workload

MODEL = ModelSpec.from_config(
    {
        "model_type": "qwen2", "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 192, "num_attention_heads": 4, "num_key_value_heads": 2,
        "vocab_size": 320, "tie_word_embeddings": False,
    }, "table3", "byte-100k",
)  # fmt: skip
WORK = Workload(batch=4, sequence=64, loss_chunk=256)
BEFORE, STEPS, EVERY = 400, 240, 60
HELD = 2**14
"""bytes"""
RATE_BEFORE, RATE = 1e-3, 1e-5
SETTINGS = AdamW()
PLANS = {
    "double_buffer": ("double_buffer", Knobs(checkpoint_interval=2, chunk_bytes=2**17)),
    "overlapped, all streams": ("overlapped", Knobs(chunk_bytes=2**16)),
    "overlapped, half resident": ("overlapped", Knobs(chunk_bytes=2**18, placement=Placement(weights="e,0", low="e", moments="0", gradients="0-1", stored="1"))),
}  # fmt: skip
Run = Iterator[tuple[float, Callable[[], Masters]]]
"""loss of each step, and how to get its weights"""


class Bf16Only(Reference):
    """The same step with weights of bf16 alone: what the update is rounded away, is lost."""

    def step(self, *args: Any, **options: Any) -> tuple[float, float | None]:
        found = super().step(*args, **options)
        for tensors in self.masters.values():
            for master in tensors.values():
                master.copy_(round_to_bf16(master).float())
        return found


def texts() -> tuple[Documents, Documents, Documents, str]:
    """What to train on before, to fine-tune on, and held out, bytes as tokens; and a digest of all of them."""
    library = Path(sysconfig.get_paths()["stdlib"])
    code = b"".join(path.read_bytes() for path in sorted((library / "email").glob("*.py")))
    prose = (library / "pydoc_data" / "topics.py").read_bytes()
    first, second, held = (
        Documents(tokens=np.frombuffer(text, dtype=np.uint8).astype(np.uint16), begins=np.array([0]), ends=np.array([len(text)]))
        for text in (code, prose[:-HELD], prose[-HELD:])
    )
    return first, second, held, hashlib.sha256(code + prose).hexdigest()[:16]


def planned(policy: str, knobs: Knobs) -> Plan:
    plan = Plan(policy=policy, hardware="cpu", source="", device_limit_bytes=1, host_limit_bytes=1, model=MODEL, workload=WORK, knobs=knobs)
    schedule = policies.lower(plan)
    need = account(schedule, 1, 1, 0, 0)
    return msgspec.structs.replace(plan, digest=schedule.digest, device_limit_bytes=need.device_peak_bytes, host_limit_bytes=max(need.host_peak_bytes, 1))


def reference(kind: type[Reference], start: Masters, corpus: Corpus, steps: int, rate: float) -> Run:
    trainer = kind(MODEL, WORK, config_of(MODEL), SETTINGS, start, torch.device("cpu"))
    for number in range(1, steps + 1):
        loss, _ = trainer.step(corpus.step(number), rate=rate, number=number)
        yield loss, lambda: trainer.masters


def own(plan: Plan, start: Masters, corpus: Corpus) -> Run:
    threads = dict.fromkeys(lane_threads(torch.device("cpu")), 1)
    with Executor(plan, config_of(MODEL), SETTINGS, torch.device("cpu"), threads=threads) as executor:
        executor.state.load(lambda layer, name, shape: start[layer][name].view(shape))

        def masters() -> Masters:
            return {layer.name: executor.state.masters(layer) for layer in MODEL.stack.values()}

        for number in range(1, STEPS + 1):
            yield executor.step(corpus.step(number), rate=RATE, number=number).loss, masters


@torch.no_grad()
def evaluate(judge: PreTrainedModel, masters: Masters, held: Corpus) -> tuple[float, float]:
    """Loss, and the share of bytes guessed right, of the held-out text with the weights rounded to bf16."""
    names: Mapping[str, torch.Tensor] = dict(judge.named_parameters())
    for layer, tensors in masters.items():
        for name, tensor in tensors.items():
            names[hub_name(layer, name)].copy_(round_to_bf16(tensor))
    losses, right = [], []
    for number in range(1, held.rows // WORK.batch + 1):
        batch: Batch = held.step(number)[0]
        logits = judge(batch.ids).logits.float().flatten(0, 1)
        losses.append(float(torch.nn.functional.cross_entropy(logits, batch.labels.flatten())))
        right.append(float((logits.argmax(-1) == batch.labels.flatten()).float().mean()))
    return float(np.mean(losses)), float(np.mean(right))


def followed(run: Run, judge: PreTrainedModel, held: Corpus, start: Masters) -> tuple[dict[str, Any], str]:
    """Loss of every step, evaluations, and a digest of the weights at the end."""
    losses, evaluations = [], [(0, *evaluate(judge, start, held))]
    for number, (loss, masters) in enumerate(run, 1):
        losses.append(loss)
        if number % EVERY == 0:
            evaluations.append((number, *evaluate(judge, masters(), held)))
            last = masters()
            bits = hashlib.sha256(b"".join(tensor.contiguous().numpy().tobytes() for tensors in last.values() for tensor in tensors.values())).hexdigest()
    return {"losses": losses, "evaluations": evaluations}, bits[:16]


@contextmanager
def one_thread() -> Iterator[None]:
    """The order of a product's additions hangs on the number of threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def simulate() -> Any:
    before, after, held_out, digest = texts()
    with one_thread():
        corpora = [Corpus(text, WORK, seed=0, packing="plain") for text in (before, after, held_out)]
        weights = random_weights(0)
        start: Masters = {layer.name: {t.name: weights(layer.name, t.name, t.shape) for t in layer.tensors} for layer in MODEL.stack.values()}
        for _, masters in reference(Reference, start, corpora[0], BEFORE, RATE_BEFORE):
            trained = masters
        start = {
            layer: {name: round_to_bf16(tensor).float() for name, tensor in tensors.items()} for layer, tensors in trained().items()
        }  # as a bf16 checkpoint
        judge = AutoModelForCausalLM.from_config(config_of(MODEL), dtype=torch.bfloat16).eval()
        runs = {
            "plain PyTorch, fp32 masters": reference(Reference, start, corpora[1], STEPS, RATE),
            **{f"ours, {name}": own(planned(*chosen), start, corpora[1]) for name, chosen in PLANS.items()},
            "bf16 weights alone": reference(Bf16Only, start, corpora[1], STEPS, RATE),
        }
        found = {name: followed(run, judge, corpora[2], start) for name, run in runs.items()}
    return {
        "parameters": MODEL.parameters, "batch": WORK.batch, "sequence": WORK.sequence, "steps": STEPS, "rate": RATE, "steps_before": BEFORE,
        "text": f"Python {platform.python_version()}'s email package, then its help topics; sha256 {digest}", "torch": str(torch.__version__),
        "machine": f"CPU, {platform.machine()}, one thread", "runs": {name: {**data, "weights_digest": bits} for name, (data, bits) in found.items()},
    }  # fmt: skip
