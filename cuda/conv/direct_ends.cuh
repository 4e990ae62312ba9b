// Pixels at the end of a line that are no whole row of several (direct_plan.h). To the TMA unit a line has whole rows
// alone, and the next one is zeros: what there is of it the threads that multiply bring themselves.
#pragma once

#include "cuda/conv/direct_data.cuh"

namespace jaxdnn::conv {

// The i-th chunk of 16 bytes of a unit's ends.
struct LineEnd {
  const uint4* from = nullptr;  // or null, if the unit has none
  uint32_t to;

  __device__ LineEnd(const DirectParams& q, const DirectPlace& place, uint32_t operand, int i) {
    int chunk, line, part, of_window;
    const int part_of_all = q.part_div.Div(q.lines_div.Div(q.end_div.Div(i, &chunk), &line), &part);
    const int image = q.window_planes_div.Div(part_of_all, &of_window);
    const int plane = place.plane * q.plane_stride - q.plane_pad + of_window * q.plane_dilation;
    const int column = q.end_row - (place.column - q.before_columns);
    const int y = (place.line - q.before_lines + line) * static_cast<int>(q.part_div.divisor) + part;
    if (i >= q.ends || image >= place.images || column < 0 || column >= q.boxes * q.box_columns || y < 0 ||
        y >= q.height_from || plane < 0 || plane >= q.planes_from)
      return;
    const int64_t memory_line = (int64_t{place.image + image} * q.planes_from + plane) * q.height_from + y;
    from = reinterpret_cast<const uint4*>(q.from + memory_line * q.line_from + q.end_row * q.x_line) + chunk;
    const int box_lines = static_cast<int>(q.lines_div.divisor);
    to = operand + (of_window * static_cast<int>(q.part_div.divisor) + part) * q.part_bytes +
         ((image * box_lines + line) * q.boxes * q.box_columns + column) * q.x_line + chunk * 16;
    to = hopper::Swizzled(to, q.x_line);
  }
  __device__ uint4 Load() const { return from != nullptr ? __ldg(from) : uint4(); }
  __device__ void Store(uint4 v) const {
    if (from != nullptr) hopper::StoreWords(to, {v.x, v.y, v.z, v.w});
  }
};

// Until the unit's operand is there, with the ends of its lines.
__device__ __forceinline__ void WaitForOperand(const DirectParams& q, const DirectShared& shared,
                                               const hopper::RingPlace& turn, int unit) {
  const uint32_t full = shared.OperandFull(turn.stage), operand = shared.Operand(q, turn.stage);
  if (q.ends == 0) return hopper::WaitBarrier(full, turn.parity);
  const DirectPlace place(q, unit);
  // On its way together with the boxes.
  const LineEnd first(q, place, operand, threadIdx.x);
  const uint4 v = first.Load();
  hopper::WaitBarrier(full, turn.parity);
  first.Store(v);
#pragma unroll 1
  for (int i = threadIdx.x + kMultipliers; i < q.ends; i += kMultipliers) {
    const LineEnd end(q, place, operand, i);
    end.Store(end.Load());
  }
  hopper::ShowSharedToTma();
  hopper::SyncThreads(1, kMultipliers);
}

}  // namespace jaxdnn::conv
