// Every op of flash_cute: its schema, and its CUDA implementation if kernels are built. The CPU implementations, the
// fakes and the autograd formulas are Python (flash_cute/ops/).
#include <torch/csrc/stable/library.h>

#include <string>

#include "boundary.h"
#include "core/built.h"
#include "core/calibration.h"
#include "core/introspect.h"
#include "core/limit.h"
#include "kernels/lab/names.h"
#ifdef FLASH_CUTE_CUDA
#include "api/api.h"
#endif

using namespace flash_cute;

namespace {

// Argument lists shared by several ops; csrc/api/arguments.h reads them off the stack in this order.
const std::string kQkv = "Tensor q, Tensor k, Tensor v, ";
const std::string kSaved = "Tensor dout, " + kQkv + "Tensor out, Tensor softmax_lse, ";
const std::string kSequences =
    "Tensor cu_seqlens_q, Tensor cu_seqlens_k, SymInt max_seqlen_q, SymInt max_seqlen_k, "
    "Tensor? seqused_q=None, Tensor? seqused_k=None, bool zero_tensors=False, ";
const std::string kBlockTable = "Tensor? block_table=None, ";
const std::string kDlse = "Tensor? dlse=None, ";
const std::string kScore =
    "float? softmax_scale=None, bool is_causal=False, SymInt window_size_left=-1, "
    "SymInt window_size_right=-1, float softcap=0.0, Tensor? alibi_slopes=None, "
    "Tensor? sink=None, float dropout_p=0.0, Tensor? rng=None, ";
const std::string kDeterministic = "bool deterministic=False";
const std::string kAllowTf32 = ", bool allow_tf32=False";
const std::string kReturns = ", bool return_softmax=False, bool return_row_max=False";
const std::string kTileLists = ", Tensor? tile_lists=None, Tensor? tile_bits=None";

const std::string kTileRanks = ", Tensor? tile_ranks=None";

const std::string kFwd = kQkv + kScore + kDeterministic + kReturns + kAllowTf32 + kTileLists;
const std::string kBwd = kSaved + kDlse + kScore + kDeterministic + kAllowTf32 + kTileLists + kTileRanks;
const std::string kVarlenFwd =
    kQkv + kSequences + kBlockTable + kScore + kDeterministic + kReturns + kAllowTf32 + kTileLists;
const std::string kVarlenBwd =
    kSaved + kSequences + kDlse + kScore + kDeterministic + kAllowTf32 + kTileLists + kTileRanks;

const std::string kPlaces =
    "Tensor? cache_seqlens=None, Tensor? cache_batch_idx=None, Tensor? cache_leftpad=None, "
    "Tensor? block_table=None, Tensor? cu_seqlens_q=None, SymInt max_seqlen_q=0, ";
const std::string kCacheScore =
    "float? softmax_scale=None, bool is_causal=False, SymInt window_size_left=-1, SymInt window_size_right=-1, "
    "float softcap=0.0, Tensor? alibi_slopes=None, Tensor? sink=None, ";
const std::string kSplits = "int num_splits=0, int split_size=0";
const std::string kFwdKvcache =
    "Tensor q, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor? k=None, Tensor? v=None, Tensor? rotary_cos=None, "
    "Tensor? rotary_sin=None, " +
    kPlaces + "Tensor? cu_seqlens_k_new=None, Tensor? rotary_seqlens=None, " + kCacheScore +
    "bool rotary_interleaved=True, " + kSplits;
const std::string kAttendKvcache = "Tensor q, Tensor k_cache, Tensor v_cache, " + kPlaces + kCacheScore + kSplits;
// Caches of 8 bits.
const std::string kAttendQuantizedKvcache =
    "Tensor q, Tensor k_cache, Tensor v_cache, Tensor? k_descale=None, Tensor? v_descale=None, " + kPlaces +
    kCacheScore + kSplits;

// Descales are what the stored e4m3 numbers are multiplied by; their dims tell what shares one.
const std::string kFp8Scales = "Tensor? q_descale=None, Tensor? k_descale=None, Tensor? v_descale=None, ";
const std::string kFp8Score =
    "float? softmax_scale=None, bool is_causal=False, SymInt window_size_left=-1, SymInt window_size_right=-1, "
    "Tensor? sink=None, bool two_level=True, ScalarType? dtype=None";
const std::string kFp8Sequences =
    "Tensor cu_seqlens_q, Tensor cu_seqlens_k, SymInt max_seqlen_q, SymInt max_seqlen_k, "
    "Tensor? seqused_q=None, Tensor? seqused_k=None, ";

const std::string kQuantize =
    "Tensor x, Tensor? cu_seqlens=None, str scaling=\"head\", SymInt? heads_k=None, bool power_of_two=False, "
    "bool hadamard=False, bool subtract_mean=False";

const std::string kLabForward = "(str config, Tensor q, Tensor k, Tensor v, *, Tensor(a!) out) -> ";

const std::string kFwdResults = " -> (Tensor out, Tensor softmax_lse, Tensor? row_max, Tensor? softmax)";
const std::string kBwdResults = " -> (Tensor dq, Tensor dk, Tensor dv, Tensor? dsink, Tensor softmax_d)";
const std::string kOutAndLse = " -> (Tensor out, Tensor softmax_lse)";
const std::string kFwdOut =
    ", *, Tensor(a!) out, Tensor(b!)? softmax_lse=None, Tensor(c!)? row_max=None, Tensor(d!)? softmax=None) -> ()";
const std::string kBwdOut =
    ", *, Tensor(a!)? dq=None, Tensor(b!)? dk=None, Tensor(c!)? dv=None, Tensor(d!)? dsink=None, "
    "Tensor(e!)? softmax_d=None) -> ()";

}  // namespace

