"""The fused transforms: their sampling, the launch with its twins, random numbers of each image."""
