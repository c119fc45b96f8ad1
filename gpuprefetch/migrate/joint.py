"""Read a dataset's transform of a picture and what is beside it, by trial.

The transform may be anything that is made of torchvision's functions. It is tried on the first
sample, with stand-ins for the picture and with several random numbers, and once with the picture
itself: both must give the same.
"""

from __future__ import annotations

import contextlib
import copy
import random
import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NoReturn

import numpy as np
import torch

from gpuprefetch.core.nested import children_of
from gpuprefetch.images.encoded import EncodedImage
from gpuprefetch.images.header import decode_cpu, read_header
from gpuprefetch.images.joint import Outcome, carried_out, carry_on
from gpuprefetch.images.recorded import Joint, RecordingError
from gpuprefetch.lists.fused import Given, as_float32
from gpuprefetch.lists.walk import FUSED, NOTHING, WORKERS, Plan, Step
from gpuprefetch.policies.known import UnsupportedTransformError, name_of
from gpuprefetch.policies.per_image import ToUint8, Transform
from gpuprefetch.policies.registry import Is, LibraryOp, has
from gpuprefetch.transforms.head import Head
from gpuprefetch.transforms.random import seeded_everywhere
from gpuprefetch.transforms.sampling import GivenOp, Size

TRIALS = 16
# Most that the pictures of a trial differ on average, in levels of 255: PIL rounds after each op.
CLOSE = 2.0
WIDE = 16.0  # no picture in [0, 1], normalized or not, spans so much
EACH = "image by image, as it was sampled"
_AS_IT_IS = (
    "The loader may also stay as it is: DataPrefetcher(loader) moves the batches that its workers "
    "make ahead of the loop."
)

_OF_PURE = (
    ": v2 does other things to a pure tensor than to an image. Give it a tv_tensors.Image: "
    "tv_tensors.Image(image)"
)
_SAMPLES = (
    " (or it samples from a generator of its own, and not from that of torch, NumPy or random)"
)


def joint_plan(image: EncodedImage, ops: Sequence[LibraryOp], *, has_workers: bool) -> Plan:
    """What becomes of the transform that a dataset has called for an image.

    Args:
        image: of the first sample, whose transform is put off.
        ops: what the transform is made of, as far as that is known.
        has_workers: whether the loader has workers, whose random generators are nobody else's.

    Raises:
        UnsupportedTransformError: if it needs pixels, or gives something else with them.
    """
    joint = image._joint
    assert joint is not None
    header = read_header(image.data)
    size = (header.height, header.width)
    if not has_workers and (whose := _generator_of(joint, size)):
        warnings.warn(
            f"The transform of the dataset samples from {whose}. With num_workers=0 it runs in "
            "your own process, whose generator is your loop's: the random numbers do not depend on "
            "seed, epoch and sample, and an epoch does not resume with them. Give the loader a "
            "worker: DataLoader(..., num_workers=1).",
            stacklevel=2,
        )
    fuses = all(map(_is_for_launch, ops))  # else some op may do more, by chance in no trial
    try:
        trials = _trials(joint, size, converts=fuses)
        launch = _launch_for(trials) if fuses else None
        if launch is None:
            trials = _trials(joint, size, converts=False) if fuses else trials
            launch = replace(_common(trials), dtype=None)
    except RecordingError as error:
        _refuse(str(error))
    except Exception as error:  # the user's code, which gets an Image for a pure tensor here
        if joint.takes_pure:
            _refuse(f"raises {type(error).__name__}: {error}, when it gets a tv_tensors.Image")
        raise
    plain = _plain(joint, image)
    _compare(plain, trials[0], image, launch)
    written: list[Transform] = [Given(launch)]
    mean_and_std = trials[0].recording.head
    if launch.dtype is None or launch.dtype == torch.uint8:
        written.append(ToUint8())
    elif mean_and_std.mean is not None and mean_and_std.std is not None:
        import kornia.augmentation as K

        constants = (as_float32(mean_and_std.mean), as_float32(mean_and_std.std))
        written.append(K.Normalize(*constants))
    return Plan(_steps(ops, launch), written=written)


