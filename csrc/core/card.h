// The cost models' constants, fitted to measurements: one struct per GPU. No other file has such numbers.
#pragma once

#include <cstdint>

#include "core/device.h"

namespace flash_cute {

// The speed of a kernel of forward.
struct ForwardSpeed {
  double rate;  // of products, in TFLOP/s of all SMs, in the limit of many keys
  double tile_keys;  // overhead of a tile, in keys
};

// The speed of a kernel of decode with even splits.
struct DecodeSpeed {
  double start_us;  // time without keys
  double tile_us;  // more time of a work tile, on its SM
  double read;  // time of reading, relative to that at the memory's full bandwidth
  double rate;  // of products, in TFLOP/s of all SMs, with rows that do not exist
};

struct Card {
  int sms;  // of the GPU that was measured
  double read;  // fraction of the memory's peak bandwidth at which keys are read
  double sm_gb_s;  // at which an SM reads if others do not slow it down
  double not_overlapped;  // of the shorter one of reading and products

  struct Forward {
    // Indexed by columns of K: 64, up to 128, more. For tiles of 192 or 128 queries; pairs are clusters of two CTAs.
    ForwardSpeed narrow_192, narrow_128, middle_192, middle_192_pairs, middle_128, middle_128_pairs, wide, wide_pairs;
    ForwardSpeed d96_192, d96_128;  // 96 columns, tiles of so many queries
    // Splits are used if they take at most this fraction of the time without splits; those of packed keys, of which the
    // host knows the mean and the longest length alone.
    double worthwhile, worthwhile_packed;
    double kernel_us;  // time of one more kernel
    double number_us;  // time of an fp32 number that a split writes and combine reads
    double idle_group;  // time of a warpgroup without tokens, relative to one with: the other has no turns to take
    double token_rows;  // rate of rows of tokens, relative to those of one head
    double token_keys;  // more of tile_keys for them without splits: threads store their results, not TMA
  } forward;

  // Lengths of a cache that only the device knows, as fractions of its capacity: their mean, and the longest.
  struct Cached {
    double mean, longest;
    double forward_us;  // time of forward without tiles
    int decode_rows;  // up to so many query rows decode is as fast as memory
    int paged_rows;  // up to so many, decode is slower than forward over pages alone
  } cached;

  struct Decode {
    // Indexed by columns of K (64, up to 128, more), and rows of a tile; pairs are two CTAs an SM.
    DecodeSpeed narrow_16, narrow_16_pairs, narrow_32, narrow_64, middle_16, middle_16_pairs, middle_32, middle_64,
        wide_16, wide_64;
    double scheduling_us;  // part of start_us that is not there if the host knows lengths
    double many_splits, many_splits_us;  // a work tile of so many splits, or more, takes so much longer to combine
    // Clusters, one or several a work tile: time without keys, of a block of 64 KB, and of each wave of clusters after the first.
    double cluster_us, cluster_us_wide, cluster_block_us, cluster_wave_us, cluster_wave_us_wide;
    double cluster_merge_us, cluster_merge_us_wide;  // the pass that combines clusters of a work tile
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
    double number_us, number_us_l2;  // time of an fp32 number that a split writes and combine reads, from memory or L2
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
    .sms = 132,
    .read = 0.9,
    .sm_gb_s = 63,
    .not_overlapped = 0.15,
    .forward = {.narrow_192 = {692, 170},
                .narrow_128 = {534, 260},
                .middle_192 = {692, 200},
                .middle_192_pairs = {700, 220},
                .middle_128 = {639, 230},
                .middle_128_pairs = {666, 230},
                .wide = {660, 250},
                .wide_pairs = {700, 250},
                .d96_192 = {692, 250},
                .d96_128 = {520, 200},
                .worthwhile = 0.95,
                .worthwhile_packed = 0.65,
                .kernel_us = 4.5,
                .number_us = 1 / 3e5,
                .idle_group = 0.5,
                .token_rows = 0.86,
                .token_keys = 150},
    .cached = {.mean = 0.58, .longest = 0.87, .forward_us = 6, .decode_rows = 16, .paged_rows = 32},
    .decode = {.narrow_16 = {9.5, 2.2, 0.86, 74},
               .narrow_16_pairs = {9.7, 2.1, 0.86, 75},
               .narrow_32 = {11.4, 2.3, 0.93, 148},
               .narrow_64 = {10.2, 4.2, 0.95, 148},
               .middle_16 = {10.2, 5.1, 0.92, 95},
               .middle_16_pairs = {10.9, 3.7, 0.92, 95},
               .middle_32 = {11.4, 7.3, 0.92, 176},
               .middle_64 = {15, 7.1, 1.1, 256},
               .wide_16 = {13.4, 5.2, 1, 98},
               .wide_64 = {13, 12.3, 1, 125},
               .scheduling_us = 2.2,
               .many_splits = 32,
               .many_splits_us = 2.5,
               .cluster_us = 4.5,
               .cluster_us_wide = 7,
               .cluster_block_us = 1.1,
               .cluster_wave_us = 6.1,
               .cluster_wave_us_wide = 11.2,
               .cluster_merge_us = 3,
               .cluster_merge_us_wide = 3.5,
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
                 .number_us_l2 = 2 * 4 / 4e6,
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
