"""What a list of transforms means: the fused launch, a draw for each image, others' ops."""
