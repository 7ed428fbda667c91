#pragma once

#include <c10/core/ScalarType.h>

#include "base/types.h"

namespace c10d_ext {

// What a dtype of torch is to engines. Bytes: it can be moved and not reduced.
inline DType dtype_of(c10::ScalarType dtype) {
  using c10::ScalarType;
  switch (dtype) {
    case ScalarType::Bool:
      return DType::Bool;
    case ScalarType::Byte:
      return DType::UInt8;
    case ScalarType::Char:
      return DType::Int8;
    case ScalarType::Short:
      return DType::Int16;
    case ScalarType::UInt16:
      return DType::UInt16;
    case ScalarType::Int:
      return DType::Int32;
    case ScalarType::UInt32:
      return DType::UInt32;
    case ScalarType::Long:
      return DType::Int64;
    case ScalarType::UInt64:
      return DType::UInt64;
    case ScalarType::Half:
      return DType::Half;
    case ScalarType::BFloat16:
      return DType::BFloat16;
    case ScalarType::Float:
      return DType::Float;
    case ScalarType::Double:
      return DType::Double;
    case ScalarType::ComplexHalf:
      return DType::ComplexHalf;
    case ScalarType::ComplexFloat:
      return DType::ComplexFloat;
    case ScalarType::ComplexDouble:
      return DType::ComplexDouble;
    case ScalarType::Float8_e4m3fn:
      return DType::Float8_e4m3fn;
    case ScalarType::Float8_e4m3fnuz:
      return DType::Float8_e4m3fnuz;
    case ScalarType::Float8_e5m2:
      return DType::Float8_e5m2;
    case ScalarType::Float8_e5m2fnuz:
      return DType::Float8_e5m2fnuz;
    default:
      return DType::Bytes;
  }
}

}  // namespace c10d_ext
