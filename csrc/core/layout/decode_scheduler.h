// Flash-decoding's scheduler: it assigns keys to CTAs, on the device, since only there lengths are known.
//
// A work tile is a tile of query rows of one kv head of one sequence (pack_gqa: all query heads of a query side by
// side). Its keys come in blocks, and blocks in quanta. Every kv head has equally many CTAs, which do the same for each
// head, so that heads, which are adjacent in memory, are read at about the same time. A head's quanta are numbered
// through all its work tiles; each CTA takes a chunk of consecutive ones. A quantum is one split of num_splits or
// split_size; without these it is a block, and a CTA's quanta of one work tile make one split.
#pragma once

#include "core/layout/cached_seq.h"
#include "core/layout/tiles.h"
#include "core/workspace.h"

namespace flash_cute {

// The work of one sequence, for one kv head.
struct Quanta {
  int tiles;  // of query rows
  int first_block;  // that some query sees
  int blocks;
  int size;  // blocks of a quantum
  int per_tile;  // at least one, so that rows without keys are written, too
  int per_head;

  FC_HOST_DEVICE Quanta(const DecodeParams& p, const SeqInfo& seq, int block_m, int block_n) {
    const RowSpan keys = visible_keys(seq, p.fwd.band, 0, seq.q.length);
    tiles = (seq.q.length * p.group.value + block_m - 1) / block_m;
    first_block = keys.first / block_n;
    blocks = keys.first < keys.last ? (keys.last + block_n - 1) / block_n - first_block : 0;
    size = p.quantum_blocks;
    if (p.num_splits > 0) size = (blocks + p.num_splits - 1) / p.num_splits;
    if (p.split_size > 0) size = (p.split_size + block_n - 1) / block_n;
    size = detail::at_least(size, 1);
    per_tile = detail::at_least(size == 1 ? blocks : (blocks + size - 1) / size, 1);
    per_head = tiles * per_tile;
  }
};

// The consecutive quanta of each CTA of a head. SMs differ in memory bandwidth: large uniform batches also have tail
// CTAs with small chunks, which start when SMs finish early.
struct CtaChunks {
  static constexpr int kOneSplit = 2;  // work tiles of so few quanta are not split
  static constexpr int kSplitCost = 3;  // a split costs about as much as so many quanta
  static constexpr int kIdle = 16;  // one in so many SMs may idle without loss of bandwidth

  bool even;  // no num_splits, no split_size
  int per_head;  // quanta
  int size;  // quanta of a full CTA
  int full_ctas;  // CTAs with `size` quanta
  int tail = 0;  // quanta of a tail CTA

  FC_HOST_DEVICE int first_quantum(int cta) const {
    return detail::at_most(cta, full_ctas) * size + detail::at_least(cta - full_ctas, 0) * tail;
  }

  // The chunks that the host has planned for a uniform batch.
  FC_HOST_DEVICE static CtaChunks planned(const DecodeParams& p) {
    const UniformBatch& uniform = p.uniform;
    return {p.even_splits(), p.fwd.batch * uniform.per_sequence.value, uniform.chunk.value, uniform.full_ctas,
            uniform.tail_chunk.value};
  }

  // Rounds a CTA's chunk to a whole number of work tiles if that adds at most kSplitCost quanta: chunks that end on
  // tile boundaries need no combine. A uniform batch may round up by a further 1/16. In others a work tile of two
  // quanta may follow one of a single quantum, so a chunk has at least kOneSplit.
  FC_HOST_DEVICE static CtaChunks of(const DecodeParams& p, int per_head, int per_tile, bool uniform = false) {
    const bool even = p.even_splits();
    const int least = !even || per_tile > kOneSplit ? 1 : uniform ? per_tile : kOneSplit;
    const int ctas = p.by_ctas_per_head.value;
    const int size = detail::at_least(p.by_ctas_per_head.div(per_head + ctas - 1), least);
    if (!even) return {even, per_head, size, ctas};
    int aligned = size;
    if (size < per_tile) {
      const int chunks_per_tile = per_tile / size, chunk = per_tile / chunks_per_tile;
      if (chunk * chunks_per_tile == per_tile) aligned = chunk;
    } else {
      aligned = (size + per_tile - 1) / per_tile * per_tile;
    }
    return {even, per_head, aligned - size <= kSplitCost + (uniform ? size / kIdle : 0) ? aligned : size, ctas};
  }
};

// The splits of one work tile, and their workspace slots. With even splits a CTA has two slots: one for a work tile
// that it continues, one for a work tile that it starts.
struct TileSplits {
  bool even;
  int count;
  int first;  // the work tile's first quantum, over all heads; with even splits the CTA that takes it

