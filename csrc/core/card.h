// Numbers that were fitted to measurements on one GPU, with their units: one struct per card. They are only here.
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
    double around_us;  // time of decode without its products
    double long_us;  // time of decode from which on 32 rows of products hide forward's overhead
    int few_rows;  // up to so many query rows decode is memory-bound
    int more_rows;  // rows of the tile whose products take a tenth longer than reading, with 128 dims
  } cached;

  struct Decode {
    double rate;  // speed with tiles of 64 rows, in the units of forward's
    double rows_of_reading;  // reading keys costs as much as so many rows of products
    double overlapped;  // time with two overlapping CTAs per SM, relative to one
    // Work tiles per SM from which on two resident CTAs beat one.
    double overlap_short, overlap_unknown, overlap_long, overlap_long_much;
    int many_heads;  // kv heads of 64 dims that leave few CTAs each
    int much_gb_s;  // bandwidth per SM above which one CTA suffices for long sequences (H200: 37, H100: 25)
    int64_t short_numbers;  // up to so many numbers of keys a sequence counts as short
    // Blocks of 64 KB per CTA of a cluster up to which clusters beat even splits: wide for more than 128 dims, unknown
    // for lengths on the device, alone for a single sequence.
    int cluster_blocks, cluster_blocks_wide, cluster_blocks_all_sms, cluster_blocks_unknown, cluster_blocks_alone;
    double all_sms, many_sms;  // fractions of the SMs that clusters keep busy
    // Even splits, in quanta: tail CTAs get a share of the chunks, 1 / taken_off, in parts of 1 / tail_parts.
    int large_chunk, taken_off, tail_parts;
    int own_cta_quanta;  // quanta of a work tile that may have a CTA of its own,
    int own_cta_waves;  // if each resident CTA has so many work tiles
    double l2_room;  // share of L2 for keys that the next call may hit
    float l2_share;  // share of such loads that L2 keeps: all of them would thrash when it is slightly too small
  } decode;

  struct Backward {
    double around_us;  // time of a CTA before its first and after its last step
    double kernel_us;  // time of one more kernel
    double number_us;  // time of an fp32 number that a split writes and combine reads
    double product_us;  // time of one of the products of a step, per query, key and column
    double worthwhile;  // splits of all tiles are used if they take at most this fraction of the time without,
    double worthwhile_last;  // splits of the last wave's tiles at most this one
    double throttled_l2;  // size of queries, dO and dQ, relative to L2, above which CTAs are throttled
    int stored_keys;  // up to so many keys of a query its first tile stores dQ, instead of adding to zeros
    int stored_keys_pair;  // stored_keys of the 2-CTA backward
    int alternating_columns;  // the most columns of dQ of the heads whose tiles alternate
    int alternating_tiles;  // tiles of the alternating heads together, on Ampere
  } backward;

  double l2_kept;  // share of L2 that stays while other data pass through
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
    .cached = {.around_us = 15, .long_us = 75, .few_rows = 16, .more_rows = 32},
    .decode = {.rate = 345,
               .rows_of_reading = 40,
               .overlapped = 0.99,
               .overlap_short = 1.01,
               .overlap_unknown = 1.9,
               .overlap_long = 3.5,
               .overlap_long_much = 16,
               .many_heads = 32,
               .much_gb_s = 30,
               .short_numbers = 64 * 1024,
               .cluster_blocks = 10,
               .cluster_blocks_wide = 12,
               .cluster_blocks_all_sms = 64,
               .cluster_blocks_unknown = 8,
               .cluster_blocks_alone = 20,
               .all_sms = 0.9,
               .many_sms = 0.3,
               .large_chunk = 128,
               .taken_off = 16,
               .tail_parts = 8,
               .own_cta_quanta = 8,
               .own_cta_waves = 8,
               .l2_room = 0.8,
               .l2_share = 0.75f},
    .backward = {.around_us = 4,
                 .kernel_us = 2.5,
                 .number_us = 2 * 4 / 3e6,
                 .product_us = 4.2e-7,
                 .worthwhile = 0.95,
                 .worthwhile_last = 0.99,
                 .throttled_l2 = 1.28,
                 .stored_keys = 4096,
                 .stored_keys_pair = 512,
                 .alternating_columns = 3072,
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
