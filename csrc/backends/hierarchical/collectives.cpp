// Collectives of several hosts, as schedules of requests.

#include "backends/hierarchical/collectives.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include "backends/hierarchical/along_hosts.h"
#include "backends/hierarchical/pieces.h"
#include "backends/hierarchical/rail_messages.h"
#include "backends/hierarchical/sizes.h"
#include "base/kept_memory.h"
#include "base/memory.h"
#include "base/reduction.h"

namespace c10d_ext::hierarchical {

namespace {

using std::string_view;
using Sizes = std::vector<int64_t>;
using Tensors = std::vector<at::Tensor>;

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

Reduction reduction_of(const InnerCollective& what) {
  return {what.reduce_op, std::nullopt};
}

// Inside, each rank reduces a share; the shares are reduced between hosts, each on a rail of its
// own; inside, everybody gathers them. Parts of the tensor are in different steps at once.
void all_reduce_over_rails(const Parts& parts, const at::Tensor& t, const Reduction& reduction) {
  constexpr string_view op = "all_reduce";
  const int64_t here = parts.hosts.count_here();
  const int64_t pieces = all_reduce_parts(t.nbytes(), parts.hosts.count());
  const int64_t share = t.numel() / (pieces * here);
  struct Pipe {
    at::Tensor whole, share;
    Step scattered, reduced, gathered;
  };
  std::vector<Pipe> pipes(share > 0 ? static_cast<size_t>(pieces) : 0);
  int64_t offset = 0;
  for (auto& pipe : pipes) {
    pipe.whole = t.narrow(0, offset, share * here);
    pipe.share = scratch({share}, t.options());
    offset += share * here;
    pipe.scattered =
        parts.local.start(CollectiveRequest::reduce_scatter(op, pipe.whole, pipe.share, reduction));
  }
  const at::Tensor rest = t.narrow(0, offset, t.numel() - offset);
  for (auto& pipe : pipes) {
    pipe.scattered.wait();
    pipe.reduced =
        parts.rail.start(CollectiveRequest::all_reduce(op, pipe.share, pipe.share, reduction));
  }
  for (auto& pipe : pipes) {
    pipe.reduced.wait();
    pipe.gathered = parts.local.start(CollectiveRequest::all_gather(op, pipe.share, pipe.whole));
  }
  if (rest.numel() != 0) {
    // Less than an element for each share: every rail carries it.
    parts.local.start(CollectiveRequest::all_reduce(op, rest, rest, reduction)).wait();
    parts.rail.start(CollectiveRequest::all_reduce(op, rest, rest, reduction)).wait();
  }
  for (auto& pipe : pipes) {
    pipe.gathered.wait();
  }
}

// The same of one part, whose share goes by messages; or all of it, by those of leaders.
void all_reduce_by_messages(const Parts& parts, const at::Tensor& t, const Reduction& reduction) {
  constexpr string_view op = "all_reduce";
  if (t.nbytes() <= kByLeaders) {
    parts.local.start(CollectiveRequest::reduce(op, t, t, reduction, 0)).wait();
    if (parts.hosts.is_leader()) {
      all_reduce_on_rail(parts, t, reduction.op);
    }
    parts.local.start(CollectiveRequest::broadcast(op, t, t, 0)).wait();
    return;
  }
  const int64_t here = parts.hosts.count_here(), share = t.numel() / here;
  const at::Tensor whole = t.narrow(0, 0, share * here);
  const at::Tensor own = scratch({share}, t.options());
  parts.local.start(CollectiveRequest::reduce_scatter(op, whole, own, reduction)).wait();
  all_reduce_on_rail(parts, own, reduction.op);
  Step gathered = parts.local.start(CollectiveRequest::all_gather(op, own, whole));
  const at::Tensor rest = t.narrow(0, share * here, t.numel() - share * here);
  if (rest.numel() != 0) {
    // Less than an element for each rank: every rail carries it.
    parts.local.start(CollectiveRequest::all_reduce(op, rest, rest, reduction)).wait();
    all_reduce_on_rail(parts, rest, reduction.op);
  }
  gathered.wait();
}

void all_reduce_by_leaders(const Parts& parts, const at::Tensor& t, const Reduction& reduction) {
  constexpr string_view op = "all_reduce";
  if (parts.local.is_there()) {
    parts.local.start(CollectiveRequest::reduce(op, t, t, reduction, 0)).wait();
  }
  if (parts.hosts.is_leader()) {
    parts.rail.start(CollectiveRequest::all_reduce(op, t, t, reduction)).wait();
  }
  if (parts.local.is_there()) {
    parts.local.start(CollectiveRequest::broadcast(op, t, t, 0)).wait();
  }
}

void all_reduce(const Parts& parts, const InnerCollective& what) {
  constexpr string_view op = "all_reduce";
  const at::Tensor t = flat(what.out);
  const Reduction reduction = reduction_of(what);
  if (!parts.hosts.is_even()) {
    all_reduce_by_leaders(parts, t, reduction);
  } else if (!parts.local.is_there()) {
    parts.rail.start(CollectiveRequest::all_reduce(op, t, t, reduction)).wait();
  } else if (goes_by_messages(parts) && t.nbytes() < kByMessages) {
    all_reduce_by_messages(parts, t, reduction);
  } else if (t.nbytes() <= kSmall) {
    parts.local.start(CollectiveRequest::all_reduce(op, t, t, reduction)).wait();
    parts.rail.start(CollectiveRequest::all_reduce(op, t, t, reduction)).wait();
  } else {
    all_reduce_over_rails(parts, t, reduction);
  }
}

void reduce(const Parts& parts, const InnerCollective& what) {
  constexpr string_view op = "reduce";
  const at::Tensor t = flat(what.out);
  const Reduction reduction = reduction_of(what);
  const int root = what.root;
  const int place = parts.hosts.place_of(root);
  const bool is_here = parts.hosts.is_here(root);
  // On a rail the root is reduced to at once; leaders are where it may have none.
  const int on_rail = parts.hosts.is_even() ? place : 0;
  if (parts.local.is_there()) {
    parts.local.start(CollectiveRequest::reduce(op, t, t, reduction, on_rail)).wait();
  }
  if (parts.hosts.place() == on_rail) {
    parts.rail.start(CollectiveRequest::reduce(op, t, t, reduction, parts.hosts.host_of(root)))
        .wait();
  }
  if (is_here && place != on_rail) {
    parts.local.start(CollectiveRequest::broadcast(op, t, t, on_rail)).wait();
  }
}

void broadcast(const Parts& parts, const InnerCollective& what) {
  constexpr string_view op = "broadcast";
  const at::Tensor t = flat(what.out);
  const int root = what.root;
  const int place = parts.hosts.place_of(root);
  const bool is_here = parts.hosts.is_here(root);
  const int on_rail = parts.hosts.is_even() ? place : 0;
  if (is_here && parts.local.is_there() && on_rail != place) {
    parts.local.start(CollectiveRequest::broadcast(op, t, t, place)).wait();
  }
  if (broadcasts_along_hosts(parts, t)) {
    broadcast_along_hosts(parts, t, parts.hosts.host_of(root), on_rail,
                          parts.hosts.place_of(root) != on_rail);
    return;
  }
  if (parts.hosts.place() == on_rail) {
    parts.rail.start(CollectiveRequest::broadcast(op, t, t, parts.hosts.host_of(root))).wait();
  }
  if (parts.local.is_there() && !(is_here && on_rail != place)) {
    parts.local.start(CollectiveRequest::broadcast(op, t, t, on_rail)).wait();
  }
}

// Each rank of this host has all ranks of its place gathered between hosts, and the others take
// that from its memory, part by part: what is not of this host, whose ranks do not wait for it.
void all_gather_over_rails(const Parts& parts, const at::Tensor& in, const at::Tensor& out) {
  constexpr string_view op = "all_gather";
  const auto& hosts = parts.hosts.ranks();
  const at::Tensor rows = rows_of(out, parts.size);
  struct Pipe {
    at::Tensor column;
    Tensors rows, outs;
    std::vector<Step> between;
    Step inside;
  };
  std::vector<Pipe> pipes;
  each_piece(in.numel(), all_gather_parts(out.nbytes()), [&](int64_t offset, int64_t count) {
    const auto tag = static_cast<int>(pipes.size());
    Pipe& pipe = pipes.emplace_back();
    const auto row_of = [&](int64_t host, size_t place) {
      return rows.select(0, hosts[static_cast<size_t>(host)][place]).narrow(0, offset, count);
    };
    const at::Tensor own = in.narrow(0, offset, count);
    const auto place = static_cast<size_t>(parts.hosts.place());
    const bool by_messages = goes_by_messages(parts);
    if (by_messages) {
      pipe.between = receive_from_all(parts, tag, [&](int host) { return row_of(host, place); });
      auto sent = send_to_all(parts, tag, [&](int /*host*/) { return own; });
      std::move(sent.begin(), sent.end(), std::back_inserter(pipe.between));
    } else {
      pipe.column = scratch({parts.hosts.count(), count}, in.options());
      pipe.between.push_back(parts.rail.start(CollectiveRequest::all_gather(op, own, pipe.column)));
    }
    for (int64_t host = 0; host < parts.hosts.count(); ++host) {
      if (host != parts.hosts.host()) {
        pipe.rows.push_back(by_messages ? row_of(host, place) : pipe.column.select(0, host));
      }
    }
    for (size_t from = 0; from < hosts[0].size(); ++from) {
      for (int64_t host = 0; host < parts.hosts.count(); ++host) {
        if (host != parts.hosts.host()) {
          pipe.outs.push_back(row_of(host, from));
        }
      }
    }
  });
  Tensors here;
  for (const int rank : parts.hosts.ranks_here()) {
    here.push_back(rows.select(0, rank));
  }
  Step own = parts.local.start(CollectiveRequest::all_gather_parts(op, in, here));
  for (auto& pipe : pipes) {
    wait(pipe.between);
    pipe.inside = parts.local.start(CollectiveRequest::all_gather_parts(op, pipe.rows, pipe.outs));
  }
  own.wait();
  for (auto& pipe : pipes) {
    pipe.inside.wait();
  }
}

void all_gather(const Parts& parts, const InnerCollective& what) {
  constexpr string_view op = "all_gather";
  const at::Tensor& out = what.out;
  // In another rank's row it would be overwritten before all have it.
  const int own_rank = parts.hosts.ranks_here()[static_cast<size_t>(parts.hosts.place())];
  const at::Tensor row = rows_of(out, parts.size).select(0, own_rank);
  const bool is_in_place = what.source.const_data_ptr() == row.const_data_ptr();
  const at::Tensor in = flat(is_in_place ? what.source : apart_from(what.source, out));
  if (parts.hosts.is_even() && parts.local.is_there()) {
    goes_round(parts, in) ? all_gather_along_hosts(parts, in, out)
                          : all_gather_over_rails(parts, in, out);
    return;
  }
  const at::Tensor all = scratch({parts.size, in.numel()}, in.options());
  const at::Tensor own = scratch({parts.hosts.count_here(), in.numel()}, in.options());
  if (parts.local.is_there()) {
    parts.local.start(CollectiveRequest::gather(op, in, own, 0)).wait();
  } else {
    own.select(0, 0).copy_(in);
  }
  if (parts.hosts.is_leader()) {
    parts.rail.start(CollectiveRequest::all_gather_uneven(op, own, all, parts.hosts.sizes()))
        .wait();
  }
  if (parts.local.is_there()) {
    parts.local.start(CollectiveRequest::broadcast(op, all, all, 0)).wait();
  }
  scatter_rows(rows_of(out, parts.size), all, parts.hosts.order_by_host());
}

// The steps of a reduce_scatter inside a host. Each reduces rows for the ranks of the hosts that it
// names. Where rows go by messages none is for the own host; `apart`: a step for each other host,
// in the order in which messages are sent.
std::vector<Sizes> steps_inside(const Parts& parts, bool by_messages, bool apart) {
  const int64_t hosts = parts.hosts.count(), own = parts.hosts.host();
  std::vector<Sizes> steps;
  if (by_messages && apart) {
    for (int64_t i = 1; i < hosts; ++i) {
      steps.push_back({(own + i) % hosts});
    }
    return steps;
  }
  auto& all = steps.emplace_back();
  for (int64_t host = 0; host < hosts; ++host) {
    if (!by_messages || host != own) {
      all.push_back(host);
    }
  }
  return steps;
}

// Inside, each rank reduces what is for the ranks of its place, from where the others have it; on
// its rail what is for this rank. Parts of each row are in different steps at once; what goes by
// messages to other hosts comes first.
void reduce_scatter_over_rails(const Parts& parts, const at::Tensor& in, const at::Tensor& out,
                               const Reduction& reduction) {
  constexpr string_view op = "reduce_scatter";
  const auto& hosts = parts.hosts.ranks();
  const at::Tensor rows = rows_of(in, parts.size);
  const bool by_messages = goes_by_messages(parts);
  const int64_t others = parts.hosts.count() - 1, own_host = parts.hosts.host();
  struct Pipe {
    int64_t offset, count;
    at::Tensor column;  // a row for each host; where they go by messages, the own one is last
    at::Tensor out;
    std::vector<Step> inside;
    Step own_inside;
    std::vector<Step> between;
    std::optional<Reducing> reducing;
  };
  const auto index_of = [&](int64_t host) {
    return !by_messages ? host : host == own_host ? others : host - (host > own_host ? 1 : 0);
  };
  const auto reduce_inside = [&](const Pipe& pipe, const Sizes& step) {
    Tensors sources;
    for (size_t place = 0; place < hosts[0].size(); ++place) {
      for (const int64_t host : step) {
        const int rank = hosts[static_cast<size_t>(host)][place];
        sources.push_back(rows.select(0, rank).narrow(0, pipe.offset, pipe.count));
      }
    }
    const auto size = static_cast<int64_t>(step.size());
    return parts.local.start(CollectiveRequest::reduce_scatter_parts(
        op, sources, pipe.column.narrow(0, index_of(step.front()), size), reduction));
  };
  const auto steps = steps_inside(parts, by_messages, reduces_rows_apart(in.nbytes(), others + 1));
  std::vector<Pipe> pipes;
  each_piece(out.numel(), reduce_scatter_parts(in.nbytes()), [&](int64_t offset, int64_t count) {
    const auto tag = static_cast<int>(pipes.size());
    Pipe& pipe = pipes.emplace_back(Pipe{.offset = offset, .count = count});
    pipe.out = out.narrow(0, offset, count);
    pipe.column = scratch({others + 1, count}, in.options());
    if (by_messages) {
      pipe.reducing.emplace(parts, tag, pipe.out);
    }
    for (const auto& step : steps) {
      pipe.inside.push_back(reduce_inside(pipe, step));
    }
  });
  for (auto& pipe : pipes) {
    if (by_messages) {
      pipe.own_inside = reduce_inside(pipe, {own_host});
    }
  }
  for (auto& pipe : pipes) {
    if (pipe.reducing) {
      // Each as soon as its step is over; where there is one step, that is for all.
      auto next = pipe.inside.begin();
      pipe.between = send_to_all(parts, static_cast<int>(&pipe - pipes.data()), [&](int host) {
        if (next != pipe.inside.end()) {
          (next++)->wait();
        }
        return pipe.column.select(0, index_of(host));
      });
    } else {
      wait(pipe.inside);
      pipe.between.push_back(parts.rail.start(
          CollectiveRequest::reduce_scatter(op, pipe.column, pipe.out, reduction)));
    }
  }
  for (auto& pipe : pipes) {
    pipe.own_inside.wait();  // nobody reads what is written from here on
  }
  for (auto& pipe : pipes) {
    if (pipe.reducing) {
      pipe.reducing->finish(pipe.column.select(0, others), reduction.op);
    }
  }
  for (auto& pipe : pipes) {
    wait(pipe.between);
  }
}

void reduce_scatter(const Parts& parts, const InnerCollective& what) {
  constexpr string_view op = "reduce_scatter";
  const at::Tensor& in = what.source;
  const at::Tensor out = flat(what.out);
  const Reduction reduction = reduction_of(what);
  if (parts.hosts.is_even() && parts.local.is_there()) {
    goes_round(parts, out) ? reduce_scatter_along_hosts(parts, in, out, reduction)
                           : reduce_scatter_over_rails(parts, in, out, reduction);
    return;
  }
  const at::Tensor sorted = scratch({parts.size, out.numel()}, in.options());
  gather_rows(sorted, rows_of(in, parts.size), parts.hosts.order_by_host());
  if (parts.local.is_there()) {
    parts.local.start(CollectiveRequest::reduce(op, sorted, sorted, reduction, 0)).wait();
  }
  const at::Tensor own = scratch({parts.hosts.count_here(), out.numel()}, in.options());
  if (parts.hosts.is_leader()) {
    parts.rail
        .start(CollectiveRequest::reduce_scatter_uneven(op, sorted, own, reduction,
                                                        parts.hosts.sizes()))
        .wait();
  }
  if (parts.local.is_there()) {
    parts.local.start(CollectiveRequest::scatter(op, own, out, 0)).wait();
  } else {
    out.copy_(own.select(0, 0));
  }
}

// What of a tensor is for each rank, or from it.
struct Sides {
  Sides(const Hosts& hosts, const at::Tensor& whole, const Sizes& sizes)
      : all(flat(whole).split_with_sizes(sizes)), there(sizes) {
    for (const int rank : hosts.ranks_here()) {
      here.push_back(all[static_cast<size_t>(rank)]);
      there[static_cast<size_t>(rank)] = 0;
    }
  }

