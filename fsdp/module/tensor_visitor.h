// Finds the tensors inside arguments and results of forward.
//
// Known: tensors, optionals, vectors, arrays, maps, pairs, tuples, and plain values that hold none (numbers, enums,
// strings, pointers to nothing of ours). A struct of one's own joins by a specialisation:
//
//   template <> struct fsdp::TensorVisitor<Output> {
//     template <typename F> static void visit(Output& o, F&& f) { f(o.logits); f(o.loss); }
//   };
//
// A type the library does not know does not compile: tensors are never missed in silence.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <map>
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

template <typename T, typename F>
void visit_tensors(T& value, F&& function) {
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

template <typename V>
struct TensorVisitor<std::optional<V>> {
  template <typename T, typename F>
  static void visit(T& value, F&& function) {
    if (value) visit_tensors(*value, function);
  }
};

namespace detail {
struct VisitElements {
  template <typename T, typename F>
  static void visit(T& values, F&& function) {
    for (auto& value : values) visit_tensors(value, function);
  }
};
struct VisitMapped {
  template <typename T, typename F>
  static void visit(T& values, F&& function) {
    for (auto& [key, value] : values) visit_tensors(value, function);
  }
};
}  // namespace detail

template <typename V, typename A>
struct TensorVisitor<std::vector<V, A>> : detail::VisitElements {};
template <typename V, std::size_t N>
struct TensorVisitor<std::array<V, N>> : detail::VisitElements {};
template <typename K, typename V, typename C, typename A>
struct TensorVisitor<std::map<K, V, C, A>> : detail::VisitMapped {};
template <typename K, typename V, typename H, typename E, typename A>
struct TensorVisitor<std::unordered_map<K, V, H, E, A>> : detail::VisitMapped {};

template <typename A, typename B>
struct TensorVisitor<std::pair<A, B>> {
  template <typename T, typename F>
  static void visit(T& value, F&& function) {
    visit_tensors(value.first, function);
    visit_tensors(value.second, function);
  }
};
template <typename... V>
struct TensorVisitor<std::tuple<V...>> {
  template <typename T, typename F>
  static void visit(T& value, F&& function) {
    std::apply([&](auto&... element) { (visit_tensors(element, function), ...); }, value);
  }
};

}  // namespace fsdp
