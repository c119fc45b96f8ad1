"""Code that takes encoded images for pictures, or a class for another, is never silently wrong."""

import copy
import pickle
import random
import shutil
import threading

import kornia.augmentation as K
import numpy as np
import pytest
import torch
from fakes import Split, assert_same_batches
from pictures import draw, encode
from PIL import ImageOps
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset, default_collate
from torchvision import transforms as v1
from torchvision import tv_tensors
from torchvision.datasets import ImageFolder
from torchvision.datasets.folder import default_loader
from torchvision.transforms import v2

import gpuprefetch
from gpuprefetch import DataPrefetcher, EncodedImage, EncodedImageFolder, accelerate
from gpuprefetch import convert_transforms as converted

CPU = {"device": "cpu", "print_plan": False}
COUNT = 6
CROP = [gpuprefetch.Resize((16, 24))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("guarded")
    for i in range(COUNT):
        path = root / f"class{i % 2}" / f"{i}.jpg"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(encode(draw(24, 32, seed=i), "JPEG", quality=95))
    return str(root)


class Numbered(Dataset):
    """Encoded images whose targets are their numbers, after ``change`` of an image and a target."""

    def __init__(self, folder, change=lambda *sample: sample):
        self.folder, self.change = EncodedImageFolder(folder), change

    def __len__(self):
        return len(self.folder)

    def __getitem__(self, index):
        return self.change(self.folder[index][0], index)


def wrapped(dataset, collate_fn=None, transforms=CROP, **options):
    loader = DataLoader(dataset, COUNT // 2, collate_fn=collate_fn, **options)
    return DataPrefetcher(loader, transforms=transforms, device="cpu", seed=3)


# --- modules that are called with encoded images ----------------------------------------------


def flip_with_boxes(image, target):
    boxes = tv_tensors.BoundingBoxes([[1, 2, 3, 4]], format="XYXY", canvas_size=(24, 32))
    return v2.RandomHorizontalFlip(1.0)(image, {"boxes": boxes})


CALLED = {
    "RandomHorizontalFlip": flip_with_boxes,
    "ColorJitter": lambda image, target: (v2.Compose([v2.ColorJitter(0.4)])(image), target),
    "RandomErasing": lambda image, target: v2.RandomErasing(1.0)([{"image": (image,)}, target]),
    "Grayscale": lambda image, target: (v1.Compose([v1.Grayscale()])(image), target),
    "RandomVerticalFlip": lambda image, target: (K.RandomVerticalFlip()(image), target),
}


@pytest.mark.parametrize("name", CALLED)
def test_a_module_that_gets_an_encoded_image_is_named(folder, name):
    with pytest.raises(
        TypeError, match=rf"{name} was called with an encoded.*transforms=\[\.\.\.\]"
    ):
        list(wrapped(Numbered(folder, CALLED[name])))


@pytest.mark.forks("its functions are local")
def test_a_module_is_named_in_a_worker_in_every_sample_and_in_a_collate_function(folder):
    def only_the_last(image, target):
        return (v2.RandomHorizontalFlip(1.0)(image) if target == COUNT - 1 else image), target

    batches = iter(wrapped(Numbered(folder, only_the_last), num_workers=1))
    assert next(batches)[1].tolist() == [0, 1, 2]
    with pytest.raises(TypeError, match="RandomHorizontalFlip was called with an encoded image"):
        next(batches)
    with pytest.raises(TypeError, match="GaussianBlur was called with an encoded image"):
        list(
            wrapped(Numbered(folder), lambda samples: v2.GaussianBlur(3)(default_collate(samples)))
        )


@pytest.mark.parametrize(
    "change",
    [
        v1.ToTensor(),
        v1.ToPILImage(),
        v2.functional.horizontal_flip,
        np.asarray,
        lambda image: 255 - image,
        lambda image: np.float32(255) - image,
    ],
)
def test_functions_for_pictures_fail_by_themselves(folder, change):
    image = Numbered(folder)[0][0]
    with pytest.raises(
        (TypeError, AttributeError), match=r"EncodedImage|\+_EncodedImage|PIL|ufunc"
    ):
        change(image)
    with pytest.raises(AttributeError, match=r"'mode': its images are not decoded.*accelerate"):
        ImageOps.invert(image)


def test_functions_that_decode_may_stand_in_a_compose(folder):
    def decoded(image):
        return torch.from_numpy(np.frombuffer(image.data, np.uint8)[:4].copy())

    pipeline = v2.Compose([decoded, v2.ToDtype(torch.float32)])
    dataset = Numbered(folder, lambda image, target: (pipeline(image), target))
    images, _ = next(iter(wrapped(dataset, transforms=None)))
    assert images[0].tolist() == list(dataset.folder[0][0].data[:4])


def test_what_is_for_boxes_alone_may_have_the_image_beside_them(folder):
    boxes = tv_tensors.BoundingBoxes(
        [[1, 2, 3, 4], [5, 5, 5, 5]], format="XYXY", canvas_size=(24, 32)
    )
    image = Numbered(folder)[0][0]
    same, target = v2.SanitizeBoundingBoxes()(image, {"boxes": boxes, "labels": torch.arange(2)})
    assert same is image and target["labels"].tolist() == [0]


@pytest.mark.parametrize("workers", [0, 1])
def test_images_that_a_dataset_has_kept_are_not_decoded_either(folder, workers):
    kept = Numbered(folder)
    kept.folder = [kept.folder[i] for i in range(COUNT)]  # reads its files once, before any loop
    list(wrapped(kept))  # after it nobody reads
    for change in (CALLED["RandomHorizontalFlip"], v2.MixUp(num_classes=COUNT)):
        kept.change = change
        with pytest.raises(TypeError, match="was called with an encoded image"):
            list(wrapped(kept, num_workers=workers))


def test_a_model_is_let_alone_between_batches(folder):
    kept, identity = EncodedImage(b"12"), torch.nn.Identity()
    with pytest.raises(TypeError, match="Identity was called"):
        identity(kept)
    for _ in wrapped(Numbered(folder)):
        assert identity(kept) is kept  # no module asks any more, nor does torch.compile warn of it
    loader = DataLoader(ImageFolder(folder, v1.Compose(PIPELINE)), 3)
    accelerate(loader, **CPU)  # which reads a sample
    assert identity(kept) is kept
    reader = threading.Thread(target=EncodedImage, args=(b"12",))
    reader.start()
    reader.join()
    next(iter(wrapped(Numbered(folder))))
    assert identity(kept) is kept  # a thread that has ended reads no more


# --- what mixes images in a collate function ----------------------------------------------------


def mixed_by(mix):
    return lambda samples: mix(*default_collate(samples))


def timm_mixup(**options):
    data = pytest.importorskip("timm.data")
    return data.Mixup(num_classes=COUNT, label_smoothing=0.0, **options)


MIXES = {
    "MixUp": lambda: v2.MixUp(num_classes=COUNT),
    "either": lambda: v2.RandomChoice([v2.MixUp(num_classes=COUNT), v2.CutMix(num_classes=COUNT)]),
    "in a Compose": lambda: v2.Compose([v2.MixUp(num_classes=COUNT)]),
    "timm's": timm_mixup,
}


@pytest.mark.parametrize("name", MIXES)
def test_mixing_encoded_images_in_a_collate_function_is_refused(folder, name):
    with pytest.raises(TypeError, match=r"not decoded|an encoded image.* in the training"):
        list(DataPrefetcher(DataLoader(Numbered(folder), 2, collate_fn=mixed_by(MIXES[name]()))))


class Indexed(ImageFolder):
    def __getitem__(self, index):
        return super().__getitem__(index)[0], index


def moved(folder, collate_fn=None, count=COUNT // 2, seed=3, **options):
    """What ``accelerate`` makes of a loader of this folder, whose targets are numbers."""
    prefetching = {name: options.pop(name) for name in ("on_error",) if name in options}
    to_float = [v2.PILToTensor(), v2.ToDtype(torch.float32, scale=True)]
    dataset = Indexed(folder, v2.Compose([v2.Resize((16, 24)), *to_float]))
    loader = DataLoader(dataset, count, collate_fn=collate_fn, **options)
    return accelerate(loader, seed=seed, **prefetching, **CPU)


@pytest.mark.parametrize(("name", "workers"), [("either", 0), ("in a Compose", 2)])
@pytest.mark.forks("its collate function is local")
def test_accelerate_mixes_the_transformed_images(folder, name, workers):
    plain = list(moved(folder))
    prefetcher = moved(folder, mixed_by(MIXES[name]()), num_workers=workers)
    for (whole, numbers), (images, target) in zip(plain, prefetcher, strict=True):
        share = target.gather(1, numbers[:, None])  # that an image has of itself
        assert ((0 < share) & (share < 1)).all()
        assert torch.equal(target.gather(1, numbers.roll(1)[:, None]), 1 - share)
        other, share = whole.roll(1, 0), share.view(-1, 1, 1, 1)
        mixed = whole * share + other * (1 - share)
        own, cut = images == whole, images == other
        if (own | cut).all():  # CutMix
            torch.testing.assert_close(
                own.float().mean((1, 2, 3)), share.flatten(), atol=0.02, rtol=0
            )
        else:
            torch.testing.assert_close(images, mixed)
    again = moved(folder, mixed_by(MIXES[name]()), num_workers=1 - bool(workers))
    prefetcher.set_epoch(0)
    for (want, _), (got, _) in zip(prefetcher, again, strict=True):
        assert torch.equal(want, got)  # whatever the number of workers
    with pytest.raises(ValueError, match=r"cannot be told apart after a collate_fn.*preview\("):
        prefetcher.replay(1)
    assert prefetcher.preview(samples=[1]) is not None


@pytest.mark.parametrize(
    "options", [{}, {"mode": "elem"}, {"mixup_alpha": 0.0, "cutmix_alpha": 1.0}]
)
@pytest.mark.forks("its collate function is local")
def test_accelerate_mixes_by_timms_mixup(folder, options):
    mix = timm_mixup(**options)
    prefetcher = moved(folder, mixed_by(mix), 2, num_workers=1)
    for (whole, numbers), (images, target) in zip(moved(folder, count=2), prefetcher, strict=True):
        share = target.gather(1, numbers[:, None]).view(-1, 1, 1, 1)
        if "cutmix_alpha" in options:
            assert ((images == whole) | (images == whole.flip(0))).all()
        else:
            torch.testing.assert_close(images, whole * share + whole.flip(0) * (1 - share))
        assert (target.max(1).values < 1).all()


def test_timms_collate_that_rounds_is_not_moved(folder):
    data = pytest.importorskip("timm.data")
    mix = data.FastCollateMixup(num_classes=COUNT)
    loader = DataLoader(Numbered(folder), 2, collate_fn=mix)
    with pytest.raises(AttributeError, match="'shape': its images are not decoded"):
        list(DataPrefetcher(loader, transforms=CROP, device="cpu"))


def test_a_resumed_epoch_mixes_the_batches_that_the_uninterrupted_one_would_have(folder):
    mix = v2.MixUp(num_classes=COUNT)

    def sometimes(samples):
        batch = default_collate(samples)
        return mix(*batch) if torch.rand(()) < 0.5 else batch

    prefetcher = moved(folder, sometimes, 1)
    mixed = [labels.dim() == 2 for _, labels in [*prefetcher, *prefetcher]]
    assert {*mixed} == {True, False}
    for _ in range(4):  # each may agree by chance
        iterator, resumed = iter(prefetcher), moved(folder, sometimes, 1)
        next(iterator)
        resumed.load_state_dict(prefetcher.state_dict())
        for want, got in zip(iterator, resumed, strict=True):
            assert all(map(torch.equal, want, got))


def test_a_bad_image_takes_its_sample_out_of_a_mix(folder, tmp_path):
    root = shutil.copytree(folder, tmp_path / "broken")
    (root / "class0" / "2.jpg").write_bytes(b"no picture")  # the second one
    sizes = [
        (len(images), (target > 0).any(0).nonzero().flatten().tolist())
        for images, target in moved(root, mixed_by(v2.MixUp(num_classes=COUNT)), on_error="skip")
    ]
    assert sizes == [(2, [0, 2]), (3, [3, 4, 5])]


# --- transforms of a dataset of one's own, under accelerate ------------------------------------


PIPELINE = [
    v1.Resize((16, 24)),
    v1.ToTensor(),
    v1.Normalize(0.5 * torch.ones(3), 0.5 * torch.ones(3)),
]


def squared(picture):
    return picture


def first_unknown(ops):
    return v1.Compose([v1.Lambda(squared), *ops])


@pytest.mark.parametrize("keep_unknown", [False, True])
@pytest.mark.parametrize(
    "change",
    [
        v2.RandomHorizontalFlip(1.0),
        v1.RandomErasing(1.0),
        lambda image: image.flip(-1),
        lambda x: -x,
    ],
    ids=["v2", "v1", "method", "operator"],
)
def test_an_outer_transform_is_not_lost(folder, change, keep_unknown):
    pipeline = first_unknown(PIPELINE) if keep_unknown else v1.Compose(PIPELINE)
    split = Split(ImageFolder(folder, pipeline), range(COUNT), change)
    with pytest.raises(TypeError, match=r"encoded|transformed yet|__getitem__.* failed"):
        list(accelerate(DataLoader(split, 2), keep_unknown=keep_unknown, **CPU))

    class OneClass(ImageFolder):  # whose first sample is not changed
        def __getitem__(self, index):
            image, target = super().__getitem__(index)
            return (change(image) if target else image), target

    moved = accelerate(DataLoader(OneClass(folder, pipeline), 2), keep_unknown=keep_unknown, **CPU)
    with pytest.raises(TypeError, match=r"called with an encoded|transformed yet|bad operand"):
        list(moved)


def test_a_dataset_that_lets_its_images_alone_moves_with_its_first_ops_kept(folder):
    class Named(ImageFolder):
        def __getitem__(self, index):
            return {"image": super().__getitem__(index)[0], "number": index}

    loader = DataLoader(Named(folder, first_unknown(PIPELINE)), 2)
    moved = accelerate(loader, keep_unknown=True, **CPU)
    assert moved.plan.transforms and moved.plan.steps[0].where == "worker CPU"
    for want, got in zip(loader, moved, strict=True):
        assert torch.equal(want["number"], got["number"])
        torch.testing.assert_close(got["image"], want["image"], atol=1e-5, rtol=0)


def test_an_outer_transform_stays_where_all_stays(folder):
    whole = v1.Compose([*PIPELINE, v1.Lambda(squared)])
    split = Split(ImageFolder(folder, whole), range(COUNT), v2.RandomHorizontalFlip(1.0))
    loader = DataLoader(split, 2)
    assert_same_batches(loader, accelerate(loader, keep_unknown=True, **CPU), atol=0)


# --- classes that are named like torchvision's --------------------------------------------------


class Compose:
    def __init__(self, transforms, p):
        self.transforms, self.p = transforms, p

    def __call__(self, image):
        for transform in self.transforms if random.random() < self.p else ():
            image = transform(image)
        return image.clone()


class Preset:
    """As torchvision's references have them, and people copy them."""

    def __init__(self, transforms):
        self.transforms = v1.Compose(transforms)

    def __call__(self, img):
        return self.transforms(img)


class ClassificationPresetTrain(Preset):
    def __call__(self, img):
        img = self.transforms(img)
        return img.flip(-1)


def flipping(base, method):
    def forward(self, image):
        return base.__dict__[method](self, image).flip(-1)

    return type(base.__name__, (base,), {method: forward})


OPS = [v1.Resize((16, 24)), v1.ToTensor()]
ALIKE = {
    "Compose with p": Compose(OPS, 1.0),
    "Compose": flipping(v1.Compose, "__call__")(OPS),
    "Compose of v2": flipping(v2.Compose, "forward")(OPS),
    "ClassificationPresetTrain": ClassificationPresetTrain(OPS),
}


@pytest.mark.parametrize("name", ALIKE)
def test_a_class_that_is_only_named_like_torchvisions_is_refused_or_kept(folder, name):
    nested = name in ("Compose", "ClassificationPresetTrain")
    pipeline = v1.Compose([ALIKE[name], v1.Normalize(MEAN, STD)]) if nested else ALIKE[name]
    with pytest.raises(ValueError, match=r"class of your own.* call its `transforms`"):
        converted(pipeline)
    loader = DataLoader(ImageFolder(folder, pipeline), 2)
    with pytest.raises(ValueError, match=f"{name.split()[0]} cannot move"):
        accelerate(loader, **CPU)
    assert_same_batches(loader, accelerate(loader, keep_unknown=True, **CPU), atol=1e-6)


MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def test_a_sequential_of_ones_own_is_refused():
    class Sequential(torch.nn.Sequential):
        def forward(self, image):
            return super().forward(image).flip(-1)

    ops = [v2.Resize((16, 24)), v2.PILToTensor()]
    with pytest.raises(ValueError, match="Sequential cannot move"):
        converted(Sequential(*ops))
    assert len(converted(torch.nn.Sequential(*ops))) == len(converted(ops))


def test_a_copied_preset_moves_whatever_its_name(folder):
    loader = DataLoader(ImageFolder(folder, Preset([*PIPELINE])), 2)
    for (want, _), (got, _) in zip(loader, accelerate(loader, **CPU), strict=True):
        assert (want - got).abs().mean() * 255 * 0.5 < 1  # the launch does not round on the way


def test_a_subclass_is_not_run_as_its_base():
    class Mirrored(gpuprefetch.Resize):
        def forward(self, images):
            return super().forward(images).flip(-1)

    class Float(K.RandomHorizontalFlip):
        pass

    images = torch.randint(256, (2, 3, 8, 8), dtype=torch.uint8)
    (plain,) = DataPrefetcher([images], transforms=[gpuprefetch.Resize((4, 4))], device="cpu")
    (own,) = DataPrefetcher([images], transforms=[Mirrored((4, 4))], device="cpu")
    torch.testing.assert_close(own, plain.flip(-1))
    (flipped,) = DataPrefetcher([images], transforms=[Float(p=1.0)], device="cpu")
    torch.testing.assert_close(flipped, images.flip(-1) / 255)

    class Mix(K.RandomMixUpV2):
        pass

    with pytest.raises(ValueError, match="Mix mixes the images of a batch"):
        DataPrefetcher([images], transforms=[Mix()], device="cpu")


# --- the dataset of an accelerated loader -------------------------------------------------------


def test_the_dataset_is_the_users_own(folder):
    """As in pytorch/examples, which validates the rest of an uneven set with a second loader."""
    dataset = ImageFolder(folder, v1.Compose(PIPELINE))
    loader = DataLoader(Subset(dataset, range(COUNT)), 2, sampler=range(0, COUNT, 2))
    moved = accelerate(loader, **CPU)
    assert moved.dataset is loader.dataset and moved.sampler is loader.sampler
    assert moved.dataset.dataset is dataset and len(moved) == len(loader)
    rest = DataLoader(Subset(moved.dataset, range(1, COUNT, 2)), 3)
    (images, target), *_ = rest
    assert torch.equal(images, torch.stack([dataset[i][0] for i in (1, 3, 5)]))
    assert target.tolist() == [dataset.targets[i] for i in (1, 3, 5)]
    seen = [batch for batch, _ in moved]
    assert torch.equal(moved.replay(2)[0][0], seen[0][1])
    with pytest.raises(AttributeError, match=r"dataset is fixed in the DataLoader.*wrap that"):
        moved.dataset = dataset
    assert accelerate(loader, **CPU).dataset is loader.dataset
    for other in (copy.copy(moved), copy.deepcopy(moved), pickle.loads(pickle.dumps(moved))):
        assert torch.equal(next(iter(other))[0], seen[0])
        assert torch.equal(other.dataset[3][0], dataset[3][0])


class Epochs(ImageFolder):
    epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __getitem__(self, index):
        return (*super().__getitem__(index), self.epoch)


@pytest.mark.parametrize("workers", [0, 1])
def test_what_the_loop_tells_its_dataset_reaches_the_samples(folder, workers):
    moved = accelerate(
        DataLoader(Epochs(folder, v1.Compose(PIPELINE)), 6, num_workers=workers), **CPU
    )
    moved.dataset.set_epoch(3)
    assert next(iter(moved))[2].tolist() == [3] * 6
    moved.set_epoch(4)
    assert moved.dataset.epoch == 4 and next(iter(moved))[2].tolist() == [4] * 6


class Switched(ImageFolder):
    """Another pipeline, and another way to read a file, where it is not for training."""

    training = True

    def __init__(self, root, train, test):
        super().__init__(root)
        self.pipelines = train, test

    @property
    def transform(self):
        """Made anew each time, of the same ops or of others."""
        return v1.Compose(list(self.pipelines[not self.training]))

    @transform.setter
    def transform(self, value):
        pass


class OwnLoader(ImageFolder):
    training = True

    @property
    def loader(self):
        return default_loader if self.training else (lambda path: default_loader(path).rotate(90))

    @loader.setter
    def loader(self, value):
        pass


def random_ops():
    jitter = v2.ColorJitter(0.4)
    return v2.Compose(
        [v2.RandomResizedCrop(16), v2.RandomApply([jitter]), v2.RandAugment(), v2.PILToTensor()]
    )


EDITS = {
    "appended": lambda data: data.transform.transforms.append(v2.RandomInvert(1.0)),
    "taken out": lambda data: data.transform.transforms.pop(2),
    "another op": lambda data: data.transform.transforms.__setitem__(2, v2.RandomInvert(1.0)),
    "p": lambda data: setattr(data.transform.transforms[1], "p", 1.0),
    "an inner op": lambda data: setattr(
        data.transform.transforms[1].transforms[0], "brightness", (0.1, 0.2)
    ),
    "the crop": lambda data: setattr(data.transform.transforms[0], "scale", (0.9, 1.0)),
    "loader": lambda data: setattr(data, "loader", lambda path: default_loader(path).rotate(90)),
}


@pytest.mark.parametrize("name", EDITS)
@pytest.mark.parametrize("around", [lambda data: data, lambda data: Subset(data, [0, 3, 4])])
def test_a_pipeline_that_is_edited_afterwards_is_an_error(folder, name, around):
    data = ImageFolder(folder, random_ops())
    options = {"num_workers": 1, "persistent_workers": True} if name == "p" else {}
    moved = accelerate(DataLoader(around(data), 3, **options), **CPU)
    for _ in range(2):
        list(moved)  # what ops keep as they run is no change
        data[0]
    EDITS[name](data)
    what = "loader" if name == "loader" else "transform"
    with pytest.raises(TypeError, match=rf"dataset\.{what} has changed since accelerate\(\)"):
        iter(moved)
    if name != "loader":
        again = accelerate(DataLoader(around(data), 3), **CPU)
        assert len(list(again)) == len(again)


def test_a_transform_that_is_a_property_may_make_equal_ops_but_no_others(folder):
    data = Switched(folder, PIPELINE, PIPELINE[:1] + PIPELINE[-1:])
    moved = accelerate(DataLoader(data, 3), **CPU)
    assert len(list(moved)) == len(list(moved)) == 2
    data.training = False
    with pytest.raises(TypeError, match=r"dataset\.transform has changed"):
        iter(moved)
    data.training = True
    assert len(list(moved)) == 2
    other = OwnLoader(folder, v1.Compose(PIPELINE))
    moved = accelerate(DataLoader(other, 3), **CPU)
    other.training = False
    with pytest.raises(TypeError, match=r"dataset\.loader has changed"):
        iter(moved)


class Counted:
    """An op of the user's, which counts its calls."""

    def __init__(self):
        self.calls, self.seen, self.strength = 0, [], 1

    def __call__(self, image):
        self.calls += 1
        self.seen.append(image.size)
        return image


def test_ops_that_stay_in_the_workers_change_as_in_a_plain_loader(folder):
    op, pipeline = Counted(), [v1.Resize((16, 24)), v1.ToTensor()]
    data = ImageFolder(folder, v1.Compose([pipeline[0], op, pipeline[1]]))
    moved = accelerate(DataLoader(data, 3), keep_unknown=True, **CPU)
    for strength in range(2):
        op.strength = strength  # it runs itself
        assert len(list(moved)) == 2
    assert op.calls > 12
    data.transform.transforms.append(v1.Normalize((0.5,) * 3, (0.5,) * 3))
    with pytest.raises(TypeError, match=r"dataset\.transform has changed"):
        iter(moved)


def another_transform(moved):
    moved.dataset.transform = v1.Compose(PIPELINE[:2])


def another_op_of_a_preset(moved):  # a container of a user's class, however deep, is read as well
    (preset,) = moved.dataset.transform.transforms
    preset.transforms.transforms.append(v1.Normalize(MEAN, STD))


def another_collate_function(moved):
    moved.wrapped.collate_fn = v2.MixUp(num_classes=2)


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (another_transform, r"dataset\.transform"),
        (another_op_of_a_preset, r"dataset\.transform"),
        (another_collate_function, "collate_fn"),
    ],
)
def test_what_is_another_afterwards_is_an_error(folder, change, what):
    data = ImageFolder(folder, v1.Compose([Preset([*PIPELINE])]))
    moved = accelerate(DataLoader(data, 3), **CPU)
    assert len(list(moved)) == len(list(moved)) == 2
    change(moved)
    with pytest.raises(TypeError, match=rf"{what} has changed since accelerate\(\)"):
        iter(moved)


def test_other_datasets_afterwards_are_an_error(folder):
    transform = v1.Compose(PIPELINE)
    parts = ConcatDataset([ImageFolder(folder, transform) for _ in range(2)])
    moved = accelerate(DataLoader(parts, 3), **CPU)
    assert len(list(moved)) == 4
    for other in (moved, copy.deepcopy(moved), pickle.loads(pickle.dumps(moved))):
        assert len(list(other)) == 4
        other.dataset.datasets[1] = ImageFolder(folder, transform)
        with pytest.raises(TypeError, match=r"dataset has changed since accelerate\(\)"):
            iter(other)


class Live(torch.nn.Module):
    """An op that runs as it is, and keeps what it was called with."""

    gain = 1.0

    def forward(self, images):
        self.latest, self.count = images, getattr(self, "count", 0) + 1
        return images * self.gain


LIST_EDITS = {
    "appended": lambda given: given.append(K.RandomVerticalFlip()),
    "the crop": lambda given: setattr(given[0], "op", gpuprefetch.Resize(8).op),
    "a kornia flip": lambda given: setattr(given[1], "p", 1.0),
    "a policy": lambda given: setattr(given[2], "magnitude", 3),
    "another op": lambda given: given.__setitem__(3, Live()),
}


@pytest.mark.parametrize("views", [False, True])
@pytest.mark.parametrize("name", LIST_EDITS)
def test_a_list_that_is_edited_afterwards_is_an_error(folder, name, views):
    given = [gpuprefetch.Resize((16, 24)), K.RandomHorizontalFlip(), v2.RandAugment(), Live()]
    transforms = gpuprefetch.Views(given, given[:1]) if views else given
    prefetcher = DataPrefetcher(
        DataLoader(EncodedImageFolder(folder), 3), transforms=transforms, device="cpu"
    )
    for gain in (1.0, 0.0):
        given[3].gain = gain  # it runs itself
        (images, *_), *_ = prefetcher
        assert bool((images[0] if views else images).any()) == bool(gain)
    LIST_EDITS[name](given)
    with pytest.raises(TypeError, match="has changed since DataPrefetcher was built"):
        iter(prefetcher)


# --- how they print -----------------------------------------------------------------------------


def test_encoded_images_print_in_a_line(folder):
    image, _ = EncodedImageFolder(folder)[4]
    assert repr(image) == f"EncodedImage({len(image.data):,} bytes, index=4, path={image.path!r})"
    assert repr(EncodedImage(bytes(27044), 0, "a.jpg")).startswith(
        "EncodedImage(27,044 bytes, index"
    )
    (batch, _), *_ = DataLoader(EncodedImageFolder(folder), 6)
    size = sum(len(image.data) for image in batch)
    assert repr(batch) == f"EncodedImages(6 images, {size:,} bytes)"
