"""One decoder for every family; what it computes is in the model's own configuration."""
