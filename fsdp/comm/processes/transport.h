// Messages between the processes of a job: the little that is needed of a message-passing library.
//
// Implementations are modules of their own, opened on demand, so that one build of the library serves machines with and
// without them: open_mpi.cpp (libfsdp_mpi.so) for jobs of mpirun and srun, zeromq.cpp (libfsdp_zeromq.so) for those of
// torchrun, which brings no library. Nothing of this library is needed to build them.
//
// Messages of one pair of ranks with one tag arrive in the order sent. Every call may come from any thread. Failures
// are thrown as std::runtime_error with the library's own text.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace fsdp::processes {

// A message under way. Owned by whoever started it; test() until done, or give up with abandon().
struct Request {
  void* handle = nullptr;  // null: done
};

struct Arrival {
  int from = 0;
  std::size_t bytes = 0;
};

class Transport {
 public:
  virtual ~Transport() = default;  // ends the library without waiting for anybody when close() was not called

  [[nodiscard]] virtual int rank() const = 0;
  [[nodiscard]] virtual int size() const = 0;
  [[nodiscard]] virtual int largest_tag() const = 0;
  // Messages up to so many bytes leave without waiting for their receiver.
  [[nodiscard]] virtual std::size_t eager_bytes() const = 0;

  // `data` stays in place until the request is done. At most 1 GiB a message.
  [[nodiscard]] virtual Request send(const void* data, std::size_t bytes, int to, int tag) = 0;
  [[nodiscard]] virtual Request receive(void* data, std::size_t bytes, int from, int tag) = 0;
  [[nodiscard]] virtual Request receive_from_any(void* data, std::size_t bytes, int tag) = 0;

  // True once the request is done; also moves other messages on. Fills `arrival` of a receive when given.
  virtual bool test(Request& request, Arrival* arrival = nullptr) = 0;
  // A receive is cancelled, unless its message is already here; a send is left to itself.
  virtual void abandon(Request& request, bool receiving) = 0;

  // Ends the library in order: returns when all ranks have called it.
  virtual void close() = 0;
};

// How processes find each other where the library does not know it by itself.
struct Bootstrap {
  int rank = 0, size = 1;
  std::string address;  // of this process, as the others reach it
  // Collective: every process gives its text, all get all, [rank].
  std::function<std::vector<std::string>(const std::string& own)> exchange;
};

// What a module exports under the name kModuleSymbol.
struct Module {
  int version;               // kModuleVersion of the header it was built with
  const char* name;          // "mpi", "zeromq"
  std::string (*library)();  // "Open MPI v4.1.4"; may be called before connect()
  // Joins the job of this process. Once a process.
  std::unique_ptr<Transport> (*connect)(const Bootstrap& bootstrap);
};

inline constexpr int kModuleVersion = 1;
inline constexpr const char* kModuleSymbol = "fsdp_transport_module";
inline constexpr const char* kMpiModule = "libfsdp_mpi.so";
inline constexpr const char* kZeroMqModule = "libfsdp_zeromq.so";

}  // namespace fsdp::processes
