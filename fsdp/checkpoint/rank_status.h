// What the ranks of a checkpoint tell each other: whether all succeeded, and small lists of numbers.
//
// Made by all ranks at the same point; every call is collective over the hosts and blocks.
#pragma once

#include <cstdint>
#include <exception>
#include <memory>
#include <string>
#include <vector>

#include "fsdp/mesh/world.h"

namespace fsdp::checkpoint {

class RankStatus {
 public:
  explicit RankStatus(const World& world);

  // Runs `action` here and on the other ranks; when it threw on any, throws on all: this rank's own error here, and
  // elsewhere an Error with the rank and the beginning of the text of the first that failed.
  template <typename F>
  void all(const F& action) const {
    std::exception_ptr error;
    std::string text;
    try {
      action();
    } catch (const std::exception& e) {
      error = std::current_exception();
      text = e.what();
    }
    agree(error, text);
  }

  // [rank] -> what that rank gave.
  [[nodiscard]] std::vector<std::vector<std::int64_t>> gather(const std::vector<std::int64_t>& values) const;
  // [i] -> whether any rank has a value other than 0 there. Equal lengths on all ranks.
  [[nodiscard]] std::vector<std::int64_t> maximum(std::vector<std::int64_t> values) const;

  [[nodiscard]] int rank() const { return static_cast<int>(communicator_.rank().value()); }
  [[nodiscard]] int size() const { return communicator_.size(); }

 private:
  void agree(const std::exception_ptr& error, const std::string& text) const;
  void wait() const;

  std::shared_ptr<Runtime> runtime_;
  Communicator communicator_;
  Stream stream_;
};

}  // namespace fsdp::checkpoint
