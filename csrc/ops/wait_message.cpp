// wait_message: the end of a message.

#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>

#include "collectives/p2p.h"
#include "frontend/op.h"

namespace c10d_ext {
namespace {

// Kernels: CPU, CUDA and Meta.

Tensors wait_message(const at::Tensor& ticket, c10::SymIntArrayRef sizes, c10::ScalarType dtype) {
  constexpr string_view op = "wait_message";
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  const auto options = ticket.options().dtype(dtype);
  if (ticket.is_meta()) {
    return {at::empty_symint(sizes, options), at::empty({}, ticket.options())};
  }
  Arrival arrival = take_message(op, ticket);
  const at::Tensor source = at::full({}, arrival.source, ticket.options());
  if (!arrival.values.defined()) {
    return {at::empty_symint(sizes, options), source};
  }
  const at::Tensor& values = arrival.values;
  if (values.scalar_type() != dtype || !same_sizes(values.sym_sizes(), sizes)) {
    throw InvalidArgument(c10::str(op, ": sizes and dtype must be those of the message, ",
                                   values.sizes(), " and ", values.scalar_type(), ", got ", sizes,
                                   " and ", dtype));
  }
  return {values, source};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(c10d_ext, m) {
  m.def("wait_message(Tensor ticket, SymInt[] sizes, ScalarType dtype) -> Tensor[]", schema_tags());
}

C10D_EXT_ON_DEVICES([](torch::Library& m) { m.impl("wait_message", wait_message); })

// Outside autograd, as torch.distributed's messages are.
TORCH_LIBRARY_IMPL(c10d_ext, Autograd, m) {
  m.impl("wait_message", torch::CppFunction::makeFallthrough());
}

}  // namespace c10d_ext