STABLE_TORCH_LIBRARY(FLASH_CUTE_NAMESPACE, m) {
  m.def(("fwd(" + kFwd + ")" + kFwdResults).c_str());
  m.def(("fwd.out(" + kFwd + kFwdOut).c_str());
  m.def(("bwd(" + kBwd + ")" + kBwdResults).c_str());
  m.def(("bwd.out(" + kBwd + kBwdOut).c_str());
  m.def(("varlen_fwd(" + kVarlenFwd + ")" + kFwdResults).c_str());
  m.def(("varlen_fwd.out(" + kVarlenFwd + kFwdOut).c_str());
  m.def(("varlen_bwd(" + kVarlenBwd + ")" + kBwdResults).c_str());
  m.def(("varlen_bwd.out(" + kVarlenBwd + kBwdOut).c_str());
  m.def(("fwd_kvcache(" + kFwdKvcache + ")" + kOutAndLse).c_str());
  m.def(("attend_kvcache(" + kAttendKvcache + ")" + kOutAndLse).c_str());
  m.def(("fp8_fwd(" + kQkv + kFp8Scales + kFp8Score + ")" + kOutAndLse).c_str());
  m.def(("fp8_varlen_fwd(" + kQkv + kFp8Sequences + kBlockTable + kFp8Scales + kFp8Score + ")" + kOutAndLse).c_str());
  m.def(("quantize_e4m3(" + kQuantize + ") -> (Tensor values, Tensor descale, Tensor? mean)").c_str());
  m.def("dequantize_e4m3(Tensor values, Tensor descale, ScalarType dtype) -> Tensor");
  m.def(("attend_quantized_kvcache(" + kAttendQuantizedKvcache + ")" + kOutAndLse).c_str());
  m.def(("combine(Tensor out_partial, Tensor lse_partial, ScalarType? dtype=None)" + kOutAndLse).c_str());
  m.def("tile_lists(Tensor codes, SymInt capacity) -> Tensor");
  m.def("transposed_tile_lists(Tensor lists, SymInt tiles) -> (Tensor lists, Tensor ranks)");
  m.def("pooled_softmax(Tensor scores, Tensor seen, float scale, SymInt queries, SymInt keys) -> Tensor");
  m.def("kernels() -> str");
  m.def("limit_kernels(str lines) -> str");
  m.def("set_calibration(str lines) -> str");
  m.def("calibration_bucket(str problem) -> str");
  m.def("describe_kernels() -> str");
  m.def("describe_gpu(int index) -> str");
  m.def("plan(str problem) -> str");
  m.def("explain(str problem) -> str");
  m.def(("lab_forward" + kLabForward + "()").c_str());
  m.def(("lab_forward_timed" + kLabForward + "float").c_str());
  m.def("lab_kernels() -> str");
  m.def("lab_usage(str config) -> (int registers, int local_bytes, int ctas_per_sm)");
}

STABLE_TORCH_LIBRARY_IMPL(FLASH_CUTE_NAMESPACE, CompositeExplicitAutograd, m) {
  m.impl("kernels", &guarded<TORCH_BOX(&kernels)>);
  m.impl("limit_kernels", &guarded<TORCH_BOX(&limit_kernels)>);
  m.impl("set_calibration", &guarded<TORCH_BOX(&set_calibration)>);
  m.impl("calibration_bucket", &guarded<TORCH_BOX(&calibration_bucket)>);
  m.impl("describe_kernels", &guarded<TORCH_BOX(&describe_kernels)>);
  m.impl("describe_gpu", &guarded<TORCH_BOX(&describe_gpu)>);
  m.impl("plan", &guarded<TORCH_BOX(&plan)>);
  m.impl("explain", &guarded<TORCH_BOX(static_cast<std::string (*)(std::string)>(&explain))>);
  m.impl("lab_kernels", &guarded<TORCH_BOX(&lab::names)>);
#ifdef FLASH_CUTE_CUDA
  m.impl("lab_usage", &guarded<&lab_usage>);
#endif
}

#ifdef FLASH_CUTE_CUDA
STABLE_TORCH_LIBRARY_IMPL(FLASH_CUTE_NAMESPACE, CUDA, m) {
  m.impl("fwd", &guarded<&fwd>);
  m.impl("fwd.out", &guarded<&fwd_out>);
  m.impl("bwd", &guarded<&bwd>);
  m.impl("bwd.out", &guarded<&bwd_out>);
  m.impl("varlen_fwd", &guarded<&varlen_fwd>);
  m.impl("varlen_fwd.out", &guarded<&varlen_fwd_out>);
  m.impl("varlen_bwd", &guarded<&varlen_bwd>);
  m.impl("varlen_bwd.out", &guarded<&varlen_bwd_out>);
  m.impl("fp8_fwd", &guarded<&fp8_fwd>);
  m.impl("fp8_varlen_fwd", &guarded<&fp8_varlen_fwd>);
  m.impl("fwd_kvcache", &guarded<&fwd_kvcache>);
  m.impl("attend_kvcache", &guarded<&attend_kvcache>);
  m.impl("attend_quantized_kvcache", &guarded<&attend_quantized_kvcache>);
  m.impl("combine", &guarded<&combine>);
  m.impl("tile_lists", &guarded<&tile_lists>);
  m.impl("transposed_tile_lists", &guarded<&transposed_tile_lists>);
  m.impl("pooled_softmax", &guarded<&pooled_softmax>);
  m.impl("quantize_e4m3", &guarded<&quantize_e4m3>);
  m.impl("dequantize_e4m3", &guarded<&dequantize_e4m3>);
  m.impl("lab_forward", &guarded<&lab_forward>);
  m.impl("lab_forward_timed", &guarded<&lab_forward_timed>);
}
#endif
