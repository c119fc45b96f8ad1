"""Triton's interpreter in less than half of its time, with the same results.

A launch replaces the functions of ``triton.language`` by the interpreter's, and puts the old ones
back when it ends. Each call of a ``@triton.jit`` function within it looks for what is left to
replace, hundreds of times a launch, and finds nothing.

A launch makes thousands of small tensors of a dozen types. The interpreter makes a new type for
most of them, and derives from it each time what follows from the type alone.

Before each sum and product of integers it works out whether they overflow, and only with
``debug`` looks at the answer.
"""

import functools
from types import ModuleType

# Triton's names. Where a release has others, tests are slower.
LOOK = "_patch_lang"
LOOK_FOR_OVERFLOW = "binary_op_sanitize_overflow_impl"
NUMPY_TYPE = "_get_np_dtype"

KEPT = "_kept_by_the_tests"  # on a type: what was derived from it


class Nothing:
    """What there is to put back after a search that found nothing."""

    def restore(self):
        pass


def look_once_a_launch():
    """Leave out the search in modules whose functions are the interpreter's already."""
    from triton import language
    from triton.runtime import interpreter

    look = getattr(interpreter, LOOK, None)
    if look is None:
        return
    languages = {}  # by module: what it knows as triton.language or triton.language.core

    def look_where_needed(function):
        module = function.__module__
        if module not in languages:
            languages[module] = [
                value
                for value in function.__globals__.values()
                if isinstance(value, ModuleType) and value in (language, language.core)
            ]
        if any(language.core.is_builtin(known.load) for known in languages[module]):
            return look(function)
        return Nothing()

    setattr(interpreter, LOOK, look_where_needed)


def look_for_overflow_in_debug_alone():
    """Leave out the question where nobody looks at the answer."""
    from triton.language import semantic

    kind = getattr(semantic, "TritonSemantic", None)
    if (look := getattr(kind, LOOK_FOR_OVERFLOW, None)) is None:
        return

    def look_in_debug(self, *operands):
        if self.builder.options.debug:
            look(self, *operands)

    setattr(kind, LOOK_FOR_OVERFLOW, look_in_debug)


def remember_types():
    """Derive once from a type what follows from it alone: its tensors' fields, other types."""
    from triton.language import core
    from triton.runtime import interpreter

    def kept(kind):
        return vars(kind).setdefault(KEPT, {})

    def replace(owner, name, wrap):
        if original := getattr(owner, name, None):
            setattr(owner, name, functools.wraps(original)(wrap(original)))

    def numpy_type(original):
        def of(kind):
            found = kept(kind)
            if "numpy" not in found:
                found["numpy"] = original(kind)
            return found["numpy"]

        return of

    def fields(original):
        def make(self, handle, type):
            found = kept(type).get("fields")
            if found is None:
                original(self, handle, type)
                kept(type)["fields"] = {k: v for k, v in vars(self).items() if k != "handle"}
            else:
                self.handle = handle
                vars(self).update(found)

        return make

    def other_element(original):
        def of(self, element):
            if type(element) is not core.dtype:  # a pointer, whose name does not say all
                return original(self, element)
            found = kept(self)
            if element.name not in found:
                found[element.name] = original(self, element)
            return found[element.name]

        return of

    def built(original):
        def of(self, builder):
            if type(builder) is not interpreter.InterpreterBuilder:
                return original(self, builder)
            found = kept(self)
            if "built" not in found:
                found["built"] = original(self, builder)
            return found["built"]

        return of

    replace(interpreter, NUMPY_TYPE, numpy_type)
    replace(core.tensor, "__init__", fields)
    replace(core.block_type, "with_element_ty", other_element)
    replace(core.block_type, "to_ir", built)
