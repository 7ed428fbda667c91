#include "backends/hierarchical/hosts.h"

#include <optional>
#include <utility>

#include "backends/adapter/adapter.h"
#include "backends/adapter/capabilities.h"
#include "backends/adapter/lowering.h"
#include "backends/process_group/request_backend.h"
#include "base/group.h"

namespace c10d_ext::hierarchical {

Step::Step(Started started) : work_(std::move(started.work)), finish_(std::move(started.finish)) {}

void Step::wait() {
  if (work_) {
    work_->wait(kNoTimeout);
    work_.reset();
  }
  if (finish_) {
    std::exchange(finish_, nullptr)();
  }
}

Part::Part(BackendPtr backend, std::string group_name)
    : backend_(std::move(backend)),
      own_(dynamic_cast<RequestBackend*>(backend_.get())),
      group_name_(std::move(group_name)),
      can_(backend_ ? capabilities_of(*backend_) : Capabilities()) {}

Step Part::start(const CollectiveRequest& request) const {
  if (own_ != nullptr) {
    const auto type = c10d::OpType::UNKNOWN;
    return Step({own_->run({request.op, type, /*async=*/true, c10d::kUnsetTimeout}, request), {}});
  }
  using Tensors = HeldRequest::Tensors;
  const HeldRequest held(request, Tensors(request.sources.begin(), request.sources.end()),
                         Tensors(request.outs.begin(), request.outs.end()));
  const Group place({}, group_name_, backend_->getRank(), backend_->getSize());
  return Step(lowering::start(Adapter(request.op, place, backend_, can_, std::nullopt), held));
}

Step Part::send(const at::Tensor& t, int peer, int tag) const {
  std::vector<at::Tensor> tensors{t};
  return Step({backend_->send(tensors, peer, tag), {}});
}

Step Part::recv(const at::Tensor& t, int peer, int tag) const {
  std::vector<at::Tensor> tensors{t};
  return Step({backend_->recv(tensors, peer, tag), {}});
}

Hosts::Hosts(int rank, int size, std::vector<std::vector<int>> ranks)
    : ranks_(std::move(ranks)),
      host_of_(static_cast<size_t>(size), -1),
      place_of_(static_cast<size_t>(size), -1) {
  for (size_t host = 0; host < ranks_.size(); ++host) {
    is_even_ = is_even_ && ranks_[host].size() == ranks_[0].size();
    for (size_t place = 0; place < ranks_[host].size(); ++place) {
      const auto at = static_cast<size_t>(ranks_[host][place]);
      host_of_.at(at) = static_cast<int>(host);
      place_of_.at(at) = static_cast<int>(place);
    }
  }
  host_ = host_of(rank);
  place_ = place_of(rank);
}

Hosts::Rows Hosts::sizes() const {
  Rows sizes;
  for (const auto& ranks : ranks_) {
    sizes.push_back(static_cast<int64_t>(ranks.size()));
  }
  return sizes;
}

Hosts::Rows Hosts::order_by_host() const {
  Rows order;
  for (const auto& ranks : ranks_) {
    order.insert(order.end(), ranks.begin(), ranks.end());
  }
  return order;
}

}  // namespace c10d_ext::hierarchical
