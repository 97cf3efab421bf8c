#include "apps/fsdp/line_reader.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "fsdp/base/check.h"

namespace fsdp::app {
namespace {

constexpr std::size_t kBlock = 1 << 20;  // bytes

}  // namespace

LineReader::LineReader(const std::string& path) {
  const bool standard = path == kStandardInput;
  name_ = standard ? "standard input" : path;
  file_ = standard ? STDIN_FILENO : ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  FSDP_CHECK(file_ >= 0 || errno != ENOENT, UsageError, "{} does not exist", name_);
  FSDP_CHECK(file_ >= 0, UsageError, "{} cannot be read: {}", name_, std::strerror(errno));
}

LineReader::~LineReader() {
  if (file_ != STDIN_FILENO) ::close(file_);
}

std::optional<std::string_view> LineReader::line() {
  std::size_t searched = begin_;
  std::size_t end;
  while ((end = buffer_.find('\n', searched)) == std::string::npos) {
    searched = buffer_.size() - begin_;  // where the new bytes come: fill() moves the rest to the front
    if (!fill()) {
      if (begin_ == buffer_.size()) return std::nullopt;
      end = buffer_.size();  // a last line without a newline
      break;
    }
  }
  ++lines_;
  const auto line = std::string_view(buffer_).substr(begin_, end - begin_);
  begin_ = std::min(end + 1, buffer_.size());
  return line;
}

std::string_view LineReader::block() {
  if (begin_ == buffer_.size() && !fill()) return {};
  const auto block = std::string_view(buffer_).substr(begin_);
  begin_ = buffer_.size();
  return block;
}

std::string LineReader::where() const { return fmt::format("{}:{}", name_, lines_); }

bool LineReader::fill() {
  buffer_.erase(0, begin_);
  begin_ = 0;
  const auto old = buffer_.size();
  buffer_.resize(old + std::max(kBlock, old));  // twice as long each time: a long line is not copied over and over
  ssize_t count;
  do {
    count = ::read(file_, buffer_.data() + old, buffer_.size() - old);
  } while (count < 0 && errno == EINTR);
  const int error = errno;
  buffer_.resize(old + static_cast<std::size_t>(std::max<ssize_t>(count, 0)));
  FSDP_CHECK(count >= 0, UsageError, "{} cannot be read: {}", name_, std::strerror(error));
  return count > 0;
}

}  // namespace fsdp::app
