"""What a dataset has in place of its pictures, while a view of it gives a sample.

The code of a dataset may do anything with a picture before its transform and after it. So every
sample must show whether the transform got what was read, and that nothing touched what it gave::

    Image.open(path), self.loader(path)    a Picture, which says that it is a PIL image
    picture.convert("RGB")                 a Picture
    decode_image(path)                     a FileTensor: see file_tensor.py
    self.transform(picture)                a Result, which says that it is a tensor
    the sample that leaves the dataset     an EncodedImage

A Picture that is used in another way stands for the real one, whose pixels the transform takes as
they are at that moment, as it does of any real picture or tensor. A Result cannot be used at all.
An error that the dataset catches refuses the sample as well.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Sequence

import torch

from gpuprefetch.core.nested import Leaf, Sample, select
from gpuprefetch.images.apart import image_of
from gpuprefetch.images.encoded import EncodedImage
from gpuprefetch.images.guard import Encoded, EndlessFaultsError, UndecodedError, faults, is_marked
from gpuprefetch.images.places import ViewPlace
from gpuprefetch.migrate.file_tensor import FileTensor, ReadFile
from gpuprefetch.migrate.picture import LeftBehind, Picture, know_functions
from gpuprefetch.migrate.replaced import reading
from gpuprefetch.migrate.result import LaterView, Result, map_stand_ins, real_tensor
from gpuprefetch.migrate.sample import current
from gpuprefetch.migrate.taken import BY_HAND
from gpuprefetch.migrate.ways import IN_THREAD, IN_WORKERS, KEPT, OF_TENSORS, OF_THREADS, TWO_WAYS


def read_sample(get: Callable[[], Sample], who: str, key: object, ways: str = TWO_WAYS) -> Sample:
    """A sample of a view, with an :class:`EncodedImage` for each result of its transform.

    Args:
        get: gives the sample. Views within views are asked in it.
        who: is asked, for messages.
        key: of the sample in its dataset.
        ways: what to write in place of a dataset that is refused.

    Raises:
        UndecodedError: if its transform got no picture, or what it gave was touched.
    """
    if current.results is not None:
        return get()
    if "torchvision.transforms.v2.functional" in sys.modules:  # else nobody can call them
        know_functions()
    read = functools.partial(_attempt, get, who, key, ways)
    with reading:
        try:
            return _decided(read, key)
        finally:
            current.forget_error()


def _decided(read: Callable[..., Sample], key: object) -> Sample:
    """The sample that a dataset decides on; what it has none for is for the prefetcher.

    No variable here holds an error, whose traceback holds the frames of all callers.
    """
    try:
        sample = read(keeps_back=False)
    except Exception as error:
        if error is not current.raised:
            raise
        with contextlib.suppress(Exception):
            return read(keeps_back=True)
        raise
    if current.raised is not None and _lacks_an_image(sample, key):
        with contextlib.suppress(Exception):
            return read(keeps_back=True)
    return sample


def _lacks_an_image(sample: Sample, key: object) -> bool:
    """Whether a sample has no image, or one of several that were asked for in one call."""
    several = isinstance(key, list) and isinstance(sample, list)
    return any(image_of(each) is None for each in (sample if several else [sample]))


def _attempt(
    get: Callable[[], Sample], who: str, key: object, ways: str, *, keeps_back: bool
) -> Sample:
    begun = current.begun(key, _called.__code__, keeps_back=keeps_back)
    with faults as messages, begun as results:
        try:
            sample = _shown(get, who, ways, messages, results)
            _refuse_left(results)
        finally:
            for picture in _kept_of(current.opened):
                if type(picture) is Picture:  # else a module got it, and it is real
                    picture.become_real()
            for each in current.opened:
                if type(each) is ReadFile:
                    each.forget_error()
    for result in results:
        # The sample has it wherever the dataset has put it, so it stays the same object.
        kind = ViewPlace if type(result) is LaterView else EncodedImage
        vars(object)["__class__"].__set__(result, kind)
    return sample


def _refuse_left(results: list[Encoded]) -> None:
    """Raise a library's error for a bad file of a sample, if nothing else would tell of it."""
    error = _error_left(results)
    try:
        if error is not None:
            raise error
    finally:
        del error  # its traceback holds this frame


