"""What the mma.sync kernels make dense: groups of few channels, and phases of few columns; and ragged lines."""

import jax
import numpy as np
import pytest
from jax import lax

import jaxdnn
from conv_cases import SAME3, SAME7, ConvCase
from conv_checks import check, coarse, sample
from conv_oracle import conv as conv_oracle
from conv_oracle import conv_gradients
from numerics import assert_close, exact

_ = ConvCase
HIGH = (lax.Precision.HIGH,) * 2
# Groups that are computed together: of all widths, in and out, at strides and dilations, more than one tile has.
GROUPED = [
  _("g4", 2, (9, 8), 128, (3, 3), 128, padding=SAME3, groups=32),
  _("g4s2", 2, (9, 8), 64, (3, 3), 64, (2, 2), SAME3, groups=16),
  _("g8", 2, (7, 9), 64, (3, 3), 64, padding=SAME3, groups=8),
  _("g16", 1, (6, 5), 64, (3, 3), 64, groups=4),
  _("g2", 2, (6, 7), 48, (3, 2), 48, groups=24),
  _("g3", 2, (6, 7), 48, (3, 3), 48, padding=SAME3, groups=16),
  _("g5", 2, (6, 7), 40, (3, 3), 80, padding=SAME3, groups=8),
  _("g4to12", 2, (6, 7), 32, (3, 3), 96, padding=SAME3, groups=8),
  _("g12to4", 2, (6, 7), 96, (3, 3), 32, padding=SAME3, groups=8),
  _("g9", 1, (6, 5), 72, (3, 3), 72, padding=SAME3, groups=8),
  _("odd_groups", 2, (6, 5), 28, (3, 3), 28, padding=SAME3, groups=7),
  _("dilated", 2, (11, 12), 64, (3, 3), 64, (2, 1), ((2, 2), (3, 3)), rhs_dilation=(2, 3), groups=16),
  _("dilated_input", 2, (5, 6), 64, (3, 3), 64, padding=SAME3, lhs_dilation=(2, 2), groups=16),
  _("1d", 3, (50,), 64, (5,), 64, padding=((2, 2),), groups=16),
  _("3d", 1, (5, 4, 6), 32, (3, 3, 3), 32, padding=((1, 1),) * 3, groups=8),
]
# Columns that are phases: extents that are no multiples of the stride, phases without taps, taps outside the window.
FOLDED = [
  _("stem", 2, (23, 22), 3, (7, 7), 64, (2, 2), SAME7),
  _("stem_even", 1, (24, 20), 3, (7, 7), 64, (2, 2), ((2, 3), (3, 2))),
  _("patch", 2, (19, 17), 3, (4, 4), 96, (4, 4)),
  _("stride_exceeds_window", 2, (19, 17), 3, (2, 3), 32, (4, 5)),
  _("one_channel", 2, (15, 14), 1, (5, 5), 32, (3, 2), ((2, 1), (0, 4))),
  _("one_dimension", 2, (9, 15), 4, (3, 3), 16, (1, 2), SAME3),
  _("negative_padding", 2, (17, 18), 3, (5, 5), 32, (2, 2), ((-2, 1), (3, -3))),
  _("far_padding", 1, (9, 8), 3, (3, 3), 32, (2, 2), ((9, 4), (7, 0))),
  _("1d", 3, (151,), 1, (10,), 512, (5,), ((3, 3),)),
  _("3d", 1, (9, 8, 7), 2, (3, 3, 3), 32, (2, 2, 2), ((1, 1),) * 3),
  _("transposed", 2, (7, 6), 64, (4, 4), 3, padding=((2, 2),) * 2, lhs_dilation=(2, 2)),
  _("transposed_odd", 2, (7, 6), 32, (3, 3), 3, padding=((2, 1), (1, 3)), lhs_dilation=(2, 3)),
  _("transposed_far", 1, (5, 6), 32, (3, 3), 4, padding=((-2, 7), (9, -1)), lhs_dilation=(3, 2)),
]
# Lines of whole chunks beside lines that are not.
RAGGED = [
  _("c3k64", 2, (9, 8), 3, (3, 3), 64, padding=SAME3),
  _("c64k3", 2, (9, 8), 64, (3, 3), 3, padding=SAME3),
  _("c64k65", 2, (9, 8), 64, (3, 3), 65, padding=SAME3),
  _("c65k64", 2, (9, 8), 65, (3, 3), 64, padding=SAME3),
  _("c12k20", 2, (9, 8), 12, (3, 3), 20, padding=SAME3),
  _("c64k66", 2, (9, 8), 64, (3, 3), 66, (2, 2), SAME3),
  _("c65k65", 3, (15, 14), 65, (3, 3), 65, padding=SAME3),
  _("c65k65s2", 2, (13, 12), 65, (3, 3), 65, (2, 2), SAME3),
  _("c31k33", 1, (9, 8), 31, (3, 3), 33, padding=((0, 3), (2, -1)), rhs_dilation=(1, 2)),
  _("c130k127", 2, (5, 7), 130, (1, 1), 127),
  _("c1k9", 2, (9, 8), 1, (3, 3), 9),
  _("wide_groups", 2, (6, 5), 138, (3, 3), 142, padding=SAME3, groups=2),
  _("ragged_1d", 3, (150,), 29, (5,), 67, (3,), ((2, 2),)),
  _("ragged_3d", 1, (5, 4, 6), 11, (3, 3, 3), 19, padding=((1, 1),) * 3),
  _("ragged_transposed", 2, (7, 6), 37, (4, 4), 35, padding=((2, 2),) * 2, lhs_dilation=(2, 2)),
  _("folded_window", 2, (9, 32), 3, (2, 16), 40, (1, 16)),
  _("folded_window_s16", 2, (32, 48), 3, (16, 16), 72, (16, 16)),
]


