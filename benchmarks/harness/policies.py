"""What each policy of the library would choose between the ring's methods, for workloads of one model."""

from __future__ import annotations

from transformers import PreTrainedModel

from megakv.choice import Evidence, choose_prefill
from megakv.config import load_config
from megakv.costmodel.context_parallel import Workload
from megakv.costmodel.hardware import load_profile
from megakv.costmodel.policy_fit import load_fit
from megakv.costmodel.shape import ModelShape

from .world import World

WITHOUT_PROFILE = "no profile"
WITH_PROFILE = ("cost", "alg1", "alg5")


class Policies:
    """The policies that decide from what is known of these ranks: at first nothing."""

    def __init__(self, world: World, model: PreTrainedModel):
        self.deciding = WITHOUT_PROFILE
        self._size = world.size
        self._shape = ModelShape.from_config(model.config, dtype=model.dtype).attention()
        self._evidence = {WITHOUT_PROFILE: Evidence()}

    def use_profile(self, path: str) -> None:
        """Know a hardware profile from now on; the cost model decides."""
        profile = load_profile(path)
        self.deciding = WITH_PROFILE[0]
        self._evidence |= {policy: Evidence(policy, profile) for policy in WITH_PROFILE}

    def use_config(self, path: str) -> None:
        """Let a configuration file's policy decide, by the files that it names."""
        config = load_config(path).megakv.context_parallel
        self.deciding = config.policy if config.profile or config.fit else WITHOUT_PROFILE
        self._evidence[self.deciding] = Evidence(
            config.policy,
            None if config.profile is None else load_profile(config.profile),
            None if config.fit is None else load_fit(config.fit),
        )

    def choose(self, new: int, cached: int) -> dict[str, str]:
        """The method of each policy for `new` tokens behind `cached` ones."""
        workload = Workload((new,), (cached,), self._size)
        return {name: choose_prefill(evidence, workload, self._shape) for name, evidence in self._evidence.items()}
