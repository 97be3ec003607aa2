// The arguments of the ops as C++ values. Each reader takes them off the dispatcher's stack in the order of the schemas
// in csrc/library.cpp. It checks none: an error would leak the tensors that are still on the stack.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <cmath>
#include <optional>
#include <utility>

#include "api/tensors.h"
#include "core/problem.h"

namespace flash_cute {

class Stack {
 public:
  explicit Stack(StableIValue* values) : first_(values), next_(values) {}

  template <class T>
  T take() {
    return torch::stable::detail::to<T>(*next_++);
  }

  View view() { return View(take<Tensor>()); }

  std::optional<View> optional_view() {
    auto tensor = take<std::optional<Tensor>>();
    return tensor ? std::optional<View>(std::move(*tensor)) : std::nullopt;
  }

  // Puts the op's results on the stack, after all arguments were taken.
  template <class... T>
  void put(const T&... results) {
    StableIValue* to = first_;
    ((*to++ = torch::stable::detail::from(results)), ...);
  }

 private:
  StableIValue* first_;
  StableIValue* next_;
};

constexpr double kMostScale = 0x1p127;  // of scores: kernels multiply by log2(e), in fp32

// The parameters of the element-wise rule, in the order of the schemas.
struct ElementArguments {
  double softcap;

  ElementRule rule() const {
    const ElementRule rule{.softcap = static_cast<float>(softcap)};
    FC_CHECK(softcap == 0 || (0 < softcap && softcap <= kMostScale && std::isnormal(rule.softcap)), "softcap is ",
             softcap, "; expected 0, or a positive normal number of fp32, at most 2**127");
    return rule;
  }
};

struct Score {
  std::optional<double> softmax_scale;
  bool is_causal;
  int64_t window_size_left, window_size_right;
  ElementArguments element;
  std::optional<View> alibi_slopes;  // [h] or [b, h]
  std::optional<View> sink;  // [h]
  double dropout_p;
  std::optional<View> rng;  // [2]
};

struct PackedSequences {
  View cu_seqlens_q, cu_seqlens_k;  // [b + 1]
  int64_t max_seqlen_q, max_seqlen_k;
  std::optional<View> seqused_q, seqused_k;  // [b]
};

struct FwdArguments {
  View q, k, v;
  std::optional<PackedSequences> sequences = {};  // of varlen ops
  std::optional<View> block_table = {};
  Score score = {};
  bool return_softmax = false, return_row_max = false;
  bool allow_tf32 = false;  // of fp32 inputs
  std::optional<View> tile_lists = {};  // [b or 1, h or h_k or 1, tiles, 1 + entries, 2]
  std::optional<View> tile_bits = {};  // [masks, queries of a tile, words of 32 keys]
  std::optional<View> tile_ranks = {};  // of backward: as tile_lists, without the last dimension
};

struct BwdArguments {
  View dout;
  FwdArguments fwd;
  View out, softmax_lse;
  std::optional<View> dlse;
  bool deterministic;
};

// The ops over a cache: those of the caches' own dtype, with and without new keys, and that of 8 bits.
enum class CacheOp { Append, Attend, AttendQuantized };

struct KvcacheArguments {
  CacheOp op;
  View q, k_cache, v_cache;
  std::optional<View> k_descale, v_descale;  // [b, h_k] or [pages, page_size, h_k]
  std::optional<View> k, v;
  std::optional<View> rotary_cos, rotary_sin;  // [positions, rotary_dim / 2]
  std::optional<View> cache_seqlens, cache_batch_idx, cache_leftpad;  // [b]
  std::optional<View> block_table;  // [b, blocks]
  std::optional<View> cu_seqlens_q;  // [b + 1]
  int64_t max_seqlen_q;
  std::optional<View> cu_seqlens_k_new;  // [b + 1]
  std::optional<View> rotary_seqlens;  // [b]
  Score score;
  bool rotary_interleaved;
  int64_t num_splits, split_size;
};

inline ElementArguments take_element(Stack& in) {
  return {in.take<double>()};
}

inline Score take_score(Stack& in) {
  return {in.take<std::optional<double>>(),
          in.take<bool>(),
          in.take<int64_t>(),
          in.take<int64_t>(),
          take_element(in),
          in.optional_view(),
          in.optional_view(),
          in.take<double>(),
          in.optional_view()};
}

inline PackedSequences take_sequences(Stack& in) {
  PackedSequences sequences{in.view(),          in.view(),          in.take<int64_t>(),
                            in.take<int64_t>(), in.optional_view(), in.optional_view()};
  in.take<bool>();  // zero_tensors: rows of no sequence are zeroed in any case
  return sequences;
}

inline void take_lists(Stack& in, FwdArguments& a) {
  a.tile_lists = in.optional_view();
  a.tile_bits = in.optional_view();
}

inline FwdArguments take_fwd(Stack& in, bool varlen) {
  FwdArguments a{.q = in.view(), .k = in.view(), .v = in.view()};
  if (varlen) {
    a.sequences = take_sequences(in);
    a.block_table = in.optional_view();
  }
  a.score = take_score(in);
  in.take<bool>();  // deterministic: only for backward, forward always is
  a.return_softmax = in.take<bool>();
  a.return_row_max = in.take<bool>();
  a.allow_tf32 = in.take<bool>();
  take_lists(in, a);
  return a;
}

inline BwdArguments take_bwd(Stack& in, bool varlen) {
  const View dout = in.view();
  FwdArguments fwd{.q = in.view(), .k = in.view(), .v = in.view()};
  const View out = in.view(), softmax_lse = in.view();
  if (varlen) fwd.sequences = take_sequences(in);
  const std::optional<View> dlse = in.optional_view();
  fwd.score = take_score(in);
  const bool deterministic = in.take<bool>();
  fwd.allow_tf32 = in.take<bool>();
  take_lists(in, fwd);
  fwd.tile_ranks = in.optional_view();
  return {dout, std::move(fwd), out, softmax_lse, dlse, deterministic};
}

inline KvcacheArguments take_kvcache(Stack& in, CacheOp op) {
  const bool joins = op == CacheOp::Append;
  auto of_new_keys = [&] { return joins ? in.optional_view() : std::nullopt; };
  auto of_descales = [&] { return op == CacheOp::AttendQuantized ? in.optional_view() : std::nullopt; };
  KvcacheArguments a{
      .op = op,
      .q = in.view(),
      .k_cache = in.view(),
      .v_cache = in.view(),
      .k_descale = of_descales(),
      .v_descale = of_descales(),
      .k = of_new_keys(),
      .v = of_new_keys(),
      .rotary_cos = of_new_keys(),
      .rotary_sin = of_new_keys(),
      .cache_seqlens = in.optional_view(),
      .cache_batch_idx = in.optional_view(),
      .cache_leftpad = in.optional_view(),
      .block_table = in.optional_view(),
      .cu_seqlens_q = in.optional_view(),
      .max_seqlen_q = in.take<int64_t>(),
      .cu_seqlens_k_new = of_new_keys(),
      .rotary_seqlens = of_new_keys(),
      .score = {},
      .rotary_interleaved = false,
      .num_splits = 0,
      .split_size = 0,
  };
  a.score = {.softmax_scale = in.take<std::optional<double>>(),
             .is_causal = in.take<bool>(),
             .window_size_left = in.take<int64_t>(),
             .window_size_right = in.take<int64_t>(),
             .element = take_element(in),
             .alibi_slopes = in.optional_view(),
             .sink = in.optional_view(),
             .dropout_p = 0,
             .rng = {}};
  if (joins) a.rotary_interleaved = in.take<bool>();
  a.num_splits = in.take<int64_t>();
  a.split_size = in.take<int64_t>();
  return a;
}

}  // namespace flash_cute
