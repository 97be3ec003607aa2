// torch.ops.flash_cute.tile_lists and transposed_tile_lists: the lists of sparse calls.
#include <torch/csrc/stable/accelerator.h>

#include <algorithm>

#include "api/api.h"
#include "api/arguments.h"
#include "api/tensors.h"
#include "kernels/passes/tile_lists.h"

namespace flash_cute {
namespace {

void check_int32(const View& t, int dims, const char* name) {
  FC_CHECK(t.dtype == ScalarType::Int && t.dims == dims && is_contiguous(t), name, " must be contiguous int32 with ",
           dims, " dimensions");
}

Tensor allocate_lists(const View& like, int64_t rows, int64_t capacity) {
  checked_int(capacity, "entries of a list");
  return allocate(like, {like.size(0), like.size(1), rows, 1 + capacity, 2}, ScalarType::Int);
}

TileEntry* entries_of(const Tensor& lists) {
  return static_cast<TileEntry*>(lists.data_ptr());
}

}  // namespace

void tile_lists(StableIValue* stack, uint64_t, uint64_t) {
  Stack in(stack);
  const View codes = in.view();
  const auto capacity = in.take<int64_t>();
  check_int32(codes, 4, "codes");
  FC_CHECK(capacity >= 0, "capacity is ", capacity, "; expected a count >= 0, the most entries of a list");
  const torch::stable::accelerator::DeviceGuard guard(codes.device);
  const Tensor lists = allocate_lists(codes, codes.size(2), capacity);
  const TileCodes table{static_cast<const int*>(codes.ptr), codes.size(0) * codes.size(1),
                        checked_int(codes.size(2), "rows of codes"), checked_int(codes.size(3), "columns of codes")};
  check_cuda("tile_lists", lists_of_rows(table, entries_of(lists), int(capacity), current_stream(codes)));
  in.put(lists);
}

void transposed_tile_lists(StableIValue* stack, uint64_t, uint64_t) {
  Stack in(stack);
  const View lists = in.view();
  const auto tiles = in.take<int64_t>();
  check_int32(lists, 5, "lists");
  FC_CHECK(lists.size(3) >= 1 && lists.size(4) == 2, "lists must be (batch, heads, tiles, 1 + entries, 2)");
  FC_CHECK(tiles >= 0, "tiles is ", tiles, "; expected a count >= 0, of the tiles that entries number");
  const torch::stable::accelerator::DeviceGuard guard(lists.device);
  const cudaStream_t stream = current_stream(lists);
  const int64_t rows = lists.size(2), numbers = lists.size(0) * lists.size(1) * rows * tiles;
  const Tensor result = allocate_lists(lists, tiles, rows);
  const Tensor ranks = allocate(lists, {lists.size(0), lists.size(1), tiles, 1 + rows}, ScalarType::Int);
  const Tensor scratch = allocate(lists, {2 * numbers}, ScalarType::Int);
  auto* const codes = static_cast<int*>(scratch.data_ptr());
  const TileCodes table{codes, lists.size(0) * lists.size(1), checked_int(rows, "rows of lists"),
                        checked_int(tiles, "tiles")};
  const ListsOfColumns p{static_cast<const TileEntry*>(lists.ptr),
                         checked_int(lists.size(3) - 1, "entries"),
                         codes,
                         codes + numbers,
                         entries_of(result),
                         static_cast<int*>(ranks.data_ptr())};
  check_cuda("transposed_tile_lists", cudaMemsetAsync(codes, 0, 2 * numbers * sizeof(int), stream));
  check_cuda("transposed_tile_lists", lists_of_columns(table, p, stream));
  in.put(result, ranks);
}

}  // namespace flash_cute
