"""A folder whose files are named in the errors of reading them."""

from __future__ import annotations

from typing import Any

from torch.utils.data import Subset


class NamedFiles(Subset[Any]):
    """All of an ``ImageFolder``: PIL's errors have the name of a file in part only."""

    dataset: Any  # the folder

    def __init__(self, folder: Any) -> None:
        super().__init__(folder, range(len(folder)))

    def __getitem__(self, index: int) -> Any:
        try:
            return self.dataset[index]
        except OSError as error:
            raise OSError(f"{self.dataset.samples[index][0]}: {error}") from error

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in indices]
