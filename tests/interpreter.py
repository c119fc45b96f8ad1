"""Triton's interpreter in two thirds of its time, with the same results.

A launch replaces the functions of ``triton.language`` by the interpreter's, and puts the old ones
back when it ends. Each call of a ``@triton.jit`` function within it looks for what is left to
replace, hundreds of times a launch, and finds nothing.
"""

from types import ModuleType

LOOK = "_patch_lang"  # Triton's name. Where a release has another, tests are slower.


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
