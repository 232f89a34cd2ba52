"""fp8 linear layers on the CPU: their definition, the layers that stay in bf16, and plans."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import Session  # noqa: F401
from fp8_definition import error, products

from megatrain.runtime.layers.fp8_linear import Fp8Linear, install, quantise
from megatrain.simulator.base.errors import UserError
from megatrain.simulator.schedule.plan import Placement, Plan
