"""Runs the `megatrain` command: `python -m megatrain.experiments.cli`."""

import sys

from megatrain.experiments.cli.entry import main

sys.exit(main())
