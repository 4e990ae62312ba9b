// How the tiles of a filter gradient are shared out: the steps of all tiles, one tile's after the other's, are one
// line, which is cut into spans of equal lengths, a block's each. So all blocks have equally much to do, however many
// tiles there are, and a block has at most two pieces of tiles, at the ends of its span, and whole ones between them.
//
// The decomposition is "stream-K": Osama, Merrill, Cecka, Garland, Owens, "Stream-K: Work-Centric Parallel
// Decomposition for Dense Matrix-Matrix Multiplication on the GPU", PPoPP 2023.
#pragma once

#include <cstdint>
#include <numeric>

#include "cuda/common/fast_div.cuh"
#include "cuda/conv/wgmma_plan.h"

namespace jaxdnn::conv {

// Neighbouring multiprocessors take spans that begin at the same step of their tiles, as far as there are such: they
// read the same pixels at the same time.
struct Spans {
  FastDiv alike;   // blocks whose spans begin at the same step of a tile
  int each, rest;  // steps of all tiles, divided by the blocks
  FastDiv blocks;  // at most as many as there are steps
  float share;     // blocks of a step
  int slots;       // pieces of tiles that a block may have
  int parts;       // equal ones of every tile, or 0

  // Of a set of taps, the steps of a tile, and its first tile and step; of none after the last, where all end. What one
  // set needs lies together: a kernel that starts waits for every other 64 bytes of its parameters.
  struct Set {
    FastDiv steps;
    int first_tile, first_step;
  };
  Set sets[kMaxMaps + 1];

  Spans() = default;
  Spans(const SetTiles* of, int count, int64_t blocks_of_all, int64_t slots_of_block)
      : blocks(blocks_of_all), slots(int(slots_of_block)), sets{} {
    for (int i = 0; i < kMaxMaps; ++i) {
      const SetTiles set = i < count ? of[i] : SetTiles{0, 1};
      sets[i].steps = FastDiv(set.steps);
      sets[i + 1].first_tile = sets[i].first_tile + int(set.tiles);
      sets[i + 1].first_step = sets[i].first_step + int(set.tiles * set.steps);
    }
    const int64_t all = sets[count].first_step, tiles = sets[count].first_tile;
    each = int(all / blocks_of_all);
    rest = int(all % blocks_of_all);
    share = float(blocks_of_all) / all;
    alike = FastDiv(count == 1 ? std::gcd(tiles, blocks_of_all) : 1);
    parts = count == 1 && blocks_of_all % tiles == 0 ? int(blocks_of_all / tiles) : 0;
  }

  __device__ int SetOfTile(int tile) const {
    int set = 0;
    while (tile >= sets[set + 1].first_tile) ++set;
    return set;
  }
  __device__ int SetOfStep(int step) const {
    int set = 0;
    while (step >= sets[set + 1].first_step) ++set;
    return set;
  }
  // Of the steps of all tiles, a tile's first, and how many it has.
  __device__ int FirstStep(int tile, int* count) const {
    const Set& set = sets[SetOfTile(tile)];
    *count = set.steps.divisor;
    return set.first_step + (tile - set.first_tile) * *count;
  }
  // A step's tile, and which of the tile's it is.
  __device__ int TileOf(int set, int step, int* in_tile) const {
    return sets[set].first_tile + sets[set].steps.Div(step - sets[set].first_step, in_tile);
  }
  __device__ int Blocks() const { return blocks.divisor; }
  __device__ int Begin(int block) const { return block * each + blocks.Div(block * rest); }
  // The block that is the device's `number`th.
  __device__ int Block(int number) const {
    int which;
    const int begin = alike.Div(number, &which);
    return which * alike.Div(Blocks()) + begin;
  }
  // Who has this step.
  __device__ int BlockOf(int step) const {
    int block = min(static_cast<int>(step * share), Blocks() - 1);
    while (Begin(block) > step) --block;
    while (Begin(block + 1) <= step) ++block;
    return block;
  }
  __device__ int FirstTile(int block) const {
    int in_tile;
    const int begin = Begin(block);
    return TileOf(SetOfStep(begin), begin, &in_tile);
  }
  // Where a block leaves its piece of a tile: a second one is its last tile's.
  __device__ int Slot(int block, int tile) const { return block * slots + (tile > FirstTile(block) ? 1 : 0); }
};

// The pieces of a block's spans, one after the other: if blocks do not run all at once, it has several.
struct Pieces {
  const Spans& spans;
  int block, set, tile, first, steps;
  bool whole;  // all of the tile's

  __device__ explicit Pieces(const Spans& s)
      : spans(s),
        block(s.Block(blockIdx.x)),
        set(0),
        number_(blockIdx.x),
        at_(s.Begin(block)),
        end_(s.Begin(block + 1)) {}

  __device__ bool Next() {
    if (at_ == end_) {
      number_ += gridDim.x;
      if (number_ >= spans.Blocks()) return false;
      block = spans.Block(number_);
      at_ = spans.Begin(block);
      end_ = spans.Begin(block + 1);
      set = 0;
    }
    while (at_ >= spans.sets[set + 1].first_step) ++set;
    tile = spans.TileOf(set, at_, &first);
    const int all = spans.sets[set].steps.divisor;
    steps = min(all - first, end_ - at_);
    whole = steps == all;
    at_ += steps;
    return true;
  }

 private:
  int number_, at_, end_;
};

}  // namespace jaxdnn::conv
