"""preprocess: a few files become the batch that a loader gives for them."""

import importlib
import sys
from collections import namedtuple
from pathlib import Path
from types import SimpleNamespace

import kornia.augmentation as K
import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader

import gpuprefetch
from gpuprefetch import BadImageError, DataPrefetcher, EncodedImage, EncodedImageFolder

FIXED = [
    gpuprefetch.Resize(40),
    gpuprefetch.CenterCrop(32),
    K.Normalize(mean=torch.full((3,), 0.5), std=torch.full((3,), 0.2)),
]


def test_files_become_what_a_loader_gives(photo_folder):
    paths = [path for path, _ in EncodedImageFolder(photo_folder).samples]
    pin = torch.cuda.is_available()
    loader = DataLoader(EncodedImageFolder(photo_folder), batch_size=100, pin_memory=pin)
    ((want, _),) = DataPrefetcher(loader, transforms=FIXED)
    contents = [Path(path).read_bytes() for path in paths]
    for files in (paths, contents, [*map(EncodedImage, contents)]):
        assert torch.equal(gpuprefetch.preprocess(files, FIXED), want)


def test_without_transforms_it_decodes(photo_folder):
    path = EncodedImageFolder(photo_folder).samples[0][0]
    (image,) = gpuprefetch.preprocess([path])
    with Image.open(path) as picture:
        assert image.shape == (3, picture.height, picture.width)
    assert image.dtype == torch.uint8


def test_it_turns_pictures_where_it_is_asked(tmp_path):
    picture, exif = Image.new("RGB", (40, 20), "red"), Image.Exif()
    exif[0x0112] = 6
    picture.save(tmp_path / "turned.jpg", exif=exif)
    for turn, shape in ((False, (20, 40)), (True, (40, 20))):
        (image,) = gpuprefetch.preprocess([tmp_path / "turned.jpg"], apply_exif=turn)
        assert image.shape[1:] == shape


@pytest.mark.parametrize(
    ("files", "error", "message"),
    [
        ("a.jpg", TypeError, r"list of files, got one str: preprocess\(\[file\]"),
        (b"abc", TypeError, "list of files, got one bytes"),
        ([], ValueError, "at least one file"),
        ([3], TypeError, "takes a file's bytes, got int"),
        ([b"no picture"], BadImageError, "sample 0"),
    ],
)
def test_what_is_no_list_of_files_is_refused(files, error, message):
    with pytest.raises(error, match=message):
        gpuprefetch.preprocess(files, FIXED)


# What the model uses of Triton's Python backend.
BACKEND = SimpleNamespace(
    Tensor=lambda name, array: SimpleNamespace(name=name, array=array),
    InferenceResponse=namedtuple("InferenceResponse", "tensors error", defaults=[None]),
    TritonError=ValueError,
    get_input_tensor_by_name=lambda request, name: SimpleNamespace(as_numpy=lambda: request[name]),
)


def test_the_served_model_answers_each_request(photo_folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", BACKEND)
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "examples" / "serving")
    served = importlib.import_module("model").TritonPythonModel()
    served.initialize({})
    files = [Path(path).read_bytes() for path, _ in EncodedImageFolder(photo_folder).samples[:3]]
    requests = [{"IMAGES": np.array(some, dtype=object)} for some in (files[:1], files[1:])]
    one, two = served.execute(requests)
    assert (one.tensors[0].array.shape, two.tensors[0].array.shape) == ((1, 1000), (2, 1000))
    alone = served.logits(files[1:]).numpy()
    np.testing.assert_allclose(two.tensors[0].array, alone, rtol=1e-3, atol=1e-3)

    broken = {"IMAGES": np.array([files[0], b"no picture"], dtype=object)}
    refused, answered = served.execute([broken, requests[1]])
    assert "sample 1" in str(refused.error)
    assert answered.error is None

    empty = {"IMAGES": np.array([], dtype=object)}
    refused, answered = served.execute([empty, requests[1]])
    assert "IMAGES is empty" in str(refused.error)
    np.testing.assert_allclose(answered.tensors[0].array, alone, rtol=1e-3, atol=1e-3)
    (refused,) = served.execute([empty])
    assert "IMAGES is empty" in str(refused.error)
    sys.modules.pop("model")
