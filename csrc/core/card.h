// The cost models' constants, fitted to measurements: one struct per GPU. No other file has such numbers.
#pragma once

#include <cstdint>

#include "core/device.h"

namespace flash_cute {

// The speed of a kernel of forward, relative to its alternatives.
struct ForwardSpeed {
  double rate;       // asymptotic, relative
  double tile_keys;  // overhead of a tile, in keys
};

struct Card {
  struct Forward {
    // Indexed by columns of K: 64, up to 128, more. For tiles of 192 or 128 queries; pairs are clusters of two CTAs.
    ForwardSpeed narrow_192, narrow_128, middle_192, middle_192_pairs, middle_128, middle_128_pairs, wide, wide_pairs;
    double worthwhile;  // splits are used if they take at most this fraction of the time without splits
    double kernel_us;  // time of one more kernel
    double number_us;  // time of an fp32 number that a split writes and combine reads
    double empty_row;  // time of an empty row, relative to a full one: it draws less power
  } forward;

  // Forward instead of decode, over a cache.
  struct Cached {
    double decode_overhead_us;  // time of decode without its products
    double long_decode_us;  // decode that takes longer is long enough for forward to make up for its overhead
    int memory_bound_rows;  // up to so many query rows decode is memory-bound
    int near_bound_rows;  // decode's tile of so many rows takes a tenth longer than reading the keys, with 128 dims
  } cached;

  struct Decode {
    double rate;  // speed with tiles of 64 rows, in the units of forward's
    double rows_of_reading;  // reading keys costs as much as so many rows of products
    double overlapped;  // time with two overlapping CTAs per SM, relative to one
    // With so many work tiles per SM or more, two resident CTAs beat one: for short sequences, for lengths that only
    // the device knows, and for long sequences on a GPU with less or more than `high_gb_s`.
    double overlap_short, overlap_unknown, overlap_long, overlap_long_high_gb_s;
    int many_heads;  // kv heads of 64 dims, of which each has few CTAs
    int high_gb_s;  // bandwidth per SM with which one CTA suffices for long sequences (H200: 37, H100: 25)
    int64_t short_numbers;  // a sequence with up to so many elements of K per head is short
    // Clusters beat even splits with up to so many blocks of 64 KB per CTA: `wide` if head dims are over 128, `unknown`
    // if only the device knows lengths, `alone` for a single sequence.
    int cluster_blocks, cluster_blocks_wide, cluster_blocks_all_sms, cluster_blocks_unknown, cluster_blocks_alone;
    double all_sms, many_sms;  // fractions of the SMs that clusters keep busy
    // Even splits: of a chunk of `large_chunk` quanta or more, 1 / tail_share goes to tail CTAs, in chunks of
    // 1 / tail_parts of it.
    int large_chunk, tail_share, tail_parts;
    // A work tile has a CTA of its own if it has so many quanta, and each resident CTA so many work tiles.
    int own_cta_quanta, own_cta_waves;
    double l2_room;  // keys and values of up to this fraction of L2 stay there for the next call
    float l2_share;  // fraction of such loads that L2 keeps: all of them would thrash if L2 is slightly too small
  } decode;

  struct Backward {
    double prologue_epilogue_us;  // time of a CTA before its first and after its last step
    double kernel_us;  // time of one more kernel
    double number_us;  // time of an fp32 number that a split writes and combine reads
    double product_us;  // time of one of the products of a step, per query, key and column
    double worthwhile;  // splits of all tiles are used if they take at most this fraction of the time without splits
    double worthwhile_last;  // the same for splits of only the last wave's tiles
    double shared_l2;  // size of queries, dO and dQ, relative to L2, above which CTAs stay near each other
    int stored_keys;  // if a query sees up to so many keys, the first tile stores its dQ instead of adding to zeros
    int stored_keys_pair;  // stored_keys of the 2-CTA backward
    int alternating_columns;  // the most columns of dQ, over all heads whose tiles alternate
    int listed_heads;  // heads whose tiles alternate in deterministic sparse calls
    int alternating_tiles;  // tiles over all heads whose tiles alternate, on Ampere
  } backward;

  double l2_kept;  // fraction of L2 that keeps its data while other data stream through
};

// Fitted on an H200, forward's speeds with plain kernels.
inline constexpr Card kH200 = {
    .forward = {.narrow_192 = {692, 170},
                .narrow_128 = {534, 250},
                .middle_192 = {692, 190},
                .middle_192_pairs = {700, 220},
                .middle_128 = {639, 290},
                .middle_128_pairs = {666, 290},
                .wide = {660, 250},
                .wide_pairs = {700, 250},
                .worthwhile = 0.95,
                .kernel_us = 3,
                .number_us = 1 / 3e5,
                .empty_row = 0.6},
    .cached = {.decode_overhead_us = 15, .long_decode_us = 75, .memory_bound_rows = 16, .near_bound_rows = 32},
    .decode = {.rate = 345,
               .rows_of_reading = 40,
               .overlapped = 0.99,
               .overlap_short = 1.01,
               .overlap_unknown = 1.9,
               .overlap_long = 3.5,
               .overlap_long_high_gb_s = 16,
               .many_heads = 32,
               .high_gb_s = 30,
               .short_numbers = 64 * 1024,
               .cluster_blocks = 10,
               .cluster_blocks_wide = 12,
               .cluster_blocks_all_sms = 64,
               .cluster_blocks_unknown = 8,
               .cluster_blocks_alone = 20,
               .all_sms = 0.9,
               .many_sms = 0.3,
               .large_chunk = 128,
               .tail_share = 16,
               .tail_parts = 8,
               .own_cta_quanta = 8,
               .own_cta_waves = 8,
               .l2_room = 0.8,
               .l2_share = 0.75f},
    .backward = {.prologue_epilogue_us = 4,
                 .kernel_us = 2.5,
                 .number_us = 2 * 4 / 3e6,
                 .product_us = 4.2e-7,
                 .worthwhile = 0.95,
                 .worthwhile_last = 0.99,
                 .shared_l2 = 1.28,
                 .stored_keys = 4096,
                 .stored_keys_pair = 512,
                 .alternating_columns = 3072,
                 .listed_heads = 4,
                 .alternating_tiles = 256},
    .l2_kept = 0.64,
};

// The numbers for every GPU: only this card was measured.
inline constexpr const Card& kCard = kH200;

// The GPU of a plan request that names none: an H100 SXM.
inline constexpr Device kH100 = {.capability = 90,
                                 .smem_optin = 227 * 1024,
                                 .sms = 132,
                                 .memory_gb_s = 3352,
                                 .l2_bytes = 50 << 20,
                                 .clusters = {0, 132, 66, 39, 30, 22, 17, 15, 15}};

}  // namespace flash_cute
