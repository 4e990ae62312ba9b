"""jaxdnn against lax/XLA, case by case: `python -m benchmarks --out benchmarks/results/FILE.json`.

One file per operator family lists its work (`work()`); `harness.py` times it and `table.py` renders what was recorded.
The shapes are those of `tests/*_cases.py`.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))
