#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Scalar.h>

#include <optional>
#include <string_view>

#include "base/group.h"
#include "base/types.h"

namespace c10d_ext {

// What a reducing collective computes: the op and, for premul_sum, the factor each rank's input is
// multiplied with first.
struct Reduction {
  ReduceOp op;
  std::optional<c10::Scalar> factor;

  // Linear in its inputs: the adjoint is the same reduction.
  bool is_linear() const {
    return op == ReduceOp::Sum || op == ReduceOp::Avg || op == ReduceOp::PremulSum;
  }
};

inline const Reduction kSum{ReduceOp::Sum, std::nullopt};

// Parses a reduce op by name (any case) and checks that it has a meaning for `dtype`.
Reduction parse_reduction(std::string_view op, const Group& group, std::string_view reduce_op,
                          const std::optional<c10::Scalar>& factor, c10::ScalarType dtype);

// That the reduction has a meaning for `dtype` and its factor fits.
void check_reduction(std::string_view op, const Group& group, const Reduction& reduction,
                     c10::ScalarType dtype);

// How a reduction over `dtype` is carried out: elements are turned into `wire_dtype` (by value, or
// by reinterpreting the bytes), combined with `wire_op`, and turned back.
struct ReductionPlan {
  enum class Encoding : uint8_t {
    // The bytes are the wire's bytes: same dtype, or an equally laid out one.
    Reinterpret,
    // Converted by value into an accumulation type.
    Convert,
    // uint64 order on a signed wire: the top bit is flipped on the way in and out.
    FlipSign,
    // Floats as integers of the same order, where NaN is what min and max look for.
    Ordered,
  };
  c10::ScalarType wire_dtype;
  ReduceOp wire_op;
  Encoding encoding = Encoding::Reinterpret;
  // No backend combines it: gather every rank's values and reduce them here.
  bool local_only = false;
};

// `low_precision_native`: the backend itself reduces half and bfloat16 to everyone's satisfaction.
// `bitwise_native`: the backend has band, bor and bxor. `keeps_nan`: min and max of floats are NaN
// where one of them is, or may be as they are.
ReductionPlan plan_reduction(ReduceOp op, c10::ScalarType dtype, bool low_precision_native,
                             bool bitwise_native, bool keeps_nan = true);

// `source` as a fresh or reinterpreted contiguous tensor of plan.wire_dtype. Complex on a real wire
// gets a trailing dimension of 2. Never writes to `source`; the result shares its memory only when
// `may_alias` and the encoding allows.
at::Tensor encode(const at::Tensor& source, const ReductionPlan& plan, bool may_alias);

// Writes what `wire` stands for into `out` (any strides, conj and neg bits included).
void decode(const at::Tensor& wire, const ReductionPlan& plan, const at::Tensor& out);

// target = left (wire_op) right, element by element, all of wire dtype; target may be left.
void combine(const at::Tensor& left, const at::Tensor& right, ReduceOp wire_op, at::Tensor target);

// A contiguous tensor without conj and neg bits that holds `t`'s values: `t` itself where it is
// one.
at::Tensor dense(const at::Tensor& t);

}  // namespace c10d_ext
