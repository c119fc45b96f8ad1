"""A folder whose files are named in the errors of reading them."""

from __future__ import annotations

from typing import Any

from torch.utils.data import Subset

from gpuprefetch.core.nested import Sample


class NamedFiles(Subset[Sample]):
    """All of an ``ImageFolder``, with errors that name the file, as not all of PIL's do."""

    dataset: Any  # the folder

    def __init__(self, folder: Any) -> None:
        super().__init__(folder, range(len(folder)))

    def __getitem__(self, index: int) -> Sample:
        try:
            return self.dataset[index]
        except OSError as error:
            raise OSError(f"{self.dataset.samples[index][0]}: {error}") from error

    def __getitems__(self, indices: list[int]) -> list[Sample]:
        return [self[index] for index in indices]
