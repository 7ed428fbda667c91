// Collectives of mpi, as messages of the library.

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
// With more, what everybody is to have goes around a ring: ranks next to each other may be on one
// host, whose link that takes once.
constexpr int64_t kRing = int64_t{512} << 10;
// Up to so many bytes are broadcast along a tree. More go from rank to rank in parts, or, where so
// few parts would wait for so many ranks, in shares that the ranks pass on.
constexpr int64_t kTree = int64_t{64} << 10;
constexpr int64_t kChainPart = int64_t{256} << 10;
constexpr int64_t kChainParts = 32;
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

// A group's collective: its messages go over one channel, with one tag.
class Collective {
 public:
  // In the same order on all ranks.
  Collective(CommsPtr comms, WorkPtr work)
      : comms_(std::move(comms)),
        work_(std::move(work)),
        channel_(comms_->collectives()),
        tag_(comms_->next_tag()) {}

  int rank() const {
    return comms_->rank();
  }
  int size() const {
    return comms_->size();
  }
  size_t own() const {
    return static_cast<size_t>(rank());
  }
  size_t ranks() const {
    return static_cast<size_t>(size());
  }

  void begin(std::vector<Step> steps, Over over) const {
    comms_->call(work_, std::move(steps), std::move(over));
  }
  void end() const {
    work_->end({});
  }

  // Part of a step.
  void send(Library& library, Requests& requests, const at::Tensor& t, int64_t offset,
            int64_t bytes, int peer) const {
    channel_.add(library, requests, /*sends=*/true, data_of(t) + offset, bytes, peer, tag_);
  }
  void receive(Library& library, Requests& requests, const at::Tensor& t, int64_t offset,
               int64_t bytes, int peer) const {
    channel_.add(library, requests, /*sends=*/false, data_of(t) + offset, bytes, peer, tag_);
  }

 private:
  const CommsPtr comms_;
  const WorkPtr work_;
  const Channel channel_;
  const int tag_;
};

// Sends and receives at once.
void exchange(const Collective& group, Exchange parts, Over over) {
  const size_t own = group.own();
  if (parts.source_bytes[own] != 0) {
    std::memcpy(data_of(parts.out) + parts.out_offsets[own],
                data_of(parts.source) + parts.source_offsets[own],
                static_cast<size_t>(parts.source_bytes[own]));
  }
  group.begin({[parts = std::move(parts), group](Library& library, Requests& requests) {
                // Nobody is everybody's first.
                for (size_t step = 1; step < group.ranks(); ++step) {
                  const size_t from = (group.own() + group.ranks() - step) % group.ranks();
                  if (parts.out_bytes[from] != 0) {
                    group.receive(library, requests, parts.out, parts.out_offsets[from],
                                  parts.out_bytes[from], static_cast<int>(from));
                  }
                }
                for (size_t step = 1; step < group.ranks(); ++step) {
                  const size_t to = (group.own() + step) % group.ranks();
                  if (parts.source_bytes[to] != 0) {
                    group.send(library, requests, parts.source, parts.source_offsets[to],
                               parts.source_bytes[to], static_cast<int>(to));
                  }
                }
              }},
              std::move(over));
}

// Each rank passes on to the next one what it has last heard from the one before it.
std::vector<Step> around_the_ring(const Collective& group, const at::Tensor& all,
                                  const Sizes& sizes) {
  std::vector<Step> steps;
  const Sizes offsets = offsets_of(sizes);
  const size_t ranks = group.ranks(), own = group.own();
  for (size_t step = 0; step + 1 < ranks; ++step) {
    const size_t sent = (own + ranks - step) % ranks, got = (own + 2 * ranks - step - 1) % ranks;
    steps.emplace_back([=](Library& library, Requests& requests) {
      const auto before = static_cast<int>((own + ranks - 1) % ranks);
      const auto next = static_cast<int>((own + 1) % ranks);
      if (sizes[got] != 0) {
        group.receive(library, requests, all, offsets[got], sizes[got], before);
      }
      if (sizes[sent] != 0) {
        group.send(library, requests, all, offsets[sent], sizes[sent], next);
      }
    });
  }
  return steps;
}

