"""Every loader that is compared, as a factory of batches on the device.

A peer runs as its documentation has it at its fastest. What it was given stands in ``options``.
A factory takes :class:`Settings` and yields ``(images, target)``: images ``(N, 3, size, size)``
bfloat16, channels_last and normalized, target ``(N,)`` int64, both on the device. All of them do
the same work on the same files: decode, a random crop resized with an antialiased bilinear filter,
a random flip, normalize (``train=False``: resize the shorter side, center crop, normalize).
"""

import ast
import contextlib
import ctypes
import importlib
import os
import random
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import repeat
from pathlib import Path
from typing import Any

import ranks
import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
)

MEAN = (0.485, 0.456, 0.406)
STD = (0.229, 0.224, 0.225)
SCALE = (0.08, 1.0)
RATIO = (3 / 4, 4 / 3)
ENDLESS = 10**8
# timm has no TrivialAugment.
TIMM_POLICIES = {"": None, "ra": "rand-m9-n2", "aa": "original"}

Batches = Iterable[tuple[torch.Tensor, torch.Tensor]]


class Missing(Exception):
    """A peer that is not installed here, or has no such policy. It says why."""


def cores() -> int:
    """CPUs this process may run on. No loader has more threads or workers."""
    return len(os.sched_getaffinity(0))


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
    persistent: bool = True  # workers live on from one epoch to the next

    @property
    def resize(self) -> int:
        return self.size * 256 // 224

    @property
    def endless(self) -> bool:
        return self.images == ENDLESS

    @property
    def shard(self) -> dict[str, int]:
        """For DALI's readers: an epoch that ends is the rank's share of the files."""
        return {} if self.endless else {"shard_id": ranks.RANK, "num_shards": ranks.WORLD}


def sampler_of(dataset: Dataset[Any], settings: Settings) -> Sampler[int]:
    """The order of an epoch: torch's own samplers where it has each photo once, by all ranks."""
    photos = len(dataset)  # type: ignore[arg-type]
    if ranks.WORLD > 1 and settings.images * ranks.WORLD == photos:
        return DistributedSampler(dataset, ranks.WORLD, ranks.RANK, shuffle=settings.train)
    if settings.images != photos:
        return _Repeated(dataset, num_samples=settings.images)  # type: ignore[arg-type]
    return RandomSampler(dataset) if settings.train else SequentialSampler(dataset)  # type: ignore[arg-type]


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
        sampler=sampler_of(dataset, settings),
        num_workers=settings.workers,
        persistent_workers=settings.persistent and settings.workers > 0,
        pin_memory=settings.device == "cuda",
        drop_last=settings.train,
        **options,
    )


@dataclass(frozen=True)
class Converted:
    """A loader whose batches are converted; it can be iterated again and keeps the loader alive."""

    loader: Iterable[Any]
    convert: Callable[[Any], tuple[Any, Any]]
    options: dict[str, Any] = field(default_factory=dict)

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        return map(self.convert, self.loader)


def moved(batch: Any, device: str) -> Any:
    """A batch of lists, tuples and dicts of tensors, on the device: it must be pinned by then."""
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, dict):
        return {key: moved(value, device) for key, value in batch.items()}
    return type(batch)(moved(value, device) for value in batch)


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


