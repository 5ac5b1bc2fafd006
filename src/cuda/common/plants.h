// What the soak can plant in its builds of kernels; see planted.cuh.
#pragma once

namespace heddle::cuda {

enum class Plant : int {
  none,
  // Faults.
  unfenced_reads,       // release_after_reads() waits for no read
  late_query_reads,     // q is given back some microseconds before it is read
  late_key_reads,       // the same for keys, weights, or what else comes stage by stage
  late_plane_reads,     // the same for a bias or mask
  unawaited_keys,       // keys are read before they have landed; copies start late
  unawaited_gradients,  // dS of the other warpgroup is read before it is there
  // Delays, of which no result may change.
  slow_producer,
  slow_consumer,
};

// Calls `set` whenever the host plants something. Returns true.
bool register_plants(void (*set)(int plant));

}  // namespace heddle::cuda
