#pragma once

// Which ranks of a group are on which host, and the backends between them.

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <cstdint>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "backends/capabilities.h"
#include "backends/request.h"
#include "work/pending.h"

namespace c10d_ext {
class RequestBackend;
}

namespace c10d_ext::hierarchical {

// Of messages that are parts of collectives, over the backend of all ranks, which users' messages
// go over, too.
constexpr int kOwnTag = std::numeric_limits<int>::max();

// Something that was begun, and waits.
class Step {
 public:
  Step() = default;
  explicit Step(Started started);
  void wait();

 private:
  c10::intrusive_ptr<c10d::Work> work_;
  std::function<void()> finish_;
};

// A backend of some of the ranks, if this rank is in it.
class Part {
 public:
  using BackendPtr = c10::intrusive_ptr<c10d::Backend>;

  // `group_name`: of the whole group, for texts.
  Part(BackendPtr backend, std::string group_name);

  bool is_there() const {
    return backend_ != nullptr;
  }
  const BackendPtr& backend() const {
    return backend_;
  }
  // The caller keeps the tensors until it has waited. Requests with parts are for shared memory,
  // which takes them from where they are.
  Step start(const CollectiveRequest& request) const;
  // One end of a message; `peer`: among these ranks.
  Step send(const at::Tensor& t, int peer, int tag) const;
  Step recv(const at::Tensor& t, int peer, int tag) const;
  bool has_messages() const {
    return can_.methods.has(Method::Send) && can_.methods.has(Method::Recv);
  }
  bool sends_over_sockets() const {
    return can_.sends_over_sockets;
  }
  // Whether kOwnTag is one of its tags, which no message of users has.
  bool has_own_tag() const {
    return has_messages() && can_.has_every_tag;
  }

 private:
  const BackendPtr backend_;
  RequestBackend* const own_;  // the same, where it takes requests
  const std::string group_name_;
  const Capabilities can_;
};

// The numbers of a group's ranks by host, as one of them sees it.
class Hosts {
 public:
  using Rows = std::vector<int64_t>;

  // `ranks`: of each host.
  Hosts(int rank, int size, std::vector<std::vector<int>> ranks);

  const std::vector<std::vector<int>>& ranks() const {
    return ranks_;
  }
  int64_t count() const {
    return static_cast<int64_t>(ranks_.size());
  }
  int host_of(int rank) const {
    return host_of_[static_cast<size_t>(rank)];
  }
  // Among the ranks of its host.
  int place_of(int rank) const {
    return place_of_[static_cast<size_t>(rank)];
  }
  int host() const {
    return host_;
  }
  bool is_here(int rank) const {
    return host_of(rank) == host_;
  }
  int place() const {
    return place_;
  }
  bool is_leader() const {
    return place_ == 0;
  }
  // Whether this rank's rail, if it is on one, goes by it.
  bool is_on_rail(int rank) const {
    return place_of(rank) == (is_even_ ? place_ : 0);
  }
  // All hosts have as many ranks.
  bool is_even() const {
    return is_even_;
  }
  const std::vector<int>& ranks_here() const {
    return ranks_[static_cast<size_t>(host_)];
  }
  int64_t count_here() const {
    return static_cast<int64_t>(ranks_here().size());
  }
  // Ranks of each host.
  Rows sizes() const;
  // Rows of a tensor, one for each rank, in the order of hosts.
  Rows order_by_host() const;

 private:
  const std::vector<std::vector<int>> ranks_;
  std::vector<int> host_of_, place_of_;
  int host_ = 0, place_ = 0;
  bool is_even_ = true;
};

// What a schedule is given of its group:
//
//   local    the ranks of this host, over shared memory,
//   rail     one rank of each host: where all hosts have as many ranks, those of the same place in
//            their hosts, else the first ones alone (the leaders),
//   flat     all ranks, for what has another size between each two.
struct Parts {
  const Hosts hosts;
  const int64_t size;  // of the group
  const Part local, rail, flat;
};

}  // namespace c10d_ext::hierarchical
