#pragma once

#include <torch/csrc/distributed/c10d/Work.hpp>

#include <string_view>

namespace c10d_ext {

// How profilers call it, as they do those of the other backends: "all_reduce".
inline std::string_view span_name(c10d::OpType type) {
  using Type = c10d::OpType;
  switch (type) {
    case Type::BROADCAST:
      return "broadcast";
    case Type::ALLREDUCE:
    case Type::_ALLREDUCE_SPARSE:
      return "all_reduce";
    case Type::REDUCE:
      return "reduce";
    case Type::_ALLGATHER_BASE:
      return "all_gather";
    case Type::_REDUCE_SCATTER_BASE:
      return "reduce_scatter";
    case Type::ALLTOALL_BASE:
      return "all_to_all";
    case Type::BARRIER:
      return "barrier";
    case Type::SEND:
      return "send";
    case Type::RECV:
      return "recv";
    default:
      return "other";
  }
}

}  // namespace c10d_ext
