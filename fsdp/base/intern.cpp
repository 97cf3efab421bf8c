#include "fsdp/base/intern.h"

#include <mutex>
#include <string>
#include <unordered_set>

namespace fsdp {

const char* intern(std::string_view text) {
  static auto* mutex = new std::mutex;  // both leaked on purpose: labels are read until the last thread ends
  static auto* names = new std::unordered_set<std::string>;
  std::lock_guard lock(*mutex);
  return names->emplace(text).first->c_str();
}

}  // namespace fsdp
