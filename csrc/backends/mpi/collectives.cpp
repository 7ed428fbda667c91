// Collectives of mpi, as calls of the library.

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <c10/util/accumulate.h>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <utility>
#include <vector>

#include "backends/mpi/backend.h"
#include "base/memory.h"
#include "base/reduction.h"
#include "base/sparse.h"

namespace c10d_ext {

namespace {

using mpi::Library;
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

}  // namespace

// What goes to rank r and what comes from there: `out_bytes[r]` from `out_offsets[r]` on, ...
struct MpiBackend::Exchange {
  at::Tensor source, out;
  Sizes source_bytes, source_offsets, out_bytes, out_offsets;

  static Sizes offsets_of(const Sizes& sizes) {
    Sizes offsets(sizes.size());
    std::exclusive_scan(sizes.begin(), sizes.end(), offsets.begin(), int64_t{0});
    return offsets;
  }
};

void MpiBackend::exchange(const InnerWork& work, Exchange parts, Over over) {
  const auto own = static_cast<size_t>(rank_);
  if (parts.source_bytes[own] != 0) {
    std::memcpy(data_of(parts.out) + parts.out_offsets[own],
                data_of(parts.source) + parts.source_offsets[own],
                static_cast<size_t>(parts.source_bytes[own]));
  }
  const int rank = rank_, ranks = size_, largest = largest_;
  call(
      work,
      [parts = std::move(parts), rank, ranks, largest, comm = collectives_](Library& library,
                                                                            auto& requests) {
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

void MpiBackend::share(const InnerWork& work, const at::Tensor& all, const Sizes& sizes,
                       Over over) {
  const auto ranks = static_cast<size_t>(size_);
  const Sizes offsets = Exchange::offsets_of(sizes);
  if (c10::sum_integers(sizes) <= largest_) {
    call(
        work,
        [all, bytes = std::vector<int>(sizes.begin(), sizes.end()),
         places = std::vector<int>(offsets.begin(), offsets.end()),
         comm = collectives_](Library& library, auto& requests) {
          requests.push_back(library.all_gather_uneven(data_of(all), bytes, places, comm));
        },
        std::move(over));
    return;
  }
  const auto own = static_cast<size_t>(rank_);
  Sizes sent(ranks, sizes[own]);
  Sizes received = sizes;
  sent[own] = received[own] = 0;
  exchange(work, {all, all, sent, Sizes(ranks, offsets[own]), received, offsets}, std::move(over));
}

Sizes MpiBackend::shares_of(int64_t count) const {
  Sizes shares(static_cast<size_t>(size_), count / size_);
  for (int64_t rank = 0; rank < count % size_; ++rank) {
    ++shares[static_cast<size_t>(rank)];
  }
  return shares;
}

void MpiBackend::reduce_parts(const InnerWork& work, const at::Tensor& source, const Sizes& sizes,
                              const at::Tensor& out, ReduceOp op, Over over) {
  const int64_t mine = sizes[static_cast<size_t>(rank_)];
  const at::Tensor rows = at::empty({size_, mine}, source.options());
  const Sizes sent = bytes_of(sizes, source);
  const Sizes received(static_cast<size_t>(size_), sent[static_cast<size_t>(rank_)]);
  exchange(
      work,
      {source, rows, sent, Exchange::offsets_of(sent), received, Exchange::offsets_of(received)},
      [rows, out, op, over = std::move(over)] {
        reduce_rows(rows, op, out);
        over();
      });
}

void MpiBackend::start_broadcast(const InnerWork& work, const at::Tensor& t, int root) {
  call(
      work,
      [t, root, largest = largest_, comm = collectives_](Library& library, auto& requests) {
        const auto bytes = static_cast<int64_t>(t.nbytes());
        for (int64_t offset = 0; offset < bytes; offset += largest) {
          const auto size = static_cast<int>(std::min<int64_t>(largest, bytes - offset));
          requests.push_back(library.broadcast(data_of(t) + offset, size, root, comm));
        }
      },
      [work] { work->end({}); });
}

// How many entries everybody has, then all of them, which each rank adds up.
MpiBackend::WorkPtr MpiBackend::all_reduce_sparse(const at::Tensor& tensor,
                                                  Milliseconds /*timeout*/) {
  const auto work = begin_work(c10d::OpType::_ALLREDUCE_SPARSE, OpType::SparseAllReduce, tensor);
  const at::Tensor own = added_up(tensor);
  const at::Tensor indices = own._indices().contiguous(), values = own._values().contiguous();
  const at::Tensor count = at::empty({1}, at::kLong).fill_(indices.size(1));
  const at::Tensor counts = at::empty({size_}, at::kLong);
  const auto self = c10::intrusive_ptr<MpiBackend>::reclaim_copy(this);
  call(
      work,
      [count, counts, comm = collectives_](Library& library, auto& requests) {
        requests.push_back(
            library.all_gather(data_of(count), data_of(counts), sizeof(int64_t), comm));
      },
      [self, work, tensor, indices, values, counts] {
        const at::AutoDispatchBelowADInplaceOrView below_autograd;
        auto shape = values.sizes().vec();
        shape[0] = 1;
        const int64_t of_indices = indices.size(0) * static_cast<int64_t>(sizeof(int64_t));
        const int64_t of_values =
            c10::multiply_integers(shape) * static_cast<int64_t>(values.element_size());
        Sizes sizes;
        for (int rank = 0; rank < self->size_; ++rank) {
          sizes.push_back(counts.const_data_ptr<int64_t>()[rank] * (of_indices + of_values));
        }
        const Sizes offsets = Exchange::offsets_of(sizes);
        const at::Tensor all = at::empty({c10::sum_integers(sizes)}, at::kByte);
        std::byte* mine = data_of(all) + offsets[static_cast<size_t>(self->rank_)];
        std::memcpy(mine, indices.const_data_ptr(), indices.nbytes());
        std::memcpy(mine + indices.nbytes(), values.const_data_ptr(), values.nbytes());
        self->share(
            work, all, sizes, [self, work, tensor, indices, values, counts, all, offsets, shape] {
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
  return work;
}

void MpiBackend::start_all_reduce(const InnerWork& work, const at::Tensor& tensor, ReduceOp op) {
  const at::Tensor t = span_of(tensor, 0, tensor.numel());
  const auto bytes = static_cast<int64_t>(t.nbytes());
  if (bytes * size_ <= kSmall && bytes <= largest_) {
    const at::Tensor rows = at::empty({size_, t.numel()}, t.options());
    call(
        work,
        [t, rows, comm = collectives_](Library& library, auto& requests) {
          requests.push_back(
              library.all_gather(data_of(t), data_of(rows), static_cast<int>(t.nbytes()), comm));
        },
        [work, t, rows, op] {
          reduce_rows(rows, op, t);
          work->end({});
        });
    return;
  }
  const Sizes shares = shares_of(t.numel());
  const Sizes offsets = Exchange::offsets_of(shares);
  const auto own = static_cast<size_t>(rank_);
  const auto self = c10::intrusive_ptr<MpiBackend>::reclaim_copy(this);
  // Others have this rank's values of their shares by then; its own share is nobody else's.
  reduce_parts(work, t, shares, t.narrow(0, offsets[own], shares[own]), op,
               [self, work, t, shares] {
                 self->share(work, t, bytes_of(shares, t), [work] { work->end({}); });
               });
}

void MpiBackend::start_reduce(const InnerWork& work, const at::Tensor& tensor, ReduceOp op,
                              int root_rank) {
  const at::Tensor t = span_of(tensor, 0, tensor.numel());
  const auto root = static_cast<size_t>(root_rank);
  const auto ranks = static_cast<size_t>(size_);
  const auto bytes = static_cast<int64_t>(t.nbytes());
  if (bytes * size_ <= kSmall || size_ <= 2) {
    // The root reduces all of it.
    Sizes sizes(ranks, 0);
    sizes[root] = t.numel();
    const bool receives = rank_ == root_rank;
    reduce_parts(work, t, sizes, receives ? t : t.narrow(0, 0, 0), op, [work] { work->end({}); });
    return;
  }
  const Sizes shares = shares_of(t.numel());
  const Sizes offsets = Exchange::offsets_of(shares);
  const auto own = static_cast<size_t>(rank_);
  const auto self = c10::intrusive_ptr<MpiBackend>::reclaim_copy(this);
  // Then each share goes to the root, where all of them lie one after the other.
  reduce_parts(work, t, shares, t.narrow(0, offsets[own], shares[own]), op,
               [self, work, t, shares, offsets, root, own, ranks] {
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
                 self->exchange(work, {t, t, sent, from, received, to}, [work] { work->end({}); });
               });
}

void MpiBackend::start_all_gather(const InnerWork& work, const at::Tensor& source,
                                  const at::Tensor& out) {
  const auto ranks = static_cast<size_t>(size_);
  const auto bytes = static_cast<int64_t>(source.nbytes());
  if (bytes * size_ <= largest_) {
    call(
        work,
        [source, out, comm = collectives_](Library& library, auto& requests) {
          requests.push_back(library.all_gather(data_of(source), data_of(out),
                                                static_cast<int>(source.nbytes()), comm));
        },
        [work] { work->end({}); });
    return;
  }
  const Sizes sizes(ranks, bytes);
  exchange(work, {source, out, sizes, Sizes(ranks, 0), sizes, Exchange::offsets_of(sizes)},
           [work] { work->end({}); });
}

void MpiBackend::start_reduce_scatter(const InnerWork& work, const at::Tensor& source,
                                      const at::Tensor& out, ReduceOp op) {
  reduce_parts(work, span_of(source, 0, source.numel()),
               Sizes(static_cast<size_t>(size_), out.numel()), span_of(out, 0, out.numel()), op,
               [work] { work->end({}); });
}

void MpiBackend::start_all_to_all(const InnerWork& work, const at::Tensor& source,
                                  const at::Tensor& out, Sizes sent, Sizes received) {
  sent = bytes_of(std::move(sent), source);
  received = bytes_of(std::move(received), source);
  const Sizes from = Exchange::offsets_of(sent), to = Exchange::offsets_of(received);
  exchange(work, {source, out, std::move(sent), from, std::move(received), to},
           [work] { work->end({}); });
}

void MpiBackend::start_barrier(const InnerWork& work) {
  call(
      work,
      [comm = collectives_](Library& library, auto& requests) {
        requests.push_back(library.barrier(comm));
      },
      [work] { work->end({}); });
}

}  // namespace c10d_ext
