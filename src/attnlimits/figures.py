"""Pictures of metrics, as matplotlib figures."""

from __future__ import annotations

from matplotlib.figure import Figure
from torch import Tensor


def heatmap(values_LxH: Tensor, title: str) -> Figure:
    """Layers down, heads across; a head without a value stays blank."""
    n_layers, n_heads = values_LxH.shape
    figure = Figure(figsize=(1.6 + 0.42 * n_heads, 1.2 + 0.42 * n_layers), layout="constrained")
    axes = figure.subplots()
    image = axes.imshow(values_LxH.numpy(), cmap="viridis", aspect="auto")
    axes.set(title=title, xlabel="head", ylabel="layer", xticks=range(n_heads), yticks=range(n_layers))
    figure.colorbar(image)
    return figure
