"""Epochs: order, one prefetch thread, hand-off between streams, resume. Knows no images."""
