// shift: rank r gets the input of rank r - offset, counted around the group.

#include "frontend/op.h"

namespace c10d_ext {
namespace {

// Kernels: CPU, CUDA and Meta.

// One row, which is the whole tensor, to one rank and from another.
void exchange(string_view op, const Group& group, const at::Tensor& input, const at::Tensor& out,
              int64_t offset) {
  if (input.is_meta() || input.numel() == 0) {
    return;
  }
  const int64_t size = group.size();
  const auto around = [size](int64_t rank) { return static_cast<size_t>((rank + size) % size); };
  std::vector<int64_t> sends(static_cast<size_t>(size), 0), receives(sends);
  sends[around(group.rank() + offset % size)] = 1;
  receives[around(group.rank() - offset % size)] = 1;
  submit(group,
         CollectiveRequest::all_to_all(op, input.unsqueeze(0), out.unsqueeze(0), receives, sends));
}

at::Tensor shift(const at::Tensor& input, int64_t offset, string_view group_name) {
  constexpr string_view op = "shift";
  const Group group = resolve_group(op, group_name);
  check_strided(op, group, "input", input);
  at::Tensor out = empty_of_shape(input);
  exchange(op, group, input, out, offset);
  return out;
}

at::Tensor& shift_(at::Tensor& input, int64_t offset, string_view group_name) {
  constexpr string_view op = "shift";
  const Group group = resolve_group(op, group_name);
  check_strided(op, group, "input", input);
  check_written(op, group, "input", input);
  exchange(op, group, input, input, offset);
  return input;
}

struct Op {
  static constexpr const char* stem = "shift";
  static constexpr auto functional = &shift;
  static constexpr auto in_place = &shift_;

  // Derivatives: gradients take the way back.
  static Derivative derivative(string_view /*op*/, at::TensorList /*inputs*/, int64_t offset,
                               string_view group_name) {
    const auto by = [name = std::string(group_name)](const at::Tensor& t, int64_t offset) {
      return call::wait_tensor(forms::handle<Op, Form::Functional>().call(t, offset, name));
    };
    Derivative d{"ShiftBackward", Constants(offset, group_name)};
    d.adjoint = [by, offset](const Tensors& grads, const Tensors&) {
      return Tensors{by(grads[0], -offset)};
    };
    d.tangent = [by, offset](const Tensors& tangents, const Tensors&) {
      return Tensors{by(tangents[0], offset)};
    };
    return d;
  }
};

}  // namespace

TORCH_LIBRARY_FRAGMENT(c10d_ext, m) {
  m.def("shift(Tensor input, int offset, str group_name) -> Tensor", schema_tags());
  m.def("shift_(Tensor(a!) input, int offset, str group_name) -> Tensor(a!)", schema_tags());
}

C10D_EXT_COLLECTIVE(Op)

}  // namespace c10d_ext
