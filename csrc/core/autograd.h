#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/FunctionRef.h>

#include <functional>
#include <string>
#include <vector>

#include "core/reduction.h"

namespace c10d_ext {

using Tensors = std::vector<at::Tensor>;

// How a collective differentiates. Every rank calls the collective and every rank runs backward.
//
// The ops are recorded as autograd nodes of their own, like torch's built-in ops, and not as
// torch::autograd::Function, which torch.func refuses.
struct Derivative {
  // The node's name in a graph: "AllReduceBackward".
  const char* name;
  // (gradients of the outputs, saved) -> gradients of the inputs. A gradient that autograd left
  // undefined arrives as zeros, so that all ranks communicate alike.
  std::function<Tensors(const Tensors& grads, const Tensors& saved)> adjoint;
  // Tangents of the inputs -> tangents of the outputs; empty where forward mode is refused.
  std::function<Tensors(const Tensors& tangents)> tangent;
  // Saves the inputs and, after them, the outputs for the adjoint.
  bool save = false;
};

// Runs `forward` below autograd and records `derivative` where a gradient is needed.
Tensors differentiable(at::TensorList inputs, c10::function_ref<Tensors()> forward,
                       const std::function<Derivative()>& derivative);
at::Tensor differentiable(const at::Tensor& input, c10::function_ref<at::Tensor()> forward,
                          const std::function<Derivative()>& derivative);

// The same for an op that writes its inputs. `op` refuses leaves that require grad in words.
void differentiable_in_place(std::string_view op, at::TensorList inputs,
                             c10::function_ref<void()> forward,
                             const std::function<Derivative()>& derivative);

// out= variants do not differentiate: raises where one of `tensors` would need a gradient.
void forward_out(std::string_view op, at::TensorList tensors, const at::Tensor& out,
                 c10::function_ref<void()> forward);

// The gradient of a reduction over ranks with respect to this rank's `input`, given `grad`, the
// gradient of the reduced values summed over all ranks that hold them, and `reduced`, those values
// (asked for by min and max alone). All three have input's shape.
at::Tensor pull_back(const Reduction& reduction, const at::Tensor& grad, const at::Tensor& input,
                     const std::function<at::Tensor()>& reduced, const std::string& group,
                     int64_t rank, int64_t group_size);

}  // namespace c10d_ext
