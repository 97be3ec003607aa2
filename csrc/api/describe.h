// Makes a kernel's problem from an op's arguments.
#pragma once

#include "api/arguments.h"
#include "core/problem.h"

namespace flash_cute {

// Checks the inputs and fills everything but the results.
FwdProblem make_problem(const FwdArguments& a);
// The same for inputs that are to be of this dtype.
FwdProblem make_problem(const FwdArguments& a, DType dtype);

// The pages of `batch` sequences, from a block_table; k holds all pages.
Pages make_pages(const View& block_table, const View& k, int batch, const View& q);

// Scale, band, rules and sink, for a problem whose sizes are known.
void describe_scores(FwdProblem& p, const Score& score, const View& q);

// The lists of a sparse call: one for each tile of `rows` queries, or in backward of keys.
void describe_lists(FwdProblem& p, const FwdArguments& a, int rows);

// The shape of q with the head dim of v, uninitialised.
Tensor allocate_out(const View& q, const View& v);

// RowStats of each row, [b, h, s] or [h, rows], uninitialised.
Tensor allocate_row_stats(const View& q);

}  // namespace flash_cute
