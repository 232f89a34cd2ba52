"""Compiles functions of layers, each with a recompile limit of its own."""

from __future__ import annotations

import itertools
import types
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

_NUMBERS = itertools.count()


def compiled(function: Callable[..., Any], **settings: Any) -> Callable[..., Any]:
    """Returns `function`, compiled for the shapes of each call.

    PyTorch compiles a code object at most 8 times (`torch._dynamo.config.recompile_limit`), and
    then runs it eagerly without an error. Without a copy, the ninth kind of layer in a process
    would run eagerly, and would be slower and use more memory than predicted. So the function is
    copied and gets its own code object.

    Args:
        function: a function, or a method of an object.
        **settings: further arguments of `torch.compile`.
    """
    plain = function.__func__ if isinstance(function, types.MethodType) else function
    assert isinstance(plain, types.FunctionType), "neither a function nor a method"
    code = plain.__code__.replace(co_name=f"{plain.__name__}_{next(_NUMBERS)}")
    copy = types.FunctionType(
        code, plain.__globals__, plain.__name__, plain.__defaults__, plain.__closure__
    )
    copy.__kwdefaults__ = plain.__kwdefaults__
    target: Callable[..., Any] = copy
    if isinstance(function, types.MethodType):
        target = types.MethodType(copy, function.__self__)
    return torch.compile(target, dynamic=False, **settings)


def rebuilding_backend(options: dict[str, Any]) -> Callable[..., Any]:
    """Returns a backend of `torch.compile`: inductor in the context `rebuilding`. `options` are
    those of inductor that differ from its defaults.
    """

    def backend(graph: Any, inputs: Any) -> Any:
        from torch._inductor.compile_fx import compile_fx

        with rebuilding():
            return compile_fx(graph, inputs, config_patches=options)

    return backend


def rebuilding() -> AbstractContextManager[None]:
    """Returns a context in which the compiler saves fewer tensors for the backward pass.

    By default, the compiler saves each output of an elementwise kernel that a matrix product of the
    backward pass reads, such as the output of a norm. In this context, it may save the inputs of
    the kernel instead, and run it again in the backward pass. PyTorch's partitioner reads this
    setting when it divides a graph into forward and backward pass
    (`torch._functorch.config.ban_recompute_materialized_backward`).
    """
    from torch._functorch import config

    context: AbstractContextManager[None] = config.patch(ban_recompute_materialized_backward=False)
    return context
