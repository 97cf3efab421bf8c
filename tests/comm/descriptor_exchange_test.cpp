// File descriptors between ranks: each arrives, at its place, and reads as it was written.
#include "fsdp/comm/nccl/descriptor_exchange.h"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <barrier>
#include <cstring>
#include <string>
#include <thread>

#include "fsdp/base/error.h"

namespace fsdp::testing {
namespace {

int file_with(const std::string& text) {
  const int descriptor = memfd_create("test", MFD_CLOEXEC);
  EXPECT_EQ(write(descriptor, text.data(), text.size()), static_cast<ssize_t>(text.size()));
  return descriptor;
}

std::string text_of(int descriptor) {
  char buffer[64] = {};
  EXPECT_GT(pread(descriptor, buffer, sizeof(buffer) - 1, 0), 0);
  return buffer;
}

std::string text(int rank, int index) { return std::to_string(rank) + "/" + std::to_string(index); }

// Ranks as threads that meet at a barrier.
void on_ranks(int size, const std::function<void(int rank, const HostAllGather&)>& body) {
  std::vector<char> all(static_cast<std::size_t>(size) * 256);
  std::barrier meeting(size);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      body(rank, [&, rank](const void* send, void* receive, std::size_t bytes) {
        std::memcpy(all.data() + static_cast<std::size_t>(rank) * bytes, send, bytes);
        meeting.arrive_and_wait();
        std::memcpy(receive, all.data(), static_cast<std::size_t>(size) * bytes);
        meeting.arrive_and_wait();
      });
    });
  }
  for (auto& thread : threads) thread.join();
}

TEST(DescriptorExchange, EveryDescriptorArrivesAtItsPlace) {
  for (const int size : {1, 2, 4}) {
    for (const int count : {0, 1, 200, 201}) {  // one message takes 200
      on_ranks(size, [&](int rank, const HostAllGather& all_gather) {
        std::vector<int> own;
        for (int i = 0; i < count; ++i) own.push_back(file_with(text(rank, i)));
        const auto got = exchange_descriptors(own, rank, size, all_gather, std::chrono::seconds(20));
        ASSERT_EQ(got.size(), static_cast<std::size_t>(size));
        for (int r = 0; r < size; ++r) {
          ASSERT_EQ(got[r].size(), r == rank ? 0u : static_cast<std::size_t>(count));
          for (std::size_t i = 0; i < got[r].size(); ++i) {
            EXPECT_EQ(text_of(got[r][i]), text(r, static_cast<int>(i)));
            close(got[r][i]);
          }
        }
        for (int descriptor : own) close(descriptor);
      });
    }
  }
}

TEST(DescriptorExchange, ARankThatSendsNothingIsAnErrorWithinTheDeadline) {
  on_ranks(2, [&](int rank, const HostAllGather& all_gather) {
    if (rank == 1) {  // it comes to the meeting, and no further
      char name[64] = {}, names[128];
      std::snprintf(name + 1, sizeof(name) - 1, "fsdp-nobody-%d", getpid());
      all_gather(name, names, sizeof(name));
      return;
    }
    const int own = file_with("x");
    try {
      (void)exchange_descriptors({own}, rank, 2, all_gather, std::chrono::milliseconds(50));
      ADD_FAILURE() << "no error";
    } catch (const CommunicationError& error) {
      EXPECT_NE(std::string(error.what()).find("descriptors"), std::string::npos) << error.what();
    }
    close(own);
  });
}

}  // namespace
}  // namespace fsdp::testing
