// A move-only function without arguments, kept in place: handing work to a stream allocates nothing.
#pragma once

#include <cstddef>
#include <new>
#include <type_traits>
#include <utility>

namespace fsdp {

class Task {
 public:
  static constexpr std::size_t kCapacity = 152;  // bytes of captured state; larger captures do not compile

  Task() = default;

  template <typename F>
  requires(!std::is_same_v<std::remove_cvref_t<F>, Task>)
      Task(F&& function) {  // NOLINT(google-explicit-constructor): a lambda is a task
    using Function = std::remove_cvref_t<F>;
    static_assert(sizeof(Function) <= kCapacity, "capture less: a Task never allocates");
    static_assert(alignof(Function) <= alignof(std::max_align_t));
    static_assert(std::is_nothrow_move_constructible_v<Function>);
    new (storage_) Function(std::forward<F>(function));
    manage_ = [](Operation operation, void* self, void* target) {
      auto& callable = *static_cast<Function*>(self);
      if (operation == Operation::call) return callable();
      if (operation == Operation::move) new (target) Function(std::move(callable));
      callable.~Function();
    };
  }

  Task(Task&& other) noexcept { take(other); }
  Task& operator=(Task&& other) noexcept {
    if (this != &other) {
      reset();
      take(other);
    }
    return *this;
  }
  ~Task() { reset(); }

  void operator()() { manage_(Operation::call, storage_, nullptr); }

 private:
  enum class Operation { call, move, destroy };

  void take(Task& other) noexcept {
    if (other.manage_ == nullptr) return;
    other.manage_(Operation::move, other.storage_, storage_);
    manage_ = std::exchange(other.manage_, nullptr);
  }
  void reset() noexcept {
    if (manage_ != nullptr) manage_(Operation::destroy, storage_, nullptr);
    manage_ = nullptr;
  }

  alignas(std::max_align_t) std::byte storage_[kCapacity];
  void (*manage_)(Operation, void* self, void* target) = nullptr;
};

}  // namespace fsdp
