#include "collectives/p2p.h"

#include <ATen/MemoryOverlap.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/zeros.h>
#include <c10/core/DeviceGuard.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <limits>
#include <mutex>

#include "backends/adapter/adapter.h"
#include "backends/adapter/messages.h"
#include "base/gil.h"
#include "base/memory.h"
#include "control/resolve_group.h"
#include "work/blocking_work.h"
#include "work/pending.h"

namespace c10d_ext {

namespace {

using WorkPtr = c10::intrusive_ptr<c10d::Work>;

struct Ticket {
  at::Tensor memory;
  std::mutex mutex;
  c10::intrusive_ptr<c10d::Work> work;  // null once taken
  at::Tensor arrives;
};

void drop_ticket(void* ticket) {
  delete static_cast<Ticket*>(ticket);
}

}  // namespace

std::string_view name_of(c10::ArrayRef<Message> messages) {
  if (messages.size() != 1) {
    return "batch_isend_irecv";
  }
  return messages.front().sends ? "isend" : "irecv";
}

void check_messages(const Group& group, c10::ArrayRef<Message> messages) {
  const std::string_view op = name_of(messages);
  C10D_EXT_CHECK_VALUE(!messages.empty(), op, group,
                       "there must be at least one message, got none");
  for (const auto& [tensor, sends, peer, tag] : messages) {
    C10D_EXT_CHECK_TYPE(tensor.layout() == c10::kStrided, op, group,
                        "tensor must be a dense (strided) tensor, got layout ", tensor.layout());
    C10D_EXT_CHECK_VALUE(tensor.device() == messages.front().tensor.device(), op, group,
                         "tensors must be on one device, got ", messages.front().tensor.device(),
                         " and ", tensor.device());
    C10D_EXT_CHECK_VALUE((peer >= 0 && peer < group.size()) || (peer == kAnySource && !sends), op,
                         group, "the peer must be a rank of the group, 0 to ", group.size() - 1,
                         ", got ", peer);
    // NCCL alone sends to itself.
    C10D_EXT_CHECK_VALUE(peer != group.rank() || tensor.is_cuda() || tensor.is_meta(), op, group,
                         "the peer must be another rank, got this rank, ", peer);
    C10D_EXT_CHECK_VALUE(tag >= 0 && tag <= std::numeric_limits<int>::max(), op, group,
                         "tag must be between 0 and ", std::numeric_limits<int>::max(), ", got ",
                         tag);
    C10D_EXT_CHECK_VALUE(sends || at::has_internal_overlap(tensor) != at::MemOverlap::Yes, op,
                         group,
                         "a tensor that receives must hold each element at a place of its "
                         "own, got shape ",
                         tensor.sym_sizes(), " with strides ", tensor.sym_strides());
  }
}

namespace {

std::vector<WorkPtr> start_in_place(const Group& group, c10::ArrayRef<Message> messages) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  for (const auto& message : messages) {
    if (!message.sends && !message.tensor.is_inference()) {
      message.tensor.unsafeGetTensorImpl()->bump_version();
    }
  }
  return start_messages(name_of(messages), group, messages);
}

}  // namespace

std::vector<c10::intrusive_ptr<c10d::Work>> start_messages_of(
    const std::vector<at::Tensor>& tensors, const std::vector<int64_t>& peers,
    const std::vector<bool>& sends, const std::vector<int64_t>& tags,
    const std::string& group_name) {
  const Group group = resolve_group("batch_isend_irecv", group_name);
  std::vector<Message> messages;
  for (size_t i = 0; i < tensors.size(); ++i) {
    messages.push_back({tensors[i], sends.at(i), peers.at(i), tags.at(i)});
  }
  check_messages(group, messages);
  return start_in_place(group, messages);
}

WorkPtr start_message(const Group& group, const Message& message) {
  return start_in_place(group, message).front();
}

std::vector<WorkPtr> start_messages(std::string_view op, const Group& group,
                                    c10::ArrayRef<Message> messages) {
  const at::Tensor& like = messages.front().tensor;
  c10::OptionalDeviceGuard device_guard;
  if (!like.is_cpu()) {
    device_guard.reset_device(like.device());
  }
  std::vector<WorkPtr> works;
  without_gil([&] { works = start_messages(Adapter(op, group, like), op, group, messages); });
  return works;
}

at::Tensor empty_ticket(const at::Tensor& like) {
  return at::zeros({1}, like.options().dtype(c10::kLong));
}

namespace {

at::Tensor ticket_for(const Message& message, c10::intrusive_ptr<c10d::Work> work) {
  at::Tensor memory = empty_ticket(message.tensor);
  at::Tensor arrives = message.sends ? at::Tensor() : message.tensor;
  void* data = memory.mutable_data_ptr();
  const auto device = memory.device();
  const auto keys = memory.key_set();
  const auto dtype = memory.dtype();
  const size_t bytes = memory.nbytes();
  auto* ticket = new Ticket{std::move(memory), {}, std::move(work), std::move(arrives)};
  c10::Storage storage(c10::Storage::use_byte_size_t(), bytes,
                       c10::DataPtr(data, ticket, &drop_ticket, device));
  at::Tensor result = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), keys, dtype);
  result.unsafeGetTensorImpl()->set_sizes_contiguous({1});
  return result;
}

}  // namespace

std::vector<at::Tensor> tickets_for(const Group& group, c10::ArrayRef<Message> messages) {
  const auto works = start_messages(name_of(messages), group, messages);
  std::vector<at::Tensor> tickets;
  for (size_t i = 0; i < works.size(); ++i) {
    tickets.push_back(ticket_for(messages[i], works[i]));
  }
  return tickets;
}

Arrival take_message(std::string_view op, const at::Tensor& tensor) {
  const auto* held = tensor.has_storage() ? &tensor.storage().data_ptr() : nullptr;
  c10::intrusive_ptr<c10d::Work> work;
  at::Tensor arrives;
  if (held != nullptr && held->get_deleter() == &drop_ticket) {
    auto* ticket = static_cast<Ticket*>(held->get_context());
    const std::lock_guard<std::mutex> lock(ticket->mutex);
    work.swap(ticket->work);
    arrives = std::move(ticket->arrives);
  }
  if (!work) {
    throw InvalidArgument(c10::str(op,
                                   ": ticket must be that of a message which nobody has "
                                   "waited for, as batch_isend_irecv returns it, got ",
                                   held != nullptr && held->get_deleter() == &drop_ticket
                                       ? "one for the second time"
                                       : "another tensor"));
  }
  work->wait(kNoTimeout);
  return {std::move(arrives), work->sourceRank()};
}

}  // namespace c10d_ext
