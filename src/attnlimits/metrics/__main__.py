"""``python -m attnlimits.metrics``: docs/metrics.md."""

from .catalogue import markdown

print(markdown(), end="")
