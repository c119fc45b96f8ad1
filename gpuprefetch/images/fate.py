"""What a collate function did with the boxes, masks and points of its samples."""

from enum import Enum


class Fate(Enum):
    """Whether transforms after the fused ones can move boxes, masks and points."""

    KEPT = "kept"
    """Every one of them lies in a list or a stack that has one entry per sample."""

    LOST = "lost"
    """At least one is a plain tensor now, is missing, or lies where its sample is not known."""
