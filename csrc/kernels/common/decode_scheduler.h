// How the keys of all sequences are shared out among CTAs, worked out on the device: lengths are known there alone.
//
// A unit is a tile of query rows of one kv head of one sequence: the rows of its query heads, all heads of a query side
// by side. A unit's keys come in blocks, and blocks in quanta. Every kv head has as many CTAs, which do the same for
// all heads: rows of all heads, which lie side by side in memory, are then read at about the same time. Quanta are
// numbered through all units of a head, and each of its CTAs takes as many quanta that follow each other. Where the
// caller asks for parts of his own, a quantum is one of them; else a quantum is one block, or as few as keep numbers of
// quanta below 2^31, and those that a CTA takes of a unit make one part.
#pragma once

#include "kernels/common/cached_seq.h"
#include "kernels/common/tiles.h"

namespace flash_cute {

// The work of one sequence.
struct Quanta {
  int tiles;  // of query rows, for each kv head
  int first_block;  // of those that some query sees
  int blocks;
  int size;  // blocks
  int per_tile;  // at least one, so that rows without keys are written too
  int per_head;

  FC_HOST_DEVICE Quanta(const DecodeProblem& p, const SeqInfo& seq, int block_m, int block_n) {
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

// Consecutive quanta of a head that each of its CTAs takes. Some SMs get more of the memory's bandwidth than others:
// where lengths are known and there is much to read, CTAs beyond those that run at once have tail chunks, for SMs that
// are done early.
struct CtaChunks {
  static constexpr int kOneSplit = 2;  // so few quanta of a unit are not worth parts
  static constexpr int kSplitCost = 3;  // about as many take as long as what a part costs beside its quanta
  static constexpr int kIdle = 16;  // of so many SMs the memory can do without one

  bool even;  // quanta of one unit make one part
  int per_head;  // quanta
  int size;  // quanta of a CTA
  int full_ctas;  // so many have `size` quanta each
  int tail = 0;  // quanta of the others

  FC_HOST_DEVICE int first_quantum(int cta) const {
    return detail::at_most(cta, full_ctas) * size + detail::at_least(cta - full_ctas, 0) * tail;
  }

  // Those that the host has foreseen.
  FC_HOST_DEVICE static CtaChunks foreseen(const DecodeProblem& p) {
    const UniformBatch& uniform = p.uniform;
    return {p.even_splits(), p.fwd.batch * uniform.per_sequence.value, uniform.chunk.value, uniform.full_ctas,
            uniform.tail_chunk.value};
  }

  // Of `per_head` quanta, of which units of the first sequence have `per_tile`: where all sequences are as long, a little
  // larger chunks may end where units do, and spare parts; if it is known that they are, `uniform`, yet larger ones. If
  // it is not, a unit of two quanta may follow one of a single quantum.
  FC_HOST_DEVICE static CtaChunks of(const DecodeProblem& p, int per_head, int per_tile, bool uniform = false) {
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

// The parts of one unit, and where in the workspace they are. With even chunks a CTA has two slots, the first for a
// unit that it goes on with, the second for one that it begins.
struct TileSplits {
  bool even;
  int count;
  int first;  // quantum of the unit, numbered through all heads, or with even chunks the CTA that takes it

  FC_HOST_DEVICE int slot(int i) const { return !even ? first + i : i == 0 ? 2 * first + 1 : 2 * (first + i); }
};

// A part of a unit's keys.
struct KvSplit {
  SeqInfo seq{SeqSpan{}, SeqSpan{}};
  int b = 0, head_k = 0;
  int row = 0;  // of the sequence's packed rows, the unit's first
  int first = 0, last = 0;  // blocks of keys
  int quanta = 0;
  TileSplits all{};  // of the unit
  int index = 0;  // among them
};

// A sequence, and its first quantum of a head.
struct Place {
  int b, first;
};

// The parts that a CTA takes, one after the other.
template <int kBlockM, int kBlockN>
class SplitIterator {
 public:
  // `from` is the sequence of the CTA's first quantum, or one before it. CTAs of one number are followed by those of the
  // next; each has a head of its own.
  FC_HOST_DEVICE SplitIterator(const DecodeProblem& p, const CtaChunks& chunks, int cta, Place from)
      : chunks_(chunks),
        number_(p.heads_k.div(cta)),
        head_(cta - number_ * p.fwd.heads_k),
        place_(from),
        quantum_(chunks.first_quantum(number_)),
        end_(chunks.first_quantum(number_ + 1)) {}

  // The next part, or one without quanta.
  FC_HOST_DEVICE KvSplit next(const DecodeProblem& p) {
    while (quantum_ < end_ && place_.b < p.fwd.batch) {
      const SeqInfo seq = cached_seq(p, place_.b);
      const Quanta quanta(p, seq, kBlockM, kBlockN);
      if (quantum_ < place_.first + quanta.per_head) return next_of(p, seq, quanta);
      place_ = {place_.b + 1, place_.first + quanta.per_head};
    }
    return {};
  }

 private:
  // The part that begins with the next quantum, one of the sequence's.
  FC_HOST_DEVICE KvSplit next_of(const DecodeProblem& p, const SeqInfo& seq, const Quanta& quanta) {
    const int work_tile = quotient(quantum_ - place_.first, quanta.per_tile, p.uniform.per_tile);
    const int first_quantum = place_.first + work_tile * quanta.per_tile, at = quantum_ - first_quantum;
    const int count = chunks_.even ? detail::at_most(quanta.per_tile - at, end_ - quantum_) : 1;
    const int first = quanta.first_block + at * quanta.size, behind = quanta.first_block + quanta.blocks;
    quantum_ += count;
    KvSplit split{.seq = seq,
                  .b = place_.b,
                  .head_k = head_,
                  .row = work_tile * kBlockM,
                  .first = first,
                  .last = detail::at_most(first + count * quanta.size, behind),
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
  FC_HOST_DEVICE int cta_of(const DecodeProblem& p, int quantum) const {
    const int of_small = quantum - chunks_.full_ctas * chunks_.size;
    if (of_small < 0) return quotient(quantum, chunks_.size, p.uniform.chunk);
    return chunks_.full_ctas + quotient(of_small, chunks_.tail, p.uniform.tail_chunk);
  }

  // n / value, a multiplication where the host has foreseen the value.
  FC_HOST_DEVICE static int quotient(int n, int value, const FastDivmod& foreseen) {
    return foreseen.value == value ? foreseen.div(n) : n / value;
  }

  CtaChunks chunks_;
  int number_;  // of the CTA among those of its head
  int head_;
  Place place_;
  int quantum_, end_;
};

}  // namespace flash_cute
