"""Batches of images that have as many patches together as a budget allows, whatever their sizes."""

from concurrent.futures import ThreadPoolExecutor

import torch
from torch.utils.data import Sampler

from gpuprefetch import image_size


def count_patches(paths, resize, patch_size, threads=16):
    """Count the patches that each file will have, by its header: a list of ints.

    ``resize`` is a :class:`gpuprefetch.SmartResize` or :class:`gpuprefetch.ResizeToSequence`. A
    file that is no image counts as one of the smallest size, and is left to ``on_error``.
    """

    def count(path):
        try:
            height, width = resize.size_of(*image_size(path))
        except (OSError, ValueError):
            height, width = resize.size_of(1, 1)
        return height * width // patch_size**2

    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(count, paths))


class BudgetBatchSampler(Sampler):
    """Fill each batch up to a number of patches, with every sample once an epoch.

    The batches of an epoch follow from ``seed`` and the number of the epoch alone. So an epoch goes
    on where it was left (``loader.state_dict()``), and ranks agree without a word to each other. A
    batch may end up on any rank, and each rank gets as many. The last batches are left out where
    they do not make a whole round.

    Args:
        counts: patches of each sample, as :func:`count_patches` gives them.
        budget: patches of a batch at most.
        shuffle: whether the order differs from epoch to epoch; False is the order of the dataset.
        seed: of the order.
        rank: of this process.
        num_replicas: processes that share the batches out.
        open_batches: batches that are filled at a time. More leave less room unused.
    """

    def __init__(
        self, counts, budget, *, shuffle=True, seed=0, rank=0, num_replicas=1, open_batches=8
    ):
        largest = max(range(len(counts)), key=counts.__getitem__)
        if counts[largest] > budget:
            raise ValueError(
                f"sample {largest} has {counts[largest]} patches, and a batch takes {budget}. "
                "Raise the budget, or lower max_pixels of the resize."
            )
        if not 0 <= rank < num_replicas:
            raise ValueError(f"rank is 0 to {num_replicas - 1}, got {rank}.")
        self.counts = counts
        self.budget = budget
        self.shuffle = shuffle
        self.seed = seed
        self.rank = rank
        self.num_replicas = num_replicas
        self.open_batches = open_batches
        self.epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        return iter(self.batches()[self.rank :: self.num_replicas])

    def __len__(self):
        return len(self.batches()) // self.num_replicas

    def batches(self):
        """List the batches of all ranks for this epoch, as many for each."""
        order = range(len(self.counts))
        if self.shuffle:
            generator = torch.Generator().manual_seed((self.seed << 32) + self.epoch)
            order = torch.randperm(len(self.counts), generator=generator).tolist()
        done = []
        filling = []  # [room left, samples], in the order in which they were begun
        for sample in order:
            need = self.counts[sample]
            fitting = [batch for batch in filling if batch[0] >= need]
            if fitting:
                batch = min(fitting, key=lambda batch: batch[0])
            else:
                batch = [self.budget, []]
                filling.append(batch)
            batch[0] -= need
            batch[1].append(sample)
            if len(filling) > self.open_batches:
                fullest = min(range(len(filling)), key=lambda i: filling[i][0])
                done.append(filling.pop(fullest)[1])
        done += [samples for _, samples in filling]
        return done[: len(done) - len(done) % self.num_replicas]
