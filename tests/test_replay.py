"""A sample that is replayed is, bit for bit, what the model saw."""

from contextlib import nullcontext
from itertools import islice

import kornia.augmentation as K
import pytest
import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
)

from gpuprefetch import (
    BadImageError,
    DataPrefetcher,
    EncodedImage,
    EncodedImageFolder,
    Patches,
    PatchPadding,
    Resize,
    ResizeToSequence,
)
from gpuprefetch import RandomResizedCrop as Crop
from gpuprefetch.images import notes as _notes
from gpuprefetch.images.collate import HostStage
from gpuprefetch.images.decode import ImageDecoder
from gpuprefetch.images.division import Share

CHANGED = [Crop(16), K.ColorJitter(0.4, 0.4, 0.4, 0.1, p=0.7)]


class Numbered(Dataset):
    """A folder whose targets are the samples' numbers; ``broken`` ones are no pictures."""

    def __init__(self, folder, broken=()):
        self.folder, self.broken = EncodedImageFolder(folder), broken

    def __len__(self):
        return len(self.folder)

    def __getitem__(self, index):
        image, _ = self.folder[index]
        data = b"no picture" if index in self.broken else image.data
        return {"image": EncodedImage(data, index, image.path), "target": index, "name": str(index)}


def prefetcher_of(dataset, device="cpu", transforms=CHANGED, **options):
    names = {"seed", "on_error", "cpu_share", "decoder"} & options.keys()
    ours = {"device": device, "transforms": transforms, **{n: options.pop(n) for n in names}}
    pinned = torch.device(device).type == "cuda"
    loader = {"batch_size": 5, "num_workers": int(pinned), "shuffle": True, "pin_memory": pinned}
    return DataPrefetcher(DataLoader(dataset, **loader | options), **ours)


def epoch_of(prefetcher):
    """What an epoch hands over, by sample."""
    seen = {}
    for batch in prefetcher:
        assert batch["name"] == [str(number) for number in batch["target"].tolist()]
        for image, number in zip(batch["image"], batch["target"].tolist(), strict=True):
            seen.setdefault(number, image.clone())
    return seen


def assert_replayed(prefetcher, seen, epoch=None, samples=None):
    for number in seen if samples is None else samples:
        batch = prefetcher.replay(number, epoch=epoch)
        assert batch["target"].tolist() == [number]
        assert batch["name"] == [str(number)]
        assert len(batch["image"]) == 1
        assert torch.equal(batch["image"][0], seen[number]), number


@pytest.mark.parametrize(
    ("transforms", "options"),
    [
        ([Crop(16), K.RandomHorizontalFlip()], {}),
        (CHANGED, {"num_workers": 1}),
        (CHANGED, {"persistent_workers": True, "num_workers": 1}),
        ([K.RandomResizedCrop((16, 16), same_on_batch=True)], {"num_workers": 0}),
    ],
)
def test_samples_of_two_epochs(photo_folder, device, transforms, options):
    dataset = Numbered(photo_folder)
    prefetcher = prefetcher_of(dataset, device, transforms, cpu_share=0.0, **options)
    epochs = [epoch_of(prefetcher), epoch_of(prefetcher)]
    state = torch.get_rng_state()
    for epoch, seen in enumerate(epochs):
        assert len(seen) == 24
        assert_replayed(prefetcher, seen, epoch, list(seen)[epoch::8])
    assert torch.equal(torch.get_rng_state(), state)
    assert not torch.equal(epochs[0][3], epochs[1][3])  # guards the test: the epochs differ
    assert torch.equal(prefetcher.replay(3)["image"][0], epochs[1][3])  # the latest is the default


@pytest.mark.parametrize("workers", [0, 1])
def test_the_autocast_of_the_loop_is_not_that_of_the_batches(photo_folder, device, workers):
    transforms = [Crop(16), K.RandomAffine(20.0)]

    def seen_under(modes):
        prefetcher = prefetcher_of(
            Numbered(photo_folder), device, transforms, seed=1, cpu_share=0.0, num_workers=workers
        )
        torch.manual_seed(0)  # the order's
        with modes:
            return epoch_of(prefetcher) | {"replayed": prefetcher.replay(3)["image"].cpu()}

    plain, cast = map(seen_under, (nullcontext(), torch.autocast(device.type, torch.bfloat16)))
    assert len(plain) == 25
    assert all(torch.equal(cast[name], picture) for name, picture in plain.items())
    # Guards the test: here it makes a difference.
    picture, turned = torch.rand(1, 3, 16, 16, device=device), []
    for modes in nullcontext(), torch.autocast(device.type, torch.bfloat16):
        torch.manual_seed(0)
        with modes:
            turned.append(transforms[1](picture))
    assert not torch.equal(*turned)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_batch_of_a_loop_in_inference_mode_may_be_trained_with(photo_folder, device, workers):
    transforms = [Crop(16), K.RandomAffine(20.0)]
    dataset = Numbered(photo_folder)
    with torch.inference_mode():
        batches = list(prefetcher_of(dataset, device, transforms, seed=1, num_workers=workers))
        assert torch.empty(1).is_inference()  # guards the test
    for batch in batches:
        weight = torch.ones(3, 1, 1, device=device, requires_grad=True)
        (weight * batch["image"]).sum().backward()  # not with an inference tensor
        assert weight.grad is not None


