// The interface between core and a family of kernels, a folder of kernels/ with its rows and its decisions about them.
// Core depends on this class, not on archs; kernels/families.cpp lists the families.
#pragma once

#include <algorithm>
#include <span>

#include "core/card.h"
#include "core/config.h"
#include "core/device.h"
#include "core/plan.h"
#include "core/problem.h"
#include "core/refusal.h"
#include "core/workspace.h"

namespace flash_cute {

class Family {
 public:
  // Facts about all kernels of a family.
  struct Facts {
    Arch arch;
    int element_bytes;           // of q, k and v
    bool runs_on_later = false;  // GPUs later than its arch run its code
    bool takes_overrides = false;  // forward splits keys and packs heads: FwdOverrides
    bool reads_caches = false;     // forward may replace decode over a cache
    bool sums_dq = true;  // backward has a workspace, with fp32 sums of dQ
  };
  const Facts facts;
  const std::span<const KernelConfig> rows;

  constexpr bool owns(const KernelConfig& config) const {
    return config.arch == facts.arch && element_bytes(config.dtype) == facts.element_bytes;
  }
  constexpr bool owns_its_rows() const {
    return std::all_of(rows.begin(), rows.end(), [this](const KernelConfig& row) { return owns(row); });
  }
  constexpr bool runs_on(int capability) const {
    const int oldest = static_cast<int>(facts.arch);
    return facts.runs_on_later ? oldest <= capability : oldest == capability;
  }

  // Shared memory of a CTA.
  virtual int smem_bytes(const KernelConfig& config) const = 0;
  virtual int threads(const KernelConfig& config) const { return config.threads(); }

  // The family's own reasons why a kernel does not support a problem; refusal.h has those of all families.
  virtual void refuse(Refusal& refusal, const KernelConfig& config, const FwdProblem& problem) const = 0;
  virtual void refuse(Refusal& refusal, const KernelConfig& config, const BwdProblem& problem) const = 0;
  virtual void refuse(Refusal& refusal, const KernelConfig& config, const DecodeProblem& problem) const = 0;

  // For forward: the speed relative to its alternatives (any number if it has none); query heads that may share a tile
  // of queries; and FwdPlan::resident.
  virtual ForwardSpeed forward_speed(const KernelConfig&) const { return {.rate = 1, .tile_keys = 0}; }
  virtual int max_pack_gqa(const KernelConfig&) const { return 1; }
  virtual int resident(const KernelConfig&, const Device&) const { return 0; }
  // Whether forward fills the rows that belong to no packed sequence; else a pass does.
  virtual bool fills_gaps(const KernelConfig&, const FwdProblem&) const { return false; }

  // For backward: its plan.
  virtual BwdPlan backward_plan(const KernelConfig& config, const BwdProblem& problem, const Device& gpu) const = 0;

  // For decode: its cost with even splits, and how it splits its work, added to a plan with all other numbers.
  virtual double decode_cost(const KernelConfig& config, const DecodeProblem& problem, const Device& gpu) const = 0;
  virtual void plan_decode(DecodeParams& p, const KernelConfig& config, const Device& gpu) const = 0;

 protected:
  constexpr Family(const Facts& facts, std::span<const KernelConfig> rows) : facts(facts), rows(rows) {}
  ~Family() = default;
};

// All families. For equivalent rows an earlier family is preferred.
std::span<const Family* const> families();

// The family that owns a kernel.
const Family& family_of(const KernelConfig& config);

// Whether a GPU runs kernels in clusters of CTAs.
bool takes_clusters(int capability);

}  // namespace flash_cute
