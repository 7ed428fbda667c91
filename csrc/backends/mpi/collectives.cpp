// Collectives of mpi, as calls of the library.

#include "backends/mpi/collectives.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <c10/util/accumulate.h>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <utility>
#include <vector>

#include "base/memory.h"
#include "base/reduction.h"
#include "base/sparse.h"

namespace c10d_ext::mpi {

namespace {

using Tensors = std::vector<at::Tensor>;
using Sizes = std::vector<int64_t>;

// Up to so many bytes of all ranks together, each rank gathers and reduces all of them itself: one
// step instead of two.
constexpr int64_t kSmall = int64_t{32} << 10;
// Elements that are reduced before the next ones, while they are in the cache.
constexpr int64_t kBlock = int64_t{1} << 14;

// Bytes of so many elements of `t`.
Sizes bytes_of(Sizes elements, const at::Tensor& t) {
  for (auto& size : elements) {
    size *= static_cast<int64_t>(t.element_size());
  }
  return elements;
}

std::byte* data_of(const at::Tensor& t) {
  return static_cast<std::byte*>(t.mutable_data_ptr());
}

// out = the rows of `rows`, one for each rank, reduced in the order of ranks.
void reduce_rows(const at::Tensor& rows, ReduceOp op, const at::Tensor& out) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const auto dtype = out.scalar_type();
  const bool is_half = c10::isReducedFloatingType(dtype);
  const int64_t ranks = rows.size(0), count = rows.size(1);
  at::Tensor wide = is_half ? at::empty({std::min(count, kBlock)}, out.options().dtype(at::kFloat))
                            : at::Tensor();
  for (int64_t offset = 0; offset < count; offset += kBlock) {
    const int64_t length = std::min(kBlock, count - offset);
    const at::Tensor target = out.narrow(0, offset, length);
    const at::Tensor sum = is_half ? wide.narrow(0, 0, length) : target;
    sum.copy_(rows.select(0, 0).narrow(0, offset, length));
    for (int64_t rank = 1; rank < ranks; ++rank) {
      combine(sum, rows.select(0, rank).narrow(0, offset, length), op, sum);
    }
    if (op == ReduceOp::Avg) {
      sum.div_(ranks);
    }
    if (is_half) {
      target.copy_(sum);
    }
  }
}

// What goes to rank r and what comes from there: `out_bytes[r]` from `out_offsets[r]` on, ...
struct Exchange {
  at::Tensor source, out;
  Sizes source_bytes, source_offsets, out_bytes, out_offsets;
};

Sizes offsets_of(const Sizes& sizes) {
  Sizes offsets(sizes.size());
  std::exclusive_scan(sizes.begin(), sizes.end(), offsets.begin(), int64_t{0});
  return offsets;
}

// Sends and receives at once.
void exchange(const CommsPtr& comms, const WorkPtr& work, Exchange parts, Over over) {
  const auto own = static_cast<size_t>(comms->rank());
  if (parts.source_bytes[own] != 0) {
    std::memcpy(data_of(parts.out) + parts.out_offsets[own],
                data_of(parts.source) + parts.source_offsets[own],
                static_cast<size_t>(parts.source_bytes[own]));
  }
  comms->call(
      work,
      [parts = std::move(parts), rank = comms->rank(), ranks = comms->size(),
       largest = comms->largest(), comm = comms->collectives()](Library& library, auto& requests) {
        // Nobody is everybody's first.
        for (int step = 1; step < ranks; ++step) {
          const int from = (rank - step + ranks) % ranks;
          const auto i = static_cast<size_t>(from);
          start_parts(library, requests, /*sends=*/false, data_of(parts.out) + parts.out_offsets[i],
                      parts.out_bytes[i], from, 0, comm, largest);
        }
        for (int step = 1; step < ranks; ++step) {
          const int to = (rank + step) % ranks;
          const auto i = static_cast<size_t>(to);
          start_parts(library, requests, /*sends=*/true,
                      data_of(parts.source) + parts.source_offsets[i], parts.source_bytes[i], to, 0,
                      comm, largest);
        }
      },
      std::move(over));
}

// Each rank's `sizes` bytes of `all`, of which it has its own, to everyone.
void share(const CommsPtr& comms, const WorkPtr& work, const at::Tensor& all, const Sizes& sizes,
           Over over) {
  const auto ranks = static_cast<size_t>(comms->size());
  const Sizes offsets = offsets_of(sizes);
  if (c10::sum_integers(sizes) <= comms->largest()) {
    comms->call(
        work,
        [all, bytes = std::vector<int>(sizes.begin(), sizes.end()),
         places = std::vector<int>(offsets.begin(), offsets.end()),
         comm = comms->collectives()](Library& library, auto& requests) {
          requests.push_back(library.all_gather_uneven(data_of(all), bytes, places, comm));
        },
        std::move(over));
    return;
  }
  const auto own = static_cast<size_t>(comms->rank());
  Sizes sent(ranks, sizes[own]);
  Sizes received = sizes;
  sent[own] = received[own] = 0;
  exchange(comms, work, {all, all, sent, Sizes(ranks, offsets[own]), received, offsets},
           std::move(over));
}

// Elements that each rank is the one to reduce.
Sizes shares_of(int64_t count, int64_t ranks) {
  Sizes shares(static_cast<size_t>(ranks), count / ranks);
  for (int64_t rank = 0; rank < count % ranks; ++rank) {
    ++shares[static_cast<size_t>(rank)];
  }
  return shares;
}

// What `sizes` elements of rank r's `source` are to rank r: reduced into `out`.
void reduce_parts(const CommsPtr& comms, const WorkPtr& work, const at::Tensor& source,
                  const Sizes& sizes, const at::Tensor& out, ReduceOp op, Over over) {
  const int64_t mine = sizes[static_cast<size_t>(comms->rank())];
  const at::Tensor rows = at::empty({comms->size(), mine}, source.options());
  const Sizes sent = bytes_of(sizes, source);
  const Sizes received(static_cast<size_t>(comms->size()),
                       sent[static_cast<size_t>(comms->rank())]);
  exchange(comms, work, {source, rows, sent, offsets_of(sent), received, offsets_of(received)},
           [rows, out, op, over = std::move(over)] {
             reduce_rows(rows, op, out);
             over();
           });
}

void broadcast(const CommsPtr& comms, const WorkPtr& work, const InnerCollective& what) {
  comms->call(
      work,
      [t = what.out, root = what.root, largest = comms->largest(), comm = comms->collectives()](
          Library& library, auto& requests) {
        const auto bytes = static_cast<int64_t>(t.nbytes());
        for (int64_t offset = 0; offset < bytes; offset += largest) {
          const auto size = static_cast<int>(std::min<int64_t>(largest, bytes - offset));
          requests.push_back(library.broadcast(data_of(t) + offset, size, root, comm));
        }
      },
      [work] { work->end({}); });
}

void all_reduce(const CommsPtr& comms, const WorkPtr& work, const InnerCollective& what) {
  const at::Tensor t = span_of(what.out, 0, what.out.numel());
  const auto bytes = static_cast<int64_t>(t.nbytes());
  if (bytes * comms->size() <= kSmall && bytes <= comms->largest()) {
    const at::Tensor rows = at::empty({comms->size(), t.numel()}, t.options());
    comms->call(
        work,
        [t, rows, comm = comms->collectives()](Library& library, auto& requests) {
          requests.push_back(
              library.all_gather(data_of(t), data_of(rows), static_cast<int>(t.nbytes()), comm));
        },
        [work, t, rows, op = what.reduce_op] {
          reduce_rows(rows, op, t);
          work->end({});
        });
    return;
  }
  const Sizes shares = shares_of(t.numel(), comms->size());
  const Sizes offsets = offsets_of(shares);
  const auto own = static_cast<size_t>(comms->rank());
  // Others have this rank's values of their shares by then; its own share is nobody else's.
  reduce_parts(comms, work, t, shares, t.narrow(0, offsets[own], shares[own]), what.reduce_op,
               [comms, work, t, shares] {
                 share(comms, work, t, bytes_of(shares, t), [work] { work->end({}); });
               });
}

void reduce(const CommsPtr& comms, const WorkPtr& work, const InnerCollective& what) {
  const at::Tensor t = span_of(what.out, 0, what.out.numel());
  const auto root = static_cast<size_t>(what.root);
  const auto ranks = static_cast<size_t>(comms->size());
  const auto bytes = static_cast<int64_t>(t.nbytes());
  if (bytes * comms->size() <= kSmall || comms->size() <= 2) {
    // The root reduces all of it.
    Sizes sizes(ranks, 0);
    sizes[root] = t.numel();
    const bool receives = comms->rank() == what.root;
    reduce_parts(comms, work, t, sizes, receives ? t : t.narrow(0, 0, 0), what.reduce_op,
                 [work] { work->end({}); });
    return;
  }
  const Sizes shares = shares_of(t.numel(), comms->size());
  const Sizes offsets = offsets_of(shares);
  const auto own = static_cast<size_t>(comms->rank());
  // Then each share goes to the root, where all of them lie one after the other.
  reduce_parts(comms, work, t, shares, t.narrow(0, offsets[own], shares[own]), what.reduce_op,
               [comms, work, t, shares, offsets, root, own, ranks] {
                 const auto width = static_cast<int64_t>(t.element_size());
                 Sizes sent(ranks, 0), received(ranks, 0), from(ranks, 0), to(ranks, 0);
                 for (size_t i = 0; i < ranks; ++i) {
                   from[i] = offsets[own] * width;
                   to[i] = offsets[i] * width;
                   if (own == root && i != own) {
                     received[i] = shares[i] * width;
                   }
                 }
                 if (own != root) {
                   sent[root] = shares[own] * width;
                 }
                 exchange(comms, work, {t, t, sent, from, received, to}, [work] { work->end({}); });
               });
}

void all_gather(const CommsPtr& comms, const WorkPtr& work, const InnerCollective& what) {
  const at::Tensor &source = what.source, &out = what.out;
  const auto ranks = static_cast<size_t>(comms->size());
  const auto bytes = static_cast<int64_t>(source.nbytes());
  if (bytes * comms->size() <= comms->largest()) {
    comms->call(
        work,
        [source, out, comm = comms->collectives()](Library& library, auto& requests) {
          requests.push_back(library.all_gather(data_of(source), data_of(out),
                                                static_cast<int>(source.nbytes()), comm));
        },
        [work] { work->end({}); });
    return;
  }
  const Sizes sizes(ranks, bytes);
  exchange(comms, work, {source, out, sizes, Sizes(ranks, 0), sizes, offsets_of(sizes)},
           [work] { work->end({}); });
}

void reduce_scatter(const CommsPtr& comms, const WorkPtr& work, const InnerCollective& what) {
  const at::Tensor &source = what.source, &out = what.out;
  reduce_parts(comms, work, span_of(source, 0, source.numel()),
               Sizes(static_cast<size_t>(comms->size()), out.numel()), span_of(out, 0, out.numel()),
               what.reduce_op, [work] { work->end({}); });
}

void all_to_all(const CommsPtr& comms, const WorkPtr& work, const InnerCollective& what) {
  Sizes sent = bytes_of(what.sent, what.source);
  Sizes received = bytes_of(what.received, what.source);
  const Sizes from = offsets_of(sent), to = offsets_of(received);
  exchange(comms, work, {what.source, what.out, std::move(sent), from, std::move(received), to},
           [work] { work->end({}); });
}

void barrier(const CommsPtr& comms, const WorkPtr& work, const InnerCollective& /*what*/) {
  comms->call(
      work,
      [comm = comms->collectives()](Library& library, auto& requests) {
        requests.push_back(library.barrier(comm));
      },
      [work] { work->end({}); });
}

}  // namespace

