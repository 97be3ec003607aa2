// Times of products and of reading, and waves of a problem's tiles on a GPU's SMs, for cost models.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

#include "core/card.h"
#include "core/config.h"
#include "core/problem.h"

namespace flash_cute {

// Microseconds of the products of so many rows and keys on one SM, at a rate in TFLOP/s of the GPU that was measured.
inline double products_us(const KernelConfig& config, double rows, double keys, double rate) {
  return rows * keys * 2 * (config.head_dim + config.head_dim_v) * kCard.sms / (rate * 1e6);
}

// Microseconds in which each of so many SMs reads so many keys and values of its own, of this dtype, from memory.
inline double reading_us(const FwdProblem& p, DType stored, double keys, double sms, const Device& gpu) {
  const double bytes = keys * (p.head_dim + p.head_dim_v) * element_bytes(stored);
  return bytes / (1e3 * std::min(kCard.read * gpu.memory_gb_s / sms, kCard.sm_gb_s));
}

inline double ceil_to(double value, double step) {
  const auto steps = static_cast<int64_t>(value / step);
  return step * static_cast<double>(steps * step < value ? steps + 1 : steps);
}

// Keys of a sequence of a cache, on average or of the longest one, as far as the host can expect.
inline double expected_keys(const DecodeProblem& p, bool longest) {
  if (p.is_uniform()) return p.fwd.seqlen_k;
  return p.fwd.seqlen_k * (longest || p.fwd.batch == 1 ? kCard.cached.longest : kCard.cached.mean);
}

// One sequence of the problem; packed ones have the mean length.
inline FwdProblem one_sequence(const FwdProblem& problem) {
  FwdProblem one = problem;
  if (!problem.dense()) {
    const int sequences = std::max(1, problem.batch);
    one.seqlen_q = static_cast<int>(std::min<int64_t>(problem.seqlen_q, problem.total_q / sequences));
    one.seqlen_k = static_cast<int>(std::min<int64_t>(problem.seqlen_k, problem.total_k / sequences));
  }
  one.varlen = {};
  return one;
}

// The longest sequence of the problem.
inline FwdProblem longest_sequence(const FwdProblem& problem) {
  FwdProblem longest = problem;
  longest.varlen = {};
  return longest;
}

// Whether packed sequences attend causally to themselves, as far as the host knows: a tile of queries then takes as long
// as there are tiles before it, a tile of keys as long as there are behind it.
inline bool is_causal_packed(const FwdProblem& p) {
  return !p.dense() && !p.dense_keys() && p.total_q == p.total_k && p.seqlen_q == p.seqlen_k &&
         p.band.left >= p.seqlen_k - 1 && p.band.right < p.seqlen_k - 1;
}

// Tiles of one side of packed sequences, about.
inline int packed_tiles(int64_t total, int sequences, int tile_rows) {
  return static_cast<int>(total / tile_rows) + (sequences + 1) / 2;
}

// The longest of packed sequences, relative to their mean.
inline double longest_to_mean(int longest, int64_t total, int sequences) {
  return double(longest) * sequences / double(std::max<int64_t>(1, total));
}

// Extremes and mean of a quantity over a problem's tiles.
struct Spread {
  double longest, shortest, mean;
};

template <class ValueOf>
Spread spread(int tiles, const ValueOf& value_of) {
  // Neighbouring tiles of a long sequence are similar: a sample is enough.
  constexpr int kSample = 16;
  const int samples = std::min(tiles, kSample);
  if (samples == 0) return {0, 0, 0};
  double longest = 0, shortest = std::numeric_limits<double>::infinity(), sum = 0;
  for (int i = 0; i < samples; ++i) {
    const double value = value_of(static_cast<int>((2 * i + 1) * int64_t(tiles) / (2 * samples)));
    longest = std::max(longest, value);
    shortest = std::min(shortest, value);
    sum += value;
  }
  return {longest, shortest, sum / samples};
}

// When the last of `tiles` ends, if per_wave run at once, the longest first, and lengths are spread evenly. Two waves
// even each other out; an odd one ends as uneven as its tiles are.
inline double end_of_longest_first(const Spread& tile, double tiles, double per_wave) {
  const double waves = tiles / per_wave;
  const auto full = static_cast<int64_t>(waves);
  const double rest = waves - static_cast<double>(full), step = (tile.longest - tile.shortest) / waves;
  const auto even = static_cast<double>(full / 2 * 2);
  const double evened = even * tile.longest - even * even * step / 2;
  const double last = rest > 0 ? tile.shortest + rest * step : 0;
  if (full % 2 == 0) return evened + last;
  const double of_odd_wave = tile.longest - even * step;
  return evened + std::max(of_odd_wave, of_odd_wave - step + last);
}

// Cost of `tiles` tiles in waves of per_wave.
inline double cost_of(const Spread& tile, double tiles, double per_wave) {
  // The shortest tiles come last: the more equal tiles are, the emptier the last wave.
  const double waves = tiles / per_wave;
  return std::max(tile.longest, tile.mean * waves + tile.shortest * (ceil_to(waves, 1) - waves));
}

}  // namespace flash_cute