def torchvision(
    settings: Settings, *, backend: str = "pil", normalize: str = "workers", policy: str = ""
) -> Batches:
    """ImageFolder with torchvision's v2 transforms.

    Args:
        settings: see :class:`Settings`.
        backend: ``"references"`` is torchvision's own training script: PIL, and transforms of PIL
            images. ``"pil"`` decodes with PIL and transforms uint8 tensors. ``"tensor"`` decodes
            with ``torchvision.io.decode_image`` and transforms uint8 tensors.
        normalize: ``"workers"``, or ``"gpu"``: uint8 batches go to the device and are normalized
            there.
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
    to_tensor = {
        "references": [*crop, v2.PILToTensor()],
        "pil": [v2.PILToTensor(), *crop],
        "tensor": crop,
    }[backend]
    to_float = [v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD)]
    on_gpu = normalize == "gpu"
    transform = v2.Compose(to_tensor if on_gpu else [*to_tensor, *to_float])
    if backend == "tensor":
        dataset = ImageFolder(settings.data, transform, loader=partial(decode_image, mode="RGB"))
    else:
        dataset = ImageFolder(settings.data, transform)
    move = _normalizing(settings.device) if on_gpu else partial(_to_device, device=settings.device)
    options = {"backend": backend, "normalize": normalize}
    return Converted(data_loader(dataset, settings), move, options)


def _normalizing(
    device: str,
) -> Callable[[tuple[torch.Tensor, torch.Tensor]], tuple[torch.Tensor, torch.Tensor]]:
    """Moves a batch of uint8 images to the device and normalizes it there, into channels_last."""
    shape = (1, 3, 1, 1)
    mean = 255 * torch.tensor(MEAN, device=device).view(shape)
    inverse = 1 / (255 * torch.tensor(STD, device=device).view(shape))

    def convert(batch: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        images, target = (tensor.to(device, non_blocking=True) for tensor in batch)
        images = images.to(memory_format=torch.channels_last)  # still uint8: a quarter to move
        return images.sub(mean).mul_(inverse).to(torch.bfloat16), target

    return convert


def _to_device(
    batch: tuple[torch.Tensor, torch.Tensor], device: str
) -> tuple[torch.Tensor, torch.Tensor]:
    images, target = (tensor.to(device, non_blocking=True) for tensor in batch)
    return images.to(torch.bfloat16, memory_format=torch.channels_last), target


def timm(settings: Settings, *, policy: str = "") -> Batches:
    """timm's PrefetchLoader: PIL in the workers, uint8 to the device, normalized there."""
    try:
        from timm.data import create_transform
        from timm.data.loader import PrefetchLoader, fast_collate
    except ImportError as error:
        raise Missing(f"timm: {error}") from None
    from torchvision.datasets import ImageFolder

    if policy not in TIMM_POLICIES:
        raise Missing(f"timm has no policy like {policy!r}")
    transform = create_transform(
        settings.size,
        is_training=settings.train,
        scale=SCALE,
        ratio=RATIO,
        color_jitter=None,
        auto_augment=TIMM_POLICIES[policy],
        interpolation="bilinear",
        crop_pct=settings.size / settings.resize,
        use_prefetcher=True,
    )
    loader = data_loader(ImageFolder(settings.data, transform), settings, collate_fn=fast_collate)
    prefetched = PrefetchLoader(
        loader, MEAN, STD, device=torch.device(settings.device), img_dtype=torch.bfloat16
    )
    return Converted(prefetched, partial(_to_device, device=settings.device))


