"""Several models on one accelerator and a few cores: carries placements out."""