@pytest.mark.parametrize("least", [0, 2])
def test_the_share_of_the_workers_is_that_of_the_batch(photo_folder, device, least):
    prefetcher = prefetcher_of(Numbered(photo_folder), device, seed=4)
    share = prefetcher._pipeline.packer.share
    share[0] = 0.6  # as the balancer had it then
    share[1] = least
    seen = epoch_of(prefetcher)
    share.zero_()
    assert_replayed(prefetcher, seen, samples=range(0, 24, 3))


class Absent(ImageDecoder):
    """A decoder that the workers leave photos to, and that gets none."""

    def decode(self, call, buffer, out):
        raise NotImplementedError


def test_of_an_epoch_without_end_the_latest_shares_are_noted(photo_folder, constants):
    constants(_notes, MOST=4)
    dataset = EncodedImageFolder(photo_folder)
    loader = DataLoader(dataset, sampler=[i % 24 for i in range(40)], batch_size=2)
    prefetcher = DataPrefetcher(loader, transforms=[Crop(8)], device="cpu")
    for _ in prefetcher:
        (notes,) = prefetcher._notes
        assert len(notes.shares) <= 4 + 1  # the latest is noted as it is packed


def test_all_views_of_a_batch_have_one_share(photo_folder):
    def views(samples):
        images = [sample["image"] for sample in samples]
        first = default_collate(images)
        packer.share.zero_()  # as the balancer may at any moment
        return {"image": first, "view": default_collate(images)}

    decoder = Absent(torch.device("cpu"))
    packer = prefetcher_of(Numbered(photo_folder), decoder=decoder)._pipeline.packer
    packer.share[0] = 1.0
    dataset = Numbered(photo_folder)
    for share in (1.0, 0.0):
        batch = HostStage(views, packer)([dataset[i] for i in range(4)])
        assert batch["image"].report.share == batch["view"].report.share == Share(share)
        assert batch["view"].decoded.all() == batch["image"].decoded.all() == bool(share)


class Together(Numbered):
    """Reads a batch at a time."""

    __getitem__ = None

    def __getitems__(self, indices):
        return [Numbered.__getitem__(self, index) for index in indices]


def renewed(samples):
    images = [EncodedImage(s["image"].data, s["target"]) for s in samples]
    return default_collate([s | {"image": i} for s, i in zip(samples, images, strict=True)])


def doubled(samples):
    return default_collate([sample for sample in samples for _ in range(2)])


def images_doubled(samples):
    return default_collate(samples) | {"image": doubled([s["image"] for s in samples])}


BATCHES = {"batch_size": 1, "shuffle": False}  # what a loader with a batch sampler is given


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (Numbered, {"shuffle": False, "sampler": WeightedRandomSampler(torch.ones(24), 30)}),
        (Numbered, {"generator": torch.Generator().manual_seed(1)}),
        (Numbered, BATCHES | {"batch_sampler": [range(7), (9, 7, 8), [20]]}),
        (Numbered, BATCHES | {"batch_sampler": [map(int, "31"), map(int, "20")]}),
        (Numbered, {"collate_fn": renewed}),
        (Numbered, {"collate_fn": doubled}),
        (Together, {}),
    ],
)
def test_however_batches_are_made(photo_folder, kind, options):
    prefetcher = prefetcher_of(kind(photo_folder), **options)
    seen = epoch_of(prefetcher)
    generator = options.get("generator", torch.default_generator)
    before = generator.get_state()
    assert_replayed(prefetcher, seen, samples=list(seen)[::3])
    assert torch.equal(generator.get_state(), before)


