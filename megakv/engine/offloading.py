"""What an engine needs of offloading."""

from megakv.offload.assembly import make_offloader
from megakv.offload.cuda_link import CudaStreams
from megakv.offload.schedule import accelerator_room, weights_by_objective
from megakv.offload.weights import LayerWeights

__all__ = ["CudaStreams", "LayerWeights", "accelerator_room", "make_offloader", "weights_by_objective"]
