"""Encoded images: from a dataset's bytes through workers and decoders to a batch on the device."""
