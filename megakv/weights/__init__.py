"""Where weights come from: a checkpoint, a seed, or a module that is loaded already."""

from megakv.weights.checkpoint import CheckpointWeights
from megakv.weights.generated import RandomWeights
from megakv.weights.source import ModuleWeights, WeightSource

__all__ = ["CheckpointWeights", "ModuleWeights", "RandomWeights", "WeightSource"]
