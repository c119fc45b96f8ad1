"""Where the views of an image stand in their sample, if a transform of the user's says so.

The encoded image stands in the place of the first view, a :class:`ViewPlace` in that of each other
one. The loop gets the results where these stand::

    worker   {"weak": image, "strong": ViewPlace(1), "mask": mask}
    loop     {"weak": (N, C, H, W), "strong": (N, C, H, W), "mask": (N, ...)}

Without any ``ViewPlace`` the results of several views are one list.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch.utils.data._utils.collate import default_collate_fn_map

from gpuprefetch.core.nested import Batch, Leaf, copied, map_leaves


class ViewPlace:
    """The place of a view in a sample or a batch.

    Args:
        number: of the view; 0 if the first one stands in a second place.
    """

    __slots__ = ("number",)

    def __init__(self, number: int) -> None:
        self.number = number

    def __reduce__(self) -> tuple[type[ViewPlace], tuple[int]]:
        return ViewPlace, (self.number,)


def place_views(batch: Batch, image: Leaf, results: Sequence[Leaf]) -> Batch:
    """The batch with the result of each view in its places; no two places share memory.

    ``image`` stands in the place of the first view.
    """
    placed = {0}

    def place(leaf: Leaf) -> Leaf:
        if leaf is image:
            return results[0]
        if not isinstance(leaf, ViewPlace):
            return leaf
        result = results[leaf.number]
        if leaf.number in placed:
            return copied(result)
        placed.add(leaf.number)
        return result

    return map_leaves(place, batch, is_place)


def is_place(leaf: object) -> bool:
    return isinstance(leaf, ViewPlace)


def _collate(places: Sequence[ViewPlace], *, collate_fn_map: object = None) -> ViewPlace:
    numbers = sorted({place.number for place in places})
    if len(numbers) > 1:
        raise TypeError(
            f"The samples of a batch have views {numbers[0]} and {numbers[1]} in one place. Let "
            "the transform return its views in one order for all pictures."
        )
    return ViewPlace(numbers[0])


default_collate_fn_map[ViewPlace] = _collate
