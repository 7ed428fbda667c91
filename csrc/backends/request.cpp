#include "backends/request.h"

#include <c10/util/StringUtil.h>
#include <c10/util/accumulate.h>

#include <algorithm>
#include <utility>

#include "base/dtype.h"

namespace c10d_ext {

namespace {

using Request = CollectiveRequest;
using Sizes = Fingerprint::Sizes;

Sizes counts_of(at::TensorList tensors) {
  Sizes counts;
  for (const auto& t : tensors) {
    counts.push_back(t.numel());
  }
  return counts;
}

// Elements of each rank's part, of which there are as many for each.
Sizes counts_of_ranks(at::TensorList parts, int64_t ranks) {
  const size_t each = parts.size() / static_cast<size_t>(ranks);
  Sizes counts(parts.empty() ? 0 : static_cast<size_t>(ranks), 0);
  for (size_t i = 0; i < parts.size(); ++i) {
    counts[i / each] += parts[i].numel();
  }
  return counts;
}

int64_t row_of(const at::Tensor& t) {
  int64_t row = 1;
  for (int64_t dim = 1; dim < t.dim(); ++dim) {
    row *= t.size(dim);
  }
  return row;
}

}  // namespace

std::vector<int64_t> elements_of(c10::IntArrayRef rows, const at::Tensor& t) {
  const int64_t all = c10::sum_integers(rows);
  const int64_t row = all == 0 ? 0 : t.numel() / all;
  std::vector<int64_t> elements(rows.begin(), rows.end());
  for (auto& count : elements) {
    count *= row;
  }
  return elements;
}

bool Request::is_empty() const {
  switch (type) {
    case OpType::Barrier:
    case OpType::SparseAllReduce:
      return false;
    case OpType::AllToAll:
      return row_of(sources.front()) == 0;
    case OpType::Gather:
      return sources.front().numel() == 0;
    case OpType::ReduceScatter:
      if (source_parts || !source_sizes.empty()) {
        return std::all_of(sources.begin(), sources.end(),
                           [](const auto& t) { return t.numel() == 0; });
      }
      break;
    default:
      break;
  }
  return std::all_of(outs.begin(), outs.end(), [](const auto& t) { return t.numel() == 0; });
}

Request Request::all_reduce(std::string_view op, const at::Tensor& source, const at::Tensor& out,
                            const Reduction& reduction) {
  return {op, OpType::AllReduce, source, out, &reduction, -1, {}, {}, false};
}

Request Request::all_reduce_coalesced(std::string_view op, at::TensorList sources,
                                      at::TensorList outs, const Reduction& reduction) {
  return {op, OpType::AllReduce, sources, outs, &reduction, -1, {}, {}, true};
}

Request Request::reduce(std::string_view op, const at::Tensor& source, const at::Tensor& out,
                        const Reduction& reduction, int64_t dst) {
  return {op, OpType::Reduce, source, out, &reduction, dst, {}, {}, false};
}

Request Request::all_gather(std::string_view op, const at::Tensor& source, const at::Tensor& out) {
  return {op, OpType::AllGather, source, out, nullptr, -1, {}, {}, false};
}

Request Request::all_gather_coalesced(std::string_view op, at::TensorList sources,
                                      at::TensorList outs) {
  return {op, OpType::AllGather, sources, outs, nullptr, -1, {}, {}, true};
}

Request Request::all_gather_uneven(std::string_view op, const at::Tensor& source,
                                   const at::Tensor& out, c10::IntArrayRef rows) {
  return {op, OpType::AllGather, source, out, nullptr, -1, {}, elements_of(rows, out), false};
}

Request Request::reduce_scatter(std::string_view op, const at::Tensor& source,
                                const at::Tensor& out, const Reduction& reduction) {
  return {op, OpType::ReduceScatter, source, out, &reduction, -1, {}, {}, false};
}

Request Request::reduce_scatter_coalesced(std::string_view op, at::TensorList sources,
                                          at::TensorList outs, const Reduction& reduction) {
  return {op, OpType::ReduceScatter, sources, outs, &reduction, -1, {}, {}, true};
}

Request Request::reduce_scatter_uneven(std::string_view op, const at::Tensor& source,
                                       const at::Tensor& out, const Reduction& reduction,
                                       c10::IntArrayRef rows) {
  return {op, OpType::ReduceScatter,     source, out,  &reduction,
          -1, elements_of(rows, source), {},     false};
}

Request Request::all_to_all(std::string_view op, const at::Tensor& source, const at::Tensor& out,
                            c10::IntArrayRef out_rows, c10::IntArrayRef source_rows) {
  Request request{op, OpType::AllToAll, source, out, nullptr, -1, {}, {}, false};
  const int64_t row = source.is_meta() ? 0 : row_of(source);
  request.source_sizes = source_rows.vec();
  request.out_sizes = out_rows.vec();
  for (auto* sizes : {&request.source_sizes, &request.out_sizes}) {
    for (auto& size : *sizes) {
      size *= row;
    }
  }
  return request;
}

Request Request::broadcast(std::string_view op, const at::Tensor& source, const at::Tensor& out,
                           int64_t src) {
  return {op, OpType::Broadcast, source, out, nullptr, src, {}, {}, false};
}

Request Request::broadcast_coalesced(std::string_view op, at::TensorList sources,
                                     at::TensorList outs, int64_t src) {
  return {op, OpType::Broadcast, sources, outs, nullptr, src, {}, {}, true};
}

Request Request::gather(std::string_view op, const at::Tensor& source, const at::Tensor& out,
                        int64_t dst) {
  return {op, OpType::Gather, source, out, nullptr, dst, {}, {}, false};
}

Request Request::scatter(std::string_view op, const at::Tensor& source, const at::Tensor& out,
                         int64_t src) {
  return {op, OpType::Scatter, source, out, nullptr, src, {}, {}, false};
}

Request Request::barrier(std::string_view op, const at::Tensor& source, const at::Tensor& out) {
  return {op, OpType::Barrier, source, out, nullptr, -1, {}, {}, false};
}

Request Request::all_reduce_sparse(std::string_view op, const at::Tensor& tensor,
                                   const Reduction& reduction) {
  return {op, OpType::SparseAllReduce, tensor, tensor, &reduction, -1, {}, {}, false};
}

Request Request::all_gather_parts(std::string_view op, at::TensorList sources,
                                  at::TensorList outs) {
  return {op, OpType::AllGather, sources, outs, nullptr, -1, {}, {}, false, false, true};
}

Request Request::reduce_scatter_parts(std::string_view op, at::TensorList sources,
                                      at::TensorList outs, const Reduction& reduction) {
  return {op, OpType::ReduceScatter, sources, outs, &reduction, -1, {}, {}, false, true, false};
}

Request Request::gather_parts(std::string_view op, at::TensorList sources, at::TensorList outs,
                              int64_t dst) {
  return {op, OpType::Gather, sources, outs, nullptr, dst, {}, {}, false, false, true};
}

Request Request::scatter_parts(std::string_view op, at::TensorList sources, at::TensorList outs,
                               int64_t src) {
  return {op, OpType::Scatter, sources, outs, nullptr, src, {}, {}, false, true, false};
}

Request Request::all_to_all_parts(std::string_view op, at::TensorList sources,
                                  at::TensorList outs) {
  return {op, OpType::AllToAll, sources, outs, nullptr, -1, {}, {}, false, true, true};
}

Request Request::all_to_all_elements(std::string_view op, const at::Tensor& source,
                                     const at::Tensor& out, std::vector<int64_t> out_elements,
                                     std::vector<int64_t> source_elements) {
  return {op,
          OpType::AllToAll,
          source,
          out,
          nullptr,
          -1,
          std::move(source_elements),
          std::move(out_elements),
          false};
}

HeldRequest::HeldRequest(const CollectiveRequest& request, Tensors own_sources, Tensors own_outs)
    : op(request.op),
      type(request.type),
      sources(std::move(own_sources)),
      outs(std::move(own_outs)),
      root(request.root),
      source_sizes(request.source_sizes),
      out_sizes(request.out_sizes),
      is_list(request.is_list),
      source_parts(request.source_parts),
      out_parts(request.out_parts) {
  if (request.reduction != nullptr) {
    reduction = *request.reduction;
  }
}

Fingerprint fingerprint_of(OpType type, at::TensorList like, int64_t count) {
  const auto scalar_type = like.front().scalar_type();
  const auto dtype = dtype_of(scalar_type);
  Fingerprint said;
  said.op_type = type;
  said.unit = dtype == DType::Bytes ? std::string_view(c10::toString(scalar_type)) : name_of(dtype);
  said.count = count;
  for (const auto& t : like) {
    said.shapes = add_shape(said.shapes, t.sizes().data(), static_cast<size_t>(t.dim()));
  }
  return said;
}

Fingerprint fingerprint_of(const Request& request, int64_t rank, int64_t size) {
  const auto type = request.type;
  const auto& sources = request.sources;
  const auto& outs = request.outs;
  const auto ranks = static_cast<size_t>(size);
  switch (type) {
    case OpType::AllReduce:
    case OpType::Reduce: {
      auto said = request.is_list ? fingerprint_of(type, outs).of_members(counts_of(outs))
                                  : fingerprint_of(type, outs, outs.front().numel());
      said.reduce_op = request.reduction->op;
      return type == OpType::Reduce ? std::move(said).rooted_at(request.root) : std::move(said);
    }
    case OpType::AllGather: {
      if (request.out_parts) {
        auto said = fingerprint_of(type, outs);
        if (request.is_list) {
          said.details = c10::str(" in ", sources.size(), " tensors for each rank");
        }
        return std::move(said).gathered(counts_of_ranks(sources, 1)[0],
                                        counts_of_ranks(outs, size));
      }
      auto said = fingerprint_of(type, sources);
      if (request.is_list) {
        return std::move(said).of_members(counts_of(sources));
      }
      const int64_t own = sources.front().numel();
      return std::move(said).gathered(
          own, request.out_sizes.empty() ? Sizes(ranks, own) : request.out_sizes);
    }
    case OpType::ReduceScatter: {
      auto said = fingerprint_of(type, outs).reduced_by(request.reduction->op);
      if (request.source_parts) {
        return std::move(said).scattered(counts_of(sources), outs.front().numel());
      }
      if (request.is_list) {
        return std::move(said).of_members(counts_of(outs));
      }
      const auto& sizes = request.source_sizes;
      const int64_t own = sizes.empty() ? outs.front().numel() : sizes[static_cast<size_t>(rank)];
      return std::move(said).scattered(sizes.empty() ? Sizes(ranks, own) : sizes, own);
    }
    case OpType::AllToAll:
      if (request.has_parts()) {
        return fingerprint_of(type, outs.front()).exchanged(counts_of(sources), counts_of(outs));
      }
      return fingerprint_of(type, outs).exchanged(request.source_sizes, request.out_sizes);
    case OpType::Broadcast:
      return (request.is_list ? fingerprint_of(type, outs).of_members(counts_of(outs))
                              : fingerprint_of(type, outs, outs.front().numel()))
          .rooted_at(request.root);
    case OpType::Gather: {
      const int64_t own = sources.front().numel();
      const Sizes parts =
          request.out_parts ? counts_of(outs) : Sizes(rank == request.root ? ranks : 0, own);
      return fingerprint_of(type, sources).gathered_at(request.root, own, parts, size);
    }
    case OpType::Scatter: {
      const int64_t own = outs.front().numel();
      const Sizes parts =
          request.source_parts ? counts_of(sources) : Sizes(rank == request.root ? ranks : 0, own);
      return fingerprint_of(type, outs).scattered_from(request.root, own, parts, size);
    }
    case OpType::SparseAllReduce: {
      const at::Tensor& tensor = outs.front();
      Fingerprint said = fingerprint_of(OpType::AllReduce, tensor);
      said.details = c10::str(" of shape ", tensor.sizes(), " with ", tensor.sparse_dim(),
                              " sparse dimensions");
      return std::move(said).reduced_by(request.reduction->op);
    }
    case OpType::Barrier:
    case OpType::Send:
    case OpType::Recv:
      break;
  }
  return Fingerprint();
}

}  // namespace c10d_ext
