// Collectives in torch's lazy graphs: one boxed kernel puts a node per call into the graph.
//
// What a call means is what it means in eager code: every collective that was called is run, once
// per execution of the graph, in the order of the calls. Neither follows from the graph alone,
// whose nodes run when and if somebody needs their values, and who needs what differs between ranks
// (a garbage collection is enough). Two things see to it:
//  * each collective's node has the one before it as an additional operand, and a lazy tensor held
//    here keeps the newest one alive until the graph has run;
//  * in TorchScript a collective takes its input through c10d_ext::in_order, which has side effects
//    in the compiler's eyes: so calls that look alike are not merged, and calls whose results are
//    unused are not removed.

#include "frontend/lazy/lazy.h"

#ifndef C10D_EXT_WITHOUT_LAZY

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>
#include <torch/csrc/jit/ir/ir.h>
#include <torch/csrc/jit/passes/pass_manager.h>
#include <torch/csrc/jit/runtime/custom_operator.h>
#include <torch/csrc/lazy/core/hash.h>
#include <torch/csrc/lazy/core/ir_builder.h>
#include <torch/csrc/lazy/core/tensor.h>
#include <torch/csrc/lazy/ts_backend/ts_lowering_context.h>
#include <torch/csrc/lazy/ts_backend/ts_node.h>
#include <torch/library.h>

#include <map>
#include <mutex>
#include <optional>
#include <sstream>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/group.h"
#include "control/resolve_group.h"

namespace c10d_ext::lazy {
namespace {

using torch::lazy::BackendDevice;
using torch::lazy::hash_t;
using torch::lazy::HashCombine;
using torch::lazy::LazyTensor;
using torch::lazy::LazyTensorPtr;
using torch::lazy::Shape;
using torch::lazy::TSOpVector;
using torch::lazy::Value;

constexpr std::string_view kNamespace = "c10d_ext::";

// Where an op's tensors stand among its arguments: one, or a list of `count`.
struct Slot {
  size_t argument;
  bool is_list;
  size_t count;
};

// An op's arguments, its tensors taken out.
struct Arguments {
  std::vector<c10::IValue> plain;  // by place in the schema; none for tensors
  std::vector<Slot> slots;
};

hash_t hash_of(const c10::IValue& value) {
  using torch::lazy::Hash;
  if (value.isNone()) {
    return Hash(std::string_view("none"));
  }
  if (value.isString()) {
    return HashCombine(Hash(std::string_view("str")), Hash(value.toStringRef()));
  }
  if (value.isScalar()) {
    // Not torch's hash of a scalar, which has no end for complex ones.
    const c10::Scalar scalar = value.toScalar();
    const hash_t kind = Hash(static_cast<int64_t>(scalar.type()));
    if (scalar.isIntegral(/*includeBool=*/true)) {
      return HashCombine(kind, Hash(scalar.toLong()));
    }
    const auto number = scalar.toComplexDouble();
    return HashCombine(kind, HashCombine(Hash(number.real()), Hash(number.imag())));
  }
  TORCH_CHECK(value.isIntList(), "c10d_ext: no hash for an argument of type ", value.tagKind());
  return HashCombine(Hash(std::string_view("ints")), Hash(value.toIntVector()));
}

hash_t hash_of(const Arguments& arguments, bool in_order) {
  hash_t hash = torch::lazy::Hash(in_order);
  for (const auto& value : arguments.plain) {
    hash = HashCombine(hash, hash_of(value));
  }
  for (const auto& slot : arguments.slots) {
    hash = HashCombine(hash, torch::lazy::Hash(static_cast<int64_t>(slot.count)));
  }
  return hash;
}

// Symbolic sizes become the numbers they stand for: they are constants of the graph.
c10::IValue concrete(const c10::IValue& value) {
  if (value.isSymInt()) {
    return value.toSymInt().guard_int(__FILE__, __LINE__);
  }
  if (value.isSymIntList()) {
    c10::List<int64_t> sizes;
    for (const auto& size : value.toSymIntVector()) {
      sizes.push_back(size.guard_int(__FILE__, __LINE__));
    }
    return sizes;
  }
  return value;
}

// Moves the insertion point up to where all of `inputs` are there: a collective starts as early as
// it can. Nothing in the graph writes in place, so any order that respects uses is right.
torch::jit::Node* earliest_point(torch::jit::Graph& graph,
                                 const std::vector<torch::jit::Value*>& inputs) {
  torch::jit::Node* latest = nullptr;
  for (const auto* input : inputs) {
    auto* producer = const_cast<torch::jit::Node*>(input->node());
    if (producer != graph.param_node() && (latest == nullptr || producer->isAfter(latest))) {
      latest = producer;
    }
  }
  return latest == nullptr ? *graph.nodes().begin() : latest->next();
}

}  // namespace

// One call of an op.
class CallNode final : public torch::lazy::TsNode {
 public:
  // `operands` are the tensors and, with `in_order`, the collective before this one.
  CallNode(const c10::FunctionSchema& schema, const std::vector<Value>& operands,
           std::vector<Shape>&& shapes, Arguments arguments, bool is_collective, bool in_order)
      : TsNode(torch::lazy::OpKind(c10::Symbol::fromQualString(schema.name())), operands,
               std::vector<Shape>(shapes), shapes.size(), hash_of(arguments, in_order)),
        schema_(schema),
        arguments_(std::move(arguments)),
        is_collective_(is_collective),
        in_order_(in_order) {}