// How many entries everybody has, then all of them, which each rank adds up.
void all_reduce_sparse(const CommsPtr& comms, const WorkPtr& work, const at::Tensor& tensor) {
  const at::Tensor own = added_up(tensor);
  const at::Tensor indices = own._indices().contiguous(), values = own._values().contiguous();
  const at::Tensor count = at::empty({1}, at::kLong).fill_(indices.size(1));
  const at::Tensor counts = at::empty({comms->size()}, at::kLong);
  comms->call(
      work,
      [count, counts, comm = comms->collectives()](Library& library, auto& requests) {
        requests.push_back(
            library.all_gather(data_of(count), data_of(counts), sizeof(int64_t), comm));
      },
      [comms, work, tensor, indices, values, counts] {
        const at::AutoDispatchBelowADInplaceOrView below_autograd;
        auto shape = values.sizes().vec();
        shape[0] = 1;
        const int64_t of_indices = indices.size(0) * static_cast<int64_t>(sizeof(int64_t));
        const int64_t of_values =
            c10::multiply_integers(shape) * static_cast<int64_t>(values.element_size());
        Sizes sizes;
        for (int rank = 0; rank < comms->size(); ++rank) {
          sizes.push_back(counts.const_data_ptr<int64_t>()[rank] * (of_indices + of_values));
        }
        const Sizes offsets = offsets_of(sizes);
        const at::Tensor all = at::empty({c10::sum_integers(sizes)}, at::kByte);
        std::byte* mine = data_of(all) + offsets[static_cast<size_t>(comms->rank())];
        std::memcpy(mine, indices.const_data_ptr(), indices.nbytes());
        std::memcpy(mine + indices.nbytes(), values.const_data_ptr(), values.nbytes());
        share(
            comms, work, all, sizes,
            [comms, work, tensor, indices, values, counts, all, offsets, shape] {
              const at::AutoDispatchBelowADInplaceOrView adding;
              Tensors all_indices, all_values;
              for (size_t rank = 0; rank < offsets.size(); ++rank) {
                auto entries = shape;
                entries[0] = counts.const_data_ptr<int64_t>()[rank];
                all_indices.push_back(at::empty({indices.size(0), entries[0]}, indices.options()));
                all_values.push_back(at::empty(entries, values.options()));
                const std::byte* from = data_of(all) + offsets[rank];
                const size_t bytes = all_indices.back().nbytes();
                std::memcpy(data_of(all_indices.back()), from, bytes);
                std::memcpy(data_of(all_values.back()), from + bytes, all_values.back().nbytes());
              }
              const at::Tensor sum =
                  added_up(at::cat(all_indices, 1), at::cat(all_values, 0), tensor.sizes());
              tensor.copy_(sum.to(tensor.scalar_type()));
              work->end({});
            });
      });
}

const InnerTable<Collective> kCollectives{.barrier = barrier,
                                          .all_reduce = all_reduce,
                                          .reduce = reduce,
                                          .broadcast = broadcast,
                                          .all_gather = all_gather,
                                          .reduce_scatter = reduce_scatter,
                                          .all_to_all = all_to_all};

}  // namespace c10d_ext::mpi