  Tensors all, here;
  Sizes there;  // of the other hosts' ranks
};

// The other hosts' parts one after the other: where they are, or a copy.
struct InOne {
  InOne(const at::Tensor& whole, const Sides& sides) {
    int64_t at = 0, end = -1, count = 0;
    for (size_t rank = 0; rank < sides.all.size(); ++rank) {
      if (const int64_t size = sides.there[rank]; size != 0) {
        parts.push_back(sides.all[rank]);
        is_copy = is_copy || (end >= 0 && end != at);
        end = at + size;
        count += size;
      }
      at += sides.all[rank].numel();
    }
    data = is_copy ? scratch({count}, whole.options())
                   : flat(whole).narrow(0, std::max<int64_t>(end, 0) - count, count);
  }

  // Calls `copy(part, place)` with each part and its place in a copy.
  template <class Copy>
  void each_copied(Copy&& copy) const {
    int64_t at = 0;
    for (size_t i = 0; is_copy && i < parts.size(); ++i) {
      copy(parts[i], data.narrow(0, at, parts[i].numel()));
      at += parts[i].numel();
    }
  }

  at::Tensor data;
  Tensors parts;
  bool is_copy = false;
};

void all_to_all_here(const Parts& parts, const Sides& from, const Sides& to) {
  if (parts.local.is_there()) {
    parts.local.start(CollectiveRequest::all_to_all_parts("all_to_all", from.here, to.here)).wait();
  } else {
    to.here.front().copy_(from.here.front());
  }
}

// Messages go from where the parts are to where they belong. Nobody is everybody's first.
std::vector<Step> send_there(const Parts& parts, const Sides& from, const Sides& to) {
  const auto ranks = static_cast<int>(parts.size);
  const int own = parts.hosts.ranks_here()[static_cast<size_t>(parts.hosts.place())];
  std::vector<Step> steps;
  for (const bool sends : {false, true}) {
    const Sides& side = sends ? from : to;
    for (int apart = 1; apart < ranks; ++apart) {
      const int peer = (sends ? own + apart : own + ranks - apart) % ranks;
      const auto at = static_cast<size_t>(peer);
      if (side.there[at] != 0) {
        steps.push_back(sends ? parts.flat.send(side.all[at], peer, kOwnTag)
                              : parts.flat.recv(side.all[at], peer, kOwnTag));
      }
    }
  }
  return steps;
}

// What stays here goes by shared memory, and the rest by the engine between hosts.
void all_to_all(const Parts& parts, const InnerCollective& what) {
  const Sides from(parts.hosts, what.source, what.sent);
  const Sides to(parts.hosts, what.out, what.received);
  if (parts.flat.has_own_tag()) {
    auto steps = send_there(parts, from, to);
    all_to_all_here(parts, from, to);
    for (auto& step : steps) {
      step.wait();
    }
    return;
  }
  const InOne sent(what.source, from), received(what.out, to);
  sent.each_copied([](const at::Tensor& part, const at::Tensor& place) { place.copy_(part); });
  Step far = parts.flat.start(
      CollectiveRequest::all_to_all("all_to_all", sent.data, received.data, to.there, from.there));
  all_to_all_here(parts, from, to);
  far.wait();
  received.each_copied([](const at::Tensor& part, const at::Tensor& place) { part.copy_(place); });
}

void barrier(const Parts& parts, const InnerCollective& /*what*/) {
  constexpr string_view op = "barrier";
  const at::Tensor nothing = at::empty({0}, at::kByte);
  const auto request = CollectiveRequest::barrier(op, nothing, nothing);
  if (parts.local.is_there()) {
    parts.local.start(request).wait();
  }
  if (parts.hosts.is_leader()) {
    parts.rail.start(request).wait();
  }
  if (parts.local.is_there()) {
    parts.local.start(request).wait();
  }
}

}  // namespace

const InnerTable<Schedule> kSchedules{.barrier = barrier,
                                      .all_reduce = all_reduce,
                                      .reduce = reduce,
                                      .broadcast = broadcast,
                                      .all_gather = all_gather,
                                      .reduce_scatter = reduce_scatter,
                                      .all_to_all = all_to_all};

}  // namespace c10d_ext::hierarchical
