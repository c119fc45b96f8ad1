"""What a loader is, as far as a prefetcher has to know: torch's, torchdata's, or any iterable."""

from __future__ import annotations

import copy
import sys
from contextlib import suppress
from typing import Any, TypeAlias

from torch.utils.data import DataLoader, IterableDataset

from gpuprefetch.core.nested import Batch, Loader
from gpuprefetch.core.samplers import attribute, named_generators_of

TorchLoader: TypeAlias = DataLoader[Batch]
LoaderState: TypeAlias = Any  # the state of a loader that saves one, else None


def is_stateful(loader: Loader) -> bool:
    """Whether it saves and loads a state, as torchdata's ``StatefulDataLoader``."""
    return hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")


def is_stream(loader: Loader) -> bool:
    """Whether its dataset is iterated, and not asked for samples by their index."""
    return isinstance(getattr(loader, "dataset", None), IterableDataset)


def in_order(loader: Loader) -> bool:
    """Whether the number of a batch says which of the sampler's it is, or the loader knows."""
    workers = getattr(loader, "num_workers", 0)
    return workers < 2 or getattr(loader, "in_order", True) or is_stateful(loader)


def kind(loader: Loader) -> str:
    """What two loaders must have in common for one's state to mean something to the other."""
    batch_size = attribute(attribute(loader, "batch_sampler"), "batch_size")
    own = "a" if is_stateful(loader) else "no"
    shared = ""
    if is_stream(loader) and not is_stateful(loader):
        # The workers share its samples out, and each makes batches of what it has.
        shared = f"samples shared out to {max(getattr(loader, 'num_workers', 0), 1)} workers, "
    elif hasattr(loader, "next_iter_state"):  # torchdata's, whose state has one of each worker
        shared = f"{loader.num_workers} workers, "
    generators = named_generators_of(loader)  # as older versions count them
    return f"{shared}{batch_size=}, {generators} generators and {own} state of its own"


def length_of(dataset: object) -> int | None:
    """How many samples a dataset has, or whatever a sampler is over; None if it does not say so."""
    with suppress(Exception):  # whatever its __len__ raises
        return len(dataset)  # type: ignore[arg-type]
    return None


def length_of_dataset(loader: Loader) -> int | None:
    """How many samples a map-style dataset has, if it says so."""
    return None if is_stream(loader) else length_of(attribute(loader, "dataset"))


def loader_within(loader: Loader) -> Loader:
    """The DataLoader of a WebLoader of webdataset's that adds nothing to it; else as given.

    One that batches, repeats or counts itself does more.
    """
    webdataset = sys.modules.get("webdataset")  # nobody has one before it is imported
    if webdataset is None or type(loader) is not getattr(webdataset, "WebLoader", None):
        return loader
    steps = loader.pipeline
    alone = len(steps) == 1 and isinstance(steps[0], DataLoader) and loader.repetitions == 1
    return steps[0] if alone else loader


def changed(loader: TorchLoader, **values: object) -> TorchLoader:
    """A copy of a loader, with its own workers, and with attributes that DataLoader locks."""
    clone = copy.copy(loader)
    clone._iterator = None
    vars(clone).update(values)
    return clone


def own_state(loader: Loader) -> LoaderState:
    """The state of a loader that has one, else None."""
    if not is_stateful(loader):
        return None
    state = loader.state_dict()
    # What workers send is a copy already. In this process a dataset may hand out live objects.
    return state if getattr(loader, "num_workers", 0) else copy.deepcopy(state)


def restores_itself(loader: Loader) -> bool:
    """Whether the dataset goes back to its saved state here, perhaps torch's generator too."""
    here = is_stateful(loader) and not getattr(loader, "num_workers", 0)
    return here and hasattr(getattr(loader, "dataset", None), "load_state_dict")
