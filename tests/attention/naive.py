"""The references that the tests of attention compare against: plain loops over plain numbers, in float64.

Nothing here uses minilm. Positions below 0 are empty slots.
"""

import math
from itertools import product

import torch

ALLOWS = {
    "causal": lambda q, k: k <= q,
    "none": lambda q, k: True,
    "window of 1": lambda q, k: k == q,
    "window of 3": lambda q, k: q - 3 < k <= q,
    "prefix of 4": lambda q, k: k <= q or k < 4,
    "every other": lambda q, k: k <= q and (q - k) % 2 == 0,
    "strictly before": lambda q, k: k < q,
}

# Press et al. 2022, section 3: 2^(-8/n), its powers; between powers of two, every other one of the next series
SLOPES = {
    1: [2**-8],
    2: [2**-4, 2**-8],
    3: [2**-4, 2**-8, 2**-2],
    4: [2**-2, 2**-4, 2**-6, 2**-8],
    6: [2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3],
    8: [1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 32, 1 / 64, 1 / 128, 1 / 256],
    12: [2**-1, 2**-2, 2**-3, 2**-4, 2**-5, 2**-6, 2**-7, 2**-8, 2**-0.5, 2**-1.5, 2**-2.5, 2**-3.5],
}


def attend(q, k, v, *, allows, scale, q_pos, k_pos, slopes=None):
    """q (B, H, n, D), k (B, G, m, D), v (B, G, m, E), positions (B, n) and (B, m) -> (B, H, n, E) float64."""
    q, k, v = (t.detach().double() for t in (q, k, v))
    B, H, n, _ = q.shape
    out = torch.zeros(B, H, n, v.shape[-1], dtype=torch.float64)
    for b, h, i in product(range(B), range(H), range(n)):
        at, g = q_pos[b][i], h // (H // k.shape[1])
        scores = {}
        for j, other in enumerate(k_pos[b]):
            if at >= 0 and other >= 0 and allows(at, other):
                scores[j] = scale * sum(
                    a * c for a, c in zip(q[b, h, i].tolist(), k[b, g, j].tolist(), strict=True)
                )
                scores[j] -= slopes[h] * abs(at - other) if slopes else 0
        if scores:
            top = max(scores.values())
            weights = {j: math.exp(score - top) for j, score in scores.items()}
            total = sum(weights.values())
            for j, weight in weights.items():
                out[b, h, i] += weight / total * v[b, g, j]
    return out


def attend_linear(q, k, v, *, causal, q_pos, k_pos, base=None):
    """As `attend`, with elu + 1 features in place of the exponential; `base` turns the numerator's (rotary)."""
    q, k, v = (t.detach().double() for t in (q, k, v))
    B, H, n, _ = q.shape
    out = torch.zeros(B, H, n, v.shape[-1], dtype=torch.float64)
    for b, h, i in product(range(B), range(H), range(n)):
        at, g = q_pos[b][i], h // (H // k.shape[1])
        above, below = torch.zeros(v.shape[-1], dtype=torch.float64), 0.0
        for j, other in enumerate(k_pos[b]):
            if at >= 0 and other >= 0 and (other <= at or not causal):
                x, y = ([elu(a) + 1 for a in t.tolist()] for t in (q[b, h, i], k[b, g, j]))
                below += sum(a * c for a, c in zip(x, y, strict=True))
                if base:
                    x, y = turn(x, at, base), turn(y, other, base)
                above += sum(a * c for a, c in zip(x, y, strict=True)) * v[b, g, j]
        if below:
            out[b, h, i] = above / below
    return out


def elu(x):
    return x if x > 0 else math.exp(x) - 1


def turn(x, pos, base):
    """Rotary: channels i and i + D/2 as a complex number, times e^(i · pos · base^(-2i/D))."""
    half = len(x) // 2
    pairs = [
        complex(x[i], x[i + half]) * complex(math.cos(angle), math.sin(angle))
        for i, angle in enumerate(pos * base ** (-2 * i / len(x)) for i in range(half))
    ]
    return [z.real for z in pairs] + [z.imag for z in pairs]
