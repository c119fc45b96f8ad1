"""Programs of ops: the eager twin is torchvision, and the kernels are held to the twin."""

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision import tv_tensors
from torchvision.transforms.v2 import InterpolationMode
from torchvision.transforms.v2 import functional as F

from gpuprefetch.policies import ops, ops_kernel, ops_launch, spatial
from gpuprefetch.policies.ops import Family, Filter, Op
from gpuprefetch.policies.program import Finish, Program
from gpuprefetch.policies.run import apply_one, reference, run

pytestmark = pytest.mark.skipif(ops_kernel.triton is None, reason="needs Triton")

NAN = float("nan")
FILL = [10.0, 120.0, 250.0]
# Of each op one or two sets of arguments.
ARGUMENTS = {
    "IDENTITY": [[]],
    "BRIGHTNESS": [[1.3], [0.4]],
    "CONTRAST": [[1.5], [0.3]],
    "SATURATION": [[1.9], [0.2]],
    "HUE": [[0.2], [-0.5]],
    "POSTERIZE": [[3], [8], [0]],
    "SOLARIZE": [[100.5], [256]],
    "SOLARIZE_ADD": [[110, 128], [20, 200]],
    "GRAYSCALE": [[]],
    "INVERT": [[]],
    "AUTOCONTRAST": [[]],
    "EQUALIZE": [[]],
    "PERMUTE": [[2, 0, 1], [0, 2, 1]],
    "ERASE": [[2, 3, 7, 9, 10, 20, 200], [0, 0, 17, 5, 0, 0, 255]],
    "ERASE_NOISE": [[2, 3, 7, 9, 77], [10, 0, 5, 8, 2**24 - 1]],
    "HFLIP": [[]],
    "VFLIP": [[]],
    "AFFINE": [[20, 3, -2, 1.1, 5, 3, NAN, NAN, *FILL], [0, 0, 0, 1, 17, 0, 0, 0, NAN]],
    "PERSPECTIVE": [
        [1.1, 0.1, -2, 0.05, 0.9, 1, 0.001, 0.002, *FILL],
        [0.9, 0, 1, 0, 1, 0, 0, 0.01, NAN],
    ],
    "MATRIX": [[0.9, 0.1, 1, -0.1, 1.1, 2, *FILL], [1, 0, 7.3, 0, 1, -2.1, *FILL]],
    "SHARPNESS": [[1.9], [0.1]],
    "BLUR": [[1, 1.5, 5, 3], [0.2, 2, 3, 7]],
}
# From which argument of an op on they are values of 0 to 255, which are scaled for other dtypes.
VALUES = {"SOLARIZE": 0, "SOLARIZE_ADD": 0, "ERASE": 4, "AFFINE": 8, "PERSPECTIVE": 8, "MATRIX": 6}
# The interpreter truncates float32 -> bfloat16, so only a GPU run says anything here.
FLOATS = [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]


def family_of(name):
    return name if name in ARGUMENTS else name.split("_")[0]


def arguments_of(name, dtype=torch.uint8):
    """The sets of arguments of an op, with values in the units of ``dtype``."""
    family = family_of(name)
    sets = [np.array(given, float) for given in ARGUMENTS[family]]
    if dtype != torch.uint8 and family in VALUES:
        for given in sets:
            given[VALUES[family] :] /= 255
    return sets


def program_of(slots, dtype=torch.uint8, **options):
    """A program of rows of (name, index of the arguments), one row a slot."""
    codes = np.array([[Op[name] for name, _ in row] for row in slots], np.int32).T
    args = np.full((*codes.shape, ops.ARGS), NAN)
    for s, row in enumerate(slots):
        for n, (name, index) in enumerate(row):
            sets = arguments_of(name, dtype)
            given = sets[index % len(sets)]
            args[n, s, : len(given)] = given
    return Program(codes, args, **options)


def photos(shape, dtype=torch.uint8, seed=0):
    """Smooth pictures with a dark and a bright end, each with colors of its own."""
    generator = torch.Generator().manual_seed(seed)
    small = torch.rand(*shape[:2], 4, 6, generator=generator)
    images = torch.nn.functional.interpolate(small, shape[2:], mode="bicubic")
    images += 0.05 * torch.randn(shape, generator=generator)
    images = images.clamp(0, 1) * torch.linspace(0.5, 1, shape[0])[:, None, None, None]
    return (images * 255).to(torch.uint8) if dtype == torch.uint8 else images.to(dtype)