def _refuse(why: str) -> NoReturn:
    raise UnsupportedTransformError(
        f"The transform of the dataset gets a picture and what is beside it, and {why}. Such a "
        "transform runs in the workers without the picture, and what it does to it is done on the "
        "device. Let it be made of torchvision's v2 ops, or of functions of "
        f"torchvision.transforms.functional. {_AS_IT_IS}"
    )


def _trials(joint: Joint, size: Size, *, converts: bool) -> list[Outcome]:
    trials = []
    for seed in range(TRIALS):
        own = replace(joint, beside=copy.deepcopy(joint.beside))
        with seeded_everywhere(seed):
            trials.append(carried_out(own, size, converts=converts))
    return trials


def _generator_of(joint: Joint, size: Size) -> str:
    """Whose random numbers a transform samples beside those of torch; empty if nobody's."""
    own = replace(joint, beside=copy.deepcopy(joint.beside))
    with seeded_everywhere(0), contextlib.suppress(Exception):  # the trials tell of it
        carried_out(own, size, converts=False)
        if random.random() != random.Random(0).random():
            return "Python's random"
        if np.random.random_sample() != np.random.RandomState(0).random_sample():
            return "NumPy"
    return ""


def _plain(joint: Joint, image: EncodedImage) -> tuple[Any, ...]:
    """What the transform gives for the picture itself, with the random numbers of trial 0."""
    from torchvision import tv_tensors
    from torchvision.transforms.v2 import functional as F

    pixels = decode_cpu(image.data)
    picture = tv_tensors.Image(pixels) if joint.takes_tensor else F.to_pil_image(pixels)
    if joint.takes_pure:
        picture = pixels
    beside = copy.deepcopy(joint.beside)
    with seeded_everywhere(0):
        made = joint.transform(picture, *beside)
    return tuple(made)  # type: ignore[arg-type]


# --- What all trials have in common ---


def _launch_for(trials: Sequence[Outcome]) -> GivenOp | None:
    """The launch that does all that was recorded; None if other calls come after it."""
    recordings = [trial.recording for trial in trials]
    first = recordings[0]
    if any(each.rest or each.dtype != first.dtype for each in recordings):
        return None
    launch = replace(_common(trials), dtype=first.dtype)
    head = Head().then(launch, "")
    assert head is not None
    head = replace(head, mean=first.head.mean, std=first.head.std)
    return launch if all(each.within(head) for each in recordings) else None


def _common(trials: Sequence[Outcome]) -> GivenOp:
    """The filter and the color of padding that the first trials with such have."""
    launch = GivenOp()
    heads = [trial.recording.head for trial in trials]
    for head in heads:
        if any(hasattr(op, "interpolation") for op in head.ops):
            launch = replace(launch, interpolation=head.interpolation, antialias=head.antialias)
            break
    for head in heads:
        padding = [op for op in head.ops if getattr(op, "pad", False)]
        if padding:
            return replace(launch, fill=getattr(padding[0], "fill", None))
    return launch


def _is_for_launch(op: LibraryOp) -> bool:
    """Whether an op does nothing to pixels but what a launch does; one of the user's may."""
    if name_of(op) is None:
        return True
    changes = has(op, Is.ONCE | Is.EACH | Is.BATCHES | Is.HOLDS)
    moves = has(op, Is.MOVES | Is.CONVERTS | Is.NORMALIZES | Is.DOES_NOTHING)
    return moves or not changes


# --- The first sample, with its picture ---


