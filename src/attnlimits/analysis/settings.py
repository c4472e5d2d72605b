"""What an analysis computes; conf/analysis/all.yaml says the same with comments."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from ..metrics.verdict import Thresholds

EXPERIMENTS = (
    *("distance_vs_length", "distance_vs_topn", "critical_topn"),
    *("separability", "gradient_sensitivity", "vanishing"),
)
REPRESENTATIONS = ("value", "hidden", "embedding")
LOGITS = ("scaled", "raw")


@dataclass(frozen=True)
class Settings:
    """The paper's values where it gives them; its grids of N and T are not given and are ours.

    Attributes:
        experiments: which of EXPERIMENTS.
        lengths: context lengths L; those above the passages' are left out, and the passages' own is always among them.
        length_n: N of distance_vs_length.
        top_n: the N of distance_vs_topn, at the longest L.
        critical_n: the N among which critical_topn looks for the first that is not rejected.
        ks_level: of its Kolmogorov-Smirnov test; 0.01 in the paper's text, 0.05 in its pseudo-code.
        separability_n: the N of separability, at the longest L.
        temperatures, steps: T and eps of gradient_sensitivity.
        representation: x_i: "value" vectors of the head, "hidden" states that the layer's keys and values come from, or
            token "embedding".
        logits: gradient_sensitivity perturbs q.k/sqrt(d) ("scaled"), or q.k ("raw", whose T is the paper's).
        verdict_n: the N whose N_s/N the verdict looks at.
        thresholds: of the verdict a head.
        seed: of the random directions and the bootstrap.
    """

    experiments: Sequence[str] = EXPERIMENTS
    lengths: Sequence[int] = (32, 64, 128, 256, 512, 1024)
    length_n: int = 5
    top_n: Sequence[int] = (1, 5, 10, 20, 100)
    critical_n: Sequence[int] = (1, 2, 3, 5, 7, 10, 14, 20, 28, 40, 56, 80, 100, 160, 224, 320)
    ks_level: float = 0.01
    separability_n: Sequence[int] = (1, 2, 4, 8, 16, 32, 64, 128)
    temperatures: Sequence[float] = (0.02, 0.03, 0.05, 0.07, 0.1, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0)
    steps: Sequence[float] = (1e-3, 1e-1, 10.0)
    representation: str = "value"
    logits: str = "scaled"
    verdict_n: int = 16
    thresholds: Thresholds = field(default_factory=Thresholds)
    seed: int = 1

    def __post_init__(self) -> None:
        for name, allowed in (("experiments", EXPERIMENTS), ("representation", REPRESENTATIONS), ("logits", LOGITS)):
            value = getattr(self, name)
            for item in [value] if isinstance(value, str) else value:
                _require(f"{name}={item}", item in allowed, "one of " + ", ".join(allowed))
        for item in fields(self):
            value = getattr(self, item.name)
            if isinstance(value, Sequence) and not isinstance(value, str):
                _require(f"{item.name}={list(value)}", len(value) > 0, "at least one value")
                object.__setattr__(self, item.name, tuple(value))
        for name, least in (("lengths", 4), ("top_n", 1), ("critical_n", 1), ("separability_n", 1)):
            _require(f"{name}={list(getattr(self, name))}", min(getattr(self, name)) >= least, f"at least {least}")
            object.__setattr__(self, name, tuple(sorted(set(getattr(self, name)))))
        for name in ("temperatures", "steps"):
            _require(f"{name}={list(getattr(self, name))}", min(getattr(self, name)) > 0, "> 0")
        for name in ("length_n", "verdict_n"):
            _require(f"{name}={getattr(self, name)}", getattr(self, name) >= 1, "at least 1")
        _require(f"ks_level={self.ks_level}", 0 < self.ks_level < 1, "above 0 and below 1")

    @classmethod
    def of(cls, options: Mapping[str, Any], *, seed: int | None) -> Settings:
        """From the values of conf/analysis; a seed is drawn where there is none.

        Raises:
            ValueError: the first option that is not allowed.
        """
        given = {key: value for key, value in options.items() if key not in ("passages", "thresholds")}
        chosen = random.getrandbits(31) if seed is None else seed
        return cls(**given, thresholds=Thresholds(**options["thresholds"]), seed=chosen)

    def runs(self, *names: str) -> bool:
        return any(name in self.experiments for name in names)

    def lengths_within(self, length: int) -> tuple[int, ...]:
        """The L up to ``length``, which is always the last."""
        return tuple(sorted({*(L for L in self.lengths if length > L), length}))

    def distance_sizes(self) -> tuple[int, ...]:
        """Every N at which d~ and its expectations are needed."""
        sizes = set(self.bounded_sizes())
        return tuple(sorted(sizes | set(self.critical_n))) if self.runs("critical_topn") else tuple(sorted(sizes))

    def bounded_sizes(self) -> tuple[int, ...]:
        """Those at which the bounds of Theorem 1 are audited."""
        sizes = {self.length_n} if self.runs("distance_vs_length") else set()
        return tuple(sorted(sizes | set(self.top_n))) if self.runs("distance_vs_topn") else tuple(sorted(sizes))

    def separability_sizes(self) -> tuple[int, ...]:
        if self.runs("separability"):
            return tuple(sorted({*self.separability_n, self.verdict_n}))
        return (self.verdict_n,) if self.runs("vanishing") else ()


def _require(shown: str, good: bool, allowed: str) -> None:
    if not good:
        raise ValueError(f"{shown}: must be {allowed}")
