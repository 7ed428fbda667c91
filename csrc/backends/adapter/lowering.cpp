#include "backends/adapter/lowering.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/util/accumulate.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "backends/adapter/lowering_parts.h"

namespace c10d_ext::lowering {

Tensors rows_of(const at::Tensor& flat, int64_t rows) {
  const int64_t width = flat.numel() / rows;
  Tensors parts;
  parts.reserve(rows);
  for (int64_t row = 0; row < rows; ++row) {
    parts.push_back(span_of(flat, row * width, width));
  }
  return parts;
}

at::Tensor empty_bytes(int64_t count, const at::Tensor& like) {
  return at::empty({count}, like.options().dtype(at::kByte));
}

Started all_to_all_bytes(const Adapter& adapter, const at::Tensor& source_bytes,
                         const at::Tensor& out_bytes, std::vector<int64_t> out_splits,
                         std::vector<int64_t> in_splits) {
  adapter.check_has(Method::AllToAllSingle);
  at::Tensor in = source_bytes;
  at::Tensor out = out_bytes;
  const auto options = adapter.options<c10d::AllToAllOptions>();
  WorkPtr work = adapter.start([&](auto& backend) {
    return backend.alltoall_base(out, in, out_splits, in_splits, options);
  });
  return {work, adapter.keep(in)};
}

Started all_gather_bytes(const Adapter& adapter, const at::Tensor& source_bytes,
                         const at::Tensor& out_bytes) {
  const int64_t ranks = adapter.size();
  if (!adapter.has(Method::AllGatherIntoTensor)) {
    const std::vector<int64_t> splits(ranks, source_bytes.numel());
    return all_to_all_bytes(adapter, source_bytes.repeat({ranks}), out_bytes, splits, splits);
  }
  at::Tensor in = source_bytes;
  at::Tensor out = out_bytes;
  const auto options = adapter.options<c10d::AllgatherOptions>();
  WorkPtr work =
      adapter.start([&](auto& backend) { return backend._allgather_base(out, in, options); });
  return {work, adapter.keep(in)};
}

at::Tensor flattened(at::TensorList tensors) {
  Tensors parts;
  parts.reserve(tensors.size());
  int64_t count = 0;
  for (const auto& t : tensors) {
    parts.push_back(bytes_of(dense(t)));
    count += t.numel();
  }
  return span_of(at::cat(parts), tensors.front().dtype(), 0, count);
}

Finish unflatten_later(const at::Tensor& flat, at::TensorList outs) {
  return [flat, outs = aliases_of(outs)] {
    used_here(flat);
    int64_t offset = 0;
    for (const auto& out : outs) {
      const at::Tensor part = span_of(flat, offset, out.numel());
      copy_values(is_dense(out) ? span_of(out, 0, out.numel()) : out, part);
      offset += out.numel();
    }
  };
}

Tensors columns(const at::Tensor& matrix, at::TensorList widths_of, int64_t divisor) {
  Tensors parts;
  int64_t offset = 0;
  for (const auto& t : widths_of) {
    const int64_t width = t.numel() / divisor;
    parts.push_back(matrix.narrow(1, offset, width));
    offset += width;
  }
  return parts;
}

void run_alone(const CollectiveRequest& request) {
  for (size_t i = 0; i < request.outs.size(); ++i) {
    const at::Tensor& source = request.sources[i];
    const at::Tensor& out = request.outs[i];
    if (request.type == OpType::Barrier) {
      continue;
    }
    if (request.reduction != nullptr) {
      const bool is_stacked = request.type == OpType::ReduceScatter &&
                              request.source_sizes.empty() && source.sizes() != out.sizes();
      reduce_alone(is_stacked ? source.reshape(out.sizes()) : source, out, *request.reduction);
    } else if (!source.is_same(out)) {
      copy_values(out, apart_from(source, out));
    }
  }
}

std::pair<at::Tensor, Finish> landing(const at::Tensor& out) {
  if (is_dense(out)) {
    return {out, Finish()};
  }
  at::Tensor buffer = at::empty(out.sizes(), out.options());
  return {buffer, [buffer, out = alias_of(out)] {
            used_here(buffer);
            copy_values(out, buffer);
          }};
}

Started all_gather_uneven(const Adapter& adapter, const at::Tensor& source, const at::Tensor& out,
                          c10::IntArrayRef sizes) {
  auto [buffer, finish] = landing(out);
  const at::Tensor in = bytes_of(dense(source));
  const at::Tensor all = bytes_of(buffer);
  const int64_t width = all.numel() / c10::sum_integers(sizes);
  std::vector<int64_t> splits(sizes.begin(), sizes.end());
  for (auto& split : splits) {
    split *= width;
  }
  Started started;
  if (adapter.has(Method::AllGatherIntoTensor) &&
      std::equal(splits.begin() + 1, splits.end(), splits.begin())) {
    // Other ranks may have called what takes no sizes.
    started = all_gather_bytes(adapter, in, all);
  } else if ((adapter.has(Method::AllGather) && adapter.can().gathers_uneven)) {
    std::vector<Tensors> lists{all.split_with_sizes(splits)};
    Tensors ins{in};
    const auto options = adapter.options<c10d::AllgatherOptions>();
    started.work =
        adapter.start([&](auto& backend) { return backend.allgather(lists, ins, options); });
    started.finish = adapter.keep(in);
  } else {
    // Everyone sends its rows to everyone: exactly the bytes needed on the wire, no padding.
    const at::Tensor copies = in.repeat({adapter.size()});
    started = all_to_all_bytes(adapter, copies, all, splits,
                               std::vector<int64_t>(adapter.size(), in.numel()));
  }
  started.finish = then(std::move(started.finish), std::move(finish));
  return started;
}

namespace {

Started barrier(const Adapter& adapter, const at::Device& device) {
  if (adapter.may_call_barrier()) {
    auto options = adapter.options<c10d::BarrierOptions>();
    options.device = device;
    if (device.has_index()) {
      options.device_ids = {device.index()};
    }
    try {
      return {adapter.start([&](auto& backend) { return backend.barrier(options); }), Finish()};
    } catch (const InvalidArgument&) {
      if (!adapter.is_process_group()) {
        throw;
      }
      // One written in Python that does not define it.
    }
  }
  Tensors token{at::zeros({1}, at::dtype(at::kFloat).device(device))};
  if (!adapter.has(Method::AllReduce)) {
    return all_gather_bytes(adapter, bytes_of(token[0]),
                            empty_bytes(adapter.size() * token[0].nbytes(), token[0]));
  }
  const auto options = adapter.options<c10d::AllreduceOptions>();
  WorkPtr work = adapter.start([&](auto& backend) { return backend.allreduce(token, options); });
  return {work, adapter.keep(token[0])};
}

Started all_gather(const Adapter& adapter, const at::Tensor& source, const at::Tensor& out) {
  auto [buffer, finish] = landing(out);
  Started started =
      all_gather_bytes(adapter, bytes_of(dense(apart_from(source, out))), bytes_of(buffer));
  started.finish = then(std::move(started.finish), std::move(finish));
  return started;
}

Started all_gather_coalesced(const Adapter& adapter, at::TensorList sources, at::TensorList outs) {
  const auto is_of_first_dtype = [&](const at::Tensor& t) {
    return t.scalar_type() == outs.front().scalar_type();
  };
  if (adapter.has(Method::AllGatherIntoTensorCoalesced)) {
    Tensors ins;
    Tensors buffers;
    Finish finish;
    for (size_t i = 0; i < outs.size(); ++i) {
      if (outs[i].numel() == 0) {
        continue;
      }
      ins.push_back(bytes_of(dense(sources[i])));
      auto [buffer, copy] = landing(outs[i]);
      buffers.push_back(bytes_of(buffer));
      finish = then(then(std::move(finish), adapter.keep(ins.back())), std::move(copy));
    }
    const auto options = adapter.options<c10d::AllgatherOptions>();
    WorkPtr work = adapter.start([&](auto& backend) {
      return backend.allgather_into_tensor_coalesced(buffers, ins, options);
    });
    return {work, std::move(finish)};
  }
  if (!std::all_of(outs.begin(), outs.end(), is_of_first_dtype)) {
    return all_gather_bytes_of_list(adapter, sources, outs);
  }
  const int64_t ranks = adapter.size();
  const at::Tensor flat = flattened(sources);
  const at::Tensor all = at::empty({ranks, flat.numel()}, flat.options());
  Started started = all_gather_bytes(adapter, bytes_of(flat), bytes_of(all));
  started.finish = then(std::move(started.finish), [all, outs = aliases_of(outs), ranks] {
    used_here(all);
    const Tensors parts = columns(all, outs, ranks);
    for (size_t i = 0; i < outs.size(); ++i) {
      const at::Tensor& out = outs[i];
      copy_values(is_dense(out) ? out.view({ranks, -1}) : out, parts[i]);
    }
  });
  return started;
}

// One rank sends its bytes to everyone, the others send nothing.
Started broadcast_by_exchange(const Adapter& adapter, const at::Tensor& bytes, Finish finish,
                              int64_t src) {
  const int64_t ranks = adapter.size();
  const bool sends = adapter.rank() == src;
  const at::Tensor in = sends ? bytes.repeat({ranks}) : empty_bytes(0, bytes);
  std::vector<int64_t> out_splits(ranks, 0);
  out_splits[src] = bytes.numel();
  Started started = all_to_all_bytes(adapter, in, bytes, std::move(out_splits),
                                     std::vector<int64_t>(ranks, sends ? bytes.numel() : 0));
  started.finish = then(std::move(started.finish), std::move(finish));
  return started;
}

Started broadcast(const Adapter& adapter, const at::Tensor& source, const at::Tensor& out,
                  int64_t src) {
  const bool sends = adapter.rank() == src;
  // What is only read may have elements that share a place.
  const bool is_read_only = sends && source.is_same(out);
  auto [buffer, finish] = is_read_only ? std::pair(dense(source), Finish()) : landing(out);
  if (sends && !is_read_only) {
    copy_values(uncounted_alias_of(buffer), source);
  }
  auto options = adapter.options<c10d::BroadcastOptions>();
  options.rootRank = src;
  Tensors tensors{bytes_of(buffer)};
  if (!adapter.has(Method::Broadcast)) {
    return broadcast_by_exchange(adapter, tensors[0], std::move(finish), src);
  }
  WorkPtr work = adapter.start([&](auto& backend) { return backend.broadcast(tensors, options); });
  return {work, std::move(finish)};
}

Started broadcast_coalesced(const Adapter& adapter, at::TensorList sources, at::TensorList outs,
                            int64_t src) {
  const at::Tensor flat = flattened(sources);
  Started started = broadcast(adapter, flat, flat, src);
  started.finish = then(std::move(started.finish), unflatten_later(flat, outs));
  return started;
}

Started all_to_all(const Adapter& adapter, const at::Tensor& source, const at::Tensor& out,
                   c10::IntArrayRef out_bytes, c10::IntArrayRef in_bytes) {
  const at::Tensor from = source.is_same(out) ? clone_of(source) : apart_from(source, out);
  auto [buffer, finish] = landing(out);
  Started started = all_to_all_bytes(adapter, bytes_of(dense(from)), bytes_of(buffer),
                                     out_bytes.vec(), in_bytes.vec());
  started.finish = then(std::move(started.finish), std::move(finish));
  return started;
}

Started gather(const Adapter& adapter, const at::Tensor& source, const at::Tensor& out,
               int64_t dst) {
  const int64_t ranks = adapter.size();
  const bool receives = adapter.rank() == dst;
  Tensors in{bytes_of(dense(source))};
  if (!adapter.has(Method::Gather) || adapter.can().exchanges_rooted_parts) {
    // Everyone sends to one rank, and nothing to the others.
    std::vector<int64_t> in_splits(ranks, 0);
    in_splits[dst] = in[0].numel();
    auto [buffer, copy] = landing(out);
    Started started =
        all_to_all_bytes(adapter, in[0], bytes_of(buffer),
                         std::vector<int64_t>(ranks, receives ? in[0].numel() : 0), in_splits);
    started.finish = then(std::move(started.finish), std::move(copy));
    return started;
  }
  std::vector<Tensors> lists;
  Finish finish = adapter.keep(in[0]);
  if (receives) {
    auto [buffer, copy] = landing(out);
    lists.push_back(rows_of(bytes_of(buffer), ranks));
    finish = then(std::move(finish), std::move(copy));
  }
  auto options = adapter.options<c10d::GatherOptions>();
  options.rootRank = dst;
  WorkPtr work = adapter.start([&](auto& backend) { return backend.gather(lists, in, options); });
  return {work, std::move(finish)};
}

Started scatter(const Adapter& adapter, const at::Tensor& source, const at::Tensor& out,
                int64_t src) {
  const int64_t ranks = adapter.size();
  const bool sends = adapter.rank() == src;
  auto [buffer, finish] = landing(out);
  Tensors received{bytes_of(buffer)};
  if (!adapter.has(Method::Scatter) || adapter.can().exchanges_rooted_parts) {
    // One rank sends to everyone, the others send nothing.
    std::vector<int64_t> out_splits(ranks, 0);
    out_splits[src] = received[0].numel();
    const at::Tensor in = sends ? bytes_of(dense(source)) : empty_bytes(0, received[0]);
    Started started =
        all_to_all_bytes(adapter, in, received[0], std::move(out_splits),
                         std::vector<int64_t>(ranks, sends ? received[0].numel() : 0));
    started.finish = then(std::move(started.finish), std::move(finish));
    return started;
  }
  std::vector<Tensors> lists;
  if (sends) {
    const at::Tensor in = dense(source);
    lists.push_back(rows_of(bytes_of(in), ranks));
    finish = then(adapter.keep(in), std::move(finish));
  }
  auto options = adapter.options<c10d::ScatterOptions>();
  options.rootRank = src;
  WorkPtr work =
      adapter.start([&](auto& backend) { return backend.scatter(received, lists, options); });
  return {work, std::move(finish)};
}

}  // namespace

Started start(const Adapter& adapter, const HeldRequest& request) {
  const auto& sources = request.sources;
  const auto& outs = request.outs;
  const auto bytes_of_elements = [&](const std::vector<int64_t>& elements) {
    std::vector<int64_t> bytes = elements;
    for (auto& count : bytes) {
      count *= static_cast<int64_t>(outs.front().element_size());
    }
    return bytes;
  };
  if (request.has_parts()) {
    return with_parts(adapter, request);
  }
  switch (request.type) {
    case OpType::AllReduce:
      return request.is_list
                 ? all_reduce_coalesced(adapter, sources, outs, *request.reduction)
                 : all_reduce(adapter, sources.front(), outs.front(), *request.reduction);
    case OpType::Reduce:
      return reduce(adapter, sources.front(), outs.front(), *request.reduction, request.root);
    case OpType::AllGather:
      if (request.is_list) {
        return all_gather_coalesced(adapter, sources, outs);
      }
      return request.out_sizes.empty()
                 ? all_gather(adapter, sources.front(), outs.front())
                 : all_gather_uneven(adapter, sources.front(), outs.front(), request.out_sizes);
    case OpType::ReduceScatter:
      if (request.is_list) {
        return reduce_scatter_coalesced(adapter, sources, outs, *request.reduction);
      }
      return request.source_sizes.empty()
                 ? reduce_scatter(adapter, sources.front(), outs.front(), *request.reduction)
                 : exchange_and_reduce(adapter, sources.front(), outs.front(), *request.reduction,
                                       request.source_sizes);
    case OpType::AllToAll:
      return all_to_all(adapter, sources.front(), outs.front(),
                        bytes_of_elements(request.out_sizes),
                        bytes_of_elements(request.source_sizes));
    case OpType::Broadcast:
      return request.is_list ? broadcast_coalesced(adapter, sources, outs, request.root)
                             : broadcast(adapter, sources.front(), outs.front(), request.root);
    case OpType::Gather:
      return gather(adapter, sources.front(), outs.front(), request.root);
    case OpType::Scatter:
      return scatter(adapter, sources.front(), outs.front(), request.root);
    case OpType::Barrier:
      return barrier(adapter, outs.front().device());
    case OpType::SparseAllReduce:
      return all_reduce_sparse(adapter, outs.front(), *request.reduction);
    case OpType::Send:
    case OpType::Recv:
      break;
  }
  TORCH_INTERNAL_ASSERT(false, request.op, ": no collective of this type is lowered");
}

}  // namespace c10d_ext::lowering
