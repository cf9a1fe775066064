"""Makes one layer's router from the FFN inputs of the calibration tokens.

Owns the clustering that gives each expert its direction and the bias that balances the load. The router depends
on the tokens, so that experts specialise; it is not random and no two experts are alike.
"""

from __future__ import annotations

import numpy as np

from smallmodel.bf16 import round_bf16
from smallmodel.forward import router_scores, top_experts
from smallmodel.layout import N_EXPERTS, FloatArray, Router

N_CLUSTER_PASSES = 12
MIN_CLUSTER_TOKENS = 8
LOGIT_STD = 1.5
"""Spread of the router's logits: wide enough that the sigmoid weights of the chosen experts differ."""
N_BALANCE_STEPS = 60
BALANCE_RATE = 0.01
BALANCE_TOLERANCE = 0.25


def make_router(x: FloatArray, rng: np.random.Generator) -> Router:
    """Router for FFN inputs x [n_tokens, hidden]; its weight is already rounded to bf16."""
    mean = x.mean(axis=0)
    centroids = spherical_kmeans(_normalised(x - mean), rng)
    # The clusters were made on x - mean. glm4_moe has no logit bias that could stand for centroid . mean, so the
    # part of each centroid along the mean is taken out instead: the rest sees nothing of the common direction.
    direction = mean / np.linalg.norm(mean)
    weight = _normalised(centroids - np.outer(centroids @ direction, direction))
    weight = round_bf16(weight * (LOGIT_STD / (x @ weight.T).std()))
    scores = router_scores(Router(weight, np.zeros(N_EXPERTS, dtype=np.float32)), x)
    return Router(weight, balance_bias(scores))


def spherical_kmeans(points: FloatArray, rng: np.random.Generator) -> FloatArray:
    """N_EXPERTS unit centroids [n_experts, hidden] of unit vectors `points` by cosine (Dhillon and Modha 2001)."""
    centroids = points[rng.choice(len(points), N_EXPERTS, replace=False)]
    for _ in range(N_CLUSTER_PASSES):
        nearest = np.argmax(points @ centroids.T, axis=1)
        for e in range(N_EXPERTS):
            members = np.flatnonzero(nearest == e)
            # A cluster that ran dry starts again from a token.
            few = len(members) <= MIN_CLUSTER_TOKENS
            centroids[e] = points[rng.integers(len(points))] if few else points[members].mean(axis=0)
        centroids = _normalised(centroids)
    return centroids


def balance_bias(scores: FloatArray) -> FloatArray:
    """Bias [n_experts] under which `scores` [n_tokens, n_experts] load the experts about evenly.

    The auxiliary-loss-free rule of Wang et al. (2024), which DeepSeek-V3 trains with: lower the bias of an
    overloaded expert by a fixed step, raise that of an idle one, leave those within the tolerance.
    """
    bias = np.zeros(N_EXPERTS, dtype=np.float32)
    for _ in range(N_BALANCE_STEPS):
        load = expert_load(scores, bias)
        step = np.sign(load - 1.0) * (np.abs(load - 1.0) > BALANCE_TOLERANCE)
        bias -= (BALANCE_RATE * step).astype(np.float32)
    return bias


def expert_load(scores: FloatArray, bias: FloatArray) -> FloatArray:
    """How often each expert is chosen, 1 being the mean: [n_experts]."""
    counts = np.bincount(top_experts(scores + bias).ravel(), minlength=N_EXPERTS)
    return np.asarray(counts / counts.mean(), dtype=np.float32)


def _normalised(rows: FloatArray) -> FloatArray:
    return np.asarray(rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-12), dtype=np.float32)