def _error_left(results: list[Encoded]) -> Exception | None:
    """The error to raise; None if something else tells of it, or there is none."""
    read = [each for each in current.opened if type(each) is ReadFile]
    left = [each.error_left() for each in read]
    files = _data_of(results)
    pictures = [each for each in current.opened if type(each) is Picture]
    left += [each.error_left(files) for each in pictures]
    return next(filter(None, left), None)


def _data_of(made: list[Encoded]) -> set[int]:
    """The identities of the bytes that results stand for."""
    return {id(result.data) for result in made if isinstance(result, EncodedImage)}


def _called(get: Callable[[], Sample]) -> Sample:
    """Call a dataset: what is called from here on is its code."""
    return get()


def _shown(
    get: Callable[[], Sample],
    who: str,
    ways: str,
    messages: list[str],
    results: list[Encoded],
) -> Sample:
    """A sample that shows what became of its pictures."""
    try:
        sample = _called(get)
    except (Exception, EndlessFaultsError) as error:
        if messages:
            raise _refusal(who, messages, ways) from error
        raise
    if messages:  # and the dataset has caught the error
        raise _refusal(who, messages, ways)
    if fault := _fault_of(sample, results):
        raise UndecodedError(f"{who} {fault} {_fitting(ways)}")
    return map_stand_ins(_left, sample, (Picture, FileTensor))


def _left(leaf: Leaf) -> Leaf:
    """What a sample holds in the place of a stand-in."""
    return LeftBehind(leaf.name) if type(leaf) is Picture else real_tensor(leaf)


def _kept_of(opened: list[object]) -> list[Picture]:
    """The pictures of a sample that something else than this list holds."""
    counts = _references(opened)
    kept = [each for each, n in zip(opened, counts, strict=True) if n > _ALONE]
    return [each for each in kept if type(each) is Picture]


def _references(objects: Sequence[object]) -> list[int]:
    return [sys.getrefcount(each) for each in objects]


_ALONE = _references([object()])[0]


def _refusal(who: str, messages: list[str], ways: str) -> UndecodedError:
    message = f"{who}: {messages[0]}"
    messages.clear()  # the refusal is one of its own
    told = message.endswith(IN_WORKERS) or BY_HAND in message
    return UndecodedError(message if told else f"{message} {_fitting(ways)}")


def _fitting(ways: str) -> str:
    """What to write, for the images that the dataset has read in this sample."""
    reads_tensors = any(type(each) is ReadFile for each in current.opened)
    return f"{ways} {OF_TENSORS}" if reads_tensors and ways == TWO_WAYS else ways


def _fault_of(sample: Sample, made: list[Encoded]) -> str:
    """Why a sample does not show what becomes of its pictures; empty if it does."""
    marked = select(sample, is_marked)
    images = [image for image in marked if type(image) is not Picture]
    files = _data_of(made)
    for picture in marked:
        if type(picture) is Picture and not (made and picture.is_among(files)):
            return "gave a picture that its transform did not get."
    results = {id(result) for result in made}
    for image in images:
        if id(image) not in results:
            return _of_another_sample(image)
    if any(type(result) is LaterView for result in made):
        if len(images) < len(made):
            return "leaves out a view that its transform has made."
        if len(images) > len(made):
            return "gives a view in two places. Let the transform return it twice."
    if images:
        return ""
    if made:
        return "gave no image, though its transform has made one."
    return transformed_already(sample)


def _of_another_sample(image: Encoded) -> str:
    """Why a sample cannot hold an image that its own transform has not given."""
    if type(image) is Result:
        return IN_THREAD
    is_new = isinstance(image, EncodedImage) and image._apart and image._made >= current.since
    return OF_THREADS if is_new else KEPT


def transformed_already(sample: Sample) -> str:
    """The fault of a sample whose image is a tensor; empty without any."""
    if not isinstance(image_of(sample), torch.Tensor):
        return ""
    return (
        "gave an image that is transformed already: one that it has kept, or that another "
        "transform than its own has made. Let it call its transform each time."
    )
