"""A Hugging Face image processor, read as a list that gives the same pixels.

A processor is known by its settings, and not by its class. A class may do more than its settings
say, so the list is compared with the processor itself on drawn pictures of several sizes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch

from gpuprefetch.lists.fused import as_float32, extended
from gpuprefetch.policies.known import Constants, UnsupportedTransformError
from gpuprefetch.policies.per_image import ToUint8
from gpuprefetch.policies.registry import LibraryOp
from gpuprefetch.transforms.fitting import ResizeToSequence, SmartResize
from gpuprefetch.transforms.head import FusedTransform, Head, Resize, Transform, apply_head, pair
from gpuprefetch.transforms.random import fold
from gpuprefetch.transforms.results import Patches, PatchPadding
from gpuprefetch.transforms.sampling import CenterCropOp

# Settings that are read here, and those that say nothing of an image's pixels.
_READ = frozenset(
    "do_resize size resample do_center_crop crop_size crop_pct do_rescale rescale_factor"
    " do_normalize image_mean image_std min_pixels max_pixels".split()
)
# Settings of patches: as Qwen2-VL's processor has them, and as SigLIP2's does.
_PACKED = frozenset("patch_size merge_size temporal_patch_size".split())
_PADDED = frozenset("patch_size max_num_patches".split())
_OTHER = frozenset(
    "do_convert_rgb do_reduce_labels image_processor_type feature_extractor_type processor_class"
    " data_format input_data_format device return_tensors disable_grouping default_to_square"
    " model_input_names auto_map backend".split()
)
WARPED = 384  # from this size on, processors with a crop_pct resize to it and cut nothing
PROBES = ((61, 83), (84, 61), (40, 173), (302, 221))  # heights and widths of the drawn pictures
MOST = 1.0  # mean difference on one of them, in levels: processors round after their resize
_INSTEAD = (
    "Call it in the dataset, on the decoded image, or write the list: transforms=[v2.Resize(256), "
    "v2.CenterCrop(224), v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize(mean, "
    "std)]."
)


class ProcessorCrop(FusedTransform):
    """A center crop whose offset is rounded down, as processors have it."""

    def __init__(self, size: int | Sequence[int]) -> None:
        super().__init__(CenterCropOp(pair(size, "crop_size"), pad=True, floors=True))


def image_processor(given: LibraryOp) -> LibraryOp:
    """The image processor that something is or holds; None for anything else."""
    for each in (given, getattr(given, "image_processor", None)):
        read = callable(getattr(each, "to_dict", None))
        if read and hasattr(each, "do_rescale") and hasattr(each, "image_mean"):
            return each
    return None


def list_of_processor(processor: LibraryOp) -> list[Transform]:
    """The list for encoded images that gives what an image processor gives.

    It ends with :class:`Patches` or :class:`PatchPadding` where the processor makes patches.

    Raises:
        UnsupportedTransformError: for a setting that is not known, and for a processor whose pixels
            are not those of its settings.
    """
    settings = _Settings(processor)
    ops = [*settings.resizes(), *settings.crops(), *settings.colors()]
    form = settings.patches()
    _compare(processor, ops, form, settings)
    return ops if form is None else [*ops, form]


class _Settings:
    """The settings of a processor, each of which is read as processors read it."""

    def __init__(self, processor: LibraryOp) -> None:
        self._name = type(processor).__name__
        self._given: dict[str, LibraryOp] = {
            name: value
            for name, value in processor.to_dict().items()
            if not (name in _OTHER or name.startswith("_"))
        }
        for name, value in self._given.items():
            if name not in self._known and value:
                raise self.refusal(f"its setting {name}={value!r} is not known here")

    @property
    def _known(self) -> frozenset[str]:
        for patches in (_PACKED, _PADDED):
            if all(self._given.get(name) for name in patches):
                return _READ | patches
        return _READ

    def patches(self) -> Patches | PatchPadding | None:
        """What images are cut into; None where a processor gives images."""
        given = self._given
        try:
            if self._known >= _PACKED:
                sides = given["patch_size"], given["merge_size"]
                return Patches(*sides, given["temporal_patch_size"])
            if self._known >= _PADDED:
                return PatchPadding(given["patch_size"], given["max_num_patches"])
        except ValueError as error:
            raise self.refusal(str(error)) from error
        return None

    def refusal(self, why: str) -> UnsupportedTransformError:
        return UnsupportedTransformError(f"{self._name} cannot move: {why}. {_INSTEAD}")

    def resizes(self) -> list[Transform]:
        if not self._given.get("do_resize"):
            return []
        how = self._given.get("resample", 2)
        if (form := self.patches()) is not None:
            return [self._fitted(form, how)]
        size = self._sides("size")
        if "height" in size:
            return [self._resize((size["height"], size["width"]), how)]
        edge = size["shortest_edge"]
        share = self._given.get("crop_pct")
        if not share:
            return [self._resize(edge, how)]
        if edge >= WARPED:
            return [self._resize((edge, edge), how)]
        return [self._resize(int(edge / share), how), ProcessorCrop(edge)]

    def _fitted(self, form: Patches | PatchPadding, how: LibraryOp) -> Transform:
        """The resize to sizes that are cut into patches."""
        try:
            if isinstance(form, PatchPadding):
                return ResizeToSequence(form.patch_size, form.max_num_patches, how)
            size = self._given.get("size") or {}
            least: LibraryOp = self._given.get("min_pixels") or size.get("shortest_edge")
            most: LibraryOp = self._given.get("max_pixels") or size.get("longest_edge")
            return SmartResize(form.patch_size * form.merge_size, least, most, how)
        except ValueError as error:
            raise self.refusal(str(error)) from error

    def _resize(self, size: int | tuple[int, int], how: LibraryOp) -> Resize:
        try:
            return Resize(size, how)
        except ValueError as error:
            raise self.refusal(f"size={size!r} and resample={how!r}: {error}") from error

    def crops(self) -> list[Transform]:
        if not self._given.get("do_center_crop"):
            return []
        size = self._sides("crop_size")
        if "height" in size:
            return [ProcessorCrop((size["height"], size["width"]))]
        return [ProcessorCrop(size["shortest_edge"])]

    def _sides(self, name: str) -> dict[str, int]:
        given = self._given.get(name)
        if isinstance(given, int):
            return {"height": given, "width": given} if name == "crop_size" else _edge(given)
        sides = {side: n for side, n in given.items() if n} if isinstance(given, Mapping) else {}
        if sides.keys() not in ({"height", "width"}, {"shortest_edge"}):
            raise self.refusal(f"{name}={given!r} is neither height and width nor shortest_edge")
        return sides

    def colors(self) -> list[Transform]:
        import kornia.augmentation as K

        if not (self._given.get("do_rescale") or self._given.get("do_normalize")):
            return [ToUint8()]
        mean, std = self.mean_and_std()
        if not any(mean) and set(std) == {1.0}:
            return []
        return [K.Normalize(mean=as_float32(mean), std=as_float32(std))]

    def mean_and_std(self) -> Constants:
        """What is subtracted from values in [0, 1], and what they are divided by then."""
        factor = float(self._given["rescale_factor"]) if self._given.get("do_rescale") else 1.0
        unit = round(factor * 255, 9)  # of values in [0, 1]; 1/255 is written in many ways
        mean: LibraryOp = 0.0
        std: LibraryOp = 1.0
        if self._given.get("do_normalize"):
            mean = self._given["image_mean"]
            std = self._given["image_std"]
        means, stds = np.broadcast_arrays(np.ravel(mean) / unit, np.ravel(std) / unit)
        return means.tolist(), stds.tolist()


def _edge(size: int) -> dict[str, int]:
    return {"shortest_edge": size}


def _compare(
    processor: LibraryOp,
    ops: Sequence[Transform],
    form: Patches | PatchPadding | None,
    settings: _Settings,
) -> None:
    """Refuse a processor that does more than its settings say."""
    from PIL import Image

    _, std = settings.mean_and_std()
    levels = 255 * max(std)
    for height, width in PROBES:
        pixels = _drawn(height, width)
        result = processor(images=Image.fromarray(pixels), return_tensors="pt")
        got = _run(ops, torch.from_numpy(pixels).permute(2, 0, 1))
        values = result["pixel_values"]
        if form is None:
            values = values[0]
        else:
            packed = form.joined([got])
            got, *counts = packed
            for name, count in zip(packed._fields[1:], counts, strict=True):
                if not torch.equal(torch.as_tensor(result[name]), count):
                    why = f"of a picture of {width} x {height} it makes another {name}"
                    raise settings.refusal(why)
        want = torch.as_tensor(values)
        if want.shape != got.shape:
            shapes = f"{tuple(want.shape)} and not {tuple(got.shape)}"
            raise settings.refusal(f"of a picture of {width} x {height} it makes {shapes}")
        off = float((got.double() - want.double()).abs().mean())
        off *= levels if got.is_floating_point() else 1
        if off > MOST:
            why = f"its pixels are {off:.1f} levels of 255 from what its settings say"
            raise settings.refusal(why)


def _drawn(height: int, width: int) -> npt.NDArray[np.uint8]:
    """A picture ``(height, width, 3)`` of shades with noise, in which no shift goes unseen."""
    rng = np.random.default_rng(0)
    shades = np.linspace(40, 180, width)[None, :, None] * np.array([1.0, 0.8, 0.6])
    pixels: npt.NDArray[np.uint8] = (shades + rng.integers(0, 60, (height, width, 3))).astype("u1")
    return pixels


def _run(ops: Sequence[Transform], image: torch.Tensor) -> torch.Tensor:
    """What a list makes of one image ``(3, H, W)``."""
    head = Head()
    rest = list(ops)
    while rest and (longer := extended(head, rest[0])) is not None:
        head = longer
        rest.pop(0)
    images = apply_head(head, image[None], fold(0, [0]))
    for op in rest:
        images = op(images)
    return images[0]
