"""What an engine needs of offloading."""

from megakv.offload.assembly import make_offloader
from megakv.offload.cuda_link import CudaStreams
from megakv.offload.schedule import accelerator_room, weights_by_objective
from megakv.offload.weights import layer_weights

__all__ = ["CudaStreams", "accelerator_room", "layer_weights", "make_offloader", "weights_by_objective"]