  std::string ToString() const override {
    std::ostringstream text;
    text << TsNode::ToString();
    for (size_t i = 0; i < arguments_.plain.size(); ++i) {
      if (!arguments_.plain[i].isNone()) {
        text << ", " << schema_.arguments()[i].name() << "=" << arguments_.plain[i];
      }
    }
    return text.str();
  }

  TSOpVector Lower(std::shared_ptr<torch::jit::GraphFunction> /*function*/,
                   torch::lazy::TSLoweringContext* context) const override {
    auto& graph = *context->graph();
    std::vector<torch::jit::Value*> tensors;
    for (const auto& operand : operands()) {
      tensors.push_back(context->GetOutputOp(operand));
    }
    std::optional<torch::jit::WithInsertPoint> up;
    if (is_collective_) {
      up.emplace(earliest_point(graph, tensors));
      torch::jit::Value* previous = nullptr;
      if (in_order_) {
        previous = tensors.back();
        tensors.pop_back();
      } else {
        previous = graph.insertConstant(c10::IValue());
      }
      static const auto in_order = c10::Symbol::fromQualString("c10d_ext::in_order");
      tensors[0] = graph.insert(in_order, {tensors[0], previous});
    }

    std::vector<torch::jit::NamedValue> positional;
    std::vector<torch::jit::NamedValue> keywords;
    auto tensor = tensors.begin();
    auto slot = arguments_.slots.begin();
    for (size_t i = 0; i < arguments_.plain.size(); ++i) {
      torch::jit::Value* value = nullptr;
      if (slot == arguments_.slots.end() || slot->argument != i) {
        value = graph.insertConstant(arguments_.plain[i]);
      } else {
        if (slot->is_list) {
          value =
              graph.insertNode(graph.createList(c10::TensorType::get(), {&*tensor, slot->count}))
                  ->output();
        } else {
          value = *tensor;
        }
        tensor += static_cast<std::ptrdiff_t>(slot->count);
        ++slot;
      }
      const auto& argument = schema_.arguments()[i];
      (argument.kwarg_only() ? keywords : positional).emplace_back(argument.name(), value);
    }
    torch::jit::Value* result = graph.insert(op().op, positional, keywords);
    if (result->type()->kind() != c10::TypeKind::ListType) {
      return {result};
    }
    return graph.insertNode(graph.createListUnpack(result, num_outputs()))->outputs().vec();
  }

 private:
  const c10::FunctionSchema schema_;
  const Arguments arguments_;
  const bool is_collective_;
  const bool in_order_;
};

namespace {

// The newest collective of each lazy device while it waits to be run.
class Newest {
 public:
  // Leaked: lazy tensors may outlive static destructors.
  static Newest& get() {
    static auto* instance = new Newest;
    return *instance;
  }

