"""PyTorch's FSDP2 with CPU offload and fused AdamW on the host. Masters are fp32 on the host,
weights on the device have the workload's dtype, and activations are recomputed.

In some versions, clipping fails with CPU offload (pytorch #148532). So it is tried before the first
step. If it fails, the steps run without clipping, and the notes state the reason. Without a GPU
nothing is offloaded, which is useful only for tests.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.nn.utils import clip_grad_norm_

from megatrain.experiments.benchmarks.steps import (
    MAX_NORM,
    RATE,
    Parts,
    Reading,
    WorkStep,
    in_group,
    random_tokens,
)
from megatrain.runtime.layers.functional_layers import config_of
from megatrain.runtime.layers.supported import refuse_unsupported
from megatrain.runtime.memory.arenas import TORCH_DTYPE
from megatrain.runtime.optimizer.settings import AdamW
from megatrain.simulator.model.workload import Workload
from megatrain.simulator.schedule.plan import Plan

NEEDS = ()
DEVICES = ("cuda", "cpu")


def build(plan: Plan, device: torch.device) -> torch.nn.Module:
    """Returns the sharded model with random weights: matrices from N(0, 0.02), norms one, biases
    zero.
    """
    from transformers import AutoModelForCausalLM

    refuse_unsupported(plan.model, plan.workload)
    config = config_of(plan.model)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    dtype, cuda = TORCH_DTYPE[plan.workload.dtype], device.type == "cuda"
    options: dict[str, Any] = {
        "mesh": init_device_mesh(device.type, (dist.get_world_size(),)),
        "mp_policy": MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype),
        "offload_policy": CPUOffloadPolicy(pin_memory=True) if cuda else OffloadPolicy(),
    }
    for layer in model.model.layers:
        fully_shard(layer, **options)
    fully_shard(model, **options)
    model.to_empty(device="cpu")
    # Its frequencies have no values after construction on the meta device.
    model.model.rotary_emb = type(model.model.rotary_emb)(config).to(device)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            local = parameter.to_local()
            if local.dim() == 1:
                local.fill_(0.0 if name.endswith("bias") else 1.0)
            else:
                # A GPU draws 7e9 random numbers in a second, and a CPU core in a minute.
                local.copy_(torch.randn(local.shape, device=device).mul_(0.02))
    return model


def prepare(plan: Plan, device: torch.device) -> tuple[WorkStep, str]:
    """Returns a step on random tokens from random weights, and notes on the system. A step can have
    another batch and sequence than `plan`.
    """
    in_group()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    work, model, own = plan.workload, build(plan, device), AdamW()
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=RATE,
        betas=own.betas,
        eps=own.epsilon,
        weight_decay=own.weight_decay,
        fused=True,
    )
    reason = "by choice" if work.clipping == "none" else _cannot_clip(model)

    def step(number: int, work: Workload) -> Reading:
        micro_batches = [
            tokens[0].to(device) for tokens in random_tokens(plan.model.vocabulary, work, number)
        ]
        parts, losses, norm = Parts(device), [], None
        for ids in micro_batches:
            with parts.time("forward"):
                loss = model(input_ids=ids, labels=ids).loss / work.accumulation
            losses.append(loss.detach())
            with parts.time("backward"):
                loss.backward()
        if not reason:
            with parts.time("clipping"):
                norm = clip_grad_norm_(model.parameters(), MAX_NORM)
        with parts.time("optimizer"):
            optimizer.step()
            optimizer.zero_grad()
        value = (
            None
            if norm is None
            else float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)
        )
        return Reading(
            seconds=sum(parts.seconds.values()),
            loss=float(torch.stack(losses).double().sum()),
            gradient_norm=value,
            parts=parts.seconds,
        )

    return step, f"PyTorch {torch.__version__}, eager layers, recompute, " + (
        f"no clipping: {reason}" if reason else "clipped"
    )


def _cannot_clip(model: torch.nn.Module) -> str:
    """Returns the first line of the error if gradients of `model` cannot be clipped, or an empty
    text if they can. It tries to clip a gradient of zeros of the smallest parameter.
    """
    parameter = min(model.parameters(), key=torch.Tensor.numel)
    parameter.grad = torch.zeros_like(parameter)
    try:
        norm = clip_grad_norm_([parameter], MAX_NORM)
        float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)
    except Exception as error:  # the notes have PyTorch's own message
        return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    finally:
        parameter.grad = None
    return ""
