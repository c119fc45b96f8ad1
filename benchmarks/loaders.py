"""Every loader that is compared, as a factory of batches on the device.

A factory takes :class:`Settings` and yields ``(images, target)``: images ``(N, 3, size, size)``
bfloat16, channels_last and normalized, target ``(N,)`` int64, both on the device. All of them do
the same work on the same files: decode, a random crop resized with an antialiased bilinear filter,
a random flip, normalize (``train=False``: resize the shorter side, center crop, normalize).
"""

import ast
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import repeat
from typing import Any

import ranks
import torch
from torch.utils.data import DataLoader, Dataset, RandomSampler

MEAN = (0.485, 0.456, 0.406)
STD = (0.229, 0.224, 0.225)
SCALE = (0.08, 1.0)
RATIO = (3 / 4, 4 / 3)
ENDLESS = 10**8

Batches = Iterable[tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class Settings:
    """What is the same for every loader.

    ``images`` is the number of images in an epoch. An epoch of a benchmark is far longer than its
    photos, as it is in training on ImageNet, so that no epoch's start is part of the measurement.
    DALI takes a finite epoch to be the files.
    """

    data: str
    batch_size: int
    workers: int
    size: int = 224
    device: str = "cuda"
    train: bool = True
    images: int = ENDLESS

    @property
    def resize(self) -> int:
        return self.size * 256 // 224


class _Repeated(RandomSampler):
    """Shuffles the dataset again and again until ``num_samples`` are drawn, without a huge list."""

    def __iter__(self) -> Iterator[int]:
        left = self.num_samples
        while left > 0:
            order = torch.randperm(len(self.data_source))[:left].tolist()
            yield from order
            left -= len(order)


def data_loader(dataset: Dataset[Any], settings: Settings, **options: Any) -> DataLoader[Any]:
    """The DataLoader that all of them but DALI stand on."""
    return DataLoader(
        dataset,
        batch_size=settings.batch_size,
        sampler=_Repeated(dataset, num_samples=settings.images),
        num_workers=settings.workers,
        persistent_workers=settings.workers > 0,
        pin_memory=settings.device == "cuda",
        drop_last=settings.train,
        **options,
    )


@dataclass(frozen=True)
class _Converted:
    """A loader whose batches are converted; it can be iterated again and keeps the loader alive."""

    loader: Iterable[Any]
    convert: Callable[[Any], tuple[torch.Tensor, torch.Tensor]]

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        return map(self.convert, self.loader)


class SameBatch:
    """A loader that is always ready: one batch, ``length`` times."""

    def __init__(self, batch: tuple[torch.Tensor, torch.Tensor], length: int) -> None:
        self._batch = batch
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        return repeat(self._batch, self._length)


def synthetic(settings: Settings) -> Batches:
    """One resident batch, again and again: the ceiling."""
    shape = (settings.batch_size, 3, settings.size, settings.size)
    images = torch.randn(shape, device=settings.device).to(
        torch.bfloat16, memory_format=torch.channels_last
    )
    target = torch.randint(100, (settings.batch_size,), device=settings.device)
    return SameBatch((images, target), settings.images // settings.batch_size)


def ready(settings: Settings, **options: Any) -> Batches:
    """gpuprefetch around a loader of ready tensors that keeps up: what the wrapping costs."""
    from gpuprefetch import DataPrefetcher

    batch = next(iter(synthetic(replace(settings, device="cpu"))))
    if settings.device == "cuda":
        batch = (batch[0].pin_memory(), batch[1].pin_memory())
    loader = SameBatch(batch, settings.images // settings.batch_size)
    return DataPrefetcher(loader, device=settings.device, **options)


def policy_of(name: str) -> list[Any]:
    """torchvision's random policy of an image: "ra", "ta", "aa", or "" for none."""
    from torchvision.transforms import v2

    policies = {"ra": v2.RandAugment, "ta": v2.TrivialAugmentWide, "aa": v2.AutoAugment}
    return [policies[name]()] if name else []


def gpuprefetch_transforms(settings: Settings, policy: str, erasing: float) -> list[Any]:
    from torchvision.transforms import v2

    from gpuprefetch import CenterCrop, RandomResizedCrop, Resize

    normalize = v2.Normalize(MEAN, STD)
    if not settings.train:
        return [Resize(settings.resize), CenterCrop(settings.size), normalize]
    crop = RandomResizedCrop(settings.size, scale=SCALE, ratio=RATIO)
    ops = [crop, v2.RandomHorizontalFlip(p=0.5), *policy_of(policy), normalize]
    return ops + ([v2.RandomErasing(erasing)] if erasing else [])


def gpuprefetch(
    settings: Settings, *, policy: str = "", erasing: float = 0.0, **options: Any
) -> Batches:
    """This library.

    Args:
        settings: see :class:`Settings`.
        policy: see :func:`policy_of`.
        erasing: probability of RandomErasing.
        options: of DataPrefetcher.
    """
    # Imported before there is a CUDA context: it prepares the environment for it.
    from gpuprefetch import DataPrefetcher, EncodedImageFolder

    return DataPrefetcher(
        data_loader(EncodedImageFolder(settings.data), settings),
        device=settings.device,
        transforms=gpuprefetch_transforms(settings, policy, erasing),
        dtype=torch.bfloat16,
        memory_format=torch.channels_last,
        **options,
    )


def torchvision(settings: Settings, *, backend: str = "pil", policy: str = "") -> Batches:
    """ImageFolder with the v2 transforms that torchvision documents, on uint8 tensors.

    Args:
        settings: see :class:`Settings`.
        backend: ``"pil"`` decodes as ImageFolder does by default, ``"tensor"`` with
            ``torchvision.io.decode_image``, which is faster.
        policy: see :func:`policy_of`.
    """
    from torchvision.datasets import ImageFolder
    from torchvision.io import decode_image
    from torchvision.transforms import v2

    if settings.train:
        crop = [
            v2.RandomResizedCrop(settings.size, scale=SCALE, ratio=RATIO, antialias=True),
            v2.RandomHorizontalFlip(),
            *policy_of(policy),
        ]
    else:
        crop = [v2.Resize(settings.resize, antialias=True), v2.CenterCrop(settings.size)]
    tail = [v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD)]
    if backend == "tensor":
        transform = v2.Compose([*crop, *tail])
        dataset = ImageFolder(settings.data, transform, loader=partial(decode_image, mode="RGB"))
    else:
        dataset = ImageFolder(settings.data, v2.Compose([v2.PILToTensor(), *crop, *tail]))
    return _Converted(data_loader(dataset, settings), partial(_to_device, device=settings.device))


def _to_device(
    batch: tuple[torch.Tensor, torch.Tensor], device: str
) -> tuple[torch.Tensor, torch.Tensor]:
    images, target = (tensor.to(device, non_blocking=True) for tensor in batch)
    return images.to(torch.bfloat16, memory_format=torch.channels_last), target


def timm(settings: Settings) -> Batches:
    """timm's PrefetchLoader: PIL in the workers, uint8 to the device, normalized there."""
    from timm.data import create_transform
    from timm.data.loader import PrefetchLoader, fast_collate
    from torchvision.datasets import ImageFolder

    transform = create_transform(
        settings.size,
        is_training=settings.train,
        scale=SCALE,
        ratio=RATIO,
        color_jitter=None,
        interpolation="bilinear",
        crop_pct=settings.size / settings.resize,
        use_prefetcher=True,
    )
    loader = data_loader(ImageFolder(settings.data, transform), settings, collate_fn=fast_collate)
    prefetched = PrefetchLoader(
        loader, MEAN, STD, device=torch.device(settings.device), img_dtype=torch.bfloat16
    )
    return _Converted(prefetched, partial(_to_device, device=settings.device))


def dali(
    settings: Settings, *, threads: int = 8, fused: bool = True, policy: str = "", **decoder: Any
) -> Batches:
    """DALI's own training pipeline: file reader, decode fused with the random crop, resize.

    Its environment, ``ENVIRONMENT``, is part of the tuning: DALI neither sets nor documents it.

    DALI has no bfloat16 output; its cheapest way there is float16 in NHWC, which is channels_last
    once permuted, and one cast.

    Args:
        settings: see :class:`Settings`.
        threads: of the pipeline.
        fused: crop in the decoder, as DALI's examples do, or decode whole photos, then crop.
        policy: see :func:`policy_of`; DALI's own of that name.
        decoder: further options of the decoder, such as ``hw_decoder_load``.
    """
    from nvidia.dali import fn, pipeline_def, types
    from nvidia.dali.plugin.pytorch import DALIGenericIterator, LastBatchPolicy

    cuda = settings.device == "cuda"
    train = settings.train
    decoder.update(device="mixed" if cuda else "cpu", output_type=types.RGB)
    decoded = _dali_images(settings, fused, decoder)
    augment = _dali_policy(policy) if policy else None

    @pipeline_def(
        batch_size=settings.batch_size,
        num_threads=threads,
        device_id=ranks.LOCAL_RANK if cuda else None,
        seed=0,
        enable_conditionals=bool(policy),
    )
    def pipeline() -> Any:
        files, target = fn.readers.file(
            file_root=settings.data, random_shuffle=train, name="reader"
        )
        images = decoded(files)
        images = images if augment is None else augment(images)
        images = fn.crop_mirror_normalize(
            images,
            crop=[settings.size] * 2,
            mirror=fn.random.coin_flip(probability=0.5) if train else 0,
            mean=[255 * value for value in MEAN],
            std=[255 * value for value in STD],
            dtype=types.FLOAT16,
            output_layout="HWC",
        )
        return images, target.gpu() if cuda else target

    # Without a reader's name it goes on for ever, around the files: no epoch ends while measured.
    endless = settings.images == ENDLESS
    last = LastBatchPolicy.FILL if endless else LastBatchPolicy.DROP
    iterator = DALIGenericIterator(
        pipeline(),
        ["images", "target"],
        reader_name=None if endless else "reader",
        auto_reset=True,
        last_batch_policy=last if train else LastBatchPolicy.PARTIAL,
    )
    return _Converted(iterator, _from_dali)


def _dali_images(settings: Settings, fused: bool, decoder: dict[str, Any]) -> Callable[[Any], Any]:
    """What decodes, crops and resizes, as part of a pipeline."""
    from nvidia.dali import fn

    crop = {"random_area": SCALE, "random_aspect_ratio": RATIO}
    size = {"size": [settings.size] * 2, "antialias": True}

    def decoded(files: Any) -> Any:
        if not settings.train:
            images = fn.decoders.image(files, **decoder)
            return fn.resize(images, resize_shorter=settings.resize, antialias=True)
        if not fused:
            return fn.random_resized_crop(fn.decoders.image(files, **decoder), **size, **crop)
        return fn.resize(fn.decoders.image_random_crop(files, **crop, **decoder), **size)

    return decoded


def _dali_policy(name: str) -> Callable[[Any], Any]:
    from nvidia.dali.auto_aug import auto_augment, rand_augment, trivial_augment

    return {
        "ra": partial(rand_augment.rand_augment, n=2, m=9),
        "ta": trivial_augment.trivial_augment_wide,
        "aa": auto_augment.auto_augment,
    }[name]


def _from_dali(batches: list[dict[str, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    (batch,) = batches  # one for each GPU
    images = batch["images"].permute(0, 3, 1, 2).to(torch.bfloat16)
    return images, batch["target"].squeeze(1).long()


LOADERS: dict[str, Callable[..., Batches]] = {
    "synthetic": synthetic,
    "ready": ready,
    "gpuprefetch": gpuprefetch,
    "dali": dali,
    "torchvision": torchvision,
    "timm": timm,
}
# A CUDA context has 8 work queues by default, and streams that share one wait for each other.
ENVIRONMENT = {"dali": {"CUDA_DEVICE_MAX_CONNECTIONS": "32"}}


def parse(spec: str) -> tuple[str, dict[str, Any]]:
    """``"gpuprefetch:cpu_share=0.5,decoder=cpu"`` is a loader's name and options of its factory."""
    name, _, words = spec.partition(":")
    if name not in LOADERS:
        raise ValueError(f"unknown loader {name!r}, expected one of {', '.join(LOADERS)}")
    options = {}
    for word in filter(None, words.split(",")):
        key, _, value = word.partition("=")
        try:
            options[key] = ast.literal_eval(value)
        except (SyntaxError, ValueError):
            options[key] = value
    return name, options


def build(spec: str, settings: Settings) -> Batches:
    """The batches of a loader with its options, as :func:`parse` reads them."""
    name, options = parse(spec)
    torch.manual_seed(0)
    return LOADERS[name](settings, **options)


def refuse_engines() -> None:
    """Have nvJPEG's hardware backend refused to this library, as on a GPU that has none."""
    from gpuprefetch.images import nvjpeg

    library = nvjpeg.library()
    if library is None:
        return
    create = library.nvjpegCreateEx
    hardware = 3
    not_supported = 7

    def refusing(backend: int, *arguments: Any) -> int:
        return not_supported if backend == hardware else create(backend, *arguments)

    library.nvjpegCreateEx = refusing
