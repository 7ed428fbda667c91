#pragma once

// Which algorithm runs a collective: a table of rules with the measured crossovers, before which a
// group may put rules of its own (TORCH_C10D_EXT_SHM_ALGORITHMS). docs/shm.md has the syntax.

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "backends/shm/engine.h"
#include "kernels/kernels.h"

namespace c10d_ext::shm {

// See algorithms/algorithms.h.
enum class Algorithm : uint8_t { Eager, TwoShot, Swap, Pipelined };
constexpr size_t kAlgorithms = 4;

std::string_view name_of(Algorithm algorithm);

// Whether the algorithm can run this collective at all in a group of so many ranks, whatever its
// size. Eager has a limit of size besides: see eager::fits().
bool can_run(Algorithm algorithm, OpType op, int ranks);

enum class DTypeClass : uint8_t { Any, Float8, Other };

struct Rule {
  std::optional<OpType> op;  // none: every one
  // Both ends included.
  size_t min_bytes, max_bytes;
  int min_ranks, max_ranks;
  DTypeClass dtypes;
  Algorithm algorithm;
};

// The measured crossovers. There is a rule without a limit for every collective and every group of
// two ranks or more.
std::span<const Rule> measured_rules();

// "op:bytes:ranks[:dtype]:algorithm;...": throws std::invalid_argument where it is not that.
std::vector<Rule> parse_rules(const std::string& text);

// Each rule as parse_rules() takes it.
std::string text_of(const std::vector<Rule>& rules);

// The rules that apply to one group. The first one wins that matches and whose algorithm can run
// the collective.
class Selection {
 public:
  // `overrides`: for parse_rules(); they come before the measured ones.
  Selection(int ranks, const std::string& overrides);

  // `bytes`: of a rank's input; where ranks have inputs of different sizes, of the largest one.
  // `fits_eagerly`: whether eager may be chosen.
  Algorithm choose(OpType op, DType dtype, size_t bytes, bool fits_eagerly) const {
    const auto& candidates = candidates_[static_cast<size_t>(op)][is_float8(dtype)];
    for (const Candidate& c : candidates) {
      if (c.min_bytes <= bytes && bytes <= c.max_bytes &&
          (fits_eagerly || c.algorithm != Algorithm::Eager)) {
        return c.algorithm;
      }
    }
    return fallback_;
  }

  // The overrides in one way of writing them; empty: there are none.
  const std::string& overrides() const {
    return overrides_;
  }
  // The same for the same overrides, and 0 without any. Ranks whose digests differ must not
  // exchange data: they may have chosen different algorithms.
  uint32_t digest() const {
    return digest_;
  }

  static bool is_float8(DType dtype) {
    return dtype == DType::Float8_e4m3fn || dtype == DType::Float8_e4m3fnuz ||
           dtype == DType::Float8_e5m2 || dtype == DType::Float8_e5m2fnuz;
  }

 private:
  struct Candidate {
    size_t min_bytes, max_bytes;
    Algorithm algorithm;
  };
  static constexpr size_t kOps = static_cast<size_t>(OpType::SparseAllReduce) + 1;

  // By collective, and by whether the dtype is a float8.
  std::array<std::array<std::vector<Candidate>, 2>, kOps> candidates_;
  // Never reached: the measured rules are complete.
  Algorithm fallback_ = Algorithm::Pipelined;
  std::string overrides_;
  uint32_t digest_ = 0;
};

}  // namespace c10d_ext::shm
