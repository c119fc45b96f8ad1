"""What is known of the ops of torchvision, kornia, timm and this library: one row for each.

A row is for exactly one class, found in the module that names it. A class derived from that one may
do anything, so it has no row; what concerns its bases is asked with :func:`is_or_extends`.
``test_lists.py`` goes through all rows: a class that a library has renamed fails there.

    row_of(v2.RandomHorizontalFlip())  # "RandomHorizontalFlip", FLIPS | ONCE | MOVES | ...
    row_of(K.Normalize(mean, std))     # "Normalize", NORMALIZES
    row_of(lambda images: images)      # None
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Flag, auto
from typing import Any

LibraryOp = Any  # a transform of a library, whose attributes are read by their names


class Is(Flag):
    """What holds for an op; an op without ONCE, EACH and ALONE samples nothing."""

    # What the op is for, where a list treats it specially.
    CROPS = auto()  # a crop or a resize
    FLIPS = auto()
    NORMALIZES = auto()
    CONVERTS = auto()  # between PIL images and tensors, or between dtypes
    HOLDS = auto()  # it chooses among other ops
    DOES_NOTHING = auto()
    # How often the op samples random parameters.
    ONCE = auto()  # a call, so that the images of a batch would share them
    EACH = auto()  # for each image of a batch
    ALONE = auto()  # once a call, for one image: no batch holds what it gives or takes
    # The values that the op is for.
    LEVELS = auto()  # 0 to 255 in uint8
    UNIT = auto()  # [0, 1] where they are floating point: it clamps to that, or counts levels in it
    VALUED = auto()  # it compares with, or paints, a value in the units of the images
    # What the op does to the places of pixels.
    MOVES = auto()
    ERASES = auto()  # it moves none, and a mask would not know what it erases
    # How the op runs.
    BATCHES = auto()  # on (N, C, H, W), as it is or with a call for each image


_NOTHING = Is(0)
SHARED = Is.ONCE | Is.ALONE  # what a batch would share


@dataclass(frozen=True, slots=True)
class Row:
    """What is known of one op."""

    name: str
    modules: tuple[str, ...]  # that have the class, under its name
    traits: Is = _NOTHING

    @property
    def library(self) -> str:
        return self.modules[0].partition(".")[0]

    @property
    def key(self) -> str:
        """The name under which policies/compile.py has it."""
        return f"timm {self.name}" if self.library == "timm" else self.name


# Libraries whose ops are read by their attributes.
LIBRARIES = frozenset(("torchvision", "timm", "kornia", "gpuprefetch"))
TORCHVISION = ("torchvision.transforms.v2", "torchvision.transforms")
PRESETS = ("torchvision.transforms._presets",)
KORNIA = ("kornia.augmentation",)
KORNIA_AUTO = ("kornia.augmentation.auto",)
TIMM = ("timm.data.transforms",)
TIMM_NAFLEX = ("timm.data.naflex_transforms",)
TIMM_AUTO = ("timm.data.auto_augment",)
TIMM_ERASING = ("timm.data.random_erasing",)
OURS = ("gpuprefetch.transforms.head",)
OURS_FITTING = ("gpuprefetch.transforms.fitting",)
OURS_PROCESSED = ("gpuprefetch.lists.processor",)
OURS_CONVERTED = ("gpuprefetch.lists.fused",)
LAUNCH = ("gpuprefetch.transforms.sampling",)

ROWS = (
    # torchvision's, of v1 and v2.
    Row("AugMix", TORCHVISION, Is.ONCE | Is.UNIT | Is.MOVES | Is.BATCHES),
    Row("AutoAugment", TORCHVISION, Is.ONCE | Is.UNIT | Is.MOVES | Is.BATCHES),
    Row("CenterCrop", TORCHVISION, Is.CROPS | Is.MOVES | Is.BATCHES),
    Row("ClampBoundingBoxes", TORCHVISION),
    Row("ClampKeyPoints", TORCHVISION),
    Row("ColorJitter", TORCHVISION, Is.ONCE | Is.UNIT | Is.BATCHES),
    Row("ConvertBoundingBoxFormat", TORCHVISION),
    Row("ConvertImageDtype", TORCHVISION, Is.CONVERTS | Is.BATCHES),
    Row("ElasticTransform", TORCHVISION, Is.ONCE | Is.MOVES | Is.BATCHES),
    Row("FiveCrop", TORCHVISION, Is.MOVES),
    Row("GaussianBlur", TORCHVISION, Is.ONCE | Is.BATCHES),
    Row("GaussianNoise", TORCHVISION, Is.ONCE | Is.BATCHES),
    Row("Grayscale", TORCHVISION, Is.BATCHES),
    Row("Identity", TORCHVISION, Is.DOES_NOTHING | Is.BATCHES),
    Row("JPEG", TORCHVISION, Is.ALONE),
    Row("Lambda", TORCHVISION),
    Row("LinearTransformation", TORCHVISION),
    Row("Normalize", TORCHVISION, Is.NORMALIZES | Is.BATCHES),
    Row("PILToTensor", TORCHVISION, Is.CONVERTS),
    Row("Pad", TORCHVISION, Is.MOVES | Is.BATCHES),
    Row("RGB", TORCHVISION, Is.BATCHES),
    Row("RandAugment", TORCHVISION, Is.ONCE | Is.UNIT | Is.MOVES | Is.BATCHES),
    Row("RandomAdjustSharpness", TORCHVISION, Is.ONCE | Is.UNIT | Is.BATCHES),
    Row("RandomAffine", TORCHVISION, Is.ONCE | Is.MOVES | Is.BATCHES),
    Row("RandomApply", TORCHVISION, Is.HOLDS | Is.ONCE | Is.BATCHES),
    Row("RandomAutocontrast", TORCHVISION, Is.ONCE | Is.UNIT | Is.BATCHES),
    Row("RandomChannelPermutation", TORCHVISION, Is.ONCE | Is.BATCHES),
    Row("RandomChoice", TORCHVISION, Is.HOLDS | Is.ONCE | Is.BATCHES),
    Row("RandomCrop", TORCHVISION, Is.CROPS | Is.ONCE | Is.MOVES | Is.BATCHES),
    Row("RandomEqualize", TORCHVISION, Is.ONCE | Is.UNIT | Is.BATCHES),
    Row("RandomErasing", TORCHVISION, Is.ONCE | Is.BATCHES | Is.VALUED),
    Row("RandomGrayscale", TORCHVISION, Is.ONCE | Is.BATCHES),
    Row(
        "RandomHorizontalFlip",
        TORCHVISION,
        Is.FLIPS | Is.ONCE | Is.MOVES | Is.BATCHES,
    ),
    Row("RandomInvert", TORCHVISION, Is.ONCE | Is.UNIT | Is.BATCHES),
    Row("RandomIoUCrop", TORCHVISION, Is.ALONE | Is.MOVES),
    Row("RandomOrder", TORCHVISION, Is.HOLDS | Is.ONCE | Is.BATCHES),
    Row("RandomPerspective", TORCHVISION, Is.ONCE | Is.MOVES | Is.BATCHES),
    Row("RandomPhotometricDistort", TORCHVISION, Is.ONCE | Is.UNIT | Is.BATCHES),
    Row("RandomPosterize", TORCHVISION, Is.ONCE | Is.UNIT | Is.BATCHES),
    Row("RandomResize", TORCHVISION, Is.ALONE | Is.MOVES),
    Row("RandomResizedCrop", TORCHVISION, Is.CROPS | Is.ONCE | Is.MOVES | Is.BATCHES),
    Row("RandomRotation", TORCHVISION, Is.ONCE | Is.MOVES | Is.BATCHES),
    Row("RandomShortestSize", TORCHVISION, Is.ALONE | Is.MOVES),
    Row("RandomSolarize", TORCHVISION, Is.ONCE | Is.UNIT | Is.BATCHES | Is.VALUED),
    Row("RandomVerticalFlip", TORCHVISION, Is.FLIPS | Is.ONCE | Is.MOVES | Is.BATCHES),
    Row("RandomZoomOut", TORCHVISION, Is.ALONE | Is.MOVES),
    Row("Resize", TORCHVISION, Is.CROPS | Is.MOVES | Is.BATCHES),
    Row("SanitizeBoundingBoxes", TORCHVISION),
    Row("SanitizeKeyPoints", TORCHVISION),
    Row("ScaleJitter", TORCHVISION, Is.ALONE | Is.MOVES),
    Row("SetClampingMode", TORCHVISION),
    Row("TenCrop", TORCHVISION, Is.MOVES),
    Row("ToDtype", TORCHVISION, Is.CONVERTS | Is.BATCHES),
    Row("ToImage", TORCHVISION, Is.CONVERTS),
    Row("ToPureTensor", TORCHVISION, Is.CONVERTS),
    Row("ToTensor", TORCHVISION, Is.CONVERTS),
    Row("TrivialAugmentWide", TORCHVISION, Is.ONCE | Is.UNIT | Is.MOVES | Is.BATCHES),
    Row("UniformTemporalSubsample", TORCHVISION),
    Row("ImageClassification", PRESETS, Is.MOVES),
    Row("ObjectDetection", PRESETS),
    Row("OpticalFlow", PRESETS),
    Row("SemanticSegmentation", PRESETS),
    Row("VideoClassification", PRESETS),
    # kornia's: they sample for each image of a batch.
    Row("CenterCrop", KORNIA, Is.CROPS | Is.MOVES),
    Row("ColorJiggle", KORNIA, Is.EACH | Is.UNIT),
    Row("ColorJitter", KORNIA, Is.EACH | Is.UNIT),
    Row("Denormalize", KORNIA),
    Row("GeometricAugmentationBase2D", KORNIA, Is.EACH | Is.MOVES),
    Row("LongestMaxSize", KORNIA, Is.MOVES),
    Row("MixAugmentationBaseV2", KORNIA, Is.EACH | Is.MOVES),
    Row("Normalize", KORNIA, Is.NORMALIZES),
    Row("PadTo", KORNIA, Is.MOVES),
    Row("PatchMix", KORNIA, Is.EACH | Is.MOVES),
    Row("RandomAffine", KORNIA, Is.EACH | Is.MOVES),
    Row("RandomAutoContrast", KORNIA, Is.EACH | Is.UNIT),
    Row("RandomBoxBlur", KORNIA, Is.EACH),
    Row("RandomBrightness", KORNIA, Is.EACH | Is.UNIT),
    Row("RandomChannelDropout", KORNIA, Is.EACH),
    Row("RandomChannelShuffle", KORNIA, Is.EACH),
    Row("RandomClahe", KORNIA, Is.EACH | Is.UNIT),
    Row("RandomContrast", KORNIA, Is.EACH | Is.UNIT),
    Row("RandomCrop", KORNIA, Is.CROPS | Is.EACH | Is.MOVES),
    Row("RandomCutMixV2", KORNIA, Is.EACH | Is.MOVES),
    Row("RandomDissolving", KORNIA, Is.EACH),
    Row("RandomElasticTransform", KORNIA, Is.EACH | Is.MOVES),
    Row("RandomEqualize", KORNIA, Is.EACH | Is.UNIT),
    Row("RandomErasing", KORNIA, Is.EACH | Is.ERASES),
    Row("RandomFisheye", KORNIA, Is.EACH | Is.MOVES),
    Row("RandomGamma", KORNIA, Is.EACH | Is.UNIT),
    Row("RandomGaussianBlur", KORNIA, Is.EACH),
    Row("RandomGaussianIllumination", KORNIA, Is.EACH),
    Row("RandomGaussianNoise", KORNIA, Is.EACH),
    Row("RandomGrayscale", KORNIA, Is.EACH),
    Row("RandomHorizontalFlip", KORNIA, Is.FLIPS | Is.EACH | Is.MOVES),
    Row("RandomHue", KORNIA, Is.EACH | Is.UNIT),
    Row("RandomInvert", KORNIA, Is.EACH | Is.UNIT),
    Row("RandomJPEG", KORNIA, Is.EACH),
    Row("RandomJigsaw", KORNIA, Is.EACH | Is.MOVES),
    Row("RandomLinearCornerIllumination", KORNIA, Is.EACH),
    Row("RandomLinearIllumination", KORNIA, Is.EACH),
    Row("RandomMedianBlur", KORNIA, Is.EACH),
    Row("RandomMixUpV2", KORNIA, Is.EACH | Is.MOVES),
    Row("RandomMosaic", KORNIA, Is.EACH | Is.MOVES),
    Row("RandomMotionBlur", KORNIA, Is.EACH),
    Row("RandomPerspective", KORNIA, Is.EACH | Is.MOVES),
    Row("RandomPlanckianJitter", KORNIA, Is.EACH),
    Row("RandomPlasmaBrightness", KORNIA, Is.EACH),
    Row("RandomPlasmaContrast", KORNIA, Is.EACH),
    Row("RandomPlasmaShadow", KORNIA, Is.EACH),
    Row("RandomPosterize", KORNIA, Is.EACH | Is.UNIT),
    Row("RandomRGBShift", KORNIA, Is.EACH),
    Row("RandomRain", KORNIA, Is.EACH),
    Row("RandomResizedCrop", KORNIA, Is.CROPS | Is.EACH | Is.MOVES),
    Row("RandomRotation", KORNIA, Is.EACH | Is.MOVES),
    Row("RandomRotation90", KORNIA, Is.EACH | Is.MOVES),
    Row("RandomSaltAndPepperNoise", KORNIA, Is.EACH),
    Row("RandomSaturation", KORNIA, Is.EACH | Is.UNIT),
    Row("RandomSharpness", KORNIA, Is.EACH | Is.UNIT),
    Row("RandomShear", KORNIA, Is.EACH | Is.MOVES),
    Row("RandomSnow", KORNIA, Is.EACH),
    Row("RandomSolarize", KORNIA, Is.EACH | Is.UNIT),
    Row("RandomThinPlateSpline", KORNIA, Is.EACH | Is.MOVES),
    Row("RandomTranslate", KORNIA, Is.EACH | Is.MOVES),
    Row("RandomTransplantation", KORNIA, Is.EACH | Is.MOVES),
    Row("RandomVerticalFlip", KORNIA, Is.FLIPS | Is.EACH | Is.MOVES),
    Row("Resize", KORNIA, Is.CROPS | Is.MOVES),
    Row("SmallestMaxSize", KORNIA, Is.MOVES),
    Row("AutoAugment", KORNIA_AUTO, Is.ONCE | Is.UNIT),
    Row("RandAugment", KORNIA_AUTO, Is.ONCE | Is.UNIT),
    Row("TrivialAugment", KORNIA_AUTO, Is.ONCE | Is.UNIT),
    # timm's.
    Row("AugMixAugment", TIMM_AUTO, Is.ONCE | Is.LEVELS | Is.MOVES),
    Row("AutoAugment", TIMM_AUTO, Is.ONCE | Is.LEVELS | Is.MOVES),
    Row("RandAugment", TIMM_AUTO, Is.ONCE | Is.LEVELS | Is.MOVES),
    Row("AugmentOp", TIMM_AUTO, Is.ONCE | Is.MOVES),
    Row("RandomErasing", TIMM_ERASING, Is.EACH | Is.BATCHES),
    Row("MaybePILToTensor", TIMM, Is.CONVERTS | Is.BATCHES),
    Row("MaybeToTensor", TIMM, Is.CONVERTS | Is.BATCHES),
    Row("ToNumpy", TIMM, Is.CONVERTS),
    Row("CenterCropOrPad", TIMM, Is.MOVES | Is.BATCHES),
    Row("TrimBorder", TIMM, Is.MOVES | Is.BATCHES),
    Row("RandomCropOrPad", TIMM, Is.ONCE | Is.MOVES | Is.BATCHES),
    Row("RandomPad", TIMM, Is.ONCE | Is.MOVES | Is.BATCHES),
    Row("RandomResizedCropAndInterpolation", TIMM, Is.ONCE | Is.MOVES | Is.BATCHES),
    Row("ResizeKeepRatio", TIMM, Is.ALONE | Is.MOVES | Is.BATCHES),
    Row("CenterCropToSequence", TIMM_NAFLEX, Is.MOVES | Is.BATCHES),
    Row("ResizeKeepRatioToSequence", TIMM_NAFLEX, Is.MOVES | Is.BATCHES),
    Row("ResizeToSequence", TIMM_NAFLEX, Is.MOVES | Is.BATCHES),
    Row("RandomCropToSequence", TIMM_NAFLEX, Is.ONCE | Is.MOVES | Is.BATCHES),
    Row("RandomResizedCropToSequence", TIMM_NAFLEX, Is.ONCE | Is.MOVES | Is.BATCHES),
    # This library's: the transforms, and what stands for them in the fused launch.
    Row("CenterCrop", OURS, Is.CROPS | Is.MOVES),
    Row("RandomCrop", OURS_CONVERTED, Is.CROPS | Is.EACH | Is.MOVES),
    Row("RandomSize", OURS_CONVERTED, Is.CROPS | Is.EACH | Is.MOVES),
    Row("Given", OURS_CONVERTED, Is.CROPS | Is.EACH | Is.MOVES),
    Row("RandomIoUCrop", OURS_CONVERTED, Is.CROPS | Is.EACH | Is.MOVES),
    Row("RandomZoomOut", OURS_CONVERTED, Is.CROPS | Is.EACH | Is.MOVES),
    Row("ChosenCrop", OURS_CONVERTED, Is.CROPS | Is.EACH | Is.MOVES),
    Row("ProcessorCrop", OURS_PROCESSED, Is.CROPS | Is.MOVES),
    Row("RandomResizedCrop", OURS, Is.CROPS | Is.EACH | Is.MOVES),
    Row("Resize", OURS, Is.CROPS | Is.MOVES),
    Row("SmartResize", OURS_FITTING, Is.CROPS | Is.MOVES),
    Row("ResizeToSequence", OURS_FITTING, Is.CROPS | Is.MOVES),
    Row("Letterbox", OURS_FITTING, Is.CROPS | Is.MOVES),
    Row("ResizedCropOp", LAUNCH, Is.EACH | Is.MOVES),
    Row("RandomCropOp", LAUNCH, Is.EACH | Is.MOVES),
    Row("ChosenPartOp", LAUNCH, Is.EACH | Is.MOVES),
    Row("ChosenPlaceOp", LAUNCH, Is.EACH | Is.MOVES),
    Row("FlipOp", LAUNCH, Is.EACH | Is.MOVES),
    Row("RandomSizeOp", LAUNCH, Is.EACH | Is.MOVES),
    Row("AmongBoxesOp", LAUNCH, Is.EACH | Is.MOVES),
    Row("ZoomOutOp", LAUNCH, Is.EACH | Is.MOVES),
    Row("GivenOp", LAUNCH, Is.EACH | Is.MOVES),
    Row("ResizeOp", LAUNCH, Is.MOVES),
    Row("FittedResizeOp", LAUNCH, Is.MOVES),
    Row("LetterboxOp", LAUNCH, Is.MOVES),
    Row("CenterCropOp", LAUNCH, Is.MOVES),
)

# Modules whose every class moves pixels: there is no list of kornia's geometry.
MOVING_MODULES = ("kornia.geometry.",)

_by_name: dict[str, list[Row]] = {}
for _row in ROWS:
    _by_name.setdefault(_row.name, []).append(_row)


def row_of(op: object) -> Row | None:
    """The row of an op; None for an op of a derived class and for anything else."""
    return _row_of_class(type(op))


def has(op: object, traits: Is) -> bool:
    """Whether an op has a row with one of these traits."""
    row = row_of(op)
    return row is not None and bool(traits & row.traits)


def is_or_extends(op: object, traits: Is) -> bool:
    """The same of an op or of a class that it is derived from."""
    kinds = type(op).__mro__
    geometry = any(f"{kind.__module__}.".startswith(MOVING_MODULES) for kind in kinds)
    if geometry and Is.MOVES in traits:
        return True
    rows = filter(None, map(_row_of_class, kinds))
    return any(traits & row.traits for row in rows)


def _row_of_class(kind: type) -> Row | None:
    for row in _by_name.get(kind.__name__, ()):
        # Nobody has an op of a module that is not imported yet.
        modules = (sys.modules.get(name) for name in row.modules)
        if any(getattr(module, row.name, None) is kind for module in modules):
            return row
    return None


def rows_of(library: str) -> Iterator[Row]:
    return (row for row in ROWS if row.library == library)