  FC_HOST_DEVICE int slot(int i) const { return !even ? first + i : i == 0 ? 2 * first + 1 : 2 * (first + i); }
};

// One split of a work tile's keys.
struct KvSplit {
  SeqInfo seq{SeqSpan{}, SeqSpan{}};
  int b = 0, head_k = 0;
  int row = 0;  // the work tile's first packed row in the sequence
  int first = 0, last = 0;  // blocks of keys
  int quanta = 0;
  TileSplits all{};  // of the work tile
  int index = 0;  // among them
};

// A sequence, and its first quantum among those of a head.
struct Place {
  int b, first;
};

// Iterates over the splits that a CTA takes.
template <int kBlockM, int kBlockN>
class SplitIterator {
 public:
  // `from`: the sequence of the CTA's first quantum, or an earlier one. Consecutive CTAs serve different heads, with
  // the same index.
  FC_HOST_DEVICE SplitIterator(const DecodeParams& p, const CtaChunks& chunks, int cta, Place from)
      : chunks_(chunks),
        number_(p.heads_k.div(cta)),
        head_(cta - number_ * p.fwd.heads_k),
        place_(from),
        quantum_(chunks.first_quantum(number_)),
        end_(chunks.first_quantum(number_ + 1)) {}

  // The next split, or one without quanta at the end.
  FC_HOST_DEVICE KvSplit next(const DecodeParams& p) {
    while (quantum_ < end_ && place_.b < p.fwd.batch) {
      const SeqInfo seq = cached_seq(p, place_.b);
      const Quanta quanta(p, seq, kBlockM, kBlockN);
      if (quantum_ < place_.first + quanta.per_head) return next_of(p, seq, quanta);
      place_ = {place_.b + 1, place_.first + quanta.per_head};
    }
    return {};
  }

 private:
  // The split that starts with the next quantum, which belongs to this sequence.
  FC_HOST_DEVICE KvSplit next_of(const DecodeParams& p, const SeqInfo& seq, const Quanta& quanta) {
    const int work_tile = quotient(quantum_ - place_.first, quanta.per_tile, p.uniform.per_tile);
    const int first_quantum = place_.first + work_tile * quanta.per_tile, at = quantum_ - first_quantum;
    const int count = chunks_.even ? detail::at_most(quanta.per_tile - at, end_ - quantum_) : 1;
    const int first = quanta.first_block + at * quanta.size, past = quanta.first_block + quanta.blocks;
    quantum_ += count;
    KvSplit split{.seq = seq,
                  .b = place_.b,
                  .head_k = head_,
                  .row = work_tile * kBlockM,
                  .first = first,
                  .last = detail::at_most(first + count * quanta.size, past),
                  .quanta = count,
                  .all = {false, quanta.per_tile, head_ * chunks_.per_head + first_quantum},
                  .index = at};
    if (chunks_.even) {
      const int first_cta = cta_of(p, first_quantum), last_cta = cta_of(p, first_quantum + quanta.per_tile - 1);
      split.all = {true, last_cta - first_cta + 1, head_ * p.ctas_per_head + first_cta};
      split.index = number_ - first_cta;
    }
    return split;
  }

  // The CTA of the head that takes a quantum.
  FC_HOST_DEVICE int cta_of(const DecodeParams& p, int quantum) const {
    const int of_small = quantum - chunks_.full_ctas * chunks_.size;
    if (of_small < 0) return quotient(quantum, chunks_.size, p.uniform.chunk);
    return chunks_.full_ctas + quotient(of_small, chunks_.tail, p.uniform.tail_chunk);
  }

  // n / value, by multiplication if the host planned with this value.
  FC_HOST_DEVICE static int quotient(int n, int value, const FastDivmod& planned) {
    return planned.value == value ? planned.div(n) : n / value;
  }

  CtaChunks chunks_;
  int number_;  // of the CTA among its head's
  int head_;
  Place place_;
  int quantum_, end_;
};

}  // namespace flash_cute