@pytest.mark.parametrize("known", [True, pytest.param(False, marks=pytest.mark.gpu)])
def test_a_resumed_epoch_can_be_replayed_from_its_start_if_the_share_is_known(photo_folder, known):
    torch.manual_seed(3)
    # The balancer changes the share on a GPU, where a core and a worker are to spare.
    where = {"device": "cpu"} if known else {"device": "cuda", "num_workers": 2}
    first = prefetcher_of(Numbered(photo_folder), seed=8, **where)
    seen = next(iter(first))
    torch.manual_seed(99)
    resumed = prefetcher_of(Numbered(photo_folder), **where)
    resumed.load_state_dict(first.state_dict())
    later = next(iter(resumed))["target"].tolist()
    assert resumed.replay(later[0])["target"].tolist() == later[:1]
    if known:
        assert_replayed(resumed, dict(zip(seen["target"].tolist(), seen["image"], strict=True)))
    else:
        with pytest.raises(ValueError, match=r"batch 0 the workers decoded.*give it a number"):
            resumed.replay(int(seen["target"][0]))


@pytest.mark.parametrize("on_error", ["skip", "replace"])
def test_beside_a_bad_image(photo_folder, on_error):
    dataset = Numbered(photo_folder, broken=(4, 9, 10))
    prefetcher = prefetcher_of(dataset, on_error=on_error)
    seen = epoch_of(prefetcher)
    bad, count = list(prefetcher.bad_images), prefetcher.stats.bad_images
    assert set(seen) == set(range(24)) - {4, 9, 10}
    assert_replayed(prefetcher, seen, samples=range(11, 24, 3))
    with pytest.raises(BadImageError, match=r"no model has seen it: .* \(sample 9 of the dataset"):
        prefetcher.replay(9)
    assert prefetcher.bad_images == bad  # they are not counted again
    assert prefetcher.stats.bad_images == count


@pytest.mark.parametrize("on_error", ["skip", "replace"])
@pytest.mark.parametrize("results", ["padded", Patches(8, 1), PatchPadding(8, 6)])
def test_a_bad_image_of_a_batch_that_has_no_rows(photo_folder, results, on_error):
    dataset = Numbered(photo_folder, broken=(1,))
    loader = DataLoader(dataset, batch_size=3)
    resize = [ResizeToSequence(8, 6)]
    prefetcher = DataPrefetcher(
        loader, device="cpu", transforms=resize, results=results, on_error=on_error
    )
    next(iter(prefetcher))
    with pytest.raises(BadImageError, match=r"no model has seen it: .* \(sample 1 of the dataset"):
        prefetcher.replay(1)
    assert prefetcher.replay(2)["target"].tolist() == [2]


def test_several_outputs_and_pictures_of_their_own_size(photo_folder):
    transforms = [*CHANGED, lambda x: (x, [x.flip(-1), 3])]
    views = prefetcher_of(Numbered(photo_folder), transforms=transforms)
    batch = next(iter(views))
    image, (flipped, three) = views.replay(int(batch["target"][1]))["image"]
    assert torch.equal(image, batch["image"][0][1:2])
    assert torch.equal(flipped, batch["image"][1][0][1:2])
    assert three == 3
    plain = prefetcher_of(Numbered(photo_folder), transforms=None, batch_size=3)  # of 3 channels
    assert_replayed(plain, epoch_of(plain), samples=range(5))


def test_old_epochs_are_forgotten(photo_folder):
    prefetcher = prefetcher_of(Subset(Numbered(photo_folder), range(5)))
    for _ in range(4):
        seen = epoch_of(prefetcher)
    assert_replayed(prefetcher, seen, 3, [1])


def test_samples_that_are_others_by_now_are_not_shown(photo_folder):
    dataset = Subset(Numbered(photo_folder), range(10))
    prefetcher = prefetcher_of(dataset)
    seen = epoch_of(prefetcher)
    dataset.indices = range(10, 20)
    with pytest.raises(ValueError, match=r"other samples under the keys.*preview\(samples="):
        prefetcher.replay(3)
    assert prefetcher.preview(samples=[3]).info["titles"][0][0].startswith("3: ")
    dataset.indices = [*range(10)]
    assert_replayed(prefetcher, seen, samples=[3])


def test_a_collate_function_that_leaves_out_and_sorts(photo_folder):
    def chosen(samples):
        return default_collate([sample for sample in reversed(samples) if sample["target"] % 5])

    prefetcher = prefetcher_of(Numbered(photo_folder), collate_fn=chosen)
    seen = epoch_of(prefetcher)
    assert len(seen) == 19
    assert_replayed(prefetcher, seen, samples=list(seen)[::4])
    with pytest.raises(ValueError, match="left the sample out"):
        prefetcher.replay(10)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"collate_fn": list}, "the collate function leaves samples apart"),
        ({"collate_fn": images_doubled}, "10 images of 5 samples beside 5 rows of the rest"),
        (
            {"transforms": [Crop(16), lambda images: images.tile(2, 1, 1, 1)]},
            "A transform made 10 rows of 5 images",
        ),
    ],
)
def test_what_has_no_row_for_a_sample_is_refused(photo_folder, options, text):
    prefetcher = prefetcher_of(Numbered(photo_folder), shuffle=False, **options)
    list(prefetcher)
    with pytest.raises(ValueError, match=text):
        prefetcher.replay(3)


