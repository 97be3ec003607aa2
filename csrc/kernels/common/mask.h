// Which keys a query sees inside a tile.
#pragma once

#include "kernels/common/seq.h"

namespace flash_cute {

struct BandMask {
  int lowest, highest;  // of key position minus query position
  int seqlen_k;

  FC_HOST_DEVICE BandMask(const SeqInfo& seq, Band band)
      : lowest(seq.shift() - band.left), highest(seq.shift() + band.right), seqlen_k(seq.k.length) {}

  FC_HOST_DEVICE bool visible(int query, int key) const {
    return key < seqlen_k && key - query >= lowest && key - query <= highest;
  }
};

}  // namespace flash_cute