def modelled(x, w, **layer):
  x, w = (jax.ShapeDtypeStruct(shape, "bfloat16") for shape in (x, w))
  found = {a.name: a for a in jaxdnn.conv_algorithms(x, w, **layer)}
  return found["implicit_gemm_mma"]


def test_few_columns_are_modelled_as_what_is_computed():
  """Neither 32 groups nor four phases take as long as if each filled a tile by itself."""
  dense = modelled((32, 56, 56, 128), (3, 3, 128, 128), padding="SAME")
  grouped = modelled((32, 56, 56, 128), (3, 3, 4, 128), padding="SAME", groups=32)
  assert grouped.microseconds < 2 * dense.microseconds and grouped.tile == "mma 128x32"
  stem = dict(direction="data_gradient", stride=2, padding=SAME7)
  few = modelled((32, 224, 224, 3), (7, 7, 3, 64), **stem)
  many = modelled((32, 224, 224, 64), (7, 7, 64, 64), **stem)
  assert few.microseconds < many.microseconds / 3 and few.tile == "mma 128x32"
  assert grouped.workspace_bytes == few.workspace_bytes == 0


@pytest.mark.gpu
@pytest.mark.parametrize("case", [*GROUPED, *FOLDED, *RAGGED], ids=lambda c: c.name)
def test_kernels(case):
  for dtype in ("bfloat16", "float16", "float32"):
    check(case, "implicit_gemm_mma", dtype, dtype)
  check(case, "implicit_gemm_mma", "bfloat16", "float32")
  check(case, "implicit_gemm_mma", "float32", "float32", HIGH, sample)


@pytest.mark.gpu
@pytest.mark.sanitize
@pytest.mark.parametrize(
  "case",
  [GROUPED[1], GROUPED[5], FOLDED[0], FOLDED[-2], RAGGED[0], RAGGED[1], RAGGED[6], RAGGED[7]],
  ids=lambda c: c.name,
)
def test_under_the_sanitizer(case):
  for dtype in ("bfloat16", "float32"):
    check(case, "implicit_gemm_mma", dtype, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(60))
def test_random_problems(seed):
  rng = np.random.default_rng(seed)
  rank = int(rng.integers(1, 4))
  small = lambda lo, hi: tuple(int(v) for v in rng.integers(lo, hi + 1, rank))  # noqa: E731
  groups = int(rng.choice([1, 1, 2, 4, 6, 8, 16]))
  c, k = (int(v) for v in rng.choice([1, 2, 3, 4, 5, 8, 12, 16, 24, 32], 2))
  lhs, stride = small(1, 3), small(1, 3)
  if rng.random() < 0.7:
    lhs = (1,) * rank
  case = _(
    "random", int(rng.integers(1, 4)), small(3, 12 if rank < 3 else 6), groups * c, small(1, 4), groups * k, stride,
    tuple((int(a), int(b)) for a, b in rng.integers(0, 4, (rank, 2))), lhs, small(1, 2), groups,
  )  # fmt: skip
  geometry = zip(case.spatial, case.window, case.padding, case.lhs_dilation, case.rhs_dilation, strict=True)
  if min((n - 1) * lhs + 1 + a + b - (r - 1) * rhs for n, r, (a, b), lhs, rhs in geometry) < 1:
    return
  for dtype in ("bfloat16", "float32"):
    check(case, "implicit_gemm_mma", dtype, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_infinities_stay_where_they_belong(dtype):
  """Neither another group's channels nor the neighbouring phases' positions become NaN."""
  x, w = (np.array(coarse(s, dtype, i)) for i, s in enumerate(((2, 9, 8, 64), (3, 3, 4, 64))))
  x[0, 4, 4, 5], x[1, 0, 0, 63] = np.inf, np.nan
  y = jaxdnn.conv(x, w, padding="SAME", groups=16, algorithm="implicit_gemm_mma", precision="default")
  want = conv_oracle(exact(x), exact(w), (1, 1), SAME3, (1, 1), (1, 1), 16)
  assert_close(y, want, dtype, terms=36, scale=12)
  assert np.isfinite(np.asarray(y[0, ..., 8:], np.float32)).all()
  g, w = (np.array(coarse(s, dtype, i)) for i, s in enumerate(((1, 8, 8, 32), (7, 7, 3, 32))))
  g[0, 3, 3, 7] = np.inf
  layer = dict(stride=2, padding=SAME7, algorithm="implicit_gemm_mma", precision="default")
  dx = jaxdnn.conv_dgrad(g, w, (16, 16), **layer)
  want, _ = conv_gradients(np.zeros((1, 16, 16, 3)), exact(w), exact(g), (2, 2), SAME7, (1, 1), (1, 1))
  assert_close(dx, want, dtype, terms=32 * 16, scale=60)
