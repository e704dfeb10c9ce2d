"""A W&B run of our own: configuration, offline by default, and failures that never kill."""

import io
import logging
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from megakv.tracking.config import WandbTrackingConfig, check_wandb
from megakv.tracking.tables import Table

logger = logging.getLogger(__name__)

# The other ranks may wait for rank 0 meanwhile. Without a network, wandb 0.31 gives up some 15 s after this time.
INIT_TIMEOUT_S = 6.0
FINISH_TIMEOUT_S = 60.0


def check_wandb_installed(config: WandbTrackingConfig) -> None:
    """Refuse a configuration that asks for W&B where it cannot be imported."""
    if config.enabled:
        setting = "megakv.tracking.wandb.enabled is true"
        check_wandb(setting, config.project, "set megakv.tracking.wandb.enabled to false")


class WandbRun:
    """A run that is told numbers, tables and pictures.

    deepspeed's own monitor starts the process-wide run, without a configuration or a name, online. This one starts
    a separate run (``reinit="create_new"``), so that neither a second engine nor a run of the user's is touched.
    It is online only if the user is logged in and has not chosen another W&B mode; the environment is not written.
    After the first failure of W&B it warns once and logs nothing more.

    Build it on rank 0 only; `run_config` is shown as the run's configuration.
    """

    def __init__(self, config: WandbTrackingConfig, run_config: dict[str, Any]):
        self._run: Any = None
        self._guard(lambda: self._start(config, run_config))

    @property
    def directory(self) -> Path | None:
        """Folder of the run's files, for ``wandb sync`` if it is offline; ``None`` without a run, or a disabled one."""
        return None if self._run is None or self._run.disabled else Path(self._run.dir).parent

    @property
    def upload(self) -> str | None:
        """The command that uploads an offline run once it is finished; ``None`` for any other."""
        return f"wandb sync {shlex.quote(str(self.directory))}" if self.directory and self._run.offline else None

    def describe(self, facts: dict[str, Any]) -> None:
        """Add to the run's configuration."""
        if self._run is not None:
            self._guard(lambda: self._run.config.update(facts, allow_val_change=True))

    def log(self, values: Mapping[str, float | Table | bytes], step: int | None = None) -> None:
        """Log numbers, tables and PNGs by name; ``step`` ``None`` is the present step."""

        def shown(value: float | Table | bytes) -> Any:
            import wandb

            if isinstance(value, Table):
                return wandb.Table(columns=[*value.columns], data=value.rows, allow_mixed_types=True)
            if isinstance(value, bytes):
                from PIL import Image

                return wandb.Image(Image.open(io.BytesIO(value)))
            return value

        if self._run is not None:
            self._guard(lambda: self._run.log({name: shown(value) for name, value in values.items()}, step=step))

    def close(self) -> None:
        """Finish the run; later calls of any method do nothing."""
        if self._run is not None:
            self._guard(lambda: self._run.finish())
            self._run = None

    def _start(self, config: WandbTrackingConfig, run_config: dict[str, Any]) -> None:
        import wandb

        mode = _mode(wandb)
        settings = wandb.Settings(
            init_timeout=INIT_TIMEOUT_S,
            finish_timeout=FINISH_TIMEOUT_S,
            # The console and the command line hold the user's questions and answers, which nobody asked to upload.
            console="off",
            x_disable_meta=True,
            # Online, W&B prints the address of the run; offline it has nothing to say.
            silent=mode != "online",
        )
        self._run = wandb.init(
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
            self._run = None
            logger.warning("W&B failed, this run is not logged there any further: %s: %s", type(error).__name__, error)


def _mode(wandb: Any) -> Any:
    """The W&B mode: the user's own setting, but offline where "online" would ask for an account."""
    mode = wandb.setup().settings.mode
    if mode not in ("online", "run"):
        return mode
    # With a run open, wandb.login() answers False whoever asks; that run has found out already.
    logged_in = not wandb.run.offline if wandb.run is not None else wandb.login(prompt=False, verify=False)
    return "online" if logged_in else "offline"
