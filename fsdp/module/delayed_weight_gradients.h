// Weight gradients of fsdp::linear computed later than the rest of a backward, when the schedule has time for them.
//
// Nothing later in a backward needs the gradient of a weight, so a schedule that has communication to hide runs the
// products of the weight gradients beside it (2-stage backward of zero-bubble schedules, Qi et al. 2023,
// arXiv:2401.10241; fine-grained 1F1B). For caller-driven units (UnitOptions::register_hooks = false) only: elsewhere
// the end of a backward reduces what has arrived.
//
//   fsdp::DelayedWeightGradients later;
//   { auto scope = later.record(); y = block(x); }
//   y.backward(dy);   // the gradient of x, and of parameters that are no weights of a linear
//   later.run();      // the others; each arrives at its unit, which completes when the last has come
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <deque>
#include <functional>
#include <memory>
#include <vector>

namespace torch::autograd {
struct Node;
}

namespace fsdp {

class WeightGradient;

class DelayedWeightGradients {
 public:
  DelayedWeightGradients();

  // Linear maps of the calling thread's forwards belong to this object while the scope lives. Scopes nest.
  class [[nodiscard]] Scope {
   public:
    explicit Scope(const DelayedWeightGradients& owner);
    ~Scope();
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    const DelayedWeightGradients* previous_;
  };
  [[nodiscard]] Scope record() const { return Scope(*this); }

  // Computes what backwards have left so far, in their order, on the current stream, which is ordered after them.
  // Weights may be resharded by then. Returns the tensors that were read: who has others than the current stream's own
  // among them keeps them until it has passed.
  std::vector<at::Tensor> run();
  [[nodiscard]] std::size_t pending() const;  // products still to come
  void drop();                                // after an error: they will not be computed

  // What a backward has left: how to add to the gradient of a weight.
  struct Product {
    std::shared_ptr<torch::autograd::Node> accumulator;  // the weight's
    at::Tensor weight;
    at::Tensor dy, x;
    std::function<void(WeightGradient&, const at::Tensor& dy, const at::Tensor& x)> add;
  };
  using Queue = std::deque<Product>;
  // Where linear maps over `weight`, of a caller-driven unit, that are made now leave their products; null: nowhere,
  // they compute them. Throws UsageError where nobody would wait for what is left.
  [[nodiscard]] static std::shared_ptr<Queue> current(const at::Tensor& weight);
  // In a backward: throws UsageError under create_graph.
  static void leave(Queue& queue, Product product);

 private:
  std::shared_ptr<Queue> queue_;
};

}  // namespace fsdp
