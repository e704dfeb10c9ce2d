"""From a checkpoint, a seed or a module to the weights of one rank."""
