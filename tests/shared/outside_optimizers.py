"""Source code of optimizers outside the package with no, one and two moments."""

from __future__ import annotations

from pages import saved_examples

HEADER = "from megatrain.simulator.model.optimizer import Optimizer\n\n\n"
SGD = (
    HEADER
    + """class Sgd(Optimizer):
    name = "sgd"
    moments = 0
    settings = ("weight_decay",)

    def update(self, weights, moments, gradient, *, rate, number, weight_decay):
        weights.mul_(1 - rate * weight_decay).sub_(gradient.mul_(rate))
"""
)
TWO_MOMENTA = (
    HEADER
    + '''class TwoMomenta(Optimizer):
    """A fast and a slow momentum; the slow one counts from the second step on."""

    name = "two momenta"
    moments = 2
    settings = ("betas", "weight_decay")

    def update(self, weights, moments, gradient, *, rate, number, betas, weight_decay):
        for moment, beta in zip(moments, betas):
            moment.mul_(beta).add_(gradient * (1 - beta))
        fast, slow = moments
        weights.mul_(1 - rate * weight_decay).sub_(fast * rate)
        if number > 1:
            weights.sub_(slow * (rate * 0.5))
'''
)
TEXTS = {0: SGD, 1: saved_examples("docs/adding.md")["lion.py"], 2: TWO_MOMENTA}
"""Sources by number of moments. The Lion of the guide has one."""
