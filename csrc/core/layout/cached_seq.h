// The rows of a sequence in a key/value cache, safe for any values in the index tensors.
#pragma once

#include "core/layout/seq.h"

namespace flash_cute {

FC_HOST_DEVICE int clamped(int64_t value, int64_t most) {
  return static_cast<int>(value < 0 ? 0 : value > most ? most : value);
}

// Rows in use before the append.
FC_HOST_DEVICE int rows_in_use(const DecodeProblem& p, int b) {
  return p.cache.lengths == nullptr ? p.fwd.seqlen_k : clamped(p.cache.lengths[b], p.fwd.seqlen_k);
}

// New rows of a sequence; the cache may not have room for all.
FC_HOST_DEVICE SeqSpan new_rows(const NewKeys& added, int b) {
  return seq_span(added.cu, nullptr, b, added.seqlen, added.total);
}

// Queries and keys of a sequence after the append. Key 0 is row k.offset of the sequence's pages.
FC_HOST_DEVICE SeqInfo cached_seq(const DecodeProblem& p, int b) {
  const int used = rows_in_use(p, b);
  const int first = p.cache.leftpad == nullptr ? 0 : clamped(p.cache.leftpad[b], used);
  const int last = clamped(int64_t(used) + new_rows(p.added, b).length, p.fwd.seqlen_k);
  return {seq_span(p.fwd.varlen.cu_q, nullptr, b, p.fwd.seqlen_q, p.fwd.total_q), {first, last - first}};
}

// The sequence that owns a packed row, or -1: of equal lengths `each`, or, with offsets, by rows_of(b).
template <class RowsOf>
FC_HOST_DEVICE int sequence_of(int row, const int* cu, int batch, int each, const RowsOf& rows_of) {
  if (cu == nullptr) return row / each;
  auto has = [&](int b) {
    const SeqSpan rows = rows_of(b);
    return rows.offset <= row && row < rows.offset + rows.length;
  };
  int first = 0, last = batch - 1;  // binary search for the last one that starts at the row or before
  while (first < last) {
    const int middle = (first + last + 1) / 2;
    if (cu[middle] <= row) {
      first = middle;
    } else {
      last = middle - 1;
    }
  }
  if (first < batch && has(first)) return first;
  // No sequence has the row, or offsets do not ascend (unused trailing entries are often 0): search all.
  int b = batch - 1;
  while (b >= 0 && !has(b)) --b;
  return b;
}

// A row's position in its sequence.
FC_HOST_DEVICE int64_t place_of(int row, const SeqSpan& span, const int* cu, int each) {
  return cu == nullptr ? row % each : row - span.offset;
}

// The page of a block of a sequence; it may not exist.
FC_HOST_DEVICE int page_id(const Pages& pages, int b, int block) {
  return pages.ids == nullptr ? b : pages.ids[b * pages.batch + block];
}

}  // namespace flash_cute