def both(images, program, device, **options):
    """What the twin and the kernels make of it, on the CPU."""
    # torchvision samples bfloat16 with coordinates in bfloat16, which are pixels off.
    if images.dtype == torch.bfloat16:
        wide = {**options, "dtype": options.get("dtype") or images.dtype}
        expected = reference(images.float(), program, Finish(**wide))
    else:
        expected = reference(images, program, Finish(**options))
    before = images.to(device)
    given = before.clone(memory_format=torch.preserve_format)
    result = ops_launch.launch(given, program, Finish(**options))
    assert torch.equal(given, before)
    assert (result.shape, result.dtype) == (expected.shape, expected.dtype)
    assert result.stride() == expected.stride()
    return expected, result.cpu()


def assert_near(result, expected, exact=0.98):  # a GPU fuses products and sums
    if expected.dtype == torch.uint8:
        distance = (result.int() - expected.int()).abs()
        wrong = (distance > 1).float().mean().item()
        assert (distance == 0).float().mean().item() >= exact
    else:
        tolerance = 1e-4 if expected.dtype == torch.float32 else 2e-2
        wrong = ((result - expected).abs() > tolerance).float().mean().item()
    assert wrong <= 1e-3, wrong


# --- The twin is torchvision ---


def by_torchvision(name, image, a):
    family = family_of(name)
    mode = InterpolationMode(name.split("_")[1].lower() if family != name else "nearest")
    fill = {"AFFINE": 8, "PERSPECTIVE": 8}.get(family)
    fill = None if fill is None or a[fill] != a[fill] else a[fill : fill + 3]
    center = None if a[6] != a[6] else a[6:8]

    limit = 256 if image.dtype == torch.uint8 else 256 / 255  # above the range
    if family in ("BRIGHTNESS", "CONTRAST", "SATURATION", "HUE", "SHARPNESS"):
        return getattr(F, f"adjust_{family.lower()}")(image, a[0])
    if family in ("INVERT", "AUTOCONTRAST", "EQUALIZE"):
        return getattr(F, family.lower())(image)
    return {
        "IDENTITY": lambda: image,
        "POSTERIZE": lambda: F.posterize(image, int(a[0])),
        "SOLARIZE": lambda: F.solarize(image, a[0]) if a[0] != limit else image,
        "GRAYSCALE": lambda: F.rgb_to_grayscale(image, 3),
        "PERMUTE": lambda: F.permute_channels(image, [int(c) for c in a[:3]]),
        "ERASE": lambda: F.erase(image, *map(int, a[:4]), torch.tensor(a[4:7])[:, None, None]),
        "HFLIP": lambda: F.horizontal_flip(image),
        "VFLIP": lambda: F.vertical_flip(image),
        "AFFINE": lambda: F.affine(image, a[0], a[1:3], a[3], a[4:6], mode, fill, center),
        "PERSPECTIVE": lambda: F.perspective(image, None, None, mode, fill, coefficients=a[:8]),
        "BLUR": lambda: F.gaussian_blur(image, [int(a[2]), int(a[3])], a[:2]),
    }[family]()


OURS = ("SOLARIZE_ADD", "ERASE_NOISE", "MATRIX_BILINEAR", "MATRIX_BICUBIC")


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
@pytest.mark.parametrize("name", [op.name for op in Op if op.name not in OURS])
def test_the_twin_is_torchvision(name, dtype):
    images = photos((2, 3, 17, 31), dtype)
    program = program_of([[(name, 0), (name, 1)]], dtype)
    result = run(images, program)
    assert result.dtype == dtype
    for n, image in enumerate(images):
        expected = by_torchvision(name, image, program.args[n, 0].tolist())
        if name == "HUE" and dtype == torch.uint8:  # a level now and then
            distance = (result[n].float() - expected.float()).abs()
            assert distance.max() <= 1 and (distance > 0).float().mean() < 0.002
        else:
            assert torch.equal(result[n], expected)