def kornia(settings: Settings, *, policy: str = "") -> Batches:
    """Photos cropped in the workers, as kornia's docs have it; flip, policy, normalize by kornia.

    kornia chooses the ops of a policy once a batch: less work than the others do.
    """
    from torchvision.datasets import ImageFolder
    from torchvision.io import decode_image
    from torchvision.transforms import v2

    try:
        from kornia import augmentation as K
        from kornia.augmentation import auto
    except ImportError as error:
        raise Missing(f"kornia: {error}") from None
    crop: list[Any] = [v2.Resize(settings.resize), v2.CenterCrop(settings.size)]
    ops: list[Any] = []
    if settings.train:
        crop = [v2.RandomResizedCrop(settings.size, scale=SCALE, ratio=RATIO)]
        policies: dict[str, Callable[[], Any]] = {
            "ra": partial(auto.RandAugment, n=2, m=9),
            "ta": auto.TrivialAugment,
            "aa": auto.AutoAugment,
        }
        ops = [K.RandomHorizontalFlip(), *([policies[policy]()] if policy else [])]
    normalize = K.Normalize(torch.tensor(MEAN), torch.tensor(STD))
    on_device = torch.nn.Sequential(*ops, normalize).to(settings.device)
    transform = v2.Compose(crop)
    dataset = ImageFolder(settings.data, transform, loader=partial(decode_image, mode="RGB"))

    def convert(batch: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        images, target = (tensor.to(settings.device, non_blocking=True) for tensor in batch)
        images = on_device(images.float() / 255)
        return images.to(torch.bfloat16, memory_format=torch.channels_last), target

    return Converted(data_loader(dataset, settings), convert)


def spdl(settings: Settings, *, policy: str = "") -> Batches:
    """SPDL's threads: demux, then decode, crop and resize by FFmpeg's filters; normalized there."""
    if policy:
        raise Missing("SPDL has no random policies")
    try:
        import spdl.io
        from spdl.pipeline import PipelineBuilder

        spdl.io.demux_image  # noqa: B018  # its FFmpeg is loaded here
    except (ImportError, OSError, RuntimeError) as error:
        raise Missing(f"SPDL: {error}") from None
    from torchvision.datasets import ImageFolder

    samples = ImageFolder(settings.data).samples
    cuda = settings.device == "cuda"
    normalize = _normalizing(settings.device)

    def load(chosen: list[tuple[str, int]]) -> tuple[Any, torch.Tensor]:
        frames = []
        for path, _ in chosen:
            packets = spdl.io.demux_image(path)
            wanted = _ffmpeg_filter(settings, packets.width, packets.height)
            frames.append(spdl.io.decode_packets(packets, filter_desc=wanted))
        size = 3 * len(frames) * settings.size**2
        storage = spdl.io.cpu_storage(size, pin_memory=True) if cuda else None
        buffer = spdl.io.convert_frames(frames, storage=storage)
        if cuda:
            where = spdl.io.cuda_config(device_index=ranks.LOCAL_RANK)
            buffer = spdl.io.transfer_buffer(buffer, device_config=where)
        return buffer, torch.tensor([target for _, target in chosen])

    def convert(batch: tuple[Any, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        buffer, target = batch
        return normalize((spdl.io.to_torch(buffer).permute(0, 3, 1, 2), target))

    def batches() -> Iterator[Any]:
        builder = PipelineBuilder().add_source(_batches_of(samples, settings))
        builder = builder.pipe(load, concurrency=settings.workers, output_order="input")
        pipeline = builder.add_sink(2).build(num_threads=settings.workers)
        with pipeline.auto_stop():
            yield from pipeline

    return Converted(Again(batches), convert, {"threads": settings.workers})


def _ffmpeg_filter(settings: Settings, width: int, height: int) -> str:
    """FFmpeg's filters of one photo: crop, resize and flip."""
    from torchvision.transforms import v2

    if settings.train:
        canvas = torch.empty(1, height, width, device="meta")
        crop = v2.RandomResizedCrop(settings.size, scale=SCALE, ratio=RATIO)
        at = crop.make_params([canvas])
        place = f"crop={at['width']}:{at['height']}:{at['left']}:{at['top']}"
        flip = ",hflip" if random.random() < 0.5 else ""
        return f"{place},scale={settings.size}:{settings.size}:flags=bilinear{flip},format=rgb24"
    shorter = min(width, height)
    wide = round(width * settings.resize / shorter)
    high = round(height * settings.resize / shorter)
    resized = f"scale={wide}:{high}:flags=bilinear"
    return f"{resized},crop={settings.size}:{settings.size},format=rgb24"


def _batches_of(samples: list[Any], settings: Settings) -> Iterator[list[Any]]:
    """Batches of an epoch in random order, over the samples again and again."""
    left = settings.images
    order: list[Any] = []
    while left >= (settings.batch_size if settings.train else 1):
        size = min(settings.batch_size, left)
        while len(order) < size:
            order += random.sample(samples, len(samples))
        yield order[:size]
        del order[:size]
        left -= size


class Again:
    """Iterates what a function gives, from its start each time."""

    def __init__(self, make: Callable[[], Iterator[Any]]) -> None:
        self._make = make

    def __iter__(self) -> Iterator[Any]:
        return self._make()


def ffcv(settings: Settings, *, policy: str = "") -> Batches:
    """FFCV's documented ImageNet pipeline, on the photos' own JPEG bytes in its file format."""
    if policy:
        raise Missing("FFCV has no random policies")
    try:
        from ffcv import fields, loader, transforms, writer
        from ffcv.fields import decoders
    except (ImportError, OSError) as error:
        raise Missing(f"FFCV: {error}") from None
    from torchvision.datasets import ImageFolder

    name = Path(settings.data).name
    file = Path(tempfile.gettempdir()) / f"{name}.beton"
    if not file.exists():
        columns = {"image": fields.RGBImageField(write_mode="jpg"), "label": fields.IntField()}
        made = writer.DatasetWriter(str(file), columns, num_workers=settings.workers)
        made.from_indexed_dataset(ImageFolder(settings.data))
    side = (settings.size, settings.size)
    decode = decoders.CenterCropRGBImageDecoder(side, ratio=settings.size / settings.resize)
    ops: list[Any] = []
    if settings.train:
        decode = decoders.RandomResizedCropRGBImageDecoder(side, scale=SCALE, ratio=RATIO)
        ops = [transforms.RandomHorizontalFlip()]
    device = torch.device(settings.device)
    images = [decode, *ops, transforms.ToTensor(), transforms.ToDevice(device)]
    images.append(transforms.ToTorchImage())
    labels = [decoders.IntDecoder(), transforms.ToTensor(), transforms.ToDevice(device)]
    labels.append(transforms.Squeeze())
    if not settings.endless:
        raise Missing("FFCV's epoch is its file: this benchmark measures it without end only")
    made = loader.Loader(
        str(file),
        batch_size=settings.batch_size,
        num_workers=settings.workers,
        order=loader.OrderOption.RANDOM if settings.train else loader.OrderOption.SEQUENTIAL,
        os_cache=True,
        drop_last=settings.train,
        pipelines={"image": images, "label": labels},
    )
    endless = Again(lambda: (batch for _ in repeat(None) for batch in made))
    return Converted(endless, _normalizing(settings.device), {"threads": settings.workers})


def dali(
    settings: Settings,
    *,
    threads: int | None = None,
    fused: bool = True,
    policy: str = "",
    hw_decoder_load: float | None = None,
    prefetch_queue_depth: int | None = None,
    hybrid_huffman_threshold: int | None = None,
    dynamic: bool = False,
    capture: bool = False,
) -> Batches:
    """DALI's own training pipeline: file reader, decode fused with the random crop, resize.

    Its environment, ``ENVIRONMENT``, is part of the tuning: DALI neither sets nor documents it.

    DALI has no bfloat16 output; its cheapest way there is float16 in NHWC, which is channels_last
    once permuted, and one cast.

    Args:
        settings: see :class:`Settings`.
        threads: of the pipeline; at most, and by default, 8 or as many as there are cores.
        fused: crop in the decoder, as DALI's examples do, or decode whole photos, then crop.
        policy: see :func:`policy_of`; DALI's own of that name.
        hw_decoder_load: share of the photos for the JPEG engines; None is DALI's default, as below.
        prefetch_queue_depth: batches that the pipeline has ready.
        hybrid_huffman_threshold: pixels from which the GPU does the Huffman decoding.
        dynamic: operators called one by one, without a pipeline: see :func:`_dali_dynamic`.
        capture: the same, and DALI makes a pipeline of them by itself.
    """
    threads = min(8, cores()) if threads is None else threads
    if threads > cores():
        raise ValueError(f"{threads} threads on {cores()} cores; a loader has as many at most")
    decoder = {
        "hw_decoder_load": hw_decoder_load,
        "hybrid_huffman_threshold": hybrid_huffman_threshold,
    }
    decoder = {key: value for key, value in decoder.items() if value is not None}
    queue = {} if prefetch_queue_depth is None else {"prefetch_queue_depth": prefetch_queue_depth}
    options = {"threads": threads, "fused": fused}
    for name in ("hw_decoder_load", "hybrid_huffman_threshold", "prefetch_queue_depth"):
        options[name] = (decoder | queue).get(name, "default")
    try:
        from nvidia.dali import fn, pipeline_def, types
        from nvidia.dali.plugin.pytorch import DALIGenericIterator, LastBatchPolicy
    except ImportError as error:
        raise Missing(f"DALI: {error}") from None

    cuda = settings.device == "cuda"
    train = settings.train
    if dynamic or capture:
        options = {"threads": threads, "dynamic": True, "capture": capture, **decoder}
        if policy or prefetch_queue_depth is not None or not fused:
            raise Missing("DALI's dynamic mode has no policy, queue or unfused decode here")
        return Converted(_dali_dynamic(settings, decoder, threads, capture), tuple, options)
    decoder |= {"device": "mixed" if cuda else "cpu", "output_type": types.RGB}
    decoded = _dali_images(settings, fused, decoder)
    normalized = _dali_normalized(settings)
    augment = _dali_policy(policy) if policy else None

    @pipeline_def(
        batch_size=settings.batch_size,
        num_threads=threads,
        device_id=ranks.LOCAL_RANK if cuda else None,
        seed=0,
        enable_conditionals=bool(policy),
        **queue,
    )
    def pipeline() -> Any:
        files, target = fn.readers.file(
            file_root=settings.data, random_shuffle=train, name="reader", **settings.shard
        )
        images = decoded(files)
        images = images if augment is None else augment(images)
        mirror = fn.random.coin_flip(probability=0.5) if train else 0
        images = fn.crop_mirror_normalize(images, mirror=mirror, **normalized)
        return images, target.gpu() if cuda else target

    endless = settings.endless
    # Without a reader's name it goes on for ever, around the files: no epoch ends while measured.
    last = LastBatchPolicy.FILL if endless else LastBatchPolicy.DROP
    iterator = DALIGenericIterator(
        pipeline(),
        ["images", "target"],
        reader_name=None if endless else "reader",
        auto_reset=True,
        prepare_first_batch=endless,  # a first epoch that is measured begins with its first batch
        last_batch_policy=last if train else LastBatchPolicy.PARTIAL,
    )
    return Converted(iterator, _from_dali, options)


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


def _dali_normalized(settings: Settings) -> dict[str, Any]:
    """What DALI's last operator makes: normalized float16 images in NHWC."""
    from nvidia.dali import types

    return {
        "crop": [settings.size] * 2,
        "mean": [255 * value for value in MEAN],
        "std": [255 * value for value in STD],
        "dtype": types.FLOAT16,
        "output_layout": "HWC",
    }


def _dali_dynamic(
    settings: Settings, decoder: dict[str, Any], threads: int, capture: bool
) -> Batches:
    """DALI's dynamic mode, as its guide has it: a loop over a reader that calls operators.

    Its reader's epoch is the files, and the last batch is filled up with pictures that count as
    well. An epoch without end is one after the other.
    """
    import nvidia.dali.experimental.dynamic as ndd

    ndd.set_num_threads(threads)
    where = "gpu" if settings.device == "cuda" else "cpu"
    order = {"random_shuffle": settings.train, **settings.shard}
    reader = ndd.readers.File(file_root=settings.data, **order)
    side = [settings.size] * 2
    crop = {"random_area": SCALE, "random_aspect_ratio": RATIO}
    normalized = _dali_normalized(settings)

    def images_of(files: Any, count: int) -> Any:
        if settings.train:
            pictures = ndd.decoders.image_random_crop(files, device=where, **crop, **decoder)
            pictures = ndd.resize(pictures, size=side, antialias=True)
            mirror = ndd.random.coin_flip(probability=0.5, batch_size=count)
        else:
            pictures = ndd.decoders.image(files, device=where, **decoder)
            pictures = ndd.resize(pictures, resize_shorter=settings.resize, antialias=True)
            mirror = 0
        return ndd.crop_mirror_normalize(pictures, mirror=mirror, **normalized)

    def epoch() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for files, target in reader.next_epoch(batch_size=settings.batch_size, capture=capture):
            images = images_of(files, files.batch_size).torch().permute(0, 3, 1, 2)
            labels = target.torch().squeeze(1).long()
            yield images.to(torch.bfloat16), labels.to(settings.device, non_blocking=True)

    if not settings.endless:
        return Again(epoch)
    return Again(lambda: (batch for _ in repeat(None) for batch in epoch()))


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
    "kornia": kornia,
    "spdl": spdl,
    "ffcv": ffcv,
}
# A CUDA context has 8 work queues by default, and streams that share one wait for each other.
ENVIRONMENT = {"dali": {"CUDA_DEVICE_MAX_CONNECTIONS": "32"}}
# Loader -> what its factory imports.
MODULES = {
    "gpuprefetch": ["gpuprefetch", "torchvision.transforms.v2"],
    "torchvision": ["torchvision.datasets", "torchvision.transforms.v2"],
    "dali": ["nvidia.dali.plugin.pytorch", "nvidia.dali.auto_aug.auto_augment"],
    "timm": ["timm.data.loader"],
    "kornia": ["kornia.augmentation.auto"],
    "spdl": ["spdl.io", "spdl.pipeline"],
    "ffcv": ["ffcv.loader"],
}


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


@dataclass
class Late:
    """The batches of a loader that is made when it is first iterated: DALI reads ahead from then.

    Args:
        spec: the loader and its options, as :func:`parse` reads them.
        settings: of the loader.
    """

    spec: str
    settings: Settings
    made: Batches | None = None

    def make(self) -> Batches:
        """The loader itself."""
        if self.made is None:
            self.made = build(self.spec, self.settings)
        return self.made

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        return iter(self.make())


def import_modules(spec: str) -> None:
    """Import what a loader needs, so that its making takes only its own time."""
    name, _ = parse(spec)
    with contextlib.suppress(ImportError):  # build() says what is missing
        for module in MODULES.get(name, ()):
            importlib.import_module(module)


def nvjpeg_version() -> str | None:
    """Version of the nvJPEG that this library decodes with; None where it has none."""
    try:
        from gpuprefetch.images import nvjpeg
    except ImportError:  # another version of this library
        return None
    library = nvjpeg.library()
    if library is None:
        return None
    numbers = []
    for part in range(3):  # major, minor, patch of libraryPropertyType
        number = ctypes.c_int()
        if library.nvjpegGetProperty(part, ctypes.byref(number)) != 0:
            return None
        numbers.append(str(number.value))
    return ".".join(numbers)


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
