"""Measures this machine for a model and a workload: link, layers, optimizer, and how they slow each other."""

from __future__ import annotations

import argparse
from pathlib import Path

from megatrain.experiments import options


def describe(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="a Hugging Face folder, a config.json, or a name in the library: the layers to measure")
    parser.add_argument("--out", type=Path, required=True, metavar="HARDWARE", help="the file to write, e.g. hardware.toml")
    parser.add_argument("--name", default="this-machine", help="the machine's name in reports")
    options.add_workload(parser)
    options.add_limits(parser)
    options.add_device(parser)


def run(args: argparse.Namespace) -> int:
    from rich.console import Console

    from megatrain.runtime.calibrate import calibrate
    from megatrain.runtime.layers.templates import config_of
    from megatrain.simulator.files import write_toml
    from megatrain.simulator.specs import ModelSpec

    options.check_writable(args.out)
    model = ModelSpec.load(args.model)
    folder = args.model if Path(args.model).is_dir() else None
    console = Console()
    with console.status("measuring"):
        hardware = calibrate(
            args.name, model, options.workload(args, model), config_of(model, folder), options.device(args),
            host_bytes=args.host_memory, device_bytes=args.device_memory, progress=lambda what: console.print(f"measuring {what}", highlight=False),
        )  # fmt: skip
    write_toml(args.out, hardware, "A machine, measured by `megatrain calibrate`. Times in ns, sizes in bytes or parameters.")
    print(
        f"wrote {args.out}: H2D {hardware.h2d_gb_per_s:.1f} GB/s, D2H {hardware.d2h_gb_per_s:.1f} GB/s, both at once {hardware.duplex_fraction:.0%} each; "
        f"matrix product {hardware.peak_tflops[args.dtype]:.3g} TFLOP/s, layer forward {100 * hardware.linear_efficiency:.2g} % of it; "
        f"CPU AdamW {hardware.cpu_update_per_s / 1e9:.2f} G parameters/s"
    )
    return 0