@pytest.mark.parametrize("shape", [(3, 40, 64), (3, 2, 9), (3, 1, 1)])
def test_quick_ops_of_flat_and_of_small_images(shape):
    flat = torch.tensor([0, 7, 255], dtype=torch.uint8)[:, None, None].expand(shape)
    stripe = flat.clone()
    stripe[1, 0] = 200
    for image in (flat, stripe, stripe.transpose(1, 2), stripe.flip(0)):
        for name in ("HUE", "SHARPNESS", "SOLARIZE", "AFFINE_BILINEAR"):
            for index in (0, 1):
                program = program_of([[(name, index)]])
                expected = by_torchvision(name, image, program.args[0, 0].tolist())
                assert torch.equal(run(image[None], program)[0], expected), (name, index)


@pytest.mark.parametrize(
    ("name", "kind"), [("MATRIX_BILINEAR", "BILINEAR"), ("MATRIX_BICUBIC", "BICUBIC")]
)
def test_matrix_is_pil(name, kind):
    images = photos((1, 3, 33, 47))
    program = program_of([[(name, 0)]])
    result = run(images, program)[0].permute(1, 2, 0).int()
    picture = apply_one(F.to_pil_image(images[0]), program, 0)
    transform = Image.Transform.AFFINE, tuple(program.args[0, 0, :6])
    fill = tuple(map(int, FILL))
    pil = F.to_pil_image(images[0]).transform(
        (47, 33), *transform, Image.Resampling[kind], fillcolor=fill
    )
    distance = (result - torch.from_numpy(np.array(pil)).int()).abs()
    # torch's bicubic has another a than PIL's.
    assert distance.float().mean() < (0.6 if kind == "BILINEAR" else 2.5)
    assert torch.equal(torch.from_numpy(np.array(picture)).int(), result)


def test_solarize_add_and_noise():
    images = photos((1, 3, 17, 31))
    result = run(images, program_of([[("SOLARIZE_ADD", 0)]]))
    expected = torch.where(images < 128, (images.int() + 110).clamp(max=255), images.int())
    assert torch.equal(result.int(), expected)
    noise = ops.noise(77, (3, 200, 200))
    assert abs(noise.mean()) < 0.02
    assert abs(noise.std() - 1) < 0.02
    assert torch.equal(noise, ops.noise(77, (3, 200, 200)))
    assert not torch.equal(noise, ops.noise(78, (3, 200, 200)))


def test_one_sample_and_its_targets():
    image = photos((1, 3, 17, 31))[0]
    mask = tv_tensors.Mask(torch.arange(17 * 31, dtype=torch.uint8).view(1, 17, 31))
    boxes = tv_tensors.BoundingBoxes([[1.0, 2, 9, 8]], format="XYXY", canvas_size=(17, 31))
    program = program_of([[("INVERT", 0)], [("AFFINE_BILINEAR", 0)], [("HFLIP", 0)]])
    args = program.args[0, 1].tolist()
    for sample, fill in ((image, FILL), (mask, FILL[:1]), (boxes, None)):
        result = apply_one(sample, program, 0)
        x = F.invert(image) if sample is image else sample
        mode = InterpolationMode.BILINEAR
        x = F.affine(x, args[0], args[1:3], args[3], args[4:6], mode, fill)
        assert torch.equal(result, F.horizontal_flip(x))
        assert type(result) is type(sample)
    for op in Op:  # whatever the kind of image
        program = program_of([[(op.name, 0)]])
        picture = apply_one(F.to_pil_image(image), program, 0)
        assert picture.size == (31, 17)
        for sample in (mask, boxes):
            result = apply_one(sample, program, 0)
            assert type(result) is type(sample)
            assert op.moves or result is sample


# --- The codes ---


def test_the_kernels_have_the_codes_of_the_enum():
    found = {}
    for module in (ops, ops_kernel):
        for name in Op.__members__.keys() & vars(module).keys():
            found[name] = getattr(module, name).value
    assert found == {name: Op[name].value for name in found}
    unnamed = set(Op) - {Op[name] for name in found}
    assert unnamed <= {Op.PERSPECTIVE_BILINEAR}  # what is none of the others


def test_pointwise_ops_come_first():
    assert [op.is_spatial for op in Op] == sorted(op.is_spatial for op in Op)
    assert {op for op in Op if op.value < ops.FIRST_SPATIAL.value} == {
        op for op in Op if not op.is_spatial
    }


def test_every_op_has_a_twin():
    assert ops.twins().keys() | spatial.twins().keys() == set(Op)
    assert spatial.twins().keys() == {op for op in Op if op.is_spatial}


