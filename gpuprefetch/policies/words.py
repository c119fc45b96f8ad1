"""What was sampled for an image, in words: for people who look at the result."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from gpuprefetch.policies.ops import Erase, Family, Op
from gpuprefetch.policies.program import Program
from gpuprefetch.policies.spatial import Affine, Blur

# Ops whose first argument says how much; the others have none, or none that says something.
_STRENGTHS = {
    Op.BRIGHTNESS: "{:.2f}",
    Op.CONTRAST: "{:.2f}",
    Op.SATURATION: "{:.2f}",
    Op.HUE: "{:+.2f}",
    Op.SHARPNESS: "{:.2f}",
    Op.POSTERIZE: "{:.0f} bits",
    Op.SOLARIZE: "{:.3g}",
    Op.SOLARIZE_ADD: "{:.3g}",
}
_NAMES = {
    Op.HFLIP: "flip",
    Op.VFLIP: "vertical flip",
    Op.PERMUTE: "channels",
    Op.ERASE_NOISE: "erase",
}


def words_of(programs: Sequence[Program], row: int) -> list[str]:
    """The ops that image ``row`` got, in their order: ``["brightness 1.30", "rotate -20"]``."""
    words: list[str] = []
    for program in programs:
        if program.weights is None:
            words += _of_row(program, row)
            continue
        count = program.weights.shape[1]
        chains = [" then ".join(_of_row(program, n)) for n in range(row, len(program.ops), count)]
        words.append("mix of " + " / ".join(chain or "itself" for chain in chains))
    return words


def _of_row(program: Program, row: int) -> Iterator[str]:
    for code, args in zip(program.ops[row].tolist(), program.args[row].tolist(), strict=True):
        op = Op(code)
        if op is not Op.IDENTITY:
            yield _word(op, args)


def _word(op: Op, args: list[float]) -> str:
    if op.family is Family.AFFINE:
        return _affine(args)
    if op.family is Family.PERSPECTIVE:
        return "perspective"
    if op.family is Family.MATRIX:
        return "affine"
    name = _NAMES.get(op, op.name.lower().replace("_", " "))
    if op in (Op.ERASE, Op.ERASE_NOISE):
        return f"{name} {args[Erase.WIDTH]:.0f} x {args[Erase.HEIGHT]:.0f}"
    if op is Op.BLUR:
        return f"{name} {args[Blur.SIGMA_X]:.1f}"
    return f"{name} {_STRENGTHS[op].format(args[0])}" if op in _STRENGTHS else name


def _affine(args: list[float]) -> str:
    words = []
    # Counterclockwise, as torchvision's rotate() and RandomRotation have it.
    if angle := 180 - (args[Affine.ANGLE] + 180) % 360:
        words.append(f"rotate {angle:.0f}")
    shear = args[Affine.SHEAR_X : Affine.SHEAR_Y + 1]
    if any(shear):
        words.append("shear " + ", ".join(f"{value:.0f}" for value in shear))
    shift = args[Affine.TRANSLATE_X : Affine.TRANSLATE_Y + 1]
    if any(shift):
        words.append("move " + ", ".join(f"{value:.0f}" for value in shift))
    if (scale := args[Affine.SCALE]) != 1:
        words.append(f"scale {scale:.2f}")
    return ", ".join(words) or "affine"
