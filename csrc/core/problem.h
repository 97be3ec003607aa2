// What a call asks for, as plain data: filled by csrc/api, read by kernels. No torch, no CuTe.
#pragma once

#include <cstdint>

#include "core/config.h"

namespace flash_cute {

// A tensor of vectors, (batch, row, head, dim) with dim contiguous. Strides count elements. For sequences laid end to
// end, batch is 0 and rows count through all of them.
struct Matrices {
  void* ptr;
  int64_t batch, row, head;
  bool vectors;  // every vector starts on a 16-byte boundary
};

// One fp32 number a row and head, rows contiguous. Strides count elements.
struct Statistics {
  float* ptr;  // [b, h, rows], or [h, rows of all sequences] with batch 0; may be null
  int64_t batch, head;
};

// Key j is visible from query i iff i + shift - left <= j <= i + shift + right, shift = seqlen_k - seqlen_q.
// Lengths and bounds stay below kUnbounded, so that sums of three of them fit an int.
struct Band {
  static constexpr int kUnbounded = 1 << 29;
  int left = kUnbounded;
  int right = kUnbounded;
};

// Where sequences of different lengths lie. Values come from the device unchecked: SeqInfo clamps them.
struct Sequences {
  const int* cu_q = nullptr;    // [batch + 1]; null: dense
  const int* cu_k = nullptr;    // [batch + 1]; null: dense
  const int* used_q = nullptr;  // [batch], may be null
  const int* used_k = nullptr;  // [batch], may be null
};

struct FwdProblem {
  DType dtype;
  int batch, heads, heads_k, head_dim;
  int seqlen_q, seqlen_k;    // the longest, for sequences of different lengths
  int64_t total_q, total_k;  // rows of all sequences
  Sequences sequences;
  Band band;
  float softmax_scale;
  Matrices q, k, v;
  Matrices out;
  Statistics lse;      // natural log
  Statistics row_max;  // may be null
};

struct BwdProblem {
  FwdProblem fwd;  // with its results: out and lse
  Matrices dout, dq, dk, dv;
  Statistics dlse;       // may be null
  Statistics softmax_d;  // result: rowsum(dout * out) - dlse
  // Workspaces. Rows are padded so that every sequence starts on a multiple of block_m: see PaddedRows.
  Statistics lse_log2;   // lse / ln 2; +inf where a row does not exist or sees no key
  Statistics row_dot;    // softmax_d, 0 where a row does not exist
  float* dq_accum;       // [b, h, rows, head_dim of the tile], each block of rows in the order of its MMA fragment
};

// The padded row space of backward's workspaces: sequence b starts at the multiple of `block` that first_row gives, and
// no two sequences share a block.
struct PaddedRows {
  int block;

  constexpr int64_t dense(int seqlen) const { return int64_t(seqlen + block - 1) / block * block; }
  constexpr int64_t packed(int64_t total, int batch) const { return (total + int64_t(batch) * block) / block * block; }
  constexpr int64_t first_row(int64_t offset, int b) const { return (offset + int64_t(b) * block) / block * block; }
};

template <Op>
struct ProblemOf;
template <>
struct ProblemOf<Op::Fwd> {
  using type = FwdProblem;
};
template <>
struct ProblemOf<Op::Bwd> {
  using type = BwdProblem;
};
template <Op op>
using Problem = typename ProblemOf<op>::type;

}  // namespace flash_cute