def test_an_op_is_found_by_family_and_filter():
    for op in Op:
        assert (op.family is None) == (op.filter is None)
        if op.family is not None and op.filter is not None:
            assert Op.sampling(op.family, op.filter) is op
            assert op.name == f"{op.family.name}_{op.filter.name}"
    assert Op.sampling(Family.MATRIX, Filter.BICUBIC) is Op.MATRIX_BICUBIC


def test_the_kernels_read_the_fields_and_arguments_by_name():
    fields = {
        ops: {"_TOP": ops.Erase.TOP, "_LEFT": 1, "_HEIGHT": 2, "_WIDTH": 3, "_VALUES": 4},
        ops_kernel: {"_TAPS_X": 2, "_TAPS_Y": 3, "_PLANE": 4, "_G": 6, "_H": 7, "_FILL": 8},
    }
    for module, constants in fields.items():
        for name, value in constants.items():
            assert getattr(module, name).value == value
    words = np.zeros(2, ops.WORDS)
    words["code"] = 3
    words["args"][1] = np.arange(ops.ARGS)
    flat = words.view(np.int32)
    assert ops_kernel._FIELDS.value == len(flat) // 2
    assert flat[ops_kernel._FIELDS.value] == 3
    first = ops_kernel._FIELDS.value + ops._ARGS.value
    assert flat[first:].view(np.float32).tolist() == list(range(ops.ARGS))


def test_the_layout_of_the_docstring():
    images = torch.empty((2, 3, 8, 8), dtype=torch.uint8, device="meta")
    slots = [[("INVERT", 0), ("CONTRAST", 0)], [("IDENTITY", 0), ("HUE", 0)]]
    laid = ops_launch.lay_out(images, program_of([*slots, [("HFLIP", 0), ("IDENTITY", 0)]]))
    assert [(group.first, group.last, group.spatial) for group in laid.groups] == [
        (0, 2, False),
        (2, 3, True),
    ]
    assert [group.rounds for group in laid.groups] == [[(0, 1)], []]
    assert (laid.n_slots, laid.colors_at, laid.pairs_at, laid.n_pairs) == (3, 72, 78, 1)
    assert laid.words[laid.pairs_at :].tolist() == [1, 0]


# --- The kernels are the twin ---


@pytest.mark.parametrize("dtype", [torch.uint8, *FLOATS])
@pytest.mark.parametrize("name", Op.__members__)
def test_each_op(name, dtype, kernel_device):
    shape = (2, 3, 15, 31)
    images = photos(shape, dtype)
    program = program_of([[(name, 0), (name, 1)]], dtype)
    expected, result = both(images, program, kernel_device)
    assert_near(result, expected)
    if name != "IDENTITY":  # guards the test itself
        assert not torch.equal(result, images)
        with pytest.raises(AssertionError):
            assert_near(result, expected.flip(0))


@pytest.mark.parametrize("laid", [False, True])
def test_a_program_without_slots_is_finished(laid, kernel_device):
    images = photos((2, 3, 15, 31))
    program = Program(np.zeros((2, 0), np.int32), np.zeros((2, 0, ops.ARGS)))
    finish = Finish(mean=[0.5, 0.4, 0.3], std=[0.2, 0.3, 0.4])
    expected = reference(images, program, finish)
    if laid:  # elsewhere, of images that are not there yet
        program = ops_launch.lay_out(images.to("meta"), program, finish)
    result = ops_launch.launch(images.to(kernel_device), program, finish)
    torch.testing.assert_close(result.cpu(), expected)


def test_a_batch_of_many_ops(kernel_device):
    images = photos((6, 3, 17, 31)).to(memory_format=torch.channels_last)  # of two tiles each
    # Each image has another op in each slot.
    names = np.random.default_rng(0).permutation(list(Op.__members__))[:12].reshape(2, 6).tolist()
    program = program_of([[(name, n % 2) for n, name in enumerate(slot)] for slot in names])
    # What comes after an op that shifts a threshold by a level may differ more.
    assert_near(*both(images, program, kernel_device)[::-1], exact=0.95)


