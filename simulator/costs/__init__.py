"""Cost models: the durations of ops, and how ops on different lanes slow each other down.

`Calibrated` takes durations from measurements, and `Datasheet` from rates. `Replayed` takes
durations from a run, to check the engine.
"""

from __future__ import annotations

from pathlib import Path

from megatrain.simulator.base import plugins
from megatrain.simulator.base.errors import UserError
from megatrain.simulator.costs.adjusted import Corrected
from megatrain.simulator.costs.calibrated import Calibrated
from megatrain.simulator.costs.contention import ContentionModel
from megatrain.simulator.costs.datasheet import Datasheet, fp8_speed
from megatrain.simulator.costs.elementwise import Elementwise
from megatrain.simulator.costs.outside import checked
from megatrain.simulator.costs.protocol import CostModel, EstimatedCosts
from megatrain.simulator.costs.replayed import Replayed
from megatrain.simulator.costs.several_gpus import OneOfSeveral, link_share
from megatrain.simulator.hardware.machine import HardwareSpec
from megatrain.simulator.hardware.several_gpus import SeveralGpus
from megatrain.simulator.model.attention_masks import document_tokens
from megatrain.simulator.model.optimizer import find
from megatrain.simulator.model.specs import ModelSpec
from megatrain.simulator.model.workload import Workload
from megatrain.simulator.schedule.plan import Plan

__all__ = [
    "Calibrated",
    "Corrected",
    "CostModel",
    "Datasheet",
    "Replayed",
    "EstimatedCosts",
    "cost_model",
    "costs_of",
    "outside_file",
]


GROUP = "megatrain.cost_models"
"""The entry point group of cost models that installed packages define."""


def cost_model(
    hardware: HardwareSpec, model: ModelSpec, workload: Workload, gpus: int = 1, hosts: int = 1
) -> CostModel:
    """Returns the cost model of `model` and `workload` on `hardware`.

    If `hardware.cost_model` names a cost model, it is used. Otherwise it is `Calibrated` if the
    machine was measured, and `Datasheet` if not. Its durations are multiplied by
    `hardware.corrections`, if there are any. With several `gpus` of a host, copies are slower,
    because these GPUs share the host's memory. If several GPUs were measured
    (`HardwareSpec.several`), copies and collectives have the measured rates. With several `hosts`,
    collectives also take the time of the network.

    Raises UserError if a cost model from outside the package is not found or fails, if the workload
    has fp8 products and the machine does not, or if there are several hosts and the machine has no
    rate of the network.
    """
    plugins.refresh()
    make = _made if hardware.cost_model else _shared
    return make(hardware, model, workload, gpus, hosts)


def costs_of(plan: Plan, hardware: HardwareSpec) -> CostModel:
    """Returns the cost model of `plan` on `hardware`, with the network of the plan if it names one.

    Raises UserError as `cost_model` does.
    """
    machine = hardware.with_network(plan.network_gb_per_s)
    return cost_model(machine, plan.model, plan.workload, plan.gpus, plan.hosts)


def _made(
    hardware: HardwareSpec, model: ModelSpec, workload: Workload, gpus: int, hosts: int
) -> CostModel:
    """Returns what `cost_model` returns, made anew."""
    measured = hardware.measured_together(gpus // hosts)
    costs = _uncorrected(hardware, model, workload, gpus, hosts, measured)
    if hardware.corrections:
        costs = Corrected(costs, hardware.corrections)
    if gpus == hosts:
        return costs
    exact = measured if measured and (measured.gpus, 1) == (gpus, hosts) else None
    return OneOfSeveral(costs, link_share(hardware, gpus // hosts), exact)


_shared = plugins.cached(maxsize=8)(_made)
"""Returns what `_made` returns. Cached because searches with the same cost model share what they
know about plans."""


def _uncorrected(
    hardware: HardwareSpec,
    model: ModelSpec,
    workload: Workload,
    gpus: int,
    hosts: int,
    several: SeveralGpus | None,
) -> CostModel:
    """Returns the cost model without `hardware.corrections` and the sharing of links. `several` has
    the collectives of several GPUs of a host, if they were measured.
    """
    if workload.fp8:
        fp8_speed(hardware)
    if hardware.cost_model:
        if hosts > 1:
            raise UserError(
                f"hardware {hardware.name}: cost_model {hardware.cost_model}",
                found=f"a cost model from outside the package, and {hosts} hosts",
                allowed="a built-in cost model, which knows the network",
                fix="remove it, or plan for one host",
            )
        return _from_outside(hardware, model, workload)
    table = hardware.costs
    if table is None:
        return Datasheet(hardware, model, workload, gpus, hosts, several=several)
    # A calibration measures rows of one document.
    rows = workload.whole_rows
    datasheet = documents = None
    if workload.dtype in hardware.peak_tflops:
        datasheet = Datasheet(hardware, model, rows, gpus, hosts, several=several)
        if document_tokens(model, workload):
            documents = Datasheet(hardware, model, workload)
    sharing = ContentionModel(
        table.contention,
        table.host_memory or hardware.host_memory,
        hardware.duplex_curve,
        table.turns or hardware.turns,
        high_priority=find(workload.optimizer).by_tensor,
        product_ns=datasheet.product_ns if datasheet else 0.0,
        several=several,
    )
    elementwise = Elementwise(model, rows, hardware.cores)
    return Calibrated(table, datasheet, sharing, elementwise, documents)


def outside_file(hardware: HardwareSpec) -> Path | None:
    """Returns the path of the `.py` file that `hardware.cost_model` names, or None if it is not the
    path of a file.
    """
    return Path(hardware.cost_model) if hardware.cost_model.endswith(".py") else None


def _from_outside(hardware: HardwareSpec, model: ModelSpec, workload: Workload) -> CostModel:
    """Returns the cost model that `hardware.cost_model` names."""
    name = hardware.cost_model
    where = f"hardware {hardware.name}: cost_model {name}"
    if file := outside_file(hardware):
        defined = plugins.load_file("cost model", str(file))
        module, make = defined.__name__, getattr(defined, "cost_model", None)
    elif name in plugins.installed(GROUP):
        make = plugins.load(GROUP, name)
        module = getattr(make, "__module__", "")
    else:
        installed = ", ".join(plugins.installed(GROUP)) or "none is installed"
        raise UserError(
            where,
            found="no such cost model",
            allowed=f"an installed one ({installed}), or the path of a .py file",
            fix="correct the name, or remove it to use the built-in cost models",
        )
    if not callable(make):
        raise UserError(
            where,
            found="no function cost_model",
            allowed="a function (hardware, model, workload) that returns a CostModel",
            fix="see docs/adding.md",
        )
    try:
        return checked(make(hardware, model, workload), where, module)
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        raise UserError(
            where,
            found=f"{type(error).__name__}: {error}".splitlines()[0]
            + plugins.line_in(module, error),
            allowed="a function that returns a CostModel",
            fix="correct the function",
        ) from error
