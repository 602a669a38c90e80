// MpiGroup in a program built without MPI: create() says so, and nothing else can be reached.
#include "moe/mpi_group.h"

namespace k3 {

struct MpiGroup::Impl {};

MpiGroup::MpiGroup(const SlabShape& shape, double timeout_seconds)
    : EpGroup(shape, timeout_seconds) {}
MpiGroup::~MpiGroup() = default;

Result<std::unique_ptr<MpiGroup>> MpiGroup::create(const SlabShape& /*shape*/, double /*timeout*/,
                                                   const std::string& /*same*/,
                                                   std::vector<int64_t>& /*limits*/) {
  return invalid_argument(
      "started by mpirun, but this k3 was built without MPI: install "
      "libopenmpi-dev and build again");
}

int64_t MpiGroup::rank() const { std::abort(); }
Slab& MpiGroup::window(int64_t /*from*/, int64_t /*to*/) { std::abort(); }
void MpiGroup::publish_dispatch(int64_t /*from*/, int64_t /*to*/, uint64_t /*generation*/) {}
void MpiGroup::publish_return(int64_t /*from*/, int64_t /*to*/, uint64_t /*generation*/,
                              std::span<const int32_t> /*assignments*/) {}
void MpiGroup::fail(const Status& status) { EpGroup::fail(status); }
void MpiGroup::send(int64_t /*to*/, const std::string& /*message*/) {}
void MpiGroup::on_message(std::function<void(int64_t, std::string)> /*call*/) {}
void MpiGroup::on_failure(std::function<void(const Status&)> /*call*/) {}
bool MpiGroup::wait_for_goodbye(int64_t /*rank*/, double /*seconds*/) { return true; }

}  // namespace k3
