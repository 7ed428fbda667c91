#include "frontend/autograd.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/AutogradState.h>
#include <torch/csrc/autograd/VariableTypeUtils.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/dynamo/compiled_autograd.h>
#include <torch/version.h>

#include <atomic>
#include <limits>

#include "frontend/calls.h"
#include "frontend/older_vmap.h"
#include "work/left_alone.h"

namespace c10d_ext {

namespace {

using torch::autograd::Node;
using torch::autograd::SavedVariable;
using torch::autograd::variable_list;
using torch::dynamo::autograd::CompiledNodeArgs;
using torch::dynamo::autograd::PackedArgs;
using torch::dynamo::autograd::SwapSavedVariables;

// The gradients of the inputs; `saved` as Derivative has it.
Tensors run_adjoint(const Derivative& derivative, const std::function<at::Tensor(size_t)>& zeros,
                    Tensors grads, Tensors saved) {
  for (size_t i = 0; i < grads.size(); ++i) {
    if (!grads[i].defined()) {
      grads[i] = zeros(i);
    }
  }
  // The outputs are the latter half. Nobody may have waited for them yet.
  for (size_t i = saved.size() / 2; i < saved.size(); ++i) {
    saved[i] = call::wait_tensor(saved[i]);
  }
  return derivative.adjoint(grads, saved);
}

class CollectiveBackward final : public Node {
 public:
  explicit CollectiveBackward(Derivative derivative) : derivative_(std::move(derivative)) {}

  variable_list apply(variable_list&& grads) override {
    std::lock_guard<std::mutex> lock(mutex_);
    check_not_released();
    return run_adjoint(
        derivative_, [this](size_t i) { return input_metadata(i).zeros_like(); }, std::move(grads),
        unpacked());
  }

  void save(const at::Tensor& t, bool is_output) {
    saved_.emplace_back(t, is_output);
  }

  void release_variables() override {
    std::lock_guard<std::mutex> lock(mutex_);
    // Nothing saved: nothing to forget, and a second backward is fine, as for any linear op.
    released_ = !saved_.empty();
    saved_.clear();
  }

  std::string name() const override {
    return derivative_.name;
  }

  // Compiled autograd: what the node's code depends on, and the code as a function in a graph.

  void compiled_args(CompiledNodeArgs& args) const override {
    check_not_released();
    args.collect(std::string(derivative_.name));
    args.collect(derivative_.constants.bytes());
    for (size_t i = 0; i < saved_.size(); ++i) {
      args.collect(saved_[i], /*is_output=*/i >= saved_.size() / 2);
    }
    // Zeros may be asked for where there are several.
    args.collect(static_cast<int64_t>(num_inputs()));
    for (uint32_t i = 0; num_inputs() > 1 && i < num_inputs(); ++i) {
      for (const auto& size : input_metadata(i).shape_as_dim_vector()) {
        args.collect(size.guard_int(__FILE__, __LINE__));
      }
    }
  }

  variable_list apply_with_saved(const variable_list& grads, SwapSavedVariables& swap) override {
    for (auto& variable : saved_) {
      swap.before(variable);
    }
    PackedArgs packed;
    packed.pack(unpacked());
    const auto& args = packed.vec();
    // Nothing of this node, which the function outlives.
    std::vector<std::pair<std::vector<int64_t>, at::TensorOptions>> shapes;
    for (uint32_t i = 0; num_inputs() > 1 && i < num_inputs(); ++i) {
      const auto& metadata = input_metadata(i);
      std::vector<int64_t> sizes;
      for (const auto& size : metadata.shape_as_dim_vector()) {
        sizes.push_back(size.guard_int(__FILE__, __LINE__));
      }
      shapes.emplace_back(std::move(sizes), metadata.options());
    }
    const auto function = [derivative = derivative_, shapes](
                              const variable_list& grads,
                              const std::vector<c10::IValue>& args) -> variable_list {
      PackedArgs packed(args);
      return run_adjoint(
          derivative, [&](size_t i) { return at::zeros(shapes.at(i).first, shapes.at(i).second); },
          grads, packed.unpack<variable_list>());
    };
    const auto& compiler = torch::dynamo::autograd::getPyCompilerInterface();
    const std::string bound =
        compiler->bind_function(swap.get_py_compiler(), name(), function, {args.at(0).type()},
                                /*is_custom_function=*/true, /*is_traceable=*/true);
    const auto edges = torch::dynamo::autograd::get_input_metadata(next_edges());
    variable_list results = compiler->call_function(
        swap.get_py_compiler(), "apply_functional", bound, grads, args,
        torch::dynamo::autograd::IValuePacker<
            std::vector<std::optional<torch::autograd::InputMetadata>>>::pack(edges));
    for (auto& variable : saved_) {
      swap.after(variable);
    }
    return results;
  }

 private:
  void check_not_released() const {
    TORCH_CHECK(!released_, torch::autograd::ERR_BACKWARD_TWICE);
  }

  Tensors unpacked() {
    Tensors saved;
    saved.reserve(saved_.size());
    for (const auto& variable : saved_) {
      saved.push_back(variable.unpack(getptr()));
    }
    return saved;
  }

