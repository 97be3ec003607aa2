#include "core/plan_request.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>

#include "core/card.h"
#include "core/e4m3.h"
#include "core/json.h"

namespace flash_cute {
namespace {

constexpr int64_t kMostSize = Band::kUnbounded - 1;  // as for calls

// Targets of pointers: a plan depends on whether a pointer is null, never on what it points to.
constexpr int kPlaceholderIndex = 0;
constexpr int64_t kPlaceholderState = 0;
constexpr float kPlaceholderSlope = 0.f;
constexpr TileEntry kPlaceholderEntry{};
float placeholder_result;

DType dtype_named(const std::string& given) {
  for (const DType dtype : {DType::FP16, DType::BF16, DType::TF32, DType::TF32x3, DType::E4M3}) {
    if (given == name(dtype)) return dtype;
  }
  throw std::invalid_argument("flash_cute: dtype is " + given + "; expected fp16, bf16, tf32, tf32x3 or e4m3");
}

void read_cache_dtype(JsonFields& in, Cache& cache) {
  const std::string given = in.text("cache_dtype", "");
  if (given.empty()) return;
  cache.eight_bits = true;
  for (const DType dtype : {DType::E4M3, DType::INT8}) {
    cache.dtype = dtype;
    if (given == name(dtype)) return;
  }
  throw std::invalid_argument("flash_cute: cache_dtype is " + given +
                              "; expected e4m3 or int8, or nothing for a cache of dtype");
}

Op op_named(const std::string& given) {
  for (const Op op : {Op::Fwd, Op::Bwd, Op::Decode}) {
    if (given == name(op)) return op;
  }
  throw std::invalid_argument("flash_cute: op is " + given + "; expected fwd, bwd or decode");
}

Device read_gpu(JsonFields& in) {
  if (in.has("device")) return device(static_cast<int>(in.integer("device", 0, 0, INT32_MAX)));
  Device gpu{};
  gpu.capability = static_cast<int>(in.integer("gpu_capability", kH100.capability, 1, 999));
  gpu.smem_optin = static_cast<int>(in.integer("gpu_smem_optin", kH100.smem_optin, 1, INT32_MAX));
  gpu.sms = static_cast<int>(in.integer("gpu_sms", kH100.sms, 1, 1 << 20));
  gpu.memory_gb_s = static_cast<int>(in.integer("gpu_memory_gb_s", kH100.memory_gb_s, 1, INT32_MAX));
  gpu.l2_bytes = static_cast<int>(in.integer("gpu_l2_bytes", kH100.l2_bytes, 1, INT32_MAX));
  if (gpu.capability == kH100.capability) gpu.clusters = kH100.clusters;
  return gpu;
}

// Contiguous (batch, rows, heads, dim).
TensorView contiguous(int64_t rows, int heads, int dim, bool dense, bool aligned, int vector) {
  const int64_t row = int64_t(heads) * dim;
  return {nullptr, dense ? rows * row : 0, row, dim, aligned && dim % vector == 0};
}

FwdProblem read_problem(JsonFields& in) {
  auto size = [&](const char* name, int64_t otherwise, int64_t least = 0) {
    return static_cast<int>(in.integer(name, otherwise, least, kMostSize));
  };
  auto window = [&](const char* name) {
    const int64_t bound = in.integer(name, -1, -1, INT64_MAX / 2);
    return bound < 0 || bound > Band::kUnbounded ? Band::kUnbounded : static_cast<int>(bound);
  };
  FwdProblem p{};
  p.dtype = dtype_named(in.text("dtype", "bf16"));
  p.batch = size("batch", 1);
  p.heads = size("heads", 1);
  p.heads_k = size("heads_k", p.heads, 1);
  if (p.heads % p.heads_k != 0) {
    throw std::invalid_argument("flash_cute: heads is " + std::to_string(p.heads) +
                                "; expected a multiple of heads_k, " + std::to_string(p.heads_k));
  }
  p.head_dim = size("head_dim", 128, 1);
  p.head_dim_v = size("head_dim_v", p.head_dim, 1);
  p.seqlen_q = size("seqlen_q", 1);
  p.seqlen_k = size("seqlen_k", p.seqlen_q);
  p.total_q = in.integer("total_q", int64_t(p.batch) * p.seqlen_q, 0, INT64_MAX / 2);
  p.total_k = in.integer("total_k", int64_t(p.batch) * p.seqlen_k, 0, INT64_MAX / 2);
  p.band = {window("window_size_left"), window("window_size_right")};
  p.softmax_scale = static_cast<float>(in.number("softmax_scale", 1));
  if (!std::isfinite(p.softmax_scale))
    throw std::invalid_argument("flash_cute: softmax_scale is not finite in fp32; give a smaller one");
  p.rules.element = ElementRule::named([&](const char* name) { return in.flag(name); });
  if (in.flag("alibi")) p.rules.alibi = &kPlaceholderSlope;
  if (in.flag("dropout")) {
    p.rules.rng = &kPlaceholderState;
    p.rules.keep_scale = 2.f;
  }
  if (in.flag("lists")) p.lists = {.ptr = &kPlaceholderEntry, .ranks = &kPlaceholderIndex};
  if (in.flag("varlen")) p.varlen.cu_q = p.varlen.cu_k = &kPlaceholderIndex;
  const bool aligned = !in.flag("unaligned");
  const int vector = p.dtype == DType::E4M3 ? 16 : 8;
  auto view = [&](int rows, int heads, int dim) { return contiguous(rows, heads, dim, p.dense(), aligned, vector); };
  p.q = view(p.seqlen_q, p.heads, p.head_dim);
  p.out = view(p.seqlen_q, p.heads, p.head_dim_v);
  p.k = view(p.seqlen_k, p.heads_k, p.head_dim);
  p.v = view(p.seqlen_k, p.heads_k, p.head_dim_v);
  return p;
}

// Keys and values in pages, or in a cache, are dense even if queries are packed.
void give_pages_strides(FwdProblem& p, int rows) {
  p.k.batch = rows * p.k.row;
  p.v.batch = rows * p.v.row;
}

// The cache of whole sequences that cache_batch_idx selects from.
Pages pages_of_sequences(const FwdProblem& p) {
  return {.ids = &kPlaceholderIndex, .batch = 1, .count = p.batch, .size = p.seqlen_k};
}

}  // namespace

PlanRequest read_plan_request(const std::string& problem) {
  JsonFields in(problem);
  PlanRequest request;
  request.op = op_named(in.text("op", "fwd"));
  request.gpu = read_gpu(in);
  request.built_only = in.flag("built_only");
  auto size = [&](const char* name, int64_t otherwise) {
    return static_cast<int>(in.integer(name, otherwise, 0, kMostSize));
  };
  FwdProblem p = read_problem(in);
  auto read_pages = [&] {
    p.pages.size = size("page_size", 0);
    if (p.pages.size == 0) return;
    p.pages.per_sequence = size("max_blocks", (int64_t(p.seqlen_k) + p.pages.size - 1) / p.pages.size);
    if (in.has("max_blocks") && p.pages.capacity() > kMostSize)
      throw std::invalid_argument("flash_cute: max_blocks * page_size is " + std::to_string(p.pages.capacity()) +
                                  "; it must be below 2^29");
    p.pages.count = static_cast<int>(std::min<int64_t>(kMostSize, int64_t(p.batch) * p.pages.per_sequence));
    p.pages.ids = &kPlaceholderIndex;
    give_pages_strides(p, p.pages.size);
  };
  if (request.op == Op::Fwd) {
    read_pages();
    if (in.flag("seqused_q")) p.varlen.used_q = &kPlaceholderIndex;
    if (in.flag("return_row_max")) p.row_max.ptr = &placeholder_result;
    if (in.flag("return_softmax")) p.softmax = &placeholder_result;
    if (p.dtype == DType::E4M3) move_sign(p);
  } else if (request.op == Op::Bwd) {
    if (!p.dense() && !p.lists.on()) clamp_lengths(p);
    request.bwd.deterministic = in.flag("deterministic");
    request.bwd.fp32_gradients = in.flag("fp32_gradients") && element_bytes(p.dtype) == 2;
    request.bwd.dout = p.out;
    request.bwd.dq = p.q;
    request.bwd.dk = p.k;
    request.bwd.dv = p.v;
    if (in.flag("sink")) request.bwd.dsink = &placeholder_result;
  } else {
    DecodeProblem& d = request.decode;
    give_pages_strides(p, p.seqlen_k);
    read_pages();
    if (in.flag("cache_batch_idx")) p.pages = pages_of_sequences(p);
    p.varlen.cu_k = nullptr;
    if (in.flag("append")) d.added.total = p.batch;
    if (in.flag("cu_seqlens_k_new")) d.added.cu = &kPlaceholderIndex;
    if (in.flag("rotary")) d.rotary.cos = &kPlaceholderIndex;
    if (in.flag("lengths")) d.cache.lengths = &kPlaceholderIndex;
    if (in.flag("leftpad")) d.cache.leftpad = &kPlaceholderIndex;
    read_cache_dtype(in, d.cache);
    d.num_splits = size("num_splits", 0);
    d.split_size = size("split_size", 0);
    if (d.num_splits > 0 && d.split_size > 0) {
      throw std::invalid_argument("flash_cute: num_splits is " + std::to_string(d.num_splits) + " and split_size " +
                                  std::to_string(d.split_size) + "; give one of them");
    }
    d.fwd = p;
  }
  request.bwd.fwd = p;
  in.end();
  return request;
}

}  // namespace flash_cute
