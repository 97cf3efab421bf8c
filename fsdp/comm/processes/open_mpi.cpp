// The transport over MPI. The only file that includes mpi.h; built into libfsdp_mpi.so.
#include <mpi.h>

#include <stdexcept>

#include "fsdp/comm/processes/transport.h"

namespace fsdp::processes {
namespace {

static_assert(sizeof(MPI_Request) <= sizeof(void*), "a request travels as a pointer");

void check(int code, const char* call) {
  if (code == MPI_SUCCESS) return;
  char text[MPI_MAX_ERROR_STRING] = {};
  int length = 0;
  MPI_Error_string(code, text, &length);
  throw std::runtime_error(std::string(call) + ": " + text);
}

void* pack(MPI_Request request) {
  if (request == MPI_REQUEST_NULL) return nullptr;
  return (void*)request;  // a pointer in Open MPI, a number in others
}
MPI_Request unpack(const Request& request) {
  return request.handle == nullptr ? MPI_REQUEST_NULL : (MPI_Request)request.handle;
}

class MpiTransport final : public Transport {
 public:
  MpiTransport() {
    int initialized = 0, finalized = 0, level = 0;
    check(MPI_Finalized(&finalized), "MPI_Finalized");
    if (finalized != 0) throw std::runtime_error("MPI was ended in this process and cannot be started again");
    check(MPI_Initialized(&initialized), "MPI_Initialized");
    if (initialized != 0) {
      check(MPI_Query_thread(&level), "MPI_Query_thread");
    } else {
      check(MPI_Init_thread(nullptr, nullptr, MPI_THREAD_MULTIPLE, &level), "MPI_Init_thread");
      owns_ = true;
    }
    if (level < MPI_THREAD_MULTIPLE)
      throw std::runtime_error("MPI was started without MPI_THREAD_MULTIPLE, which communication streams need");
    check(MPI_Comm_dup(MPI_COMM_WORLD, &world_), "MPI_Comm_dup");  // apart from the program's own messages
    check(MPI_Comm_set_errhandler(world_, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
    check(MPI_Comm_rank(world_, &rank_), "MPI_Comm_rank");
    check(MPI_Comm_size(world_, &size_), "MPI_Comm_size");
    int* limit = nullptr;
    int found = 0;
    check(MPI_Comm_get_attr(world_, MPI_TAG_UB, &limit, &found), "MPI_Comm_get_attr");
    if (found != 0) largest_tag_ = *limit;
  }

  int rank() const override { return rank_; }
  int size() const override { return size_; }
  int largest_tag() const override { return largest_tag_; }
  std::size_t eager_bytes() const override { return 3840; }  // Open MPI's smallest limit is 4 KiB with its own header

  Request send(const void* data, std::size_t bytes, int to, int tag) override {
    MPI_Request request = MPI_REQUEST_NULL;
    check(MPI_Isend(data, static_cast<int>(bytes), MPI_BYTE, to, tag, world_, &request), "MPI_Isend");
    return {pack(request)};
  }
  Request receive(void* data, std::size_t bytes, int from, int tag) override {
    MPI_Request request = MPI_REQUEST_NULL;
    check(MPI_Irecv(data, static_cast<int>(bytes), MPI_BYTE, from, tag, world_, &request), "MPI_Irecv");
    return {pack(request)};
  }
  Request receive_from_any(void* data, std::size_t bytes, int tag) override {
    return receive(data, bytes, MPI_ANY_SOURCE, tag);
  }

  bool test(Request& request, Arrival* arrival) override {
    MPI_Request own = unpack(request);
    MPI_Status status;
    int done = 0;
    check(MPI_Test(&own, &done, &status), "MPI_Test");
    request.handle = pack(own);
    if (done != 0 && arrival != nullptr) {
      int bytes = 0;
      check(MPI_Get_count(&status, MPI_BYTE, &bytes), "MPI_Get_count");
      *arrival = {status.MPI_SOURCE, static_cast<std::size_t>(bytes)};
    }
    return done != 0;
  }

  void abandon(Request& request, bool receiving) override {
    MPI_Request own = unpack(request);
    request.handle = nullptr;
    if (own == MPI_REQUEST_NULL) return;
    if (receiving) {
      MPI_Cancel(&own);
      MPI_Wait(&own, MPI_STATUS_IGNORE);  // cancelled, or its data is being copied: either ends by itself
    } else {
      MPI_Request_free(&own);
    }
  }

  void close() override {
    if (!owns_) return;
    owns_ = false;
    check(MPI_Comm_free(&world_), "MPI_Comm_free");
    check(MPI_Finalize(), "MPI_Finalize");
  }

 private:
  MPI_Comm world_ = MPI_COMM_NULL;
  int rank_ = 0, size_ = 1;
  int largest_tag_ = 32767;  // the least that the standard allows
  bool owns_ = false;
};

std::string library() {
  char text[MPI_MAX_LIBRARY_VERSION_STRING] = {};
  int length = 0;
  MPI_Get_library_version(text, &length);
  const std::string all(text, static_cast<std::size_t>(length));
  return all.substr(0, all.find_first_of(",\n"));
}

}  // namespace
}  // namespace fsdp::processes

extern "C" __attribute__((visibility("default"))) const fsdp::processes::Module fsdp_transport_module = {
    fsdp::processes::kModuleVersion, "mpi", &fsdp::processes::library,
    [](const fsdp::processes::Bootstrap&) -> std::unique_ptr<fsdp::processes::Transport> {
      return std::make_unique<fsdp::processes::MpiTransport>();
    }};
