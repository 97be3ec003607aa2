// The rows of packed tensors that no sequence has.
#pragma once

#include "core/layout/seq.h"

namespace flash_cute {

struct RowRange {
  int64_t begin, end;
};

// Gap b of `batch` + 1: from the end of sequence b - 1 (gap 0: from row 0) to the start of the next one. For offsets in
// any order the gaps have all rows of no sequence, and no others; `ascending`: no offset is below the one before.
// span_of(sequence) is a SeqSpan.
template <class SpanOf>
FC_HOST_DEVICE RowRange gap_of(int b, int batch, int64_t total, bool ascending, const SpanOf& span_of) {
  RowRange rows{0, b < batch ? span_of(b).offset : total};
  if (b > 0) {
    const SeqSpan before = span_of(b - 1);
    rows.begin = before.offset + before.length;
  }
  if (ascending || rows.begin == rows.end) return rows;  // gap b + 1 begins there, too, if sequence b is empty
  rows.end = total;
  for (int i = 0; i < batch && rows.begin < rows.end; ++i) {
    const SeqSpan other = span_of(i);
    if (other.length == 0 || other.offset + other.length <= rows.begin) continue;
    rows.end = other.offset <= rows.begin ? rows.begin : other.offset < rows.end ? other.offset : rows.end;
  }
  return rows;
}

}  // namespace flash_cute
