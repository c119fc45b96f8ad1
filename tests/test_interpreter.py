"""What the tests change in Triton's interpreter gives what Triton's own functions give."""

import dataclasses
import itertools

import pytest
import torch

core = pytest.importorskip("triton.language").core
interpreter = pytest.importorskip("triton.runtime.interpreter")
if torch.cuda.is_available():
    pytest.skip("Triton compiles: the interpreter is as it was", allow_module_level=True)

ELEMENTS = [core.int1, core.uint8, core.int32, core.uint32, core.int64, core.float32, core.float64]
SHAPES = [[1], [8], [4, 16], [1, 1, 2]]


def types():
    """Scalars, pointers and blocks of both; anew each time, as the interpreter makes them."""
    scalars = [*ELEMENTS, *map(core.pointer_type, ELEMENTS)]
    blocks = itertools.starmap(core.block_type, itertools.product(scalars, SHAPES))
    return [*scalars, *blocks]


@pytest.mark.parametrize("times", [1, 3])
def test_tensors_have_the_fields_of_their_type(times):
    for kind in types():
        for handle in range(times):
            made = core.tensor(handle, kind)
        plain = object.__new__(core.tensor)
        core.tensor.__init__.__wrapped__(plain, times - 1, kind)
        assert vars(made).keys() == vars(plain).keys()
        for name in ("handle", "numel", "type", "dtype"):
            assert getattr(made, name) == getattr(plain, name)
        assert [*made.shape] == [*plain.shape]
        assert made.shape.type.types == plain.shape.type.types


def test_types_that_are_derived_are_tritons():
    builder = interpreter.interpreter_builder
    numpy_type = interpreter._get_np_dtype
    for kind in types() * 2:
        assert numpy_type(kind) == numpy_type.__wrapped__(kind)
        if kind.is_block():
            for element in [*ELEMENTS, *map(core.pointer_type, ELEMENTS)] * 2:
                made = kind.with_element_ty(element)
                assert made == type(kind).with_element_ty.__wrapped__(kind, element)
                assert made.name == f"<{kind.shape}, {element}>"
            built = kind.to_ir(builder)
            assert built == type(kind).to_ir.__wrapped__(kind, builder)
            assert kind.to_ir(builder) is built


@pytest.mark.parametrize("name", ["add", "sub", "mul"])
def test_an_overflow_is_an_error_in_debug_alone(name):
    kind = pytest.importorskip("triton.language.semantic").TritonSemantic
    builder = interpreter.InterpreterBuilder()
    semantic = kind(builder)
    large, small = map(semantic.to_tensor, (2**31 - 1, -2))
    calculate, other = getattr(semantic, name), large if name == "add" else small
    calculate(large, other, True)
    builder.options = dataclasses.replace(builder.options, debug=True)
    calculate(small, small, True)
    with pytest.raises(AssertionError, match="overflow"):
        calculate(large, other, True)
