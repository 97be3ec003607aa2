// The config of a kernel, its only template parameter.
#pragma once

#include <string>

namespace flash_cute {

enum class Op { Fwd, Bwd, Decode };  // Decode: forward over a key/value cache
enum class Arch { Sm80 = 80, Sm90 = 90 };
// TF32 and TF32x3: fp32, in one or in three products of TF32. E4M3: fp8, of inputs or caches, with results in 16 bits.
// INT8: of caches alone.
enum class DType { FP16, BF16, TF32, TF32x3, E4M3, INT8 };
enum class Tier { Plain, Rich };  // Rich: with softcap, ALiBi and dropout (ScoreRules), and scales below 0
// The tiles that a kernel visits: consecutive ones, or those of a list (TileLists). Tokens: consecutive tiles of keys for
// rows that are all query heads of a group for a token, then for the next.
enum class TileKind { Interval, List, Tokens };

constexpr int element_bytes(DType dtype) {
  switch (dtype) {
    case DType::FP16:
    case DType::BF16:
      return 2;
    case DType::TF32:
    case DType::TF32x3:
      return 4;
    case DType::E4M3:
    case DType::INT8:
      return 1;
  }
  return 0;
}

constexpr const char* name(DType dtype) {
  switch (dtype) {
    case DType::FP16:
      return "fp16";
    case DType::BF16:
      return "bf16";
    case DType::TF32:
      return "tf32";
    case DType::TF32x3:
      return "tf32x3";
    case DType::E4M3:
      return "e4m3";
    case DType::INT8:
      return "int8";
  }
  return nullptr;
}

constexpr const char* name(Op op) {
  switch (op) {
    case Op::Fwd:
      return "fwd";
    case Op::Bwd:
      return "bwd";
    case Op::Decode:
      return "decode";
  }
  return nullptr;
}

// Whether GPUs have clusters of CTAs.
constexpr bool has_clusters(Arch arch) {
  return arch >= Arch::Sm90;
}

}  // namespace flash_cute

// Outside the namespace: the launch stubs that nvcc writes cannot name a namespaced class as a template argument.
struct KernelConfig {
  flash_cute::Op op;
  flash_cute::Arch arch;
  flash_cute::DType dtype;
  flash_cute::Tier tier;
  int head_dim;  // of the tiles of Q and K; the problem's head dims may be smaller
  int head_dim_v;  // of the tiles of V and O
  int block_m;  // query rows a tile
  int block_n;  // key rows a tile
  int stages;  // buffers of the streamed operands: K and V forward, Q and dO backward
  int warps;  // warps of a CTA that issue MMA; a family may add others
  int ctas;  // resident CTAs an SM: bounds the registers of a thread
  int cluster;  // CTAs of a cluster (for decode the most), or 1
  flash_cute::TileKind tiles = flash_cute::TileKind::Interval;
  flash_cute::DType cache = dtype;  // of K and V; for decode one of 8 bits beside dtype

  bool operator==(const KernelConfig&) const = default;
  constexpr bool rich() const { return tier == flash_cute::Tier::Rich; }
  constexpr bool walks_lists() const { return tiles == flash_cute::TileKind::List; }
  constexpr bool packs_tokens() const { return tiles == flash_cute::TileKind::Tokens; }
  constexpr bool widens_cache() const { return cache != dtype; }  // of 8 bits
  constexpr bool fp32() const { return flash_cute::element_bytes(dtype) == 4; }

  // Threads of the warps that issue MMA.
  constexpr int threads() const { return warps * 32; }

  // Name of the kernel in logs, profiles, tests and the benchmark's JSON.
  std::string id() const {
    auto number = [](const char* name, int value) { return name + std::to_string(value); };
    return std::string(flash_cute::name(op)) + number("_sm", static_cast<int>(arch)) + "_" + flash_cute::name(dtype) +
           (rich() ? "_rich" : "_plain") + number("_d", head_dim) + number("x", head_dim_v) + number("_m", block_m) +
           number("_n", block_n) + number("_s", stages) + number("_w", warps) + number("_c", ctas) +
           (has_clusters(arch) ? number("_x", cluster) : "") +
           (walks_lists()    ? "_list"
            : packs_tokens() ? "_tokens"
                             : "") +
           (widens_cache() ? std::string("_") + flash_cute::name(cache) : "");
  }
};
