"""The theatre: at most one deployment runs at a time, because machines that test this have few cores."""

import contextlib
import shutil
from collections.abc import Callable
from pathlib import Path

from engine.deployment import Deployment, machine_lock
from kvbaton.launch.config import UpConfig
from kvbaton.launch.specs import ProcessSpec

Change = Callable[[ProcessSpec], ProcessSpec]


class Theatre:
    """Starts deployments, each after stopping the one before.

    Owner: a session fixture.
    """

    def __init__(self, folder: Path, lock: str | None) -> None:
        self._folder = folder
        self._lock = lock
        self._playing: tuple[str, Deployment] | None = None
        self._exit = contextlib.ExitStack()

    def play(
        self,
        name: str,
        config: Callable[[Path], UpConfig],
        change: Change = lambda spec: spec,
        *,
        alone: bool = False,
    ) -> Deployment:
        """Return the deployment of this name, started unless it is the one that runs."""
        if self._playing is not None and self._playing[0] == name:
            return self._playing[1]
        self.close()
        self._exit.enter_context(machine_lock(self._lock))
        folder = self._folder / name
        shutil.rmtree(folder, ignore_errors=True)
        deployment = self._exit.enter_context(Deployment(config(folder), change, alone=alone))
        self._playing = (name, deployment)
        return deployment

    def close(self) -> None:
        """Stop what runs."""
        self._playing = None
        self._exit.close()
