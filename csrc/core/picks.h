// For tests: what heuristics.h and backward_order.h pick on a Hopper GPU for sizes alone, of all kernels, whether this
// build has them or not.
#pragma once

#include <cstdint>
#include <string>
#include <tuple>

namespace flash_cute {

// Id of the kernel that a forward of bf16 would use, into how many parts it would cut keys, and how many heads would
// share a tile. Windows of -1 have no end; with `varlen` lengths are those of sequences end to end; heads_k of 0 are as
// many as heads; `rules` are softcap or ALiBi.
std::tuple<std::string, int64_t, int64_t> preferred_forward(int64_t batch, int64_t heads, int64_t seqlen_q,
                                                            int64_t seqlen_k, int64_t head_dim,
                                                            int64_t window_size_left, int64_t window_size_right,
                                                            bool varlen, int64_t sms, int64_t heads_k, bool rules);

// Id of the kernel, of decoding or of forward, that a call of bf16 over a key/value cache would use, with lengths of
// sequences in a tensor, or keys in pages, where memory gives so many GB/s, and a CTA has so much shared memory at
// most.
std::string preferred_kvcache(int64_t batch, int64_t heads, int64_t heads_k, int64_t seqlen_q, int64_t seqlen_k,
                              int64_t head_dim, bool lengths, bool pages, int64_t sms, int64_t memory_gb_s,
                              int64_t smem_optin);

// CTAs of each cluster of Hopper's kernel of decoding, if it does such a call.
int64_t preferred_decode_cluster(int64_t batch, int64_t heads, int64_t heads_k, int64_t seqlen_q, int64_t seqlen_k,
                                 int64_t head_dim);

// Parts of heads and of queries that a plain backward of bf16 would have, and how many tiles before those; sizes as
// above.
std::tuple<int64_t, int64_t, int64_t> preferred_parts(int64_t batch, int64_t heads, int64_t heads_k, int64_t seqlen_q,
                                                      int64_t seqlen_k, int64_t head_dim, int64_t head_dim_v,
                                                      int64_t window_size_left, int64_t window_size_right, bool varlen,
                                                      int64_t sms);

// In which order tiles of such a backward would add to sums of dQ, "added", "opened" or "in turns", and whether its
// CTAs would be kept near each other.
std::tuple<std::string, bool> preferred_dq_order(int64_t batch, int64_t heads, int64_t heads_k, int64_t seqlen_q,
                                                 int64_t seqlen_k, int64_t head_dim, int64_t head_dim_v,
                                                 int64_t window_size_left, int64_t window_size_right, bool varlen,
                                                 bool deterministic);

// The fields of its KeyOrder.
std::tuple<int64_t, int64_t, bool, bool, bool> preferred_key_order(int64_t batch, int64_t heads, int64_t heads_k,
                                                                   int64_t seqlen_q, int64_t seqlen_k, int64_t head_dim,
                                                                   int64_t head_dim_v, int64_t window_size_left,
                                                                   int64_t window_size_right, bool varlen,
                                                                   bool deterministic);

}  // namespace flash_cute
