#include "kernels/passes/tile_lists.h"

#include "core/layout/tile_lists.h"
#include "kernels/launch.h"

namespace flash_cute {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr int kTogether = 8;  // loads in flight of a thread

// A list's first entry: how many follow, and whether each has a whole tile.
__device__ TileEntry head_of_list(int entries, bool whole) {
  return {entries, entries > 0 && whole ? TileCode::kWhole : 0};
}

// One warp for each row.
__global__ void __launch_bounds__(kThreads)
    compact_rows(const __grid_constant__ TileCodes codes, TileEntry* lists, int capacity) {
  const int64_t row = int64_t(blockIdx.x) * kWarps + threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  if (row >= codes.tables * codes.rows) return;
  const int* const from = codes.ptr + row * codes.columns;
  TileEntry* const to = lists + row * (1 + capacity);
  int found = 0, whole = 0;
  for (int first = lane; first - lane < codes.columns; first += 32 * kTogether) {
    int code[kTogether];
    for (int i = 0; i < kTogether; ++i) {
      const int column = first + 32 * i;
      code[i] = column < codes.columns ? from[column] : 0;
    }
    for (int i = 0; i < kTogether; ++i) {
      const uint32_t listed = __ballot_sync(~0u, code[i] != 0);
      const int place = found + __popc(listed & ((1u << lane) - 1));
      if (code[i] != 0 && place < capacity) to[1 + place] = {first + 32 * i, code[i]};
      found += __popc(listed);
      whole += __popc(__ballot_sync(~0u, code[i] == TileCode::kWhole));
    }
  }
  const bool all_whole = whole == found;
  found = min(found, capacity);
  if (lane == 0) to[0] = head_of_list(found, all_whole);
  for (int i = found + lane; i < capacity; i += 32) to[1 + i] = {};
}

__global__ void __launch_bounds__(kThreads)
    scatter(const __grid_constant__ TileCodes table, const __grid_constant__ ListsOfColumns p) {
  const int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x, row = i / (1 + p.capacity);
  const int entry = static_cast<int>(i % (1 + p.capacity));
  if (row >= table.tables * table.rows || entry == 0) return;
  const TileEntry* const list = p.of_rows + row * (1 + p.capacity);
  const auto [tile, code] = list[entry];
  if (entry > list->tile || tile < 0 || tile >= table.columns) return;
  p.codes[row * table.columns + tile] = code;
  p.numbers[row * table.columns + tile] = entry - 1;
}

// One CTA for 32 columns of a table, one lane for each; warps share the rows.
__global__ void __launch_bounds__(kThreads, 1)
    compact_columns(const __grid_constant__ TileCodes table, const __grid_constant__ ListsOfColumns p, int ctas) {
  __shared__ int counts[kWarps][32];
  __shared__ int wholes[kWarps][32];
  const int64_t number = blockIdx.x / ctas;  // of the table
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int column = int(blockIdx.x % ctas) * 32 + lane;
  const bool exists = column < table.columns;
  const int share = (table.rows + kWarps - 1) / kWarps, begin = warp * share, end = min(table.rows, begin + share);
  const int64_t first_of_table = number * table.rows * table.columns + column;
  auto each = [&](auto&& listed) {
    for (int first = begin; first < end; first += kTogether) {
      int code[kTogether];
      for (int i = 0; i < kTogether; ++i) {
        const bool inside = exists && first + i < end;
        code[i] = inside ? p.codes[first_of_table + int64_t(first + i) * table.columns] : 0;
      }
      for (int i = 0; i < kTogether; ++i) {
        if (code[i] != 0) listed(first + i, code[i]);
      }
    }
  };
  int found = 0, whole = 0;
  each([&](int, int code) {
    ++found;
    whole += code == TileCode::kWhole;
  });
  counts[warp][lane] = found;
  wholes[warp][lane] = whole;
  // After this barrier all counts are there.
  __syncthreads();
  int place = 0, all = 0, all_whole = 0;
  for (int i = 0; i < kWarps; ++i) {
    if (i < warp) place += counts[i][lane];
    all += counts[i][lane];
    all_whole += wholes[i][lane];
  }
  const int64_t list = (number * table.columns + column) * (1 + table.rows);
  each([&](int row, int code) {
    ++place;
    p.lists[list + place] = {row, code};
    p.ranks[list + place] = p.numbers[first_of_table + int64_t(row) * table.columns];
  });
  if (exists && warp == 0) {
    p.lists[list] = head_of_list(all, all_whole == all);
    p.ranks[list] = 0;
  }
  // The rest of each list, which a warp writes as one piece.
  for (int other_lane = warp; other_lane < min(32, table.columns - (column - lane)); other_lane += kWarps) {
    const int64_t first = list + int64_t(other_lane - lane) * (1 + table.rows);
    for (int i = 1 + __shfl_sync(~0u, all, other_lane) + lane; i <= table.rows; i += 32) {
      p.lists[first + i] = {};
      p.ranks[first + i] = 0;
    }
  }
}

}  // namespace

cudaError_t lists_of_rows(const TileCodes& codes, TileEntry* lists, int capacity, cudaStream_t stream) {
  const int64_t rows = codes.tables * codes.rows;
  return launch_kernel<compact_rows>((rows + kWarps - 1) / kWarps, kThreads, 0, stream, codes, lists, capacity);
}

cudaError_t lists_of_columns(const TileCodes& table, const ListsOfColumns& p, cudaStream_t stream) {
  const int64_t entries = table.tables * table.rows * (1 + int64_t(p.capacity));
  const int ctas = (table.columns + 31) / 32;
  if (cudaError_t e = launch_kernel<scatter>((entries + kThreads - 1) / kThreads, kThreads, 0, stream, table, p)) {
    return e;
  }
  return launch_kernel<compact_columns>(table.tables * ctas, kThreads, 0, stream, table, p, ctas);
}

}  // namespace flash_cute
