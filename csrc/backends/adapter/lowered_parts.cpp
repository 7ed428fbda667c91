// What c10d's methods ask for and ops do not: a tensor for each rank's part, in place of one that
// holds all of them; lists of several dtypes; sparse tensors.

#include <ATen/ops/_to_copy.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/view_as_complex.h>
#include <ATen/ops/view_as_real.h>
#include <c10/util/accumulate.h>

#include <algorithm>
#include <string_view>
#include <utility>
#include <vector>

#include "backends/adapter/lowering.h"
#include "backends/adapter/lowering_parts.h"
#include "base/sparse.h"

namespace c10d_ext::lowering {

namespace {

using Sizes = std::vector<int64_t>;

int64_t bytes_in(const at::Tensor& t) {
  return static_cast<int64_t>(t.nbytes());
}

// Bytes of each rank's part, of which there are as many for each; all 0 where there are none.
Sizes bytes_of_ranks(at::TensorList parts, int64_t ranks) {
  Sizes sizes(static_cast<size_t>(ranks), 0);
  const size_t each = parts.size() / sizes.size();
  for (size_t i = 0; i < parts.size(); ++i) {
    sizes[i / each] += bytes_in(parts[i]);
  }
  return sizes;
}

// The values of tensors of any dtypes, one after the other.
at::Tensor packed(at::TensorList tensors, const at::Tensor& like) {
  if (tensors.size() == 1 && is_dense(tensors.front())) {
    return bytes_of(tensors.front());
  }
  const Sizes sizes = bytes_of_ranks(tensors, 1);
  const at::Tensor bytes = empty_bytes(sizes[0], like);
  int64_t offset = 0;
  for (const auto& t : tensors) {
    span_of(bytes, offset, bytes_in(t)).copy_(bytes_of(dense(t)));
    offset += bytes_in(t);
  }
  return bytes;
}

// c10d's methods alone have parts, and lists of several dtypes: those of our backends, on the CPU.
// Memory of a device would have to be kept for the stream of the wait.
void check_on_cpu(std::string_view op, const at::Tensor& like) {
  TORCH_INTERNAL_ASSERT(like.is_cpu(), op, ": tensors must be on the CPU, got ", like.device());
}

// `bytes` of any shape become the values of `out`.
void put(const at::Tensor& bytes, const at::Tensor& out) {
  if (is_dense(out)) {
    bytes_of(out).view(bytes.sizes()).copy_(bytes);
    return;
  }
  // The bytes may lie at an odd address for the dtype.
  const at::Tensor values = at::empty(out.sizes(), out.options());
  bytes_of(values).view(bytes.sizes()).copy_(bytes);
  copy_values(out, values);
}

Finish unpack_later(const at::Tensor& bytes, at::TensorList outs) {
  return [bytes, outs = aliases_of(outs)] {
    int64_t offset = 0;
    for (const auto& out : outs) {
      put(span_of(bytes, offset, bytes_in(out)), out);
      offset += bytes_in(out);
    }
  };
}

bool are_equal(const Sizes& sizes) {
  return std::equal(sizes.begin() + 1, sizes.end(), sizes.begin());
}

// A copy of a sparse tensor whose values the backend can add up. A complex value is two real ones.
at::Tensor to_wire(const at::Tensor& tensor) {
  const at::Tensor sparse = added_up(tensor);
  const auto dtype = sum_dtype(sparse.scalar_type());
  if (sparse.is_complex()) {
    auto sizes = sparse.sizes().vec();
    sizes.push_back(2);
    return at::_sparse_coo_tensor_unsafe(sparse._indices().clone(),
                                         at::view_as_real(at::_to_copy(sparse._values(), dtype)),
                                         sizes)
        ._coalesced_(true);
  }
  return at::_to_copy(sparse, c10::isFloatingType(dtype) ? dtype : c10::kLong);
}

// What comes of it, as values of `like`.
at::Tensor from_wire(const at::Tensor& sparse, const at::Tensor& like) {
  if (!like.is_complex()) {
    return sparse.to(like.scalar_type());
  }
  const at::Tensor values = at::view_as_complex(sparse._values().contiguous());
  return at::_sparse_coo_tensor_unsafe(sparse._indices(), values.to(like.scalar_type()),
                                       like.sizes())
      ._coalesced_(sparse.is_coalesced());
}

}  // namespace

Started with_parts(const Adapter& adapter, const HeldRequest& request) {
  const auto& sources = request.sources;
  const auto& outs = request.outs;
  const int64_t ranks = adapter.size();
  const at::Tensor& like = outs.empty() ? sources.front() : outs.front();
  check_on_cpu(request.op, like);
  const at::Tensor source = packed(sources, like);
  if (request.type == OpType::ReduceScatter) {
    Sizes elements = bytes_of_ranks(sources, ranks);
    for (auto& size : elements) {
      size /= static_cast<int64_t>(like.element_size());
    }
    const at::Tensor whole = span_of(source, like.dtype(), 0, c10::sum_integers(elements));
    return are_equal(elements)
               ? reduce_scatter(adapter, whole, like, *request.reduction)
               : exchange_and_reduce(adapter, whole, like, *request.reduction, elements);
  }
  Sizes in, out;
  switch (request.type) {
    case OpType::AllGather:
      out = bytes_of_ranks(outs, ranks);
      break;
    case OpType::AllToAll:
      in = bytes_of_ranks(sources, ranks);
      out = bytes_of_ranks(outs, ranks);
      break;
    // As exchanges: only the root knows whether parts differ in size.
    case OpType::Gather:
      in.assign(static_cast<size_t>(ranks), 0);
      in[static_cast<size_t>(request.root)] = source.numel();
      out = bytes_of_ranks(outs, ranks);
      break;
    case OpType::Scatter:
      in = bytes_of_ranks(sources, ranks);
      out.assign(static_cast<size_t>(ranks), 0);
      out[static_cast<size_t>(request.root)] = bytes_in(like);
      break;
    default:
      TORCH_INTERNAL_ASSERT(false, request.op, ": no collective of this type has parts");
  }
  const at::Tensor received = empty_bytes(c10::sum_integers(out), like);
  Started started;
  if (request.type != OpType::AllGather) {
    started = all_to_all_bytes(adapter, source, received, std::move(out), std::move(in));
  } else if (are_equal(out)) {
    // All ranks know all sizes, and so start the same.
    started = all_gather_bytes(adapter, source, received);
  } else {
    started = all_gather_uneven(adapter, source, received, out);
  }
  started.finish = then(std::move(started.finish), unpack_later(received, outs));
  return started;
}

Started all_gather_bytes_of_list(const Adapter& adapter, at::TensorList sources,
                                 at::TensorList outs) {
  check_on_cpu("all_gather", outs.front());
  const int64_t ranks = adapter.size();
  const at::Tensor own = packed(sources, outs.front());
  // Row r: what rank r has of every tensor.
  const at::Tensor all = empty_bytes(ranks * own.numel(), own).view({ranks, own.numel()});
  Started started = all_gather_bytes(adapter, own, bytes_of(all));
  started.finish = then(std::move(started.finish), [all, outs = aliases_of(outs), ranks] {
    int64_t offset = 0;
    for (const auto& out : outs) {
      const int64_t width = bytes_in(out) / ranks;
      put(all.narrow(1, offset, width), out);
      offset += width;
    }
  });
  return started;
}

Started all_reduce_sparse(const Adapter& adapter, const at::Tensor& tensor,
                          const Reduction& reduction) {
  Tensors sums{to_wire(tensor)};
  const auto options = adapter.options<c10d::AllreduceOptions>();
  WorkPtr work = adapter.start([&](auto& backend) { return backend.allreduce(sums, options); });
  const int64_t divisor = reduction.op == ReduceOp::Avg ? adapter.size() : 1;
  return {work, [sum = sums[0], tensor, divisor] {
            if (divisor != 1) {
              sum._values().div_(divisor);
            }
            tensor.copy_(from_wire(sum, tensor));
          }};
}

}  // namespace c10d_ext::lowering
