"""deepspeed's W&B monitor with a run of our own: configuration, offline by default, and failures that never kill."""

import importlib.util
import logging
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from deepspeed.monitor.config import WandbConfig
from deepspeed.monitor.wandb import WandbMonitor

from megakv.tracking.config import WandbTrackingConfig
from megakv.tracking.tables import Table

logger = logging.getLogger(__name__)

# The other ranks may wait for rank 0 meanwhile. Without a network, wandb 0.31 gives up some 15 s after this time.
INIT_TIMEOUT_S = 6.0
FINISH_TIMEOUT_S = 60.0


def check_wandb_installed(config: WandbTrackingConfig) -> None:
    """Refuse a configuration that asks for W&B where it cannot be imported."""
    if config.enabled and importlib.util.find_spec("wandb") is None:
        raise ValueError(
            "megakv.tracking.wandb.enabled is true, but the package wandb is not installed: "
            "install it (pip install wandb) or set megakv.tracking.wandb.enabled to false"
        )


class WandbRunMonitor(WandbMonitor):
    """A `deepspeed.monitor` back end that owns its W&B run.

    deepspeed's own monitor starts the process-wide run, without a configuration or a name, online. This one starts
    a separate run (``reinit="create_new"``), so that neither a second engine nor a run of the user's is touched.
    It is online only if the user is logged in and has not chosen another W&B mode; the environment is not written.
    After the first failure of W&B it warns once and logs nothing more.

    Build it on rank 0 only; `run_config` is shown as the run's configuration.
    """

    def __init__(self, config: WandbTrackingConfig, run_config: dict[str, Any]):
        # Not enabled yet: with it, deepspeed's monitor would start its own run here.
        super().__init__(WandbConfig(project=config.project, team=config.team, group=config.group))
        self.run: Any = None
        self._guard(lambda: self._start(config, run_config))
        self.enabled = self.run is not None

    @property
    def directory(self) -> Path | None:
        """Folder of the run's files, for ``wandb sync`` if it is offline; ``None`` without a run."""
        return Path(self.run.dir).parent if self.enabled and self.run.dir else None

    def log(self, data: dict[str, Any], step: int | None = None, commit: bool | None = None) -> None:
        """Log to this run; ``step`` ``None`` is the present step."""
        if self.enabled:
            self._guard(lambda: self.run.log(data, step=step, commit=commit))

    def write_events(self, event_list: list[tuple[str, float, int]]) -> None:
        """Log (name, value, step) triples, one call of W&B for each step rather than for each value."""
        steps: dict[int, dict[str, float]] = {}
        for name, value, step in event_list:
            steps.setdefault(step, {})[name] = value
        for step, values in steps.items():
            self.log(values, step=step)

    def log_tables(self, tables: dict[str, Table]) -> None:
        """Log tables by name."""

        def write() -> None:
            import wandb

            self.run.log({name: wandb.Table(columns=[*t.columns], data=t.rows) for name, t in tables.items()})

        if self.enabled:
            self._guard(write)

    def draw(self, name: str, draw: Callable[[Path], None]) -> None:
        """Log the picture that `draw` writes to a file; W&B copies it."""
        if not self.enabled:
            return
        with tempfile.TemporaryDirectory() as folder:
            draw(picture := Path(folder, "picture.png"))

            def write() -> None:
                import wandb

                self.run.log({name: wandb.Image(str(picture))})

            self._guard(write)

    def close(self) -> None:
        """Finish the run; later calls of any method do nothing."""
        if self.enabled:
            self._guard(lambda: self.run.finish())
            self.enabled = False

    def _start(self, config: WandbTrackingConfig, run_config: dict[str, Any]) -> None:
        import wandb

        mode = _mode(wandb)
        settings = wandb.Settings(
            init_timeout=INIT_TIMEOUT_S,
            finish_timeout=FINISH_TIMEOUT_S,
            # The console holds the user's prompt and answer, which nobody asked to upload.
            console="off",
            # Online, W&B prints the address of the run; offline it has nothing to say.
            silent=mode != "online",
        )
        self.run = wandb.init(
            project=config.project,
            entity=config.team,
            group=config.group,
            name=config.name,
            config=run_config,
            mode=mode,
            reinit="create_new",
            settings=settings,
        )

    def _guard(self, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:  # whatever a tracking service throws, the run goes on
            self.enabled = False
            logger.warning("W&B failed, this run is not logged there any further: %s: %s", type(error).__name__, error)


def _mode(wandb: Any) -> Any:
    """The W&B mode: the user's own setting, but offline where "online" would ask for an account."""
    mode = wandb.setup().settings.mode
    if mode not in ("online", "run"):
        return mode
    # With a run open, wandb.login() answers False whoever asks; that run has found out already.
    logged_in = not wandb.run.offline if wandb.run is not None else wandb.login(prompt=False, verify=False)
    return "online" if logged_in else "offline"
