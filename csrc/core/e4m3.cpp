#include "core/e4m3.h"

#include <cmath>

#include "core/layout/addressable.h"
#include "core/layout/transposed_values.h"
#include "core/route.h"

namespace flash_cute {
namespace {

constexpr int kTmaVector = 16;     // numbers that TMA aligns
constexpr int kSwizzleRows = 8;    // of a page that land in shared memory together
constexpr int kNoKeyStride = 512;  // at least the largest head dim

// A pass will write the lengths: until then only this pointer's not being null counts.
constexpr int kCountedLater = 0;

// Columns of q and k: whole vectors, and none of a kernel's blocks of columns is empty.
int padded_dim(const FwdProblem& p) {
  const int wide = p.head_dim_v > 128 && p.head_dim <= 128 ? 256 : p.head_dim;
  return (wide + kTmaVector - 1) / kTmaVector * kTmaVector;
}

// The problem after all copies but those of rows.
FwdProblem before_rows(const FwdProblem& problem, const Fp8Copies& copies) {
  const FwdProblem p = problem.pages.ids == nullptr ? problem : over_counted_pages(problem, &kCountedLater);
  if (copies.no_keys) return over_no_keys(p, nullptr, &kCountedLater);
  return copies.gather ? over_gathered(p, copies.gathered_rows) : p;
}

}  // namespace

Fp8Copies copies_of(const FwdProblem& problem) {
  Fp8Copies copies{.head_dim = padded_dim(problem)};
  const Pages& pages = problem.pages;
  if (pages.ids == nullptr) {
    copies.no_keys = problem.all_keys() == 0;
  } else {
    copies.gathered_rows = gathered_rows(problem);
    copies.no_keys = problem.batch == 0 || pages.count == 0 || copies.gathered_rows == 0;
    copies.gather = !copies.no_keys && pages.together(TransposedValues::kTile) % kSwizzleRows != 0;
  }
  const FwdProblem p = before_rows(problem, copies);
  if (p.batch == 0 || p.all_rows() == 0) return copies;  // nothing is read
  const bool pads = copies.head_dim != p.head_dim;
  copies.q = pads || !addressable(p, {p.q}, {});
  copies.k = !copies.no_keys && (pads || !addressable(p, {}, {p.k}));
  return copies;
}

FwdProblem over_copies(const FwdProblem& problem) {
  const Fp8Copies copies = copies_of(problem);
  FwdProblem p = before_rows(problem, copies);
  if (copies.q) p.q = stored_queries(p).contiguous(copies.head_dim, nullptr);
  if (copies.k) p.k = stored_keys(p).contiguous(copies.head_dim, nullptr);
  p.head_dim = copies.head_dim;
  return p;
}

FwdProblem over_counted_pages(const FwdProblem& problem, const int* lengths) {
  FwdProblem p = over_pages(problem, lengths).fwd;
  p.varlen.used_k = lengths;
  return p;
}

FwdProblem over_no_keys(const FwdProblem& problem, void* row, const int* lengths) {
  FwdProblem p = problem;
  const int64_t stride = int64_t(p.heads_k) * kNoKeyStride;
  p.k = p.v = {row, stride, stride, kNoKeyStride, true};
  p.pages = {};
  p.seqlen_k = 1;
  p.total_k = p.batch;
  p.varlen.cu_k = nullptr;
  p.varlen.used_k = lengths;
  return p;
}

StoredRows stored_queries(const FwdProblem& p) {
  return p.dense() ? StoredRows{p.batch, p.seqlen_q, p.heads, false} : StoredRows{1, p.total_q, p.heads, true};
}

StoredRows stored_keys(const FwdProblem& p) {
  if (p.pages.ids != nullptr) return {p.pages.count, p.pages.size, p.heads_k, false};
  return p.dense_keys() ? StoredRows{p.batch, p.seqlen_k, p.heads_k, false} : StoredRows{1, p.total_k, p.heads_k, true};
}

void move_sign(FwdProblem& p) {
  p.fp8.negative = p.softmax_scale < 0;
  p.softmax_scale = std::fabs(p.softmax_scale);
}

int64_t bytes_of_copies(const FwdProblem& problem) {
  const Fp8Copies copies = copies_of(problem);
  const FwdProblem p = over_copies(problem);
  const int64_t length = sizeof(int);
  int64_t bytes = problem.pages.ids == nullptr ? 0 : p.batch * length;
  if (copies.no_keys) bytes += p.batch * (p.k.batch + length);
  if (copies.gather) bytes += stored_keys(p).numbers(problem.head_dim + problem.head_dim_v) + p.batch * length;
  if (copies.q) bytes += stored_queries(p).numbers(p.head_dim);
  if (copies.k) bytes += stored_keys(p).numbers(p.head_dim);
  return bytes;
}

}  // namespace flash_cute
