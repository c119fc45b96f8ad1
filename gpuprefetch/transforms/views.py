"""Several views of one decode."""

from collections.abc import Callable, Sequence


class Views:
    """Several views of each image, as contrastive and self-distilling training needs them.

    An image is read, copied and decoded once. Give ``Views`` in place of a list of transforms::

        crop = [RandomResizedCrop(224), K.RandomHorizontalFlip(), jitter, normalize]
        loader = DataPrefetcher(loader, transforms=Views(crop, crop))
        for (first, second), labels in loader: ...

    Random parameters are sampled for each view. The first view has those of its list alone.

    Args:
        lists: two or more, each as for ``DataPrefetcher(transforms=...)``, with a crop or a resize.

    Raises:
        TypeError: for what is no list.
        ValueError: for a single one.
    """

    def __init__(self, *lists: Sequence[Callable[..., object]]) -> None:
        for each in lists:
            if not isinstance(each, (list, tuple)) or any(isinstance(op, Views) for op in each):
                raise TypeError(
                    f"Views takes a list of transforms for each view, got {type(each).__name__}: "
                    "Views([RandomResizedCrop(224), ...], [RandomResizedCrop(96), ...])."
                )
        if len(lists) < 2:
            raise ValueError(
                f"Views takes two lists of transforms or more, got {len(lists)}. For one view give "
                "transforms=[...] itself."
            )
        self.lists = lists

    def __repr__(self) -> str:
        return f"Views({', '.join(map(repr, self.lists))})"