class Stream(IterableDataset):
    __iter__ = None


def after(batches, prefetcher):
    """A prefetcher that has handed over so many batches."""
    list(islice(prefetcher, batches))
    return prefetcher


def of_folder(folder):
    return prefetcher_of(Numbered(folder), shuffle=False)


ALL = None
# A prefetcher of a folder, what is asked of it, the error, and what it says.
NOT_REPLAYED = {
    "another epoch": (
        of_folder,
        (3, 17),
        ValueError,
        r"epoch 17 are not known, only those of epochs \[\]",
    ),
    "an old epoch": (
        lambda folder: after(ALL, after(ALL, after(ALL, of_folder(folder)))),
        (1, 0),
        ValueError,
        r"epoch 0 are not known.*\[1, 2\]",
    ),
    "no epoch": (of_folder, (3,), LookupError, "no batch of any epoch"),
    "no such sample": (
        lambda folder: after(1, of_folder(folder)),
        (24,),
        LookupError,
        "no batch of epoch 0 has held sample 24",
    ),
    "a stream": (
        lambda folder: DataPrefetcher(DataLoader(Stream()), device="cpu"),
        (0,),
        ValueError,
        "a map-style dataset",
    ),
    "samples that are not batched": (
        lambda folder: after(
            ALL, prefetcher_of(Numbered(folder), batch_size=None, shuffle=False, transforms=None)
        ),
        (0,),
        ValueError,
        "making batches of a map-style dataset",
    ),
    "batches in any order": (
        lambda folder: prefetcher_of(Numbered(folder), num_workers=2, in_order=False),
        (0,),
        ValueError,
        "a map-style dataset in order",
    ),
    "a list of batches": (
        lambda folder: DataPrefetcher([torch.ones(2)], device="cpu"),
        (0,),
        ValueError,
        "a map-style dataset",
    ),
    "tensors": (
        lambda folder: after(
            ALL, DataPrefetcher(DataLoader(TensorDataset(torch.ones(4, 3, 8, 8))), device="cpu")
        ),
        (0,),
        ValueError,
        "for encoded images",
    ),
}


@pytest.mark.parametrize("case", NOT_REPLAYED)
def test_what_cannot_be_replayed_says_why(photo_folder, case):
    make, question, error, text = NOT_REPLAYED[case]
    prefetcher = make(photo_folder)
    with pytest.raises(error, match=text):
        prefetcher.replay(*question)


def test_a_dataset_that_draws_for_itself_is_not_replayed(photo_folder):
    # Guards the tests above: they would see another picture.
    dataset = Numbered(photo_folder)
    prefetcher = prefetcher_of(dataset, transforms=[Resize((8, 8))], shuffle=False)
    seen = epoch_of(prefetcher)
    dataset.folder.samples.reverse()
    assert not torch.equal(prefetcher.replay(0)["image"][0], seen[0])


@pytest.mark.parametrize(
    "act",
    [
        lambda prefetcher: prefetcher.set_epoch(0),
        lambda prefetcher: prefetcher.set_epoch(5),
        lambda prefetcher: prefetcher.load_state_dict(prefetcher.state_dict()),
        iter,
    ],
    ids=["set_epoch(0)", "set_epoch(5)", "load_state_dict", "unused"],
)
def test_the_latest_epoch_is_one_that_the_model_saw(photo_folder, act):
    prefetcher = prefetcher_of(Numbered(photo_folder))
    epoch_of(prefetcher)
    seen = epoch_of(prefetcher)
    kept = act(prefetcher)
    assert_replayed(prefetcher, seen, samples=[3, 7])
    del kept


@pytest.mark.parametrize("workers", [0, 1])
def test_a_sample_whose_batch_was_not_handed_over(photo_folder, workers):
    prefetcher = prefetcher_of(Numbered(photo_folder), num_workers=workers, shuffle=False)
    iterator = iter(prefetcher)
    next(iterator)
    assert prefetcher.replay(4)["target"].tolist() == [4]
    with pytest.raises(LookupError, match="no batch of epoch 0 has held sample 5 so far"):
        prefetcher.replay(5)
    next(iterator)
    assert prefetcher.replay(5)["target"].tolist() == [5]
