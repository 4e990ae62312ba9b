"""What layers of one example check."""

from typing import Any

from jax import Array


def check_rank(layer: Any, x: Array) -> None:
  if x.ndim != layer.num_spatial_dims + 1:
    raise ValueError(
      f"{type(layer).__name__}: x must be one example of rank {layer.num_spatial_dims + 1}, [channels, *spatial], got "
      f"shape {x.shape}; batches go through jax.vmap"
    )
