"""Which keys a query may read. One predicate a class; every kernel consumes the same predicate.

A position is a token's true index in its own sequence. `allows` broadcasts over tensors (or ints) of
positions, so it serves the readable reference, a dense mask and FlexAttention alike. Adding a mask is a
small class here and one file in configs/mask/.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from minilm.errors import ConfigError


@dataclass(frozen=True)
class Mask:
    """A rule for who reads whom; subclass it (as a frozen dataclass: it is a key) and say `allows`."""

    @property
    def lookahead(self) -> float:
        """Tokens below this position may read one another's future: 0 for a causal mask, inf for no mask."""
        return 0

    @property
    def reach(self) -> int | None:
        """How many positions back a query reads, its own included; None is all of them."""
        return None

    def allows(self, q_pos: Any, k_pos: Any) -> Any:
        """True where the query at `q_pos` may read the key at `k_pos`; broadcasts."""
        raise NotImplementedError


@dataclass(frozen=True)
class Causal(Mask):
    """Every position reads itself and the past (Vaswani et al. 2017, sec. 3.2.3)."""

    def allows(self, q_pos: Any, k_pos: Any) -> Any:
        return k_pos <= q_pos


@dataclass(frozen=True)
class Full(Mask):
    """Everything reads everything, the future included."""

    @property
    def lookahead(self) -> float:
        return math.inf

    def allows(self, q_pos: Any, k_pos: Any) -> Any:
        return k_pos >= 0  # a slot without a position is empty


@dataclass(frozen=True)
class SlidingWindow(Mask):
    """Causal, and no farther back than `window` positions, the query's own included (Child et al. 2019)."""

    window: int = 128

    def __post_init__(self) -> None:
        if self.window < 1:
            raise ConfigError(
                f"mask.window={self.window}: a window holds at least 1 position, the query's own"
            )

    @property
    def reach(self) -> int | None:
        return self.window

    def allows(self, q_pos: Any, k_pos: Any) -> Any:
        return (k_pos <= q_pos) & (q_pos - k_pos < self.window)


@dataclass(frozen=True)
class Prefix(Mask):
    """The first `length` positions read one another freely; after them, causal (Raffel et al. 2020, sec. 3.2.1)."""

    length: int = 16

    def __post_init__(self) -> None:
        if self.length < 0:
            raise ConfigError(f"mask.length={self.length}: a prefix holds 0 positions or more")

    @property
    def lookahead(self) -> float:
        return self.length

    def allows(self, q_pos: Any, k_pos: Any) -> Any:
        return (k_pos <= q_pos) | (k_pos < self.length)


@dataclass(frozen=True)
class Predicate(Mask):
    """Any function of (q_pos, k_pos). It counts as reading ahead, and is so not cached, unless `causal` is set."""

    function: Callable[[Any, Any], Any]
    causal: bool = False

    @property
    def lookahead(self) -> float:
        return 0 if self.causal else math.inf

    def allows(self, q_pos: Any, k_pos: Any) -> Any:
        return self.function(q_pos, k_pos)
