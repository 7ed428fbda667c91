// Collectives of several hosts, as schedules of requests.

#include <ATen/ops/empty.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include "backends/hierarchical/backend.h"
#include "base/memory.h"

namespace c10d_ext {

namespace {

using std::string_view;
using Sizes = std::vector<int64_t>;

// Up to so many bytes every rail carries all of them: one step between hosts and none after it.
constexpr int64_t kSmall = int64_t{16} << 10;
// Larger ones travel in parts, so that memory and links work at once.
constexpr int64_t kPart = int64_t{1} << 20;
constexpr int64_t kParts = 8;

at::Tensor flat(const at::Tensor& t) {
  return span_of(t, 0, t.numel());
}

at::Tensor rows_of(const at::Tensor& t, int64_t rows) {
  return flat(t).view({rows, t.numel() / std::max<int64_t>(rows, 1)});
}

// to[i] = from[order[i]]
void gather_rows(const at::Tensor& to, const at::Tensor& from, const Sizes& order) {
  for (size_t i = 0; i < order.size(); ++i) {
    to.select(0, static_cast<int64_t>(i)).copy_(from.select(0, order[i]));
  }
}

// to[order[i]] = from[i]
void scatter_rows(const at::Tensor& to, const at::Tensor& from, const Sizes& order) {
  for (size_t i = 0; i < order.size(); ++i) {
    to.select(0, order[i]).copy_(from.select(0, static_cast<int64_t>(i)));
  }
}

}  // namespace

Sizes HierarchicalBackend::order_by_host() const {
  Sizes order;
  for (const auto& ranks : hosts_) {
    order.insert(order.end(), ranks.begin(), ranks.end());
  }
  return order;
}

Sizes HierarchicalBackend::order_by_place() const {
  Sizes order;
  for (size_t place = 0; place < hosts_[0].size(); ++place) {
    for (const auto& ranks : hosts_) {
      order.push_back(ranks[place]);
    }
  }
  return order;
}

// Inside, each rank reduces a share; the shares are reduced between hosts, each on a rail of its
// own; inside, everybody gathers them. Parts of the tensor are in different steps at once.
void HierarchicalBackend::all_reduce_over_rails(const at::Tensor& t, const Reduction& reduction) {
  constexpr string_view op = "all_reduce";
  const int64_t here = ranks_here();
  const int64_t parts =
      std::clamp<int64_t>(static_cast<int64_t>(t.nbytes()) / kPart, int64_t{1}, kParts);
  const int64_t share = t.numel() / (parts * here);
  struct Pipe {
    at::Tensor whole, share;
    Step scattered, reduced, gathered;
  };
  std::vector<Pipe> pipes(share > 0 ? static_cast<size_t>(parts) : 0);
  int64_t offset = 0;
  for (auto& pipe : pipes) {
    pipe.whole = t.narrow(0, offset, share * here);
    pipe.share = at::empty({share}, t.options());
    offset += share * here;
    pipe.scattered =
        start(local_, CollectiveRequest::reduce_scatter(op, pipe.whole, pipe.share, reduction));
  }
  const at::Tensor rest = t.narrow(0, offset, t.numel() - offset);
  for (auto& pipe : pipes) {
    pipe.scattered.wait();
    pipe.reduced =
        start(rail_, CollectiveRequest::all_reduce(op, pipe.share, pipe.share, reduction));
  }
  for (auto& pipe : pipes) {
    pipe.reduced.wait();
    pipe.gathered = start(local_, CollectiveRequest::all_gather(op, pipe.share, pipe.whole));
  }
  if (rest.numel() != 0) {
    // Less than an element for each share: every rail carries it.
    start(local_, CollectiveRequest::all_reduce(op, rest, rest, reduction)).wait();
    start(rail_, CollectiveRequest::all_reduce(op, rest, rest, reduction)).wait();
  }
  for (auto& pipe : pipes) {
    pipe.gathered.wait();
  }
}

void HierarchicalBackend::all_reduce_by_leaders(const at::Tensor& t, const Reduction& reduction) {
  constexpr string_view op = "all_reduce";
  if (local_.is_there()) {
    start(local_, CollectiveRequest::reduce(op, t, t, reduction, 0)).wait();
  }
  if (is_leader()) {
    start(rail_, CollectiveRequest::all_reduce(op, t, t, reduction)).wait();
  }
  if (local_.is_there()) {
    start(local_, CollectiveRequest::broadcast(op, t, t, 0)).wait();
  }
}

void HierarchicalBackend::start_all_reduce(const InnerWork& work, const at::Tensor& tensor,
                                           ReduceOp reduce_op) {
  schedule(work, [this, t = flat(tensor), reduction = Reduction{reduce_op, std::nullopt}] {
    constexpr string_view op = "all_reduce";
    if (!is_even_) {
      all_reduce_by_leaders(t, reduction);
    } else if (!local_.is_there()) {
      start(rail_, CollectiveRequest::all_reduce(op, t, t, reduction)).wait();
    } else if (static_cast<int64_t>(t.nbytes()) <= kSmall) {
      start(local_, CollectiveRequest::all_reduce(op, t, t, reduction)).wait();
      start(rail_, CollectiveRequest::all_reduce(op, t, t, reduction)).wait();
    } else {
      all_reduce_over_rails(t, reduction);
    }
  });
}

void HierarchicalBackend::start_reduce(const InnerWork& work, const at::Tensor& tensor,
                                       ReduceOp reduce_op, int root) {
  schedule(work, [this, t = flat(tensor), reduction = Reduction{reduce_op, std::nullopt}, root] {
    constexpr string_view op = "reduce";
    const int place = place_of_[static_cast<size_t>(root)];
    const bool is_here = host_of(root) == host_;
    // On a rail the root is reduced to at once; leaders are where it may have none.
    const int on_rail = is_even_ ? place : 0;
    if (local_.is_there()) {
      start(local_, CollectiveRequest::reduce(op, t, t, reduction, on_rail)).wait();
    }
    if (place_in_host_ == on_rail) {
      start(rail_, CollectiveRequest::reduce(op, t, t, reduction, host_of(root))).wait();
    }
    if (is_here && place != on_rail) {
      start(local_, CollectiveRequest::broadcast(op, t, t, on_rail)).wait();
    }
  });
}

void HierarchicalBackend::start_broadcast(const InnerWork& work, const at::Tensor& tensor,
                                          int root) {
  schedule(work, [this, t = flat(tensor), root] {
    constexpr string_view op = "broadcast";
    const int place = place_of_[static_cast<size_t>(root)];
    const bool is_here = host_of(root) == host_;
    const int on_rail = is_even_ ? place : 0;
    if (is_here && local_.is_there() && on_rail != place) {
      start(local_, CollectiveRequest::broadcast(op, t, t, place)).wait();
    }
    if (place_in_host_ == on_rail) {
      start(rail_, CollectiveRequest::broadcast(op, t, t, host_of(root))).wait();
    }
    if (local_.is_there() && !(is_here && on_rail != place)) {
      start(local_, CollectiveRequest::broadcast(op, t, t, on_rail)).wait();
    }
  });
}

void HierarchicalBackend::start_all_gather(const InnerWork& work, const at::Tensor& source,
                                           const at::Tensor& out) {
  schedule(work, [this, in = flat(source), out] {
    constexpr string_view op = "all_gather";
    const int64_t hosts = static_cast<int64_t>(hosts_.size());
    const at::Tensor all = at::empty({size_, in.numel()}, in.options());
    if (is_even_) {
      // The ranks of this place, then those of all places: rows by place and host.
      const at::Tensor column = at::empty({hosts, in.numel()}, in.options());
      start(rail_, CollectiveRequest::all_gather(op, in, column)).wait();
      if (local_.is_there()) {
        start(local_, CollectiveRequest::all_gather(op, column, all)).wait();
      }
      scatter_rows(rows_of(out, size_), local_.is_there() ? all : column, order_by_place());
      return;
    }
    const at::Tensor own = at::empty({ranks_here(), in.numel()}, in.options());
    if (local_.is_there()) {
      start(local_, CollectiveRequest::gather(op, in, own, 0)).wait();
    } else {
      own.select(0, 0).copy_(in);
    }
    if (is_leader()) {
      Sizes rows;
      for (const auto& ranks : hosts_) {
        rows.push_back(static_cast<int64_t>(ranks.size()));
      }
      start(rail_, CollectiveRequest::all_gather_uneven(op, own, all, rows)).wait();
    }
    if (local_.is_there()) {
      start(local_, CollectiveRequest::broadcast(op, all, all, 0)).wait();
    }
    scatter_rows(rows_of(out, size_), all, order_by_host());
  });
}

void HierarchicalBackend::start_reduce_scatter(const InnerWork& work, const at::Tensor& source,
                                               const at::Tensor& target, ReduceOp reduce_op) {
  schedule(work, [this, in = source, out = flat(target),
                  reduction = Reduction{reduce_op, std::nullopt}] {
    constexpr string_view op = "reduce_scatter";
    const int64_t hosts = static_cast<int64_t>(hosts_.size());
    const at::Tensor sorted = at::empty({size_, out.numel()}, in.options());
    if (is_even_) {
      // What is for the ranks of this place, then what is for this rank.
      gather_rows(sorted, rows_of(in, size_), order_by_place());
      at::Tensor column = sorted;
      if (local_.is_there()) {
        column = at::empty({hosts, out.numel()}, in.options());
        start(local_, CollectiveRequest::reduce_scatter(op, sorted, column, reduction)).wait();
      }
      start(rail_, CollectiveRequest::reduce_scatter(op, column, out, reduction)).wait();
      return;
    }
    gather_rows(sorted, rows_of(in, size_), order_by_host());
    if (local_.is_there()) {
      start(local_, CollectiveRequest::reduce(op, sorted, sorted, reduction, 0)).wait();
    }
    const at::Tensor own = at::empty({ranks_here(), out.numel()}, in.options());
    if (is_leader()) {
      Sizes rows;
      for (const auto& ranks : hosts_) {
        rows.push_back(static_cast<int64_t>(ranks.size()));
      }
      start(rail_, CollectiveRequest::reduce_scatter_uneven(op, sorted, own, reduction, rows))
          .wait();
    }
    if (local_.is_there()) {
      start(local_, CollectiveRequest::scatter(op, own, out, 0)).wait();
    } else {
      out.copy_(own.select(0, 0));
    }
  });
}

void HierarchicalBackend::start_all_to_all(const InnerWork& work, const at::Tensor& source,
                                           const at::Tensor& target, Sizes sent, Sizes received) {
  schedule(work, [this, in = flat(source), out = flat(target), sent = std::move(sent),
                  received = std::move(received)] {
    constexpr string_view op = "all_to_all";
    // What stays here goes by shared memory, and the rest by the engine between hosts.
    struct Side {
      Sizes here, there;
      at::Tensor near, far;
      std::vector<std::pair<at::Tensor, at::Tensor>> pieces;  // of the whole, of near or far
    };
    const auto& ranks = hosts_[static_cast<size_t>(host_)];
    const auto part = [&](const at::Tensor& whole, const Sizes& sizes) {
      Side side;
      side.there = sizes;
      Sizes offsets(sizes.size(), 0);
      for (size_t i = 1; i < sizes.size(); ++i) {
        offsets[i] = offsets[i - 1] + sizes[i - 1];
      }
      int64_t near = 0;
      for (const int rank : ranks) {
        const auto i = static_cast<size_t>(rank);
        side.here.push_back(sizes[i]);
        side.there[i] = 0;
        near += sizes[i];
      }
      side.near = at::empty({near}, whole.options());
      side.far = at::empty({whole.numel() - near}, whole.options());
      int64_t at_near = 0, at_far = 0;
      for (const int rank : ranks) {
        const auto i = static_cast<size_t>(rank);
        side.pieces.emplace_back(whole.narrow(0, offsets[i], sizes[i]),
                                 side.near.narrow(0, at_near, sizes[i]));
        at_near += sizes[i];
      }
      for (size_t i = 0; i < sizes.size(); ++i) {
        if (side.there[i] != 0) {
          side.pieces.emplace_back(whole.narrow(0, offsets[i], sizes[i]),
                                   side.far.narrow(0, at_far, sizes[i]));
          at_far += sizes[i];
        }
      }
      return side;
    };
    const Side from = part(in, sent), to = part(out, received);
    for (const auto& [whole, piece] : from.pieces) {
      piece.copy_(whole);
    }
    Step far =
        start(flat_, CollectiveRequest::all_to_all(op, from.far, to.far, to.there, from.there));
    if (local_.is_there()) {
      start(local_, CollectiveRequest::all_to_all(op, from.near, to.near, to.here, from.here))
          .wait();
    } else {
      to.near.copy_(from.near);
    }
    far.wait();
    for (const auto& [whole, piece] : to.pieces) {
      whole.copy_(piece);
    }
  });
}

void HierarchicalBackend::start_barrier(const InnerWork& work) {
  schedule(work, [this] {
    constexpr string_view op = "barrier";
    const at::Tensor nothing = at::empty({0}, at::kByte);
    const auto request = CollectiveRequest::barrier(op, nothing, nothing);
    if (local_.is_there()) {
      start(local_, request).wait();
    }
    if (is_leader()) {
      start(rail_, request).wait();
    }
    if (local_.is_there()) {
      start(local_, request).wait();
    }
  });
}

}  // namespace c10d_ext
