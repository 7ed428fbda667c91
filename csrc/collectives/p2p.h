#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>
#include <c10/util/intrusive_ptr.h>

#include <string>
#include <string_view>
#include <vector>

#include "backends/request.h"
#include "base/group.h"

namespace c10d {
class Work;
}

// Point to point, as ops and eager calls share it.
namespace c10d_ext {

// Starts messages, together where the backend would otherwise wait for one before the next, and
// returns the work of each. Nothing is attached to a storage. Not for meta tensors.
std::vector<c10::intrusive_ptr<c10d::Work>> start_messages(std::string_view op, const Group& group,
                                                           c10::ArrayRef<Message> messages);

// How messages are called in texts.
std::string_view name_of(c10::ArrayRef<Message> messages);

// What must hold of messages before the first is sent: their peers, tags, layouts and device.
void check_messages(const Group& group, c10::ArrayRef<Message> messages);

// Starts messages that are read from and written to the caller's own tensors.
std::vector<c10::intrusive_ptr<c10d::Work>> start_messages_of(
    const std::vector<at::Tensor>& tensors, const std::vector<int64_t>& peers,
    const std::vector<bool>& sends, const std::vector<int64_t>& tags,
    const std::string& group_name);

// Starts one message that check_messages() would let pass; otherwise the same.
c10::intrusive_ptr<c10d::Work> start_message(const Group& group, const Message& message);

// A message as a tensor, which a graph can hand from its start to its wait. The message hangs on
// the tensor's storage and ends with it; the values mean nothing. What is received belongs to
// whoever takes it: a compiler that plans the ticket's memory cannot give away the message's.
at::Tensor empty_ticket(const at::Tensor& like);
// Starts messages, whose tensors nobody else has.
std::vector<at::Tensor> tickets_for(const Group& group, c10::ArrayRef<Message> messages);

struct Arrival {
  at::Tensor values;  // undefined where the message was sent
  int64_t source;     // a rank of the group
};

// Waits for the message of a ticket and takes it. Once: raises ValueError for any other tensor.
Arrival take_message(std::string_view op, const at::Tensor& ticket);

}  // namespace c10d_ext
