"""Per-image policies: random ops that each image samples for itself, and their kernels."""