def _compare(plain: tuple[Any, ...], trial: Outcome, image: EncodedImage, launch: GivenOp) -> None:
    """Refuse a transform that gives something else with the picture itself."""
    pure = image._joint is not None and image._joint.takes_pure
    picture, *beside = plain
    recorded = trial.recording
    form = (tuple(getattr(picture, "shape", ())), getattr(picture, "dtype", None))
    want = ((3, *recorded.size), recorded.dtype)
    if not isinstance(picture, torch.Tensor) or form != want:
        what = f"{form[1]} {form[0]}" if isinstance(picture, torch.Tensor) else "no tensor"
        why = _OF_PURE if pure else ""
        _refuse(f"gives {what} for the first one, where {want[1]} {want[0]} was expected{why}")
    if not _same(beside, [*trial.beside]):
        _refuse(f"gives something else beside the picture when it gets no pixels{_SAMPLES}")
    if any(call.name == "gaussian_noise" for call in recorded.calls):
        return  # each pixel is sampled, and not with the same random numbers
    pixels = decode_cpu(image.data)
    head = replace(recorded.head, interpolation=launch.interpolation, antialias=launch.antialias)
    calls = recorded.rest
    if not recorded.within(head):
        head = Head()
        calls = recorded.calls
    key = np.zeros(1, np.uint64)
    sampling = head.sample([tuple(pixels.shape[1:])], key)
    height, width = sampling.length[0].astype(int).tolist()
    made = head.resample([pixels], sampling.rows(), (height, width))
    if launch.dtype is None:
        made = (made * 255).round().to(torch.uint8)
    elif launch.dtype == torch.uint8:
        made = made * 255
    (made_one,) = carry_on([made[0]], [calls], key)
    spread = 1.0 if launch.dtype == torch.uint8 else 255 * min(head.std or [1.0])
    values = picture.as_subclass(torch.Tensor).double()
    if made_one.dtype.is_floating_point and launch.dtype is None:
        # Levels that are floats, as of ToDtype(torch.float32); else of [0, 1] and normalized.
        spread = 1.0 if values.max() - values.min() > WIDE else 255.0 * 0.2
    difference = (made_one.double() - values).abs().mean()
    if not float(difference) * spread <= CLOSE:
        _refuse(
            f"what was noted of it gives other pixels than it gives itself, by {difference:.3g} "
            f"on average{_SAMPLES}"
        )


def _same(one: object, other: object) -> bool:
    """Whether two structures hold the same values."""
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        if type(one) is not type(other):
            return False
        first, second = (torch.Tensor(each.as_subclass(torch.Tensor)) for each in (one, other))  # type: ignore[attr-defined]
        return first.dtype == second.dtype and _same_numbers(first, second)
    some = children_of(one, None)
    others = children_of(other, None)
    if some is None or others is None:
        if type(one) is not type(other):
            return False
        if type(one).__eq__ is object.__eq__ and hasattr(one, "__dict__"):
            return _same(vars(one), vars(other))
        return _same_numbers(one, other)
    return len(some) == len(others) and all(map(_same, some, others))


def _same_numbers(one: Any, other: Any) -> bool:
    """Whether two values of one type are equal; what is no number in both is."""
    if getattr(one, "shape", ()) != getattr(other, "shape", ()):
        return False
    same = (one == other) | ((one != one) & (other != other))
    return bool(same.all()) if isinstance(same, torch.Tensor) else bool(np.all(same))


# --- The plan, in words ---


def _steps(ops: Sequence[LibraryOp], launch: GivenOp) -> list[Step]:
    steps = []
    fused = True
    for op in ops:
        fused = fused and _is_for_launch(op) and not (launch.dtype is None and _converts(op))
        steps.append(_step(op, fused=fused))
    return steps


def _step(op: LibraryOp, *, fused: bool) -> Step:
    where = FUSED if fused else EACH
    if name_of(op) is None:
        return Step(op, None, where, "its code runs in the workers, without the picture")
    if type(op).__name__ in ("ToImage", "ToPureTensor", "PILToTensor"):
        return Step(op, None, NOTHING)
    if not has(op, Is.MOVES | Is.CONVERTS | Is.NORMALIZES | Is.BATCHES):
        return Step(op, None, WORKERS, "for what is beside the picture")
    return Step(op, None, where, "" if _converts(op) else "sampled in the workers")


def _converts(op: LibraryOp) -> bool:
    return has(op, Is.CONVERTS | Is.NORMALIZES)
