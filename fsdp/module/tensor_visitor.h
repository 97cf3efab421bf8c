// Finds the tensors inside arguments and results of forward.
//
// Known: tensors, optionals, vectors, lists, deques, arrays, maps, pairs, tuples, variants, pointers to one value
// (unique_ptr, shared_ptr), and plain values that hold none (numbers, enums, strings). A struct of one's own joins by a
// specialisation:
//
//   template <> struct fsdp::TensorVisitor<Output> {
//     template <typename T, typename F> static void visit(T& o, F&& f) { visit_tensors(o.logits, f); f(o.loss); }
//   };
//
// A result of a type the library does not know does not compile: tensors are never missed in silence.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <deque>
#include <list>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <unordered_map>
#include <utility>
#include <variant>
#include <vector>

namespace fsdp {

template <typename T>
struct TensorVisitor;

namespace detail {
// A visitor that knows its elements says whether it knows theirs (`known`); one of the user's is believed.
template <typename T>
consteval bool is_visitable() {
  if constexpr (!requires { sizeof(TensorVisitor<T>); }) {
    return false;
  } else if constexpr (requires { TensorVisitor<T>::known; }) {
    return TensorVisitor<T>::known;
  } else {
    return true;
  }
}
}  // namespace detail

// Types whose tensors can be found.
template <typename T>
concept Visitable = detail::is_visitable<std::remove_cvref_t<T>>();

// Calls `function(tensor)` for each tensor in `value`, in a fixed order.
template <typename T, typename F>
void visit_tensors(T& value, F&& function) {
  static_assert(Visitable<T>, "this type may hold tensors that cannot be found: specialise fsdp::TensorVisitor for it");
  TensorVisitor<std::remove_cv_t<T>>::visit(value, function);
}

template <>
struct TensorVisitor<at::Tensor> {
  template <typename T, typename F>
  static void visit(T& tensor, F&& function) {
    function(tensor);
  }
};

template <typename V>
concept HoldsNoTensor =
    std::is_arithmetic_v<V> || std::is_enum_v<V> || std::is_null_pointer_v<V> || std::is_same_v<V, std::string> ||
    std::is_same_v<V, std::string_view> || std::is_same_v<V, const char*> || std::is_same_v<V, std::monostate>;

template <typename V>
requires HoldsNoTensor<V>
struct TensorVisitor<V> {
  template <typename T, typename F>
  static void visit(T&, F&&) {}
};

namespace detail {
template <typename V>
struct VisitElements {
  static constexpr bool known = Visitable<V>;
  template <typename T, typename F>
  static void visit(T& values, F&& function) {
    for (auto& value : values) visit_tensors(value, function);
  }
};
template <>
struct VisitElements<bool> {  // a vector of bool has no references to its elements
  template <typename T, typename F>
  static void visit(T&, F&&) {}
};
template <typename V>
struct VisitMapped {
  static constexpr bool known = Visitable<V>;
  template <typename T, typename F>
  static void visit(T& values, F&& function) {
    for (auto& [key, value] : values) visit_tensors(value, function);
  }
};
template <typename V>
struct VisitPointee {
  static constexpr bool known = Visitable<V>;
  template <typename T, typename F>
  static void visit(T& value, F&& function) {
    if (value) visit_tensors(*value, function);
  }
};
}  // namespace detail

template <typename V>
struct TensorVisitor<std::optional<V>> : detail::VisitPointee<V> {};
template <typename V>
struct TensorVisitor<std::shared_ptr<V>> {  // others hold the pointee too: its tensors are seen, never replaced
  static constexpr bool known = Visitable<V>;
  template <typename T, typename F>
  static void visit(T& value, F&& function) {
    if (value) visit_tensors(std::as_const(*value), function);
  }
};
template <typename V, typename D>
struct TensorVisitor<std::unique_ptr<V, D>> : detail::VisitPointee<V> {};
template <typename V, typename A>
struct TensorVisitor<std::vector<V, A>> : detail::VisitElements<V> {};
template <typename V, typename A>
struct TensorVisitor<std::list<V, A>> : detail::VisitElements<V> {};
template <typename V, typename A>
struct TensorVisitor<std::deque<V, A>> : detail::VisitElements<V> {};
template <typename V, std::size_t N>
struct TensorVisitor<std::array<V, N>> : detail::VisitElements<V> {};
template <typename K, typename V, typename C, typename A>
struct TensorVisitor<std::map<K, V, C, A>> : detail::VisitMapped<V> {};
template <typename K, typename V, typename H, typename E, typename A>
struct TensorVisitor<std::unordered_map<K, V, H, E, A>> : detail::VisitMapped<V> {};

template <typename A, typename B>
struct TensorVisitor<std::pair<A, B>> {
  static constexpr bool known = Visitable<A> && Visitable<B>;
  template <typename T, typename F>
  static void visit(T& value, F&& function) {
    visit_tensors(value.first, function);
    visit_tensors(value.second, function);
  }
};
template <typename... V>
struct TensorVisitor<std::tuple<V...>> {
  static constexpr bool known = (Visitable<V> && ...);
  template <typename T, typename F>
  static void visit(T& value, F&& function) {
    std::apply([&](auto&... element) { (visit_tensors(element, function), ...); }, value);
  }
};
template <typename... V>
struct TensorVisitor<std::variant<V...>> {
  static constexpr bool known = (Visitable<V> && ...);
  template <typename T, typename F>
  static void visit(T& value, F&& function) {
    std::visit([&](auto& alternative) { visit_tensors(alternative, function); }, value);
  }
};

}  // namespace fsdp
