// batch_isend_irecv: starts messages to and from other ranks; each has a ticket to wait for it
// with.

#include "collectives/p2p.h"
#include "frontend/op.h"

namespace c10d_ext {
namespace {

// Kernels: CPU, CUDA and Meta. What is sent is copied: a graph may write or give away the tensor's
// memory before the wait. What arrives waits with the ticket, so tensors that receive lend their
// shape and dtype alone.

Tensors batch_isend_irecv(at::TensorList tensors, c10::IntArrayRef peers,
                          const c10::List<bool>& sends, c10::IntArrayRef tags,
                          string_view group_name) {
  constexpr string_view op = "batch_isend_irecv";
  const Group group = resolve_group(op, group_name);
  const bool fits =
      peers.size() == tensors.size() && sends.size() == peers.size() && tags.size() == peers.size();
  C10D_EXT_CHECK_VALUE(fits, op, group, "each message must have a tensor, peer, direction and tag",
                       ", got ", tensors.size(), ", ", peers.size(), ", ", sends.size(), " and ",
                       tags.size());
  std::vector<Message> messages;
  for (size_t i = 0; i < tensors.size(); ++i) {
    messages.push_back({tensors[i], sends.get(i), peers[i], tags[i]});
  }
  check_messages(group, messages);
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  if (tensors.front().is_meta()) {
    Tensors tickets;
    for (const auto& tensor : tensors) {
      tickets.push_back(empty_ticket(tensor));
    }
    return tickets;
  }
  for (auto& message : messages) {
    message.tensor = message.sends ? message.tensor.clone(at::MemoryFormat::Contiguous)
                                   : empty_of_shape(message.tensor);
  }
  return tickets_for(group, messages);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(c10d_ext, m) {
  m.def(
      "batch_isend_irecv(Tensor[] tensors, int[] peers, bool[] sends, int[] tags, str group_name)"
      " -> Tensor[]",
      schema_tags());
}

C10D_EXT_ON_DEVICES([](torch::Library& m) { m.impl("batch_isend_irecv", batch_isend_irecv); })

// Outside autograd, as torch.distributed's messages are.
TORCH_LIBRARY_IMPL(c10d_ext, Autograd, m) {
  m.impl("batch_isend_irecv", torch::CppFunction::makeFallthrough());
}

}  // namespace c10d_ext