  Derivative derivative_;
  std::vector<SavedVariable> saved_;
  bool released_ = false;
};

// Nodes are shared_ptrs up to torch 2.12 and intrusive_ptrs since.
auto make_node(Derivative derivative) {
#if TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR < 13
  return std::shared_ptr<CollectiveBackward>(new CollectiveBackward(std::move(derivative)),
                                             torch::autograd::deleteNode);
#else
  return c10::make_intrusive<CollectiveBackward>(std::move(derivative));
#endif
}

bool any_requires_grad(at::TensorList tensors) {
  if (!c10::GradMode::is_enabled()) {
    return false;
  }
  for (const auto& t : tensors) {
    if (t.requires_grad()) {
      return true;
    }
  }
  return false;
}

bool any_has_tangent(at::TensorList tensors) {
  if (!c10::AutogradState::get_tls_state().get_fw_grad_mode()) {
    return false;
  }
  for (const auto& t : tensors) {
    if (t._fw_grad(/*level=*/0).defined()) {
      return true;
    }
  }
  return false;
}

// The outputs' tangents. What they are computed from has none at this level.
Tensors tangents_of(const Derivative& derivative, at::TensorList inputs, const Tensors& outputs) {
  Tensors tangents;
  Tensors saved;
  for (const auto& t : inputs) {
    const at::Tensor tangent = t._fw_grad(/*level=*/0);
    const bool is_dual = tangent.defined();
    tangents.push_back(is_dual ? tangent : at::zeros_like(t));
    if (derivative.save) {
      saved.push_back(is_dual ? t._fw_primal(/*level=*/0) : t);
    }
  }
  if (derivative.save) {
    for (const auto& output : outputs) {
      saved.push_back(call::wait_tensor(output));
    }
  }
  return derivative.tangent(tangents, saved);
}

// A leaf that requires grad must not be written.
void check_no_leaf(std::string_view op, const at::Tensor& input) {
  TORCH_CHECK(!input.requires_grad() || !input.is_leaf(), op,
              ": an in-place collective needs a tensor that is no leaf requiring grad, got a leaf "
              "of shape ",
              input.sizes(),
              " that requires grad; use the functional op, or "
              "torch.no_grad()");
}

}  // namespace

void Constants::add(const c10::SymInt& value) {
  // One that is traced is equal to no other.
  static std::atomic<int64_t> traced{std::numeric_limits<int64_t>::min()};
  const auto known = value.maybe_as_int();
  add(known ? *known : traced++);
}

void Constants::add(const ReductionRule& rule) {
  add(static_cast<int64_t>(rule.reduction.op));
  if (rule.reduction.factor) {
    const auto factor = rule.reduction.factor->toComplexDouble();
    add(std::string_view(reinterpret_cast<const char*>(&factor), sizeof(factor)));
  }
  add(rule.group);
  add(rule.rank);
  add(rule.group_size);
}

Tensors differentiable(at::TensorList inputs, c10::function_ref<Tensors()> forward,
                       const std::function<Derivative()>& derivative) {
  const bool needs_grad = any_requires_grad(inputs);
  const bool has_tangent = any_has_tangent(inputs);
  Tensors outputs;
  {
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    outputs = forward();
  }
  if (needs_grad) {
    Derivative description = derivative();
    const bool save = description.save;
    auto node = make_node(std::move(description));
    node->set_next_edges(torch::autograd::collect_next_edges(inputs));
    for (const auto& output : outputs) {
      torch::autograd::set_history(output, node);
    }
    if (save) {
      for (const auto& input : inputs) {
        node->save(input, /*is_output=*/false);
      }
      for (const auto& output : outputs) {
        node->save(output, /*is_output=*/true);
      }
    }
  }
  if (has_tangent) {
    const Tensors tangents = tangents_of(derivative(), inputs, outputs);
    for (size_t i = 0; i < outputs.size(); ++i) {
      outputs[i]._set_fw_grad(batch_first(tangents[i]), /*level=*/0, /*is_inplace_op=*/false);
    }
  }
  return outputs;
}

at::Tensor differentiable(const at::Tensor& input, c10::function_ref<at::Tensor()> forward,
                          const std::function<Derivative()>& derivative) {
  if (!any_requires_grad(input) && !any_has_tangent(input)) {
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    return forward();
  }
  const auto as_list = [&] { return Tensors{forward()}; };
  return differentiable(at::TensorList(input), as_list, derivative).front();
}

void differentiable_in_place(std::string_view op, std::string_view group_name,
                             at::TensorList inputs, c10::function_ref<void()> forward,
                             c10::function_ref<Tensors()> values,
                             const std::function<Derivative()>& derivative) {
  const bool needs_grad = any_requires_grad(inputs);
  if (needs_grad) {
    for (const auto& input : inputs) {
      check_no_leaf(op, input);
    }
  }
  if (any_has_tangent(inputs) || (needs_grad && derivative().save)) {
    replaced(inputs, values());
    return;
  }
  // The edges to what the inputs are now: asked for later, a view would take the version that the
  // collective makes for the one it has a gradient of.
  std::vector<std::pair<Tensors, torch::autograd::edge_list>> written;
  if (needs_grad) {
    bool any_view = false;
    Tensors all;
    for (const auto& input : inputs) {
      if (input.requires_grad()) {
        all.push_back(input);
        any_view = any_view || input.is_view();
      }
      torch::autograd::check_inplace(input, /*requires_grad=*/true);
    }
    const auto add = [&](Tensors tensors) {
      auto edges = torch::autograd::collect_next_edges(tensors);
      written.emplace_back(std::move(tensors), std::move(edges));
    };
    if (!any_view) {
      // One node: the gradients of a list travel in one message as well.
      add(std::move(all));
    } else {
      // One of several outputs of a node cannot be written into a view.
      for (const auto& input : all) {
        add({input});
      }
    }
  }
  {
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    forward();
  }
  for (const auto& input : inputs) {
    torch::autograd::impl::bump_version(input);
  }
  for (const auto& input : inputs) {
    leave_alone(op, group_name, input);
  }
  for (auto& [tensors, edges] : written) {
    auto node = make_node(derivative());
    node->set_next_edges(std::move(edges));
    torch::autograd::rebase_history(tensors, node);
  }
}

namespace {

// torch has no lazy copy_: it runs eagerly, and cuts the graph in two.
void replace(const at::Tensor& tensor, const at::Tensor& values) {
  if (tensor.device().is_lazy()) {
    // What is added to minus zero keeps its sign.
    tensor.fill_(tensor.is_complex() ? c10::Scalar(c10::complex<double>(-0.0, -0.0)) : -0.0);
    tensor.add_(values);
  } else {
    tensor.copy_(values);
  }
}

}  // namespace

Tensors replaced(at::TensorList inputs, const Tensors& values) {
  for (size_t i = 0; i < inputs.size(); ++i) {
    replace(inputs[i], values[i]);
  }
  return inputs.vec();
}

void forward_out(std::string_view op, std::string_view group_name, at::TensorList tensors,
                 const at::Tensor& out, c10::function_ref<void()> forward) {
  TORCH_CHECK(!any_requires_grad(tensors) && !any_requires_grad(out), op,
              ": out= does not differentiate, got a tensor that requires grad; use the functional "
              "op, or torch.no_grad()");
  {
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    forward();
  }
  torch::autograd::impl::bump_version(out);
  leave_alone(op, group_name, out);
}

namespace {

// The product of the rows, by multiplications that every backend has: lazy tensors lack prod, and
// its gradient looks for zeros.
at::Tensor product_of_rows(at::Tensor rows) {
  for (int64_t count = rows.size(0); count > 1; count = rows.size(0)) {
    const int64_t half = count / 2;
    const at::Tensor products = rows.narrow(0, 0, half).mul(rows.narrow(0, half, half));
    rows = count % 2 == 0 ? products : at::cat({products, rows.narrow(0, count - 1, 1)});
  }
  return rows.select(0, 0);
}

// `t` times the derivative of min, max or product with respect to this rank's `input`, or times its
// conjugate.
at::Tensor weigh(const ReductionRule& rule, const at::Tensor& t, const at::Tensor& input,
                 c10::function_ref<at::Tensor()> reduced, bool conjugate) {
  if (rule.reduction.op == ReduceOp::Product) {
    if (rule.group_size == 1) {
      return t;
    }
    // The product of the other ranks' values, by multiplication alone: right where values are zero.
    const at::Tensor all =
        call::all_gather_into_tensor(input.unsqueeze(0), rule.group_size, rule.group);
    const at::Tensor others =
        product_of_rows(at::cat({all.narrow(0, 0, rule.rank),
                                 all.narrow(0, rule.rank + 1, rule.group_size - rule.rank - 1)}));
    return t.mul(conjugate ? others.conj() : others);
  }
  TORCH_CHECK(rule.reduction.op == ReduceOp::Min || rule.reduction.op == ReduceOp::Max,
              "reduce_op '", name_of(rule.reduction.op), "' has no derivative");
  // The ranks that hold the winning value share evenly.
  const at::Tensor won = input.eq(reduced()).to(t.scalar_type());
  const at::Tensor winners = call::all_reduce(won, kSum, rule.group);
  return t.mul(won).div(winners);
}

}  // namespace

at::Tensor ReductionRule::pull_back(const at::Tensor& grad, const at::Tensor& input,
                                    c10::function_ref<at::Tensor()> reduced) const {
  switch (reduction.op) {
    case ReduceOp::Sum:
      return grad;
    case ReduceOp::Avg:
      return grad.div(group_size);
    case ReduceOp::PremulSum:
      return grad.mul(reduction.factor->conj());
    default:
      return weigh(*this, grad, input, reduced, /*conjugate=*/true);
  }
}

at::Tensor ReductionRule::push_forward(const at::Tensor& tangent, const at::Tensor& input,
                                       c10::function_ref<at::Tensor()> reduced) const {
  return weigh(*this, tangent, input, reduced, /*conjugate=*/false);
}

}  // namespace c10d_ext
