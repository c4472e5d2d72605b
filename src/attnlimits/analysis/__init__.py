"""The paper's experiments on one model, every bound held against every row.

from attnlimits.analysis import Settings, analyze
result = analyze(model, input_ids)          # any Hugging Face decoder; (passages, L) token ids without padding
result.claims                               # claim of the paper, what this model shows, verdict
"""

from .experiments import Analysis, analyze
from .settings import Settings

__all__ = ["Analysis", "Settings", "analyze"]
