"""What a list of transforms means: how it is read, converted, refused and compared."""