@pytest.mark.parametrize(
    ("source", "finals", "options"),
    [
        (torch.uint8, 2, {"mean": (0.5, 0.4, 0.3), "std": (0.2, 0.3, 0.4)}),
        (torch.uint8, 0, {"dtype": torch.float16, "memory_format": torch.channels_last}),
        (torch.float32, 2, {"std": 0.5, "memory_format": torch.channels_last}),
        (torch.float32, 0, {"mean": torch.tensor(0.5), "dtype": torch.float16}),
    ],
)
def test_the_last_launch_normalizes_and_erases(source, options, finals, kernel_device):
    images = photos((3, 3, 15, 31), source)
    erases = [[("ERASE", 1), ("IDENTITY", 0), ("ERASE_NOISE", 0)]] * 2
    program = program_of([[("INVERT", 0)] * 3, *erases], torch.float32, finals=finals)
    if not finals:
        program.ops, program.args = program.ops[:, :1], program.args[:, :1]
    expected, result = both(images, program, kernel_device, **options)
    assert result.dtype == options.get("dtype", torch.float32)
    tolerance = 1e-4 if result.dtype == torch.float32 else 1e-2
    torch.testing.assert_close(result, expected, atol=tolerance, rtol=tolerance)
    if finals:
        value = torch.tensor([0, 0, 1.0]).to(result.dtype)[:, None, None]
        assert (result[0, :, :, :5] == value).all()


def test_gray_images(kernel_device):
    names = "CONTRAST AUTOCONTRAST EQUALIZE SATURATION HUE GRAYSCALE AFFINE_BILINEAR SHARPNESS BLUR"
    names += " PERMUTE"
    images = photos((10, 1, 15, 31))
    program = program_of([[(name, 0) for name in names.split()]])
    program.args[6, 0, 9:11] = NAN  # a fill of one value
    expected, result = both(images, program, kernel_device, mean=0.5)
    assert ((result - expected).abs() < 1.5 / 255).float().mean() > 0.999


def launches_of(layout):
    """What a layout launches, in order: the kernel, and of how many images."""
    for group in layout.groups:
        for _, images in group.rounds:
            yield "statistics", images
        _, images = group.blurred
        if images:
            yield "blur", images
        yield "ops", 2


@pytest.mark.parametrize(
    ("slots", "launches"),
    [
        # Points share a launch, which one of statistics precedes where an image needs it.
        (["HUE INVERT", "SATURATION HUE", "SOLARIZE INVERT"], [("ops", 2)]),
        (["CONTRAST HUE", "HUE CONTRAST", "INVERT INVERT"], [("statistics", 2), ("ops", 2)]),
        # Of an image that needs them twice, the second ones wait for the first.
        (["CONTRAST HUE", "EQUALIZE HUE"], [("statistics", 1)] * 2 + [("ops", 2)]),
        # Where pixels move a launch begins, and where statistics are of what has moved.
        (["HFLIP INVERT", "INVERT INVERT"], [("ops", 2)]),
        (["INVERT INVERT", "INVERT HFLIP"], [("ops", 2)] * 2),
        (["HFLIP INVERT", "INVERT EQUALIZE"], [("ops", 2), ("statistics", 1), ("ops", 2)]),
        (["IDENTITY BLUR", "IDENTITY IDENTITY"], [("blur", 1), ("ops", 2)]),
        (["IDENTITY IDENTITY"], []),
    ],
)
def test_launches(slots, launches, kernel_device):
    images = photos((2, 3, 16, 32))
    program = program_of([[(name, 0) for name in slot.split()] for slot in slots])
    assert [*launches_of(ops_launch.lay_out(images, program))] == launches
    assert_near(*both(images, program, kernel_device)[::-1], exact=0.95)


def test_nothing_to_do_gives_the_images():
    images = photos((2, 3, 16, 32))
    program = program_of([[("IDENTITY", 0)] * 2])
    assert run(images, program) is images
    assert ops_launch.launch(images, program) is images


@pytest.mark.parametrize("carry_out", [reference, ops_launch.launch])
def test_what_does_not_fit(carry_out):
    program = program_of([[("BLUR", 0)] * 2])
    with pytest.raises((ValueError, RuntimeError), match=r"too small for a blur|Padding size"):
        carry_out(torch.zeros(2, 3, 4, 1), program)
    with pytest.raises(ValueError, match="mean must have 3 values"):
        carry_out(torch.zeros(2, 3, 9, 9), program, Finish(mean=(0.5, 0.5)))
