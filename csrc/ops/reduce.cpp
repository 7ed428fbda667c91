// reduce: rank dst gets the reduction of all ranks' inputs, the others get zeros (reduce_: keep
// theirs).

#include "frontend/op.h"

namespace c10d_ext {
namespace {

// Kernels: CPU, CUDA and Meta.

at::Tensor reduce(const at::Tensor& input, string_view reduce_op, int64_t dst,
                  string_view group_name, const Factor& factor) {
  constexpr string_view op = "reduce";
  const Group group = resolve_group(op, group_name);
  check_strided(op, group, "input", input);
  check_rank(op, group, "dst", dst);
  const Reduction reduction = parse_reduction(op, group, reduce_op, factor, input.scalar_type());
  at::Tensor out = empty_of_shape(input);
  if (group.rank() != dst && !out.is_meta()) {
    out.zero_();
  }
  submit(group, CollectiveRequest::reduce(op, input, out, reduction, dst));
  return out;
}

at::Tensor& reduce_(at::Tensor& input, string_view reduce_op, int64_t dst, string_view group_name,
                    const Factor& factor) {
  constexpr string_view op = "reduce";
  const Group group = resolve_group(op, group_name);
  check_strided(op, group, "input", input);
  check_written(op, group, "input", input);
  check_rank(op, group, "dst", dst);
  const Reduction reduction = parse_reduction(op, group, reduce_op, factor, input.scalar_type());
  submit(group, CollectiveRequest::reduce(op, input, input, reduction, dst));
  return input;
}

// Derivatives: what dst was told about the result goes to every rank.

Derivative derivative_of(string_view op, string_view reduce_op, int64_t dst, string_view group_name,
                         const Factor& factor, c10::ScalarType dtype, bool in_place) {
  const Group group = resolve_group(op, group_name);
  const Reduction reduction = parse_reduction(op, group, reduce_op, factor, dtype);
  const ReductionRule rule{reduction, group.name(), group.rank(), group.size()};
  const bool kept = in_place && group.rank() != dst;
  Derivative d{"ReduceBackward", Constants(rule, dst, kept)};
  d.save = !reduction.is_linear();
  d.adjoint = [rule, dst, kept](const Tensors& grads, const Tensors& saved) {
    at::Tensor grad = rule.pull_back(call::broadcast(grads[0], dst, rule.group),
                                     saved.empty() ? at::Tensor() : saved[0],
                                     [&] { return call::broadcast(saved[1], dst, rule.group); });
    // reduce_ leaves the tensor of the other ranks as it is: the identity for them.
    return Tensors{kept ? grad.add(grads[0]) : grad};
  };
  d.tangent = [rule, dst](const Tensors& tangents, const Tensors& saved) {
    if (saved.empty()) {
      return Tensors{call::reduce(tangents[0], rule.reduction, dst, rule.group)};
    }
    const at::Tensor share = rule.push_forward(
        tangents[0], saved[0], [&] { return call::broadcast(saved[1], dst, rule.group); });
    return Tensors{call::reduce(share, kSum, dst, rule.group)};
  };
  return d;
}

struct Op {
  static constexpr const char* stem = "reduce";
  static constexpr auto functional = &reduce;
  static constexpr auto in_place = &reduce_;

  static Derivative derivative(string_view op, at::TensorList inputs, string_view reduce_op,
                               int64_t dst, string_view group_name, const Factor& factor) {
    return derivative_of(op, reduce_op, dst, group_name, factor, inputs[0].scalar_type(),
                         /*in_place=*/false);
  }

  // In place the tensors of the other ranks stay.
  static at::Tensor& in_place_autograd(c10::DispatchKeySet keys, at::Tensor& input,
                                       string_view reduce_op, int64_t dst, string_view group_name,
                                       const Factor& factor);
  static at::Tensor& in_place_functionalize(at::Tensor& input, string_view reduce_op, int64_t dst,
                                            string_view group_name, const Factor& factor);
};

at::Tensor& Op::in_place_autograd(c10::DispatchKeySet keys, at::Tensor& input,
                                  string_view reduce_op, int64_t dst, string_view group_name,
                                  const Factor& factor) {
  differentiable_in_place(
      "reduce_", group_name, input,
      [&] {
        forms::handle<Op, Form::InPlace>().redispatch(below_autograd(keys), input, reduce_op, dst,
                                                      group_name, factor);
      },
      [&] {
        const at::Tensor reduced = call::wait_tensor(forms::handle<Op, Form::Functional>().call(
            input.clone(), reduce_op, dst, group_name, factor));
        const Group group = resolve_group("reduce", group_name);
        // The other ranks subtract zeros, which changes no bit and keeps them in the backward.
        return Tensors{group.rank() == dst ? reduced : input.sub(reduced)};
      },
      [&] {
        return derivative_of("reduce", reduce_op, dst, group_name, factor, input.scalar_type(),
                             /*in_place=*/true);
      });
  return input;
}

at::Tensor& Op::in_place_functionalize(at::Tensor& input, string_view reduce_op, int64_t dst,
                                       string_view group_name, const Factor& factor) {
  check_if_lazy(forms::handle<Op, Form::InPlace>(), group_name, input, reduce_op, dst, group_name,
                factor);
  const Group group = resolve_group("reduce", group_name);
  const at::Tensor value = functional_value(input);
  at::AutoDispatchSkipFunctionalize below_functionalize;
  const at::Tensor reduced = traced_wait(
      forms::handle<Op, Form::Functional>().call(value, reduce_op, dst, group_name, factor));
  if (group.rank() == dst) {
    replace_value(input, reduced);
  }
  return input;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(c10d_ext, m) {
  m.def(
      "reduce(Tensor input, str reduce_op, int dst, str group_name, *, Scalar? factor=None) -> "
      "Tensor",
      schema_tags());
  m.def(
      "reduce_(Tensor(a!) input, str reduce_op, int dst, str group_name, *, Scalar? factor=None) "
      "-> Tensor(a!)",
      schema_tags());
}

C10D_EXT_COLLECTIVE(Op)

}  // namespace c10d_ext
