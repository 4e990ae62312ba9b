"""jaxdnn against lax/XLA, case by case: `python -m benchmarks --out benchmarks/results/FILE.json`.

One file per operator family lists its work (`work()`); `harness.py` times it and `table.py` renders what was recorded.
The shapes are those of `tests/*_cases.py`.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
# `python -m` puts the source folder first, whose jaxdnn lacks the native module: the installed one goes before it.
sys.path = [str(ROOT / "tests"), *(p for p in sys.path if Path(p or ".").resolve() != ROOT), str(ROOT)]
