"""What the checks share with the benchmarks."""

import importlib
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))
harness, photos, ranks, table = map(
    importlib.import_module, ("harness", "photos", "ranks", "table")
)