  // Puts the node that `make` builds, given the collective before it or nothing, in its place.
  template <class Make>
  torch::lazy::NodePtr follow(const BackendDevice& device, const Make& make) {
    std::lock_guard<std::mutex> lock(mutex_);
    LazyTensorPtr& newest = by_device_[device.toString()];
    // Once the graph has run the tensor holds data in place of a node.
    const bool pending = newest && !newest->CurrentDataHandle();
    torch::lazy::NodePtr node = make(pending ? newest->CurrentIrValue() : Value());
    newest = LazyTensor::Create(Value(node, 0), device);
    return node;
  }

 private:
  std::mutex mutex_;
  std::map<std::string, LazyTensorPtr> by_device_;
};

std::string_view bare_name(const c10::FunctionSchema& schema) {
  return std::string_view(schema.name()).substr(kNamespace.size());
}

std::string_view group_of(const c10::FunctionSchema& schema,
                          const std::vector<c10::IValue>& values) {
  const auto at = schema.argumentIndexWithName("group_name");
  TORCH_CHECK(at, schema.name(), ": no argument group_name");
  return values[*at].toStringView();
}

// The kernel of every functional op.
void trace(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const c10::FunctionSchema& schema = op.schema();
  const size_t count = schema.arguments().size();
  std::vector<c10::IValue> values(stack->end() - static_cast<std::ptrdiff_t>(count), stack->end());
  torch::jit::drop(*stack, count);

  Arguments arguments;
  std::vector<Value> operands;
  std::optional<BackendDevice> device;
  torch::jit::Stack as_meta;
  const auto take = [&](const at::Tensor& tensor, const std::string& name) {
    const at::Tensor plain = tensor.resolve_conj().resolve_neg();
    const LazyTensorPtr lazy = torch::lazy::TryGetLtcTensor(plain);
    if (!lazy || (device && lazy->GetDevice() != *device)) {
      const auto bare = bare_name(schema);
      type_error(bare, resolve_group(bare, group_of(schema, values)), name,
                 " must be on the lazy device of the other tensors, got ", tensor.device());
    }
    device = lazy->GetDevice();
    operands.push_back(lazy->GetIrValue());
    const auto shape = lazy->shape();
    return at::empty(shape.Get().sizes(), at::dtype(lazy->dtype()).device(c10::kMeta));
  };
  for (size_t i = 0; i < count; ++i) {
    const std::string& name = schema.arguments()[i].name();
    if (values[i].isTensor()) {
      arguments.slots.push_back({i, /*is_list=*/false, 1});
      arguments.plain.emplace_back();
      as_meta.emplace_back(take(values[i].toTensor(), name));
    } else if (values[i].isTensorList()) {
      std::vector<at::Tensor> list;
      for (const at::Tensor& tensor : values[i].toTensorVector()) {
        list.push_back(take(tensor, c10::str(name, "[", list.size(), "]")));
      }
      arguments.slots.push_back({i, /*is_list=*/true, list.size()});
      arguments.plain.emplace_back();
      as_meta.emplace_back(std::move(list));
    } else {
      arguments.plain.push_back(concrete(values[i]));
      as_meta.push_back(arguments.plain.back());
    }
  }

  // The op's own checks and shapes: nothing is traced that would be refused when it runs.
  op.callBoxed(as_meta);
  const bool is_list = as_meta.back().isTensorList();
  std::vector<Shape> shapes;
  for (const at::Tensor& out : is_list ? as_meta.back().toTensorVector()
                                       : std::vector<at::Tensor>{as_meta.back().toTensor()}) {
    shapes.emplace_back(out.scalar_type(), out.sizes());
  }

  const bool is_collective = !schema.hasAnyAliasInfo();
  const auto make = [&](const Value& previous) -> torch::lazy::NodePtr {
    const bool in_order = static_cast<bool>(previous);
    if (in_order) {
      operands.push_back(previous);
    }
    return std::make_shared<CallNode>(schema, operands, std::move(shapes), std::move(arguments),
                                      is_collective, in_order);
  };
  const auto node = is_collective ? Newest::get().follow(*device, make) : make(Value());
  std::vector<at::Tensor> outs;
  for (size_t i = 0; i < node->num_outputs(); ++i) {
    outs.push_back(
        torch::lazy::CreateAtenFromLtcTensor(LazyTensor::Create(Value(node, i), *device)));
  }
  if (is_list) {
    stack->emplace_back(std::move(outs));
  } else {
    stack->emplace_back(std::move(outs.front()));
  }
}

// In place and out= forms arrive as functional ones, by functionalization, which all lazy tensors
// pass through.
void refuse(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const c10::FunctionSchema& schema = op.schema();
  const size_t count = schema.arguments().size();
  const std::vector<c10::IValue> values(stack->end() - static_cast<std::ptrdiff_t>(count),
                                        stack->end());
  const auto bare = bare_name(schema);
  value_error(bare, resolve_group(bare, group_of(schema, values)),
              "writing a lazy tensor must go through functionalization, got a lazy tensor without "
              "it");
}

// A message is not started again by every reader of a graph, as a node would be.
void refuse_message(const c10::OperatorHandle& op, torch::jit::Stack*) {
  TORCH_CHECK_NOT_IMPLEMENTED(false, bare_name(op.schema()),
                              ": tensors must not be lazy, which have collectives but no messages; "
                              "use permute_tensor or all_to_all_single, got a lazy tensor");
}

// Moves each wait down to the first use of what it waits for: until then the collective has
// company. TorchScript runs nodes in the order they stand in.
void sink_waits(std::shared_ptr<torch::jit::Graph>& graph) {
  static const auto wait_tensor = c10::Symbol::fromQualString("c10d_ext::wait_tensor");
  std::vector<torch::jit::Node*> waits;
  for (auto* node : graph->nodes()) {
    if (node->kind() == wait_tensor) {
      waits.push_back(node);
    }
  }
  torch::jit::Node* end = graph->return_node();
  // Backwards: a wait for a wait is a use, too.
  for (auto wait = waits.rbegin(); wait != waits.rend(); ++wait) {
    torch::jit::Node* first = end;
    for (const auto& use : (*wait)->output()->uses()) {
      torch::jit::Node* user = use.user;
      while (user->owningBlock() != graph->block()) {
        user = user->owningBlock()->owningNode();
      }
      if (user->isBefore(first)) {
        first = user;
      }
    }
    (*wait)->moveBefore(first);
    if (first == end) {
      end = *wait;
    }
  }
}

// Hands its input on, in the order of the calls and after `previous`, the collective before.
void in_order(torch::jit::Stack& stack) {
  torch::jit::drop(stack, 1);
}

}  // namespace

bool is_built() {
  return true;
}

void register_kernels() {
  static const torch::jit::RegisterOperators operators(
      {torch::jit::Operator("c10d_ext::in_order(Tensor input, Tensor? previous) -> Tensor",
                            in_order, c10::AliasAnalysisKind::CONSERVATIVE)});
  torch::jit::registerPrePass(sink_waits);

  // Every op there is: a new one needs nothing here.
  static torch::Library library(torch::Library::IMPL, "c10d_ext", c10::DispatchKey::Lazy, __FILE__,
                                __LINE__);
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& name : dispatcher.getAllOpNames()) {
    if (name.name.compare(0, kNamespace.size(), kNamespace) != 0) {
      continue;
    }
    const auto op = dispatcher.findOp(name);
    if (!op || !op->hasSchema()) {
      continue;
    }
    const auto bare = bare_name(op->schema());
    if (bare == "batch_isend_irecv" || bare == "wait_message") {
      library.impl(name.name.c_str(), torch::CppFunction::makeFromBoxedFunction<&refuse_message>());
    } else if (op->schema().is_mutable()) {
      library.impl(name.name.c_str(), torch::CppFunction::makeFromBoxedFunction<&refuse>());
    } else {
      library.impl(name.name.c_str(), torch::CppFunction::makeFromBoxedFunction<&trace>());
    }
  }
}

}  // namespace c10d_ext::lazy

#else

namespace c10d_ext::lazy {

bool is_built() {
  return false;
}

void register_kernels() {}

}  // namespace c10d_ext::lazy

#endif
