#pragma once

// What collectives are described with, once for all of csrc: ops, backends, checks. No torch in
// here, neither its tensors nor torch.distributed.

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>

namespace c10d_ext {

enum class OpType : uint8_t {
  Barrier,
  AllReduce,
  Reduce,
  Broadcast,
  AllGather,
  ReduceScatter,
  AllToAll,
  Gather,
  Scatter,
  Send,
  Recv,
  SparseAllReduce,
};

inline constexpr std::array<std::string_view, 12> kOpTypes{
    "barrier",    "all_reduce", "reduce",  "broadcast", "all_gather", "reduce_scatter",
    "all_to_all", "gather",     "scatter", "send",      "recv",       "all_reduce"};
static_assert(kOpTypes.size() == static_cast<size_t>(OpType::SparseAllReduce) + 1);

// "all_reduce": that of a sparse tensor, too. "unknown" of a number that another process sent.
constexpr std::string_view name_of(OpType op) {
  const auto i = static_cast<size_t>(op);
  return i < kOpTypes.size() ? kOpTypes[i] : "unknown";
}

enum class DType : uint8_t {
  Bool,
  UInt8,
  Int8,
  Int16,
  UInt16,
  Int32,
  UInt32,
  Int64,
  UInt64,
  Half,
  BFloat16,
  Float,
  Double,
  ComplexHalf,
  ComplexFloat,
  ComplexDouble,
  Float8_e4m3fn,
  Float8_e4m3fnuz,
  Float8_e5m2,
  Float8_e5m2fnuz,
  // Anything else: moved, never reduced. Counted in bytes.
  Bytes,
};

enum class DTypeKind : uint8_t { Bool, Integer, Floating, Complex, Opaque };

struct DTypeInfo {
  std::string_view name;
  size_t size;
  DTypeKind kind;
};

// In the order of the enumerators.
inline constexpr std::array kDTypes{
    DTypeInfo{"bool", 1, DTypeKind::Bool},
    DTypeInfo{"uint8", 1, DTypeKind::Integer},
    DTypeInfo{"int8", 1, DTypeKind::Integer},
    DTypeInfo{"int16", 2, DTypeKind::Integer},
    DTypeInfo{"uint16", 2, DTypeKind::Integer},
    DTypeInfo{"int32", 4, DTypeKind::Integer},
    DTypeInfo{"uint32", 4, DTypeKind::Integer},
    DTypeInfo{"int64", 8, DTypeKind::Integer},
    DTypeInfo{"uint64", 8, DTypeKind::Integer},
    DTypeInfo{"float16", 2, DTypeKind::Floating},
    DTypeInfo{"bfloat16", 2, DTypeKind::Floating},
    DTypeInfo{"float32", 4, DTypeKind::Floating},
    DTypeInfo{"float64", 8, DTypeKind::Floating},
    DTypeInfo{"complex32", 4, DTypeKind::Complex},
    DTypeInfo{"complex64", 8, DTypeKind::Complex},
    DTypeInfo{"complex128", 16, DTypeKind::Complex},
    DTypeInfo{"float8_e4m3fn", 1, DTypeKind::Floating},
    DTypeInfo{"float8_e4m3fnuz", 1, DTypeKind::Floating},
    DTypeInfo{"float8_e5m2", 1, DTypeKind::Floating},
    DTypeInfo{"float8_e5m2fnuz", 1, DTypeKind::Floating},
    DTypeInfo{"bytes", 1, DTypeKind::Opaque},
};
static_assert(kDTypes.size() == static_cast<size_t>(DType::Bytes) + 1);

constexpr const DTypeInfo& info_of(DType dtype) {
  return kDTypes[static_cast<size_t>(dtype)];
}
constexpr size_t size_of(DType dtype) {
  return info_of(dtype).size;
}
constexpr std::string_view name_of(DType dtype) {
  return info_of(dtype).name;
}

enum class ReduceOp : uint8_t { Sum, Avg, Product, Min, Max, Band, Bor, Bxor, PremulSum, None };

inline constexpr std::array<std::string_view, 10> kReduceOps{
    "sum", "avg", "product", "min", "max", "band", "bor", "bxor", "premul_sum", "none"};
static_assert(kReduceOps.size() == static_cast<size_t>(ReduceOp::None) + 1);

constexpr std::string_view name_of(ReduceOp op) {
  return kReduceOps[static_cast<size_t>(op)];
}

// Whether `op` has a meaning for `dtype`: avg for floating and complex ones, min and max for
// ordered ones, band, bor and bxor for integers and bool, premul_sum for all but bool. float8 has
// all that floats have. Sum and max of bool are `or`, product and min are `and`.
constexpr bool has_meaning(ReduceOp op, DType dtype) {
  const DTypeKind kind = info_of(dtype).kind;
  if (kind == DTypeKind::Opaque) {
    return false;
  }
  switch (op) {
    case ReduceOp::Sum:
    case ReduceOp::Product:
      return true;
    case ReduceOp::Avg:
      return kind == DTypeKind::Floating || kind == DTypeKind::Complex;
    case ReduceOp::Min:
    case ReduceOp::Max:
      return kind != DTypeKind::Complex;
    case ReduceOp::Band:
    case ReduceOp::Bor:
    case ReduceOp::Bxor:
      return kind == DTypeKind::Integer || kind == DTypeKind::Bool;
    case ReduceOp::PremulSum:
      return kind != DTypeKind::Bool;
    case ReduceOp::None:
      return false;
  }
  return false;
}

}  // namespace c10d_ext
