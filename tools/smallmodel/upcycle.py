"""Turns one dense FFN into a Mixture of Experts that computes nearly the same (sparse upcycling).

Owns the choice of neurons and the refit of the down projections. The shared expert takes the neurons that matter
most overall, each routed expert those that matter most to its own tokens (neurons may serve several experts);
then all down projections are fitted by ridge regression so that the weighted sum of what a token's experts say
comes close to what the dense FFN says. Nothing is trained by gradient.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from smallmodel.bf16 import round_bf16
from smallmodel.forward import ffn_activations, router_scores, routing_weights
from smallmodel.layout import EXPERT_WIDTH, N_EXPERTS, SHARED_WIDTH, FeedForward, FloatArray, IntArray, Moe
from smallmodel.router import make_router

RIDGE = 0.05
"""Strength of the pull towards the dense columns, as a share of the mean squared activation."""
N_SWEEPS = 2
MIN_FIT_TOKENS = 16


@dataclass(frozen=True)
class Fit:
    """How well one layer came out: relative error of its output before and after the refit."""

    error_cut: float
    error_refit: float


class _Part:
    """One expert during the fit: its tokens, their activations times routing weight, and its down projection."""

    def __init__(self, tokens: IntArray | slice, activations: FloatArray, dense_down: FloatArray) -> None:
        self.tokens = tokens
        self.activations = activations  # [n_part_tokens, width]
        self.dense_down = dense_down  # [hidden, width]
        self.down = dense_down
        self.gram: npt.NDArray[np.float64] = (activations.T @ activations).astype(np.float64)
        ridge = RIDGE * np.trace(self.gram) / len(self.gram) + 1e-8
        self.inverse = np.linalg.inv(self.gram + ridge * np.eye(len(self.gram)))

    def improve(self, residual: FloatArray) -> None:
        """Refit this part to what all others leave over; `residual` [n_tokens, hidden] is kept up to date.

        argmin over D of |T - A D^T|^2 + ridge |D - D_dense|^2, where T = residual + A down^T is what is left for
        this part to explain. With D = D_dense + C it is ordinary ridge regression of C on T - A D_dense^T (Hoerl,
        Kennard 1970), and A^T of that is A^T residual + gram (down - D_dense)^T: no second pass over the tokens.
        """
        if len(self.activations) < MIN_FIT_TOKENS:
            return
        left_over = (self.activations.T @ residual[self.tokens]).astype(np.float64)
        left_over += self.gram @ (self.down - self.dense_down).T.astype(np.float64)
        # Rounded here and not at the end, so that the residual is that of the weights as they are stored.
        down = round_bf16((self.dense_down + (self.inverse @ left_over).T).astype(np.float32))
        residual[self.tokens] -= self.activations @ (down - self.down).T
        self.down = down


def upcycle(ffn: FeedForward, x: FloatArray, rng: np.random.Generator) -> tuple[Moe, FloatArray, Fit]:
    """(MoE that stands for `ffn` on inputs like x [n_tokens, hidden], its output on x, how well it fits).

    All weights of the MoE are rounded to bf16 already."""
    router = make_router(x, rng)
    weights = routing_weights(router_scores(router, x), router.bias)
    activations = ffn_activations(ffn, x)
    shared, own = choose_neurons(np.abs(activations) * np.linalg.norm(ffn.down, axis=0), weights)
    parts = [_Part(slice(None), activations[:, shared], ffn.down[:, shared])]
    for e in range(N_EXPERTS):
        tokens = np.flatnonzero(weights[:, e])
        weighted = activations[np.ix_(tokens, own[e])] * weights[tokens, e : e + 1]
        parts.append(_Part(tokens, weighted, ffn.down[:, own[e]]))
    output, fit = refit(parts, activations @ ffn.down.T)
    experts = [
        FeedForward(ffn.gate[neurons], ffn.up[neurons], part.down)
        for neurons, part in zip([shared, *own], parts, strict=True)
    ]
    return Moe(router, experts[0], tuple(experts[1:])), output, fit


def choose_neurons(importance: FloatArray, weights: FloatArray) -> tuple[IntArray, list[IntArray]]:
    """(neurons of the shared expert, neurons of each routed expert), most important first.

    importance [n_tokens, n_neurons] is each neuron's share in the output, |activation| * |its down column|;
    weights [n_tokens, n_experts] are the routing weights.
    """
    shared = np.argsort(-importance.mean(axis=0), kind="stable")[:SHARED_WIDTH]
    per_expert = weights.T @ importance
    per_expert[:, shared] = -1.0
    return shared, [np.argsort(-row, kind="stable")[:EXPERT_WIDTH] for row in per_expert]


def refit(parts: list[_Part], target: FloatArray) -> tuple[FloatArray, Fit]:
    """Fit the parts' down projections to `target` [n_tokens, hidden], one part at a time, N_SWEEPS times over.

    Returns the sum of the parts' outputs, [n_tokens, hidden], and the errors."""
    residual = target.copy()
    for part in parts:
        residual[part.tokens] -= part.activations @ part.down.T
    cut = relative_norm(residual, target)
    for _ in range(N_SWEEPS):
        for part in parts:
            part.improve(residual)
    return target - residual, Fit(cut, relative_norm(residual, target))


def relative_norm(error: FloatArray, target: FloatArray) -> float:
    """|error| / |target|, both as one long vector."""
    return float(np.linalg.norm(error) / np.linalg.norm(target))
