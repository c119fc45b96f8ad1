"""A DataLoader that goes on with one iterator, epoch after epoch."""

from torch.utils.data import DataLoader


class OneIterator(DataLoader):
    """As timm's ``MultiEpochsDataLoader``: from the first epoch on, before timm 1.0.31 at once."""

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