// Each rank's `sizes` bytes of `all`, of which it has its own, to everyone.
void share(const Collective& group, const at::Tensor& all, const Sizes& sizes, Over over) {
  if (group.ranks() > 2 && c10::sum_integers(sizes) > kRing) {
    group.begin(around_the_ring(group, all, sizes), std::move(over));
    return;
  }
  const Sizes offsets = offsets_of(sizes);
  Sizes sent(group.ranks(), sizes[group.own()]);
  Sizes received = sizes;
  sent[group.own()] = received[group.own()] = 0;
  exchange(group, {all, all, sent, Sizes(group.ranks(), offsets[group.own()]), received, offsets},
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
void reduce_parts(const Collective& group, const at::Tensor& source, const Sizes& sizes,
                  const at::Tensor& out, ReduceOp op, Over over) {
  const int64_t mine = sizes[group.own()];
  const at::Tensor rows = at::empty({group.size(), mine}, source.options());
  const Sizes sent = bytes_of(sizes, source);
  const Sizes received(group.ranks(), sent[group.own()]);
  exchange(group, {source, rows, sent, offsets_of(sent), received, offsets_of(received)},
           [rows, out, op, over = std::move(over)] {
             reduce_rows(rows, op, out);
             over();
           });
}

// From the root to more and more ranks, each of which tells those that follow it in the tree.
std::vector<Step> along_a_tree(const Collective& group, const at::Tensor& t, int root) {
  const int ranks = group.size(), from_root = (group.rank() - root + ranks) % ranks;
  const auto bytes = static_cast<int64_t>(t.nbytes());
  int apart = 1;
  while (apart < ranks && (from_root & apart) == 0) {
    apart *= 2;
  }
  std::vector<Step> steps;
  if (from_root != 0) {
    steps.emplace_back([=](Library& library, Requests& requests) {
      group.receive(library, requests, t, 0, bytes, (from_root - apart + root) % ranks);
    });
  }
  steps.emplace_back([=](Library& library, Requests& requests) {
    for (int to = apart / 2; to > 0; to /= 2) {
      if (from_root + to < ranks) {
        group.send(library, requests, t, 0, bytes, (from_root + to + root) % ranks);
      }
    }
  });
  return steps;
}

// From the root to the rank behind it and on to the last one: each passes a part on while the next
// one comes.
std::vector<Step> along_a_chain(const Collective& group, const at::Tensor& t, int root,
                                int64_t parts) {
  const int ranks = group.size(), from_root = (group.rank() - root + ranks) % ranks;
  const Sizes sizes = shares_of(static_cast<int64_t>(t.nbytes()), parts);
  const Sizes offsets = offsets_of(sizes);
  const auto message = [=](bool sends, size_t part, Library& library, Requests& requests) {
    if (sends && from_root + 1 < ranks) {
      group.send(library, requests, t, offsets[part], sizes[part], (group.rank() + 1) % ranks);
    } else if (!sends && from_root != 0) {
      const int before = (group.rank() + ranks - 1) % ranks;
      group.receive(library, requests, t, offsets[part], sizes[part], before);
    }
  };
  std::vector<Step> steps;
  for (size_t part = 0; part <= sizes.size(); ++part) {
    steps.emplace_back([=, count = sizes.size()](Library& library, Requests& requests) {
      if (part < count) {
        message(/*sends=*/false, part, library, requests);
      }
      if (part > 0) {
        message(/*sends=*/true, part - 1, library, requests);
      }
    });
  }
  return steps;
}

void broadcast(const CommsPtr& comms, const WorkPtr& work, const InnerCollective& what) {
  const Collective group(comms, work);
  const at::Tensor t = span_of(what.out, 0, what.out.numel());
  const auto bytes = static_cast<int64_t>(t.nbytes());
  const int64_t parts = std::clamp<int64_t>(bytes / kChainPart, int64_t{1}, kChainParts);
  if (bytes <= kTree || group.ranks() <= 2) {
    group.begin(along_a_tree(group, t, what.root), [group] { group.end(); });
    return;
  }
  if (group.size() - 2 <= parts) {
    group.begin(along_a_chain(group, t, what.root, parts), [group] { group.end(); });
    return;
  }
  // Each rank is sent a share, and passes that on.
  const Sizes shares = shares_of(bytes, group.size()), offsets = offsets_of(shares);
  const auto root = static_cast<size_t>(what.root);
  Sizes sent(group.ranks(), 0), received(group.ranks(), 0);
  if (group.own() == root) {
    sent = shares;
    sent[root] = 0;
  } else {
    received[root] = shares[group.own()];
  }
  exchange(group, {t, t, sent, offsets, received, Sizes(group.ranks(), offsets[group.own()])},
           [group, t, shares] { share(group, t, shares, [group] { group.end(); }); });
}

void all_reduce(const CommsPtr& comms, const WorkPtr& work, const InnerCollective& what) {
  const Collective group(comms, work);
  const at::Tensor t = span_of(what.out, 0, what.out.numel());
  const auto bytes = static_cast<int64_t>(t.nbytes());
  if (bytes * group.size() <= kSmall) {
    const at::Tensor rows = at::empty({group.size(), t.numel()}, t.options());
    rows.select(0, group.rank()).copy_(t);
    share(group, rows, Sizes(group.ranks(), bytes), [group, t, rows, op = what.reduce_op] {
      reduce_rows(rows, op, t);
      group.end();
    });
    return;
  }
  const Sizes shares = shares_of(t.numel(), group.size());
  const Sizes offsets = offsets_of(shares);
  // Others have this rank's values of their shares by then; its own share is nobody else's.
  reduce_parts(
      group, t, shares, t.narrow(0, offsets[group.own()], shares[group.own()]), what.reduce_op,
      [group, t, shares] { share(group, t, bytes_of(shares, t), [group] { group.end(); }); });
}

void reduce(const CommsPtr& comms, const WorkPtr& work, const InnerCollective& what) {
  const Collective group(comms, work);
  const at::Tensor t = span_of(what.out, 0, what.out.numel());
  const auto root = static_cast<size_t>(what.root);
  const auto bytes = static_cast<int64_t>(t.nbytes());
  if (bytes * group.size() <= kSmall || group.ranks() <= 2) {
    // The root reduces all of it.
    Sizes sizes(group.ranks(), 0);
    sizes[root] = t.numel();
    reduce_parts(group, t, sizes, group.own() == root ? t : t.narrow(0, 0, 0), what.reduce_op,
                 [group] { group.end(); });
    return;
  }
  const Sizes shares = shares_of(t.numel(), group.size());
  const Sizes offsets = offsets_of(shares);
  // Then each share goes to the root, where all of them lie one after the other.
  reduce_parts(group, t, shares, t.narrow(0, offsets[group.own()], shares[group.own()]),
               what.reduce_op, [group, t, shares, offsets, root] {
                 const auto width = static_cast<int64_t>(t.element_size());
                 const size_t own = group.own(), ranks = group.ranks();
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
                 exchange(group, {t, t, sent, from, received, to}, [group] { group.end(); });
               });
}

void all_gather(const CommsPtr& comms, const WorkPtr& work, const InnerCollective& what) {
  const Collective group(comms, work);
  const at::Tensor out = span_of(what.out, 0, what.out.numel());
  const int64_t count = what.source.numel();
  out.narrow(0, group.rank() * count, count).copy_(span_of(what.source, 0, count));
  const Sizes sizes(group.ranks(), static_cast<int64_t>(what.source.nbytes()));
  share(group, out, sizes, [group] { group.end(); });
}

void reduce_scatter(const CommsPtr& comms, const WorkPtr& work, const InnerCollective& what) {
  const Collective group(comms, work);
  const at::Tensor &source = what.source, &out = what.out;
  reduce_parts(group, span_of(source, 0, source.numel()), Sizes(group.ranks(), out.numel()),
               span_of(out, 0, out.numel()), what.reduce_op, [group] { group.end(); });
}

void all_to_all(const CommsPtr& comms, const WorkPtr& work, const InnerCollective& what) {
  const Collective group(comms, work);
  Sizes sent = bytes_of(what.sent, what.source);
  Sizes received = bytes_of(what.received, what.source);
  const Sizes from = offsets_of(sent), to = offsets_of(received);
  exchange(group, {what.source, what.out, std::move(sent), from, std::move(received), to},
           [group] { group.end(); });
}

// After each step a rank has heard, from those before it, of twice as many.
void barrier(const CommsPtr& comms, const WorkPtr& work, const InnerCollective& /*what*/) {
  const Collective group(comms, work);
  const at::Tensor nothing = at::empty({0}, at::kByte);
  std::vector<Step> steps;
  for (int apart = 1; apart < group.size(); apart *= 2) {
    steps.emplace_back([=](Library& library, Requests& requests) {
      const int size = group.size(), rank = group.rank();
      group.receive(library, requests, nothing, 0, 0, (rank - apart + size) % size);
      group.send(library, requests, nothing, 0, 0, (rank + apart) % size);
    });
  }
  group.begin(std::move(steps), [group] { group.end(); });
}

}  // namespace

// How many entries everybody has, then all of them, which each rank adds up.
void all_reduce_sparse(const CommsPtr& comms, const WorkPtr& work, const at::Tensor& tensor) {
  const Collective group(comms, work);
  const at::Tensor own = added_up(tensor);
  const at::Tensor indices = own._indices().contiguous(), values = own._values().contiguous();
  const at::Tensor counts = at::empty({group.size()}, at::kLong);
  counts[group.rank()].fill_(indices.size(1));
  const Sizes each(group.ranks(), sizeof(int64_t));
  share(group, counts, each, [group, tensor, indices, values, counts] {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    auto shape = values.sizes().vec();
    shape[0] = 1;
    const int64_t of_indices = indices.size(0) * static_cast<int64_t>(sizeof(int64_t));
    const int64_t of_values =
        c10::multiply_integers(shape) * static_cast<int64_t>(values.element_size());
    Sizes sizes;
    for (int rank = 0; rank < group.size(); ++rank) {
      sizes.push_back(counts.const_data_ptr<int64_t>()[rank] * (of_indices + of_values));
    }
    const Sizes offsets = offsets_of(sizes);
    const at::Tensor all = at::empty({c10::sum_integers(sizes)}, at::kByte);
    std::byte* mine = data_of(all) + offsets[group.own()];
    std::memcpy(mine, indices.const_data_ptr(), indices.nbytes());
    std::memcpy(mine + indices.nbytes(), values.const_data_ptr(), values.nbytes());
    share(group, all, sizes, [group, tensor, indices, values, counts, all, offsets, shape] {
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
      group.end();
    });
  });
}

const InnerTable<Begin> kCollectives{.barrier = barrier,
                                     .all_reduce = all_reduce,
                                     .reduce = reduce,
                                     .broadcast = broadcast,
                                     .all_gather = all_gather,
                                     .reduce_scatter = reduce_scatter,
                                     .all_to_all = all_to_all};

}  // namespace c10d_ext::mpi
