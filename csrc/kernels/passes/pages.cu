#include "kernels/passes/pages.h"

#include <algorithm>

#include "core/layout/cached_seq.h"
#include "kernels/launch.h"

namespace flash_cute {
namespace {

constexpr int kThreads = 128;
constexpr int kCtaRows = 8;

__global__ void __launch_bounds__(kThreads)
    count_keys(const int* cu_k, const int* used_k, int batch, int longest, int* lengths) {
  const int b = static_cast<int>(blockIdx.x * kThreads + threadIdx.x);
  if (b >= batch) return;
  const int64_t length = used_k != nullptr ? used_k[b] : int64_t(cu_k[b + 1]) - cu_k[b];
  lengths[b] = clamped(length, longest);
}

// A row of all heads, in units of so many elements; zeros if it does not exist.
template <class Unit>
__device__ void copy_row(const TensorView& from, int64_t page, int64_t row, bool exists, const TensorView& to,
                         int64_t b, int64_t to_row, int heads, int head_dim, int unit_elements) {
  const int units = head_dim / unit_elements;
  const Unit* const source = static_cast<const Unit*>(from.ptr) + (page * from.batch + row * from.row) / unit_elements;
  Unit* const target = static_cast<Unit*>(to.ptr) + (b * to.batch + to_row * to.row) / unit_elements;
  for (int i = threadIdx.x; i < heads * units; i += kThreads) {
    const int head = i / units, unit = i % units;
    target[head * to.head / unit_elements + unit] = exists ? source[head * from.head / unit_elements + unit] : Unit{};
  }
}

// One CTA for kCtaRows rows of a sequence.
template <class Unit>
__global__ void __launch_bounds__(kThreads)
    gather(const __grid_constant__ DecodeProblem p, const __grid_constant__ GatheredKeys to, int unit_elements,
           int ctas_of_sequence) {
  const FwdProblem& f = p.fwd;
  const int b = static_cast<int>(blockIdx.x) / ctas_of_sequence;
  const int first = static_cast<int>(blockIdx.x) % ctas_of_sequence * kCtaRows;
  const SeqSpan keys = cached_seq(p, b).k;
  const int length = min(keys.length, to.rows);
  if (first == 0 && threadIdx.x == 0) to.lengths[b] = length;
  for (int row = first; row < min(first + kCtaRows, length); ++row) {
    const int place = static_cast<int>(keys.offset) + row;
    const int page = page_id(f.pages, b, place / f.pages.size);
    const bool exists = 0 <= page && page < f.pages.count;
    copy_row<Unit>(f.k, page, place % f.pages.size, exists, to.k, b, row, f.heads_k, f.head_dim, unit_elements);
    copy_row<Unit>(f.v, page, place % f.pages.size, exists, to.v, b, row, f.heads_k, f.head_dim_v, unit_elements);
  }
}

}  // namespace

cudaError_t count_paged_keys(const int* cu_k, const int* used_k, int batch, int longest, int* lengths,
                             cudaStream_t stream) {
  return launch_kernel<count_keys>((batch + kThreads - 1) / kThreads, kThreads, 0, stream, cu_k, used_k, batch, longest,
                                   lengths);
}

cudaError_t gather_pages(const DecodeProblem& p, const GatheredKeys& to, cudaStream_t stream) {
  const int ctas_of_sequence = std::max(1, (to.rows + kCtaRows - 1) / kCtaRows);
  const int64_t ctas = int64_t(p.fwd.batch) * ctas_of_sequence;
  const int bytes = element_bytes(p.fwd.dtype), in_vector = 16 / bytes;
  const bool vectors = p.fwd.k.vectors && p.fwd.v.vectors && to.k.vectors && to.v.vectors &&
                       p.fwd.head_dim % in_vector == 0 && p.fwd.head_dim_v % in_vector == 0;
  if (vectors) return launch_kernel<gather<uint4>>(ctas, kThreads, 0, stream, p, to, in_vector, ctas_of_sequence);
  if (bytes == 4) return launch_kernel<gather<uint32_t>>(ctas, kThreads, 0, stream, p, to, 1, ctas_of_sequence);
  if (bytes == 1) return launch_kernel<gather<uint8_t>>(ctas, kThreads, 0, stream, p, to, 1, ctas_of_sequence);
  return launch_kernel<gather<uint16_t>>(ctas, kThreads, 0, stream, p, to, 1, ctas_of_sequence);
}

}  // namespace flash_cute
