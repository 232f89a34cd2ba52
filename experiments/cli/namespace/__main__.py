"""Runs the `megatrain` command: `python -m megatrain`."""

import sys

from megatrain.experiments.cli.entry import main

sys.exit(main())
