from collections.abc import Sequence
from typing import Any

ffi_version: tuple[int, int]
cuda_architectures: str
cuda_version: str
conv_tiles: list[str]

def causal_workspace(
  problems: int, sequences: int, length: int, channels: int, taps: int, bias: bool
) -> int: ...
def channel_activation_workspace(itemsize: int, groups: int, outer: int, channels: int, inner: int) -> int: ...
def handlers() -> dict[str, Any]: ...
def layer_norm_workspace(dtype: str, problems: int, rows: int, n: int, *, gradients: int | None) -> int: ...
conv_workspace_limit: int

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
  padding_mode: Sequence[int],
  groups: int,
  products: int,
  hopper: bool,
  algorithm: str,
  workspace_limit: int,
) -> dict[str, Any] | None: ...
def group_norm_workspace(
  call: str, dtype: str, channels_last: bool, x: Sequence[int], groups: int
) -> int | None: ...
def softmax_workspace(op: str, dtype: str, outer: int, n: int, inner: int) -> int: ...
