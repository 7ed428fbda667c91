#include "backends/process_group/argument_checks.h"

#include <ATen/MemoryOverlap.h>
#include <c10/util/SmallVector.h>
#include <torch/csrc/distributed/c10d/Types.hpp>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <numeric>

#include "backends/request.h"

namespace c10d_ext {

using std::string_view;
using Tensors = std::vector<at::Tensor>;

void ArgumentChecks::check_tensor(string_view op, string_view name, const at::Tensor& t) const {
  C10D_EXT_CHECK_VALUE(t.defined(), op, place_, name, " must be a tensor, got an undefined one");
  C10D_EXT_CHECK_VALUE(t.is_cpu(), op, place_, name, " must be on the CPU, which the ", backend_,
                       " backend serves, got one on ", t.device());
  C10D_EXT_CHECK_TYPE(t.layout() == c10::kStrided, op, place_, name,
                      " must be a dense (strided) tensor, got layout ", t.layout());
}

void ArgumentChecks::check_written(string_view op, string_view name, const at::Tensor& t) const {
  check_tensor(op, name, t);
  C10D_EXT_CHECK_VALUE(t.is_contiguous() || at::has_internal_overlap(t) != at::MemOverlap::Yes, op,
                       place_, name, " must hold each element at a place of its own, got shape ",
                       t.sizes(), " with strides ", t.strides());
}

void ArgumentChecks::check_apart(string_view op, at::TensorList written) const {
  struct Span {
    const std::byte *begin, *end;
    size_t index;
  };
  c10::SmallVector<Span, 16> spans;
  for (size_t i = 0; i < written.size(); ++i) {
    const at::Tensor& t = written[i];
    if (t.numel() != 0 && (t.is_contiguous() || t.is_non_overlapping_and_dense())) {
      const auto* data = static_cast<const std::byte*>(t.const_data_ptr());
      spans.push_back({data, data + t.nbytes(), i});
    }
  }
  std::sort(spans.begin(), spans.end(),
            [](const Span& a, const Span& b) { return a.begin < b.begin; });
  for (size_t i = 1; i < spans.size(); ++i) {
    const auto [first, second] = std::minmax(spans[i - 1].index, spans[i].index);
    C10D_EXT_CHECK_VALUE(spans[i - 1].end <= spans[i].begin, op, place_,
                         "tensors that are written must have no memory in common, got numbers ",
                         first, " and ", second, " that overlap");
  }
}

const at::Tensor& ArgumentChecks::only(string_view op, string_view name,
                                       const Tensors& tensors) const {
  C10D_EXT_CHECK_VALUE(tensors.size() == 1, op, place_, name, " must be one tensor, got ",
                       tensors.size());
  return tensors.front();
}

const Tensors& ArgumentChecks::only_list(string_view op, string_view name,
                                         const std::vector<Tensors>& lists) const {
  C10D_EXT_CHECK_VALUE(lists.size() == 1, op, place_, name, " must be one list of tensors, got ",
                       lists.size());
  return lists.front();
}

// A tensor for each rank, this rank's as large as `own`.
void ArgumentChecks::check_parts(string_view op, string_view name, const Tensors& parts,
                                 const at::Tensor& own, string_view own_name) const {
  C10D_EXT_CHECK_VALUE(parts.size() == static_cast<size_t>(place_.size()), op, place_, name,
                       " must be one tensor for each of the ", place_.size(), " ranks, got ",
                       parts.size());
  for (const auto& part : parts) {
    check_tensor(op, name, part);
    C10D_EXT_CHECK_VALUE(part.scalar_type() == own.scalar_type(), op, place_, name, " must have ",
                         own_name, "'s dtype, ", own.scalar_type(), ", got ", part.scalar_type());
  }
  C10D_EXT_CHECK_VALUE(parts[place_.rank()].numel() == own.numel(), op, place_, name, "[",
                       place_.rank(), "], this rank's part, must have as many elements as ",
                       own_name, ", ", own.sizes(), ", got ", parts[place_.rank()].sizes());
}

void ArgumentChecks::check_whole(string_view op, string_view name, const at::Tensor& whole,
                                 string_view part_name, const at::Tensor& part) const {
  C10D_EXT_CHECK_VALUE(whole.scalar_type() == part.scalar_type(), op, place_, name, " must have ",
                       part_name, "'s dtype, ", part.scalar_type(), ", got ", whole.scalar_type());
  C10D_EXT_CHECK_VALUE(whole.numel() == part.numel() * place_.size(), op, place_, name,
                       " must have ", place_.size(), " times the elements of ", part_name, ", ",
                       part.sizes(), ", got ", whole.sizes());
}

void ArgumentChecks::check_pairs(string_view op, const Tensors& outputs,
                                 const Tensors& inputs) const {
  C10D_EXT_CHECK_VALUE(!inputs.empty() && outputs.size() == inputs.size(), op, place_,
                       "there must be an output for each input and at least one, got ",
                       outputs.size(), " outputs and ", inputs.size(), " inputs");
  for (size_t i = 0; i < inputs.size(); ++i) {
    check_tensor(op, "each input", inputs[i]);
    check_written(op, "each output", outputs[i]);
  }
  check_apart(op, outputs);
}

void ArgumentChecks::check_list(string_view op, const Tensors& tensors) const {
  C10D_EXT_CHECK_VALUE(!tensors.empty(), op, place_,
                       "tensors must hold at least one tensor, got an empty list");
  for (const auto& tensor : tensors) {
    check_written(op, "each tensor", tensor);
    C10D_EXT_CHECK_VALUE(tensor.scalar_type() == tensors[0].scalar_type(), op, place_,
                         "tensors must have one dtype, got ", tensors[0].scalar_type(), " and ",
                         tensor.scalar_type());
  }
  check_apart(op, tensors);
}

void ArgumentChecks::check_lists(string_view op, const std::vector<Tensors>& outputs,
                                 const Tensors& inputs) const {
  C10D_EXT_CHECK_VALUE(outputs.size() == static_cast<size_t>(place_.size()), op, place_,
                       "outputs must be one list for each of the ", place_.size(), " ranks, got ",
                       outputs.size());
  for (const auto& input : inputs) {
    check_tensor(op, "each input", input);
  }
  Tensors written;
  for (const auto& list : outputs) {
    written.insert(written.end(), list.begin(), list.end());
    C10D_EXT_CHECK_VALUE(list.size() == inputs.size(), op, place_,
                         "each list of outputs must hold as many tensors as inputs, ",
                         inputs.size(), ", got ", list.size());
    for (size_t i = 0; i < inputs.size(); ++i) {
      C10D_EXT_CHECK_VALUE(list[i].scalar_type() == inputs[i].scalar_type(), op, place_,
                           "each output must have its input's dtype, ", inputs[i].scalar_type(),
                           ", got ", list[i].scalar_type());
    }
  }
  check_all_written(op, written);
}

void ArgumentChecks::check_all_written(string_view op, const Tensors& outputs) const {
  for (const auto& output : outputs) {
    check_written(op, "each output", output);
  }
  check_apart(op, outputs);
}

void ArgumentChecks::check_no_lists(string_view op, string_view name,
                                    const std::vector<Tensors>& lists, int64_t root) const {
  C10D_EXT_CHECK_VALUE(lists.empty(), op, place_, name, " must be empty but on the root, rank ",
                       root, ", got ", lists.size(), " lists");
}

void ArgumentChecks::check_peer(string_view op, string_view role, int64_t peer) const {
  C10D_EXT_CHECK_VALUE(peer >= 0 && peer < place_.size() && peer != place_.rank(), op, place_,
                       "the ", role, " must be another rank of the group, 0 to ", place_.size() - 1,
                       ", got ", peer);
}

Reduction ArgumentChecks::check_sparse(string_view op, const at::Tensor& tensor,
                                       const c10d::ReduceOp& reduce_op) const {
  C10D_EXT_CHECK_VALUE(tensor.defined() && tensor.is_cpu(), op, place_,
                       "tensor must be on the CPU, which the ", backend_,
                       " backend serves, got another");
  C10D_EXT_CHECK_TYPE(tensor.layout() == c10::kSparse, op, place_,
                      "tensor must be dense or sparse in COO layout, got layout ", tensor.layout());
  const auto reduction = reduction_of(op, reduce_op, tensor.scalar_type());
  C10D_EXT_CHECK_TYPE(reduction.op == ReduceOp::Sum || reduction.op == ReduceOp::Avg, op, place_,
                      "sparse tensors can be reduced with sum and avg, got ",
                      name_of(reduction.op));
  return reduction;
}

void ArgumentChecks::check_root(string_view op, int64_t root) const {
  C10D_EXT_CHECK_VALUE(root >= 0 && root < place_.size(), op, place_,
                       "the root must be a rank of the group, 0 to ", place_.size() - 1, ", got ",
                       root);
}

std::vector<int64_t> ArgumentChecks::elements_of(string_view op, string_view name,
                                                 const at::Tensor& t,
                                                 const std::vector<int64_t>& rows) const {
  if (rows.empty()) {
    C10D_EXT_CHECK_VALUE(t.dim() > 0 && t.size(0) % place_.size() == 0, op, place_, name,
                         "'s first dimension must be a multiple of the ", place_.size(),
                         " ranks without split sizes, got shape ", t.sizes());
    return std::vector<int64_t>(place_.size(), t.numel() / place_.size());
  }
  C10D_EXT_CHECK_VALUE(
      rows.size() == static_cast<size_t>(place_.size()) && t.dim() > 0 &&
          std::all_of(rows.begin(), rows.end(), [](int64_t r) { return r >= 0; }) &&
          std::accumulate(rows.begin(), rows.end(), int64_t{0}) == t.size(0),
      op, place_, name, "'s split sizes must be one for each of the ", place_.size(),
      " ranks and sum to its first dimension, got ", rows, " for shape ", t.sizes());
  return c10d_ext::elements_of(rows, t);
}

ReduceOp reduce_op_of(const c10d::ReduceOp& op) {
  static_assert(static_cast<int>(ReduceOp::Sum) == c10d::ReduceOp::SUM &&
                static_cast<int>(ReduceOp::Avg) == c10d::ReduceOp::AVG &&
                static_cast<int>(ReduceOp::Product) == c10d::ReduceOp::PRODUCT &&
                static_cast<int>(ReduceOp::Min) == c10d::ReduceOp::MIN &&
                static_cast<int>(ReduceOp::Max) == c10d::ReduceOp::MAX &&
                static_cast<int>(ReduceOp::Band) == c10d::ReduceOp::BAND &&
                static_cast<int>(ReduceOp::Bor) == c10d::ReduceOp::BOR &&
                static_cast<int>(ReduceOp::Bxor) == c10d::ReduceOp::BXOR &&
                static_cast<int>(ReduceOp::PremulSum) == c10d::ReduceOp::PREMUL_SUM);
  return static_cast<ReduceOp>(op.op_);
}

Reduction ArgumentChecks::reduction_of(string_view op, const c10d::ReduceOp& reduce_op,
                                       c10::ScalarType dtype) const {
  C10D_EXT_CHECK_VALUE(reduce_op.op_ < c10d::ReduceOp::UNUSED, op, place_,
                       "the reduce op must be one of torch.distributed.ReduceOp, got number ",
                       static_cast<int>(reduce_op.op_));
  Reduction reduction{reduce_op_of(reduce_op), std::nullopt};
  if (reduction.op == ReduceOp::PremulSum) {
    C10D_EXT_CHECK_VALUE(reduce_op.supplement_, op, place_, "PREMUL_SUM needs a factor, got none");
    // Its only kind, by the layout that torch gives it.
    const auto& supplement =
        static_cast<const c10d::NCCLPreMulSumSupplement&>(*reduce_op.supplement_);
    if (supplement.tensor_factor.defined()) {
      reduction.factor = supplement.tensor_factor.item();
    } else if (c10::isIntegralType(dtype, /*includeBool=*/true) &&
               std::abs(supplement.double_factor) < 0x1p53 &&
               supplement.double_factor == std::trunc(supplement.double_factor)) {
      reduction.factor = static_cast<int64_t>(supplement.double_factor);
    } else {
      reduction.factor = supplement.double_factor;
    }
  }
  check_reduction(op, place_, reduction, dtype);
  return reduction;
}

}  // namespace c10d_ext
