"""What the checks share, with the benchmarks and with the tests too."""

import importlib
import sys
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parents[1]
sys.path += [str(TESTS.parent / "benchmarks"), str(TESTS)]
names = ("children", "clock", "harness", "photos", "pictures", "ranks", "table")
children, clock, harness, photos, pictures, ranks, table = map(importlib.import_module, names)


def verdict(results: list[dict[str, Any]]) -> str | int:
    """What to exit with: 0, or the checks that failed or missed the mistake made in them."""
    bad = [r["check"] for r in results if not r["ok"] or "missed" in r.get("mistakes", {}).values()]
    return f"failed: {', '.join(bad)}" if bad else 0
