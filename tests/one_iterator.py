"""DataLoaders that go on with one iterator, epoch after epoch.

Those that do no more than repeat their sampler get epochs: ``Repeating`` and ``RepeatingAtOnce``.
"""

from torch.utils.data import DataLoader


class OneIterator(DataLoader):
    """Counts its epochs as well: what else it may do is not known."""

    epochs = 0

    at_once = False

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        vars(self)["batch_sampler"] = _Repeated(self.batch_sampler)
        self.iterator = super().__iter__() if self.at_once else None

    def __len__(self):
        return len(self.batch_sampler.sampler)

    def __iter__(self):
        if self.iterator is None:
            self.iterator = super().__iter__()
        self.epochs += 1
        for _ in range(len(self)):
            yield next(self.iterator)


class _Repeated:
    def __init__(self, sampler):
        self.sampler = sampler

    def __iter__(self):
        while True:
            yield from self.sampler


class OneIteratorAtOnce(OneIterator):
    at_once = True


class Repeating(DataLoader):
    """As timm's ``MultiEpochsDataLoader`` from 1.0.31 on, which numbers epochs ahead."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        vars(self)["batch_sampler"] = _Numbered(self.batch_sampler)
        self.iterator = None

    def __len__(self):
        return len(self.batch_sampler.sampler)

    def __iter__(self):
        """Give the batches of an epoch."""
        if self.iterator is None:
            self.iterator = super().__iter__()
        for _number in range(len(self)):
            yield next(self.iterator)


class RepeatingAtOnce(DataLoader):
    """As ultralytics' ``InfiniteDataLoader``, whose workers read before the first epoch."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        object.__setattr__(self, "batch_sampler", _Repeated(self.batch_sampler))
        self.iterator = super().__iter__()

    def __len__(self):
        return len(self.batch_sampler.sampler)

    def __iter__(self):
        for _ in range(len(self)):
            yield next(self.iterator)

    def reset(self):
        self.iterator = self._get_iterator()


class RepeatingLater(DataLoader):
    """As ultralytics' from 8.4 on, whose workers start with the first epoch."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        object.__setattr__(self, "batch_sampler", _Repeated(self.batch_sampler))
        self.iterator = None

    def __len__(self):
        return len(self.batch_sampler.sampler)

    def __iter__(self):
        if self.iterator is None:
            self.iterator = self._get_iterator()
        for _ in range(len(self)):
            yield next(self.iterator)


class _Numbered(_Repeated):
    passes = 0

    def __iter__(self):
        numbered = getattr(self.sampler, "sampler", self.sampler)
        epoch = getattr(numbered, "epoch", 0)
        while True:
            if hasattr(numbered, "set_epoch"):
                numbered.set_epoch(epoch)
            epoch += 1
            self.passes += 1
            yield from iter(self.sampler)


class Partly(DataLoader):
    """Ends its epochs in the middle of a pass, and goes on there."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        object.__setattr__(self, "batch_sampler", _Repeated(self.batch_sampler))
        self.iterator = None

    def __len__(self):
        return 2

    def __iter__(self):
        if self.iterator is None:
            self.iterator = super().__iter__()
        for _ in range(len(self)):
            yield next(self.iterator)


class Skipping(DataLoader):
    """Leaves batches out, so that its epochs are not those of its sampler."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        object.__setattr__(self, "batch_sampler", _EverySecond(self.batch_sampler))
        self.iterator = None

    def __len__(self):
        return len(self.batch_sampler.sampler) // 2

    def __iter__(self):
        if self.iterator is None:
            self.iterator = super().__iter__()
        for _ in range(len(self)):
            yield next(self.iterator)


class _EverySecond(_Repeated):
    def __iter__(self):
        while True:
            yield from list(self.sampler)[::2]
