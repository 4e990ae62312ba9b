"""What the layers for Flax, Haiku and Equinox have in common."""
