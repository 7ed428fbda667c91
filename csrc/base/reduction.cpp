#include "base/reduction.h"

#include <ATen/ops/add.h>
#include <ATen/ops/bitwise_and.h>
#include <ATen/ops/bitwise_or.h>
#include <ATen/ops/bitwise_xor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/minimum.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/view_as_complex.h>
#include <ATen/ops/view_as_real.h>
#include <c10/core/ScalarType.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <limits>
#include <string>

#include "base/dtype.h"
#include "base/memory.h"

namespace c10d_ext {

namespace {

// Those that users may ask for: all but None.
const auto kNames = [] {
  std::array<std::string_view, kReduceOps.size() - 1> names;
  std::copy_n(kReduceOps.begin(), names.size(), names.begin());
  return names;
}();

bool is_float8(c10::ScalarType dtype) {
  return c10::isFloat8Type(dtype);
}

bool is_bitwise(ReduceOp op) {
  return op == ReduceOp::Band || op == ReduceOp::Bor || op == ReduceOp::Bxor;
}

// The dtypes whose reductions end in a float, complex ones included.
bool is_fractional(c10::ScalarType dtype) {
  return c10::isFloatingType(dtype) || c10::isComplexType(dtype);
}

bool has_meaning(ReduceOp op, c10::ScalarType dtype) {
  // A scale, which is a float8 like others to who converts it.
  return has_meaning(
      op,
      dtype_of(dtype == c10::ScalarType::Float8_e8m0fnu ? c10::ScalarType::Float8_e5m2 : dtype));
}

std::string_view advice(ReduceOp op, c10::ScalarType dtype) {
  switch (op) {
    case ReduceOp::Avg:
      return "avg needs a floating point or complex dtype (reduce with sum and divide)";
    case ReduceOp::Min:
    case ReduceOp::Max:
      return c10::isComplexType(dtype) ? "min and max need an ordered dtype"
                                       : "the dtype must be one that can be reduced";
    case ReduceOp::Band:
    case ReduceOp::Bor:
    case ReduceOp::Bxor:
      return "band, bor and bxor need an integer or bool dtype";
    case ReduceOp::PremulSum:
      return "premul_sum needs a numeric dtype";
    default:
      return "the dtype must be one that can be reduced";
  }
}

c10::ScalarType real_part_of(c10::ScalarType dtype) {
  return c10::toRealValueType(dtype);
}

ReduceOp on_bytes_of_bools(ReduceOp op) {
  switch (op) {
    case ReduceOp::Sum:
    case ReduceOp::Bor:
      return ReduceOp::Max;
    case ReduceOp::Product:
    case ReduceOp::Band:
      return ReduceOp::Min;
    default:
      return op;
  }
}

template <class T>
at::Tensor put_in_order(const at::Tensor& values, ReduceOp op) {
  using Limits = std::numeric_limits<T>;
  const at::Tensor bits = values.view(c10::CppTypeToScalarType<T>::value);
  // Negative numbers, whose magnitudes grow away from zero, turn around.
  return bits.bitwise_xor(bits.bitwise_right_shift(Limits::digits).bitwise_and_(Limits::max()))
      .masked_fill_(values.isnan(), op == ReduceOp::Max ? Limits::max() : Limits::min());
}

// The same once more; what stands for NaN becomes one.
template <class T>
at::Tensor out_of_order(const at::Tensor& wire, c10::ScalarType dtype) {
  using Limits = std::numeric_limits<T>;
  return wire.bitwise_xor(wire.bitwise_right_shift(Limits::digits).bitwise_and_(Limits::max()))
      .view(dtype);
}

// premul_sum multiplies before the wire is reduced, so the wire itself sums.
ReduceOp after_premul(ReduceOp op) {
  return op == ReduceOp::PremulSum ? ReduceOp::Sum : op;
}

}  // namespace

Reduction parse_reduction(std::string_view op, const Group& group, std::string_view reduce_op,
                          const std::optional<c10::Scalar>& factor, c10::ScalarType dtype) {
  auto found = std::find(kNames.begin(), kNames.end(), reduce_op);
  if (C10_UNLIKELY(found == kNames.end())) {
    std::string lower(reduce_op);
    std::transform(lower.begin(), lower.end(), lower.begin(),
                   [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
    found = std::find(kNames.begin(), kNames.end(), lower);
  }
  C10D_EXT_CHECK_VALUE(found != kNames.end(), op, group, "reduce_op must be one of ",
                       c10::Join(", ", kNames), ", got '", reduce_op, "'");
  Reduction reduction{static_cast<ReduceOp>(found - kNames.begin()), factor};
  check_reduction(op, group, reduction, dtype);
  return reduction;
}

void check_reduction(std::string_view op, const Group& group, const Reduction& reduction,
                     c10::ScalarType dtype) {
  const auto& factor = reduction.factor;
  C10D_EXT_CHECK_TYPE(has_meaning(reduction.op, dtype), op, group, advice(reduction.op, dtype),
                      ", got ", name_of(reduction.op), " of ", dtype);
  const bool premul = reduction.op == ReduceOp::PremulSum;
  C10D_EXT_CHECK_VALUE(
      premul == factor.has_value(), op, group,
      premul ? "premul_sum needs factor=, got none" : "factor= belongs to premul_sum, got it with ",
      premul ? std::string_view() : name_of(reduction.op));
  if (premul) {
    const bool fits = factor->isComplex()         ? c10::isComplexType(dtype)
                      : factor->isFloatingPoint() ? is_fractional(dtype)
                                                  : true;
    C10D_EXT_CHECK_TYPE(fits, op, group, "factor must be representable in the input's dtype, got ",
                        *factor, " for ", dtype);
  }
}

ReductionPlan plan_reduction(ReduceOp op, c10::ScalarType dtype, bool low_precision_native,
                             bool bitwise_native, bool keeps_nan) {
  using c10::ScalarType;
  using Encoding = ReductionPlan::Encoding;
  const ReduceOp wire_op = after_premul(op);
  ReductionPlan plan{dtype, wire_op};
  if (!keeps_nan && (op == ReduceOp::Min || op == ReduceOp::Max) && is_fractional(dtype)) {
    plan.wire_dtype = dtype == ScalarType::Double ? ScalarType::Long : ScalarType::Int;
    plan.encoding = Encoding::Ordered;
    return plan;
  }
  switch (dtype) {
    case ScalarType::Bool:
      plan.wire_dtype = ScalarType::Byte;
      plan.wire_op = on_bytes_of_bools(op);
      break;
    case ScalarType::Short:
    case ScalarType::UInt16:
      plan.wire_dtype = ScalarType::Int;
      plan.encoding = Encoding::Convert;
      break;
    case ScalarType::UInt32:
      // Two's complement: signed and unsigned agree on everything but the order.
      plan.wire_dtype = ScalarType::Int;
      if (op == ReduceOp::Min || op == ReduceOp::Max) {
        plan.wire_dtype = ScalarType::Long;
        plan.encoding = Encoding::Convert;
      }
      break;
    case ScalarType::UInt64:
      plan.wire_dtype = ScalarType::Long;
      if (op == ReduceOp::Min || op == ReduceOp::Max) {
        plan.encoding = Encoding::FlipSign;
      }
      break;
    case ScalarType::Half:
    case ScalarType::BFloat16:
      if (!low_precision_native) {
        plan.wire_dtype = ScalarType::Float;
        plan.encoding = Encoding::Convert;
      }
      break;
    case ScalarType::ComplexHalf:
      plan.wire_dtype = op == ReduceOp::Product ? ScalarType::ComplexFloat : ScalarType::Float;
      plan.encoding = Encoding::Convert;
      plan.local_only = op == ReduceOp::Product;
      break;
    case ScalarType::ComplexFloat:
    case ScalarType::ComplexDouble:
      if (op == ReduceOp::Product) {
        plan.local_only = true;
      } else {
        plan.wire_dtype = real_part_of(dtype);
      }
      break;
    default:
      if (is_float8(dtype)) {
        plan.wire_dtype = ScalarType::Float;
        plan.encoding = Encoding::Convert;
      }
      break;
  }
  if (is_bitwise(plan.wire_op) && !bitwise_native) {
    plan.local_only = true;
  }
  return plan;
}

at::Tensor dense(const at::Tensor& t) {
  if (C10_UNLIKELY(t.is_conj() || t.is_neg())) {
    return t.resolve_conj().resolve_neg().contiguous();
  }
  return t.is_contiguous() ? t : contiguous(t);
}

at::Tensor encode(const at::Tensor& source, const ReductionPlan& plan, bool may_alias) {
  const bool complex_as_real = source.is_complex() && !c10::isComplexType(plan.wire_dtype);
  switch (plan.encoding) {
    case ReductionPlan::Encoding::Reinterpret: {
      at::Tensor values = dense(source);
      if (!may_alias && values.is_alias_of(source)) {
        values = values.clone(at::MemoryFormat::Contiguous);
      }
      if (complex_as_real) {
        return at::view_as_real(values);
      }
      return values.scalar_type() == plan.wire_dtype ? values : values.view(plan.wire_dtype);
    }
    case ReductionPlan::Encoding::Convert: {
      at::Tensor values = complex_as_real ? at::view_as_real(dense(source)) : source;
      at::Tensor wire = at::empty(values.sizes(), values.options().dtype(plan.wire_dtype));
      return wire.copy_(values);
    }
    case ReductionPlan::Encoding::FlipSign:
      return dense(source).view(plan.wire_dtype).bitwise_xor(std::numeric_limits<int64_t>::min());
    case ReductionPlan::Encoding::Ordered:
      return plan.wire_dtype == c10::ScalarType::Long
                 ? put_in_order<int64_t>(dense(source), plan.wire_op)
                 : put_in_order<int32_t>(dense(source.to(c10::ScalarType::Float)), plan.wire_op);
  }
  return {};
}

void decode(const at::Tensor& wire, const ReductionPlan& plan, const at::Tensor& out) {
  at::Tensor values = wire;
  if (plan.encoding == ReductionPlan::Encoding::FlipSign) {
    values = values.bitwise_xor(std::numeric_limits<int64_t>::min());
  }
  if (plan.encoding == ReductionPlan::Encoding::Ordered) {
    out.copy_((plan.wire_dtype == c10::ScalarType::Long
                   ? out_of_order<int64_t>(wire, c10::ScalarType::Double)
                   : out_of_order<int32_t>(wire, c10::ScalarType::Float))
                  .view(out.sizes()));
    return;
  }
  if (out.is_complex() && !c10::isComplexType(plan.wire_dtype)) {
    // A conj view cannot be seen as real numbers, so the values are put together first.
    values = at::view_as_complex(values);
  } else if (plan.encoding != ReductionPlan::Encoding::Convert &&
             values.scalar_type() != out.scalar_type()) {
    values = values.view(out.scalar_type());
  }
  out.copy_(values.view(out.sizes()));
}

void combine(const at::Tensor& left, const at::Tensor& right, ReduceOp wire_op, at::Tensor target) {
  switch (wire_op) {
    case ReduceOp::Sum:
    case ReduceOp::Avg:
    case ReduceOp::PremulSum:
      at::add_out(target, left, right);
      return;
    case ReduceOp::Product:
      at::mul_out(target, left, right);
      return;
    case ReduceOp::Min:
      at::minimum_out(target, left, right);
      return;
    case ReduceOp::Max:
      at::maximum_out(target, left, right);
      return;
    case ReduceOp::Band:
      at::bitwise_and_out(target, left, right);
      return;
    case ReduceOp::Bor:
      at::bitwise_or_out(target, left, right);
      return;
    case ReduceOp::Bxor:
      at::bitwise_xor_out(target, left, right);
      return;
    case ReduceOp::None:
      TORCH_INTERNAL_ASSERT(false, "nothing combines values without a reduction");
  }
}

}  // namespace c10d_ext
