// Makes the lists of TileLists, in ascending order, from a table of codes, or from the other side's lists.
#pragma once

#include <cuda_runtime_api.h>

#include "core/problem.h"

namespace flash_cute {

// Codes of all tiles of `tables` tables, 0 where nothing is visible: [tables, rows, columns].
struct TileCodes {
  const int* ptr;
  int64_t tables;
  int rows, columns;
};

// Lists of a table's rows: [tables, rows, 1 + capacity], zeros after the last entry. Entries beyond capacity are
// dropped.
cudaError_t lists_of_rows(const TileCodes& codes, TileEntry* lists, int capacity, cudaStream_t stream);

// Lists of its columns, each with room for all rows: [tables, columns, 1 + rows]; and for each entry its number in the
// list of the row. `codes` and `numbers`, [tables, rows, columns], are given as zeros, to work in.
struct ListsOfColumns {
  const TileEntry* of_rows;  // [tables, rows, 1 + capacity]
  int capacity;
  int *codes, *numbers;
  TileEntry* lists;  // results
  int* ranks;
};
cudaError_t lists_of_columns(const TileCodes& table, const ListsOfColumns& p, cudaStream_t stream);

}  // namespace flash_cute
