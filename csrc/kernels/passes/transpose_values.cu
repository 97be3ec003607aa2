#include "kernels/passes/transpose_values.h"

#include <algorithm>

#include "core/layout/cached_seq.h"
#include "core/layout/transposed_values.h"
#include "kernels/common/pdl.h"
#include "kernels/common/query_tile.h"
#include "kernels/launch.h"

namespace flash_cute {
namespace {

constexpr int kThreads = 256;
constexpr int kKeys = TransposedValues::kTile;
constexpr int kDims = 128;  // of a CTA's tile
constexpr int kWords = kDims / 4;  // of a row

// The word of four dims of a row of the tile. Rows of other groups of 16 are moved, so that a warp which reads eight
// groups finds them in other banks.
__device__ int word_of(int row, int word) {
  return row * kWords + (word + 4 * (row / 16)) % kWords;
}

// A tile of keys: its sequence, or -1, and its first key.
struct Keys {
  int sequence, first, length;
  int64_t offset;
};
__device__ Keys keys_of_tile(const FwdParams& p, int tile, int sequence) {
  const int64_t row = int64_t(tile) * kKeys;
  auto span_of = [&](int b, const int* used) { return seq_span(p.varlen.cu_k, used, b, p.seqlen_k, p.total_k); };
  auto first_of = [&](int b) { return row - TransposedValues::first_key(p, span_of(b, nullptr), b); };
  if (!p.dense_keys()) {
    sequence = last_sequence(p.batch, [&](int b) {
      const int64_t first = first_of(b);
      return 0 <= first && first < span_of(b, nullptr).length;
    });
    if (sequence < 0) return {-1, 0, 0, 0};
  }
  const SeqSpan span = span_of(sequence, p.varlen.used_k);
  return {sequence, static_cast<int>(first_of(sequence)), span.length, span.offset};
}

// A key's place in tensors: (batch, row), with a negative row if it does not exist.
struct Place {
  int64_t batch, row;
};
__device__ Place place_of(const FwdParams& p, const Keys& keys, int row) {
  const int key = keys.first + row;
  if (key >= keys.length) return {0, -1};
  if (p.pages.ids == nullptr) return {keys.sequence, keys.offset + key};
  const int page = page_id(p.pages, keys.sequence, key / p.pages.size);
  return {page, page < 0 || page >= p.pages.count ? -1 : key % p.pages.size};
}

// Bytes `at` of four words, side by side.
__device__ uint32_t bytes_of(const uint32_t (&words)[4], int at) {
  const uint32_t low = __byte_perm(words[0], words[1], at | (at + 4) << 4);
  return __byte_perm(low, __byte_perm(words[2], words[3], at | (at + 4) << 4), 0x5410);
}

// One CTA for a tile of keys and dims of a head. Vector: what a thread loads of a row.
template <class Vector>
__global__ void __launch_bounds__(kThreads) transpose(const __grid_constant__ FwdParams p, int tiles, int parts) {
  __shared__ __align__(16) uint32_t tile[kKeys * kWords];
  const int number = blockIdx.x % tiles, other = blockIdx.x / tiles;
  const int first_dim = other % parts * kDims, head = other / parts % p.heads_k;
  const int sequence = other / parts / p.heads_k;  // of those that have memory of their own
  // After this wait the kernel before has ended: V may be its result, and the workspace its own.
  wait_on_dependent_grids();
  launch_dependent_grids();
  const Keys keys = keys_of_tile(p, number, sequence);
  if (keys.sequence < 0) return;
  const int dims = min(kDims, p.head_dim_v - first_dim);
  constexpr int kVectors = kDims / sizeof(Vector);
  for (int i = threadIdx.x; i < kKeys * kVectors; i += kThreads) {
    const int row = i / kVectors, dim = i % kVectors * static_cast<int>(sizeof(Vector));
    const Place from = place_of(p, keys, row);
    Vector loaded{};
    if (from.row >= 0 && dim < dims) {
      loaded = *reinterpret_cast<const Vector*>(static_cast<const uint8_t*>(p.v.ptr) + from.batch * p.v.batch +
                                                from.row * p.v.row + head * p.v.head + first_dim + dim);
    }
    auto* const to = reinterpret_cast<uint8_t*>(tile + word_of(row, dim / 4)) + dim % 4;
    *reinterpret_cast<Vector*>(to) = loaded;
  }
  if (p.key_factors != nullptr && first_dim == 0 && threadIdx.x < kKeys) {
    const Place from = place_of(p, keys, threadIdx.x);
    const Descale& k = p.fp8.k;
    float factor = p.fp8.negative ? -1.f : 1.f;
    if (k.each && from.row >= 0) factor *= k.ptr[from.batch * k.batch + from.row * k.row + head * k.head];
    p.key_factors[((int64_t(sequence) * p.heads_k + head) * tiles + number) * kKeys + threadIdx.x] = factor;
  }
  // After this barrier the tile is in shared memory.
  __syncthreads();
  constexpr int kGroups = kKeys / 16;
  for (int i = threadIdx.x; i < kGroups * kWords; i += kThreads) {
    const int group = i % kGroups, word = i / kGroups;  // 16 keys, and four dims
    uint4 of_dims[4];
    CUTE_UNROLL
    for (int j = 0; j < 4; ++j) {
      const int pairs[2] = {16 * group + TransposedValues::first_pair(j),
                            16 * group + TransposedValues::second_pair(j)};
      const uint32_t words[4] = {tile[word_of(pairs[0], word)], tile[word_of(pairs[0] + 1, word)],
                                 tile[word_of(pairs[1], word)], tile[word_of(pairs[1] + 1, word)]};
      CUTE_UNROLL
      for (int dim = 0; dim < 4; ++dim) reinterpret_cast<uint32_t*>(&of_dims[dim])[j] = bytes_of(words, dim);
    }
    const int64_t of_head = (int64_t(sequence) * p.heads_k + head) * p.head_dim_v + first_dim + 4 * word;
    auto* const to = static_cast<uint8_t*>(p.values) + int64_t(number) * kKeys + 16 * group;
    CUTE_UNROLL
    for (int dim = 0; dim < 4; ++dim) {
      if (4 * word + dim < dims) *reinterpret_cast<uint4*>(to + (of_head + dim) * tiles * kKeys) = of_dims[dim];
    }
  }
}

}  // namespace

cudaError_t transpose_values(const FwdParams& p, cudaStream_t stream) {
  const auto values = TransposedValues::of(p);
  const int parts = (p.head_dim_v + kDims - 1) / kDims;
  const int64_t tiles = values.keys / kKeys, ctas = tiles * values.sequences * p.heads_k * parts;
  if (ctas > kMaxCtas) return cudaErrorInvalidConfiguration;
  auto run = [&](auto vector) {
    return launch_with_pdl<transpose<decltype(vector)>>({ctas, kThreads, 0}, stream, p, static_cast<int>(tiles), parts);
  };
  if (p.v.vectors && p.head_dim_v % 16 == 0) return run(uint4{});
  return run(uint8_t{});
}

}  // namespace flash_cute
