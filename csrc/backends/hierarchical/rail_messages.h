#pragma once

// Collectives of one rail whose data goes by messages from where it is to where it belongs, all at
// once. An engine's own take their steps one after the other, each with a handshake.

#include <ATen/core/Tensor.h>

#include <functional>
#include <vector>

#include "backends/hierarchical/hosts.h"
#include "base/types.h"

namespace c10d_ext::hierarchical {

// Whether the engine has messages, and hosts are so few that all talk to all, as leaders do.
bool goes_by_messages(const Parts& parts);

// What of a tensor is for a host, or of it.
using PartOf = std::function<at::Tensor(int host)>;
std::vector<Step> send_to_all(const Parts& parts, int tag, const PartOf& part_of);
std::vector<Step> receive_from_all(const Parts& parts, int tag, const PartOf& part_of);
void wait(std::vector<Step>& steps);

// Something of which each host has its own, reduced here. Waits for the others' from the beginning.
class Reducing {
 public:
  // `out` is contiguous.
  Reducing(const Parts& parts, int tag, const at::Tensor& out);
  // `own`: this host's; may be `out`. Hosts are taken in their order.
  void finish(const at::Tensor& own, ReduceOp op);

 private:
  const int host_;
  const at::Tensor out_, rows_;
  std::vector<Step> came_;
};

// In place; `t` is contiguous.
void all_reduce_on_rail(const Parts& parts, const at::Tensor& t, ReduceOp op);

}  // namespace c10d_ext::hierarchical
