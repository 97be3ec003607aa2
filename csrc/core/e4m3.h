// What attention of e4m3 inputs copies before its kernel runs: TMA loads Q and K, and V is transposed by a pass.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/problem.h"

namespace flash_cute {

struct Fp8Copies {
  bool no_keys = false;  // there is no key: a row that no sequence has takes their place
  bool gather = false;   // keys and values leave pages that kernels cannot read
  int gathered_rows = 0;  // of each sequence
  bool q = false, k = false;  // rows are copied to where TMA reads them,
  int head_dim = 0;           // with so many columns
};

// The copies of a call. Pages are counted before, so that lengths of sequences are known.
Fp8Copies copies_of(const FwdProblem& problem);

// The problem of the kernel, before the copies are allocated. Tensors that are copied have no pointers.
FwdProblem over_copies(const FwdProblem& problem);

// Packed sequences over pages as kernels see them, with their lengths at `lengths`.
FwdProblem over_counted_pages(const FwdProblem& problem, const int* lengths);

// The problem over a row of keys, at `row`, that no sequence has: the lengths at `lengths` are zeros.
FwdProblem over_no_keys(const FwdProblem& problem, void* row, const int* lengths);

// Rows of a tensor in memory: (batches, rows, heads, dim).
struct StoredRows {
  int batches;
  int64_t rows;
  int heads;
  bool packed;

  // At most 2^57: a plan request may have any sizes.
  int64_t numbers(int dim) const {
    return static_cast<int64_t>(std::min(double(batches) * double(rows) * heads * dim, 0x1p57));
  }
  TensorView contiguous(int dim, void* ptr) const {
    const int64_t row = int64_t(heads) * dim;
    return {ptr, packed ? 0 : rows * row, row, dim, dim % 16 == 0};
  }
};
StoredRows stored_queries(const FwdProblem& problem);
StoredRows stored_keys(const FwdProblem& problem);

// Kernels have no scale below 0: factors of keys take its sign.
void move_sign(FwdProblem& problem);

// Bytes of the copies, and of lengths.
int64_t bytes_of_copies(const FwdProblem& problem);

}  // namespace flash_cute
