// Exchanges by MPI's messages without waiting, which are asked for until they are there or time is over.
#include <mpi.h>

#include <algorithm>
#include <thread>

#include "distributed/named.h"
#include "heddle/distributed_mpi.h"

namespace heddle::distributed {
namespace {

using Clock = std::chrono::steady_clock;

// MPI counts in int.
constexpr std::size_t kMostBytes = std::size_t{1} << 30;

void check_mpi(int code, const Purpose& purpose) {
  if (code == MPI_SUCCESS) return;
  char said[MPI_MAX_ERROR_STRING];
  int length = 0;
  MPI_Error_string(code, said, &length);
  throw RuntimeError(text(beginning(purpose), std::string(said, static_cast<std::size_t>(length))));
}

class MpiTransfer : public Transfer {
 public:
  MpiTransfer(Purpose purpose, int self, std::chrono::milliseconds timeout)
      : purpose_(std::move(purpose)), self_(self), timeout_(timeout) {}
  MpiTransfer(const MpiTransfer&) = delete;
  MpiTransfer& operator=(const MpiTransfer&) = delete;
  ~MpiTransfer() override {
    // After an error: what was received no one will read.
    for (Message& message : messages_) {
      if (message.request == MPI_REQUEST_NULL) continue;
      if (message.received) MPI_Cancel(&message.request);
      MPI_Request_free(&message.request);
    }
  }

  void send(std::span<const std::byte> out, int to, MPI_Comm comm) {
    for (std::size_t at = 0; at < out.size(); at += kMostBytes) {
      const std::size_t bytes = std::min(kMostBytes, out.size() - at);
      Message& message = messages_.emplace_back(Message{MPI_REQUEST_NULL, to, false, static_cast<int>(bytes)});
      check_mpi(MPI_Isend(out.data() + at, message.bytes, MPI_BYTE, to, kTag, comm, &message.request), purpose_);
    }
  }
  void receive(std::span<std::byte> in, int from, MPI_Comm comm) {
    for (std::size_t at = 0; at < in.size(); at += kMostBytes) {
      const std::size_t bytes = std::min(kMostBytes, in.size() - at);
      Message& message = messages_.emplace_back(Message{MPI_REQUEST_NULL, from, true, static_cast<int>(bytes)});
      check_mpi(MPI_Irecv(in.data() + at, message.bytes, MPI_BYTE, from, kTag, comm, &message.request), purpose_);
    }
  }

  void wait() override {
    const Clock::time_point end = Clock::now() + timeout_;
    for (Message& message : messages_) {
      for (int tries = 0; !done(message); ++tries) {
        if (Clock::now() > end) {
          throw RuntimeError(lost(purpose_, waiting(self_, message.received, message.rank), timeout_, kNotInTime));
        }
        if (tries < kBusyTries) {
          std::this_thread::yield();
        } else {
          std::this_thread::sleep_for(std::chrono::microseconds(50));
        }
      }
    }
    messages_.clear();
  }

 private:
  static constexpr int kTag = 0, kBusyTries = 1000;
  struct Message {
    MPI_Request request;
    int rank;
    bool received;
    int bytes;
  };

  bool done(Message& message) {
    if (message.request == MPI_REQUEST_NULL) return true;
    int flag = 0, count = 0;
    MPI_Status status;
    check_mpi(MPI_Test(&message.request, &flag, &status), purpose_);
    if (flag == 0) return false;
    if (message.received) {
      check_mpi(MPI_Get_count(&status, MPI_BYTE, &count), purpose_);
      if (count != message.bytes) {
        throw RuntimeError(lost(purpose_, waiting(self_, true, message.rank), timeout_,
                                text("it sent ", count, " bytes where ", message.bytes, " were expected")));
      }
    }
    return true;
  }

  const Purpose purpose_;
  const int self_;
  const std::chrono::milliseconds timeout_;
  std::vector<Message> messages_;
};

class MpiCommunicator : public Communicator {
 public:
  MpiCommunicator(MPI_Comm of, std::chrono::milliseconds timeout) : timeout_(timeout) {
    check_mpi(MPI_Comm_dup(of, &comm_), "communicator");
    MPI_Comm_set_errhandler(comm_, MPI_ERRORS_RETURN);
    MPI_Comm_rank(comm_, &rank_);
    MPI_Comm_size(comm_, &size_);
  }
  MpiCommunicator(const MpiCommunicator&) = delete;
  MpiCommunicator& operator=(const MpiCommunicator&) = delete;
  ~MpiCommunicator() override {
    int finalized = 0;
    MPI_Finalized(&finalized);
    if (finalized == 0) MPI_Comm_free(&comm_);
  }
  int rank() const override { return rank_; }
  int size() const override { return size_; }
  const char* name() const override { return "MPI"; }
  std::unique_ptr<Transfer> exchange(std::span<const std::byte> out, int to, std::span<std::byte> in, int from,
                                     const Purpose& purpose) override {
    auto transfer = std::make_unique<MpiTransfer>(purpose, rank_, timeout_);
    transfer->receive(in, from, comm_);
    transfer->send(out, to, comm_);
    return transfer;
  }

 private:
  MPI_Comm comm_ = MPI_COMM_NULL;
  std::chrono::milliseconds timeout_;
  int rank_ = 0, size_ = 1;
};

void require_running(const Check& check) {
  int initialized = 0, finalized = 0;
  MPI_Initialized(&initialized);
  MPI_Finalized(&finalized);
  check.require(initialized != 0 && finalized == 0, "MPI is not running: call this between MPI_Init and MPI_Finalize");
}

}  // namespace

std::unique_ptr<Communicator> mpi_communicator(int fortran_handle, std::chrono::milliseconds timeout) {
  const Check check("distributed.mpi_communicator");
  check.require(timeout.count() > 0, "timeout is ", timeout.count(), " ms: it must be above 0");
  require_running(check);
  return std::make_unique<MpiCommunicator>(MPI_Comm_f2c(fortran_handle), timeout);
}

int mpi_local_rank(int fortran_handle) {
  const Check check("distributed.mpi_local_rank");
  require_running(check);
  MPI_Comm here = MPI_COMM_NULL;
  int rank = 0;
  check_mpi(MPI_Comm_split_type(MPI_Comm_f2c(fortran_handle), MPI_COMM_TYPE_SHARED, 0, MPI_INFO_NULL, &here),
            "local rank");
  check_mpi(MPI_Comm_rank(here, &rank), "local rank");
  MPI_Comm_free(&here);
  return rank;
}

}  // namespace heddle::distributed
