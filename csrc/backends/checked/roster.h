#pragma once

// The ranks of a group, and how texts tell of them. No torch in here.

#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "base/errors.h"
#include "control/meeting.h"

namespace c10d_ext {

class Roster {
 public:
  Roster(Place place, std::vector<Member> members);

  const Place& place() const {
    return place_;
  }
  std::vector<int> all_ranks() const;
  // Whether it is on this machine, where its process can be seen.
  bool is_near(int rank) const;
  // Of its process, where it is near.
  std::string process_state(int rank) const;
  bool has_ended(int rank) const;
  // Whether there is a link between it and this one.
  bool is_linked(int rank) const;
  bool are_on_one_machine(int one, int other) const {
    return member(one).machine == member(other).machine &&
           member(one).network == member(other).network;
  }
  // The ranks of each host by their leaders, where those have lines to each other, else none.
  const std::vector<std::vector<int>>& hosts() const {
    return hosts_;
  }
  // The ranks of this one's host, the first of which is its leader; none where there is no such.
  const std::vector<int>& own_host() const {
    return own_host_;
  }
  // Whether it is another rank of rank 0's host.
  bool is_beside_root(int rank) const {
    return rank != 0 && !hosts_.empty() && member(rank).network == member(0).network;
  }
  // Whether rank 0 itself hears that the link to it is down: one of the two is on rank 0's host.
  bool is_watched_by_root(int rank) const {
    return is_beside_root(rank) || is_beside_root(place_.rank);
  }
  // Whether they have a line for their messages.
  bool are_direct(int one, int other) const {
    return !hosts_.empty() && c10d_ext::are_direct(members_, one, other);
  }
  // Whether it has one to anybody.
  bool has_direct(int rank) const;
  // Whether a rank leads a host; of none where rank 0 alone hears of all.
  bool is_leader(int rank) const;
  // Whether rank 0 hears of its calls by its leader: it is not on rank 0's host.
  bool calls_by_leader(int rank) const {
    return !hosts_.empty() && member(rank).network != member(0).network;
  }
  // Itself in a group without leaders.
  int leader_of(int rank) const;
  std::vector<int> leaders() const;
  int pid(int rank) const {
    return member(rank).peer.pid;
  }
  // As far as this rank, which is another one, can see.
  bool is_root_stopped() const {
    return place_.rank != 0 && is_near(0) && process_state(0) == "stopped";
  }
  // "rank 1 (pid 1234, gone)", or "rank 1 (pid 1234 on node7, gone)" where hosts are several
  std::string describe(int rank, const std::string& state) const;
  std::string describe(const std::vector<int>& ranks,
                       const std::function<std::string(int)>& state) const;

 private:
  const Member& member(int rank) const {
    return members_[static_cast<size_t>(rank)];
  }

  const Place place_;
  const std::vector<Member> members_;
  const std::vector<std::vector<int>> hosts_;
  std::vector<int> own_host_;
  bool has_hosts_ = false;
};

// How a rank is no more there, as far as the others know.
constexpr char kLeft[] = "left the group";
constexpr char kGone[] = "gone";
constexpr char kUnreachable[] = "unreachable";

std::string text_of_message(int64_t tag);
// `what` needs ranks that are no more there, whom `who` describes.
std::string text_of_loss(const std::string& what, const std::string& who);

}  // namespace c10d_ext
