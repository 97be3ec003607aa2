// From an op's arguments to the problem that kernels are given.
#pragma once

#include "api/arguments.h"
#include "core/problem.h"

namespace flash_cute {

// Checks the inputs and fills everything but the results.
FwdProblem make_problem(const FwdArguments& a);

// Where the keys of `batch` sequences lie, by a table of pages; k has them all.
Pages make_pages(const View& block_table, const View& k, int batch, const View& q);

// Scale, band, rules and sink, for a problem whose sizes are known.
void describe_scores(FwdProblem& p, const Score& score, const View& q);

// The lists of a sparse call, if it is one: one for each tile of `rows` queries, or in backward of keys.
void describe_lists(FwdProblem& p, const FwdArguments& a, int rows);

// The shape of q with the head dim of v, uninitialised.
Tensor allocate_out(const View& q, const View& v);

// RowStats of each row, [b, h, s] or [h, rows], uninitialised.
Tensor allocate_row_stats(const View& q);

}  // namespace flash_cute
