// The operands of unaligned channels as a first kernel leaves them in the workspace: chunks of 16 bytes, each of all
// rows side by side (unaligned_plan.h says what rows are), with zeros where there is padding, so that a strip of any
// rows is one bulk copy a chunk.
#pragma once

#include <cuda_runtime.h>

#include "cuda/common/fast_div.cuh"
#include "cuda/common/hopper.cuh"
#include "cuda/conv/edges.cuh"
#include "cuda/conv/unaligned_plan.h"

namespace jaxdnn::conv {

struct PackedRows {
  const uint4* begin;
  int64_t pitch;     // of a chunk: the array's rows, and zeros, as many as a strip is long
  int rows, chunks;  // of the array
};

// How the rows of a result lie among those of the operand.
struct PackedPlanes {
  bool together;                 // they are the same
  FastDiv rows_div, planes_div;  // rows of a plane; planes of an image of the result
  int planes;                    // of the result, of all images
  Edges edges;                   // of an image of the operand
};

// A chunk of a strip, by one thread: `count` rows of the result's from `row` on, where each plane is that so many
// planes further on.
__device__ inline void CopyPacked(const PackedRows& from, const PackedPlanes& q, int chunk, int row, int count,
                                  int further, uint32_t to, uint32_t barrier) {
  const uint4* const begin = from.begin + chunk * from.pitch;
  while (count > 0) {
    int at = min(row, from.rows), some = count;
    if (!q.together) {
      int in_plane, z;
      const int plane = q.rows_div.Div(row, &in_plane), image = q.planes_div.Div(plane, &z);
      z += further;
      const bool inside = q.edges.FindAny(&z) && plane < q.planes;
      some = min(count, static_cast<int>(q.rows_div.divisor) - in_plane);
      at = inside ? (image * q.edges.extent + z) * static_cast<int>(q.rows_div.divisor) + in_plane : from.rows;
    }
    hopper::CopyBulk(to, begin + at, some * 16, barrier);
    to += some * 16;
    row += some;
    count -= some;
  }
}

inline PackedPlanes PlanesOf(const Problem& p, const UnalignedRows& rows) {
  const bool together = p.window[0] == 1 && p.pad[0] == 0 && p.x[0] == p.y[0];
  return {together, FastDiv(rows.Rows(1)), FastDiv(p.y[0]), int(p.images * p.y[0]), OperandEdges(p, 0)};
}

// An array [planes, *extent, channels], of which some planes are packed, and where to.
struct Packing {
  const void* array;
  int64_t all_planes, first_plane, planes;
  Edges edges[2];            // of a plane and a line
  int64_t pad[2];            // lines before those of a plane, and pixels before those of a line
  int64_t channels, chunks;  // those behind the last channel are zeros
  int64_t strip;             // as many rows of zeros behind the last one
  void* packed;
};

inline PackedRows RowsOf(const Packing& p, const UnalignedRows& rows) {
  const int64_t all = rows.Rows(p.planes);
  return {static_cast<const uint4*>(p.packed), all + p.strip, int(all), int(p.chunks)};
}

// Both operands, in one kernel.
cudaError_t PackRows(const UnalignedRows& rows, const Packing (&packings)[2], cudaStream_t stream);

}  // namespace jaxdnn::conv
