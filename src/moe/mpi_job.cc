#include <cstdlib>

#include "moe/mpi_group.h"

namespace k3 {
namespace {

std::optional<int64_t> number(const char* name) {
  const char* text = std::getenv(name);
  if (text == nullptr || *text == '\0') return std::nullopt;
  char* end = nullptr;
  const long long value = std::strtoll(text, &end, 10);
  return *end == '\0' ? std::optional<int64_t>(value) : std::nullopt;
}

}  // namespace

// The variables Open MPI's launcher sets for each process.
std::optional<MpiJob> mpi_job() {
  const auto rank = number("OMPI_COMM_WORLD_RANK"), size = number("OMPI_COMM_WORLD_SIZE");
  if (!rank || !size) return std::nullopt;
  return MpiJob{*rank, *size, number("OMPI_COMM_WORLD_LOCAL_SIZE").value_or(*size)};
}

}  // namespace k3
