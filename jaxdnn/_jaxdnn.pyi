from collections.abc import Sequence
from typing import Any

ffi_version: tuple[int, int]
cuda_architectures: str
cuda_version: str

def handlers() -> dict[str, Any]: ...
def plan_conv(
  direction: str,
  in_dtype: str,
  out_dtype: str,
  x: Sequence[int],
  w: Sequence[int],
  y: Sequence[int],
  stride: Sequence[int],
  padding_low: Sequence[int],
  lhs_dilation: Sequence[int],
  rhs_dilation: Sequence[int],
  groups: int,
) -> dict[str, Any] | None: ...
