"""One copy of the weights on one device: the engine owns the memory, the learner's parameters are views of it.

Used by the learner (OneCopySender) and the engine (OneCopyReceiver), behind `weights.base`. The bridge says where the
tensors are, the fence when they may change. Knows nothing of models or optimisers.

- A new version is no copy: the learner asks the engine to pause, changes the weights in place, and says that they are
  at rest. The engine pauses between two decoding steps, in `fetch`, and goes on with the new version.
- Parameters of another dtype than the engine's (float32 for an engine in bfloat16) are copied inside the fence.
- Engine dead: the learner stops with WeightsOwnerLost. Learner dead while it changes them: the engine stops with
  WeightsTimeout, for they are half of two versions. Either is started again and finds the other.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Literal

from busrl import device as devices
from busrl.errors import UserError, WeightsOwnerLost, WeightsTimeout
from busrl.weights import bridge
from busrl.weights.base import NOTHING, Hook, StepTable
from busrl.weights.fence import Fence, State
from busrl.weights.fusing import Shape
from busrl.weights.mark import NOBODY, Mark

if TYPE_CHECKING:
    import torch

LOOK_EVERY_S = 0.0005  # an engine is paused for as long as this takes: nothing wakes across processes
SEARCH_EVERY_S = 0.02


class OneCopyReceiver:
    """The engine's side. `share` before anything else; then as any receiver."""

    def __init__(self, bridge_file: str | Path, fence_file: str | Path, name: str, *, timeout_s: float = 10.0) -> None:
        self.bridge_file, self.fence_file = Path(bridge_file), Path(fence_file)
        self.name = name
        self._timeout_s = timeout_s
        self._steps = StepTable()
        self._fence: Fence | None = None
        self._kept: list[torch.Tensor] = []
        self._device: torch.device | None = None

    @property
    def kind(self) -> Literal["tensors"]:
        return "tensors"

    def share(self, named: Mapping[str, torch.Tensor], wanted: Mapping[str, Shape] | None = None) -> None:
        """Let the learner have the tensors of this process's model (its parameters, by name, each once).

        `wanted`: the checkpoint's names and shapes, for an engine that has fused its own.
        """
        self._kept = list(named.values())  # what is shared stays, whatever becomes of the model
        self._device = self._kept[0].device
        described = bridge.describe(self.name, named, wanted)
        self._fence = Fence.create(self.fence_file)
        bridge.write(self.bridge_file, described)

    def newest(self) -> tuple[int, int]:
        """The version at rest, or the one that the learner asks for a pause for: `fetch` waits until it is complete."""
        return NOTHING if self._fence is None else self._fence.state.stamp

    def wait_for(self, version: int, timeout_s: float) -> tuple[int, int]:
        """For an engine that has nothing running: it is paused for every change."""
        deadline, pause = time.monotonic() + timeout_s, Event()
        while True:
            state = self._shared().state
            if not state.changing and state.version >= version:
                return state.stamp
            self._pause_for(state)
            if time.monotonic() > deadline:
                raise WeightsTimeout(f"{self.name}: no version {version} after {timeout_s:g} s: {self._told(state)}")
            pause.wait(LOOK_EVERY_S)

    def fetch(self, params: dict[str, torch.Tensor]) -> tuple[int, int]:
        """Be paused until the weights are at rest; returns which version they are. Nothing is copied into `params`."""
        deadline, pause = time.monotonic() + self._timeout_s, Event()
        while (state := self._shared().state).changing:
            self._pause_for(state)
            if time.monotonic() > deadline:
                raise WeightsTimeout(f"{self.name}: paused for {self._timeout_s:g} s: {self._told(state)}")
            pause.wait(LOOK_EVERY_S)
        self._steps.add(state.version, state.step)
        return state.version, state.step

    def step_of(self, version: int) -> int:
        return self._steps.step_of(version)

    def close(self) -> None:
        """Take the weights away, once the learner has let go of them: it may be writing its last checkpoint."""
        if self._fence is None:
            return
        deadline, pause = time.monotonic() + self._timeout_s, Event()
        while self._fence.learner.alive and time.monotonic() < deadline:
            self._pause_for(self._fence.state)
            pause.wait(SEARCH_EVERY_S)
        if self._fence.still_named():
            self.bridge_file.unlink(missing_ok=True)
            self.fence_file.unlink(missing_ok=True)
        self._fence.close()
        self._fence, self._kept = None, []

    def _pause_for(self, state: State) -> None:
        """Nothing of ours reads the weights from here on; said once for each change."""
        fence = self._shared()
        if state.changing and not fence.paused_for(state):
            if self._device is not None:
                devices.synchronize(self._device)
            fence.pause_for(state)

    def _shared(self) -> Fence:
        if self._fence is None:
            raise UserError(f"{self.name}: its weights are not shared yet")
        return self._fence

    def _told(self, state: State) -> str:
        learner = self._shared().learner
        if not state.changing:
            return f"the learner ({learner}) has published nothing beyond version {state.version}"
        half = "" if learner.alive else "; the weights are half of two versions, this engine has to load its own again"
        return f"the learner ({learner}) changes the weights to version {state.version} (step {state.step}){half}"


class OneCopySender:
    """The learner's side. `connect`, then a fence (`begin` ... `publish`) around every change of the weights."""

    def __init__(self, bridge_file: str | Path, fence_file: str | Path, *, timeout_s: float = 10.0) -> None:
        self.bridge_file, self.fence_file = Path(bridge_file), Path(fence_file)
        self.hook: Hook | None = None  # nothing is copied: one piece
        self._timeout_s = timeout_s
        self._fence: Fence | None = None
        self._bridge: bridge.Bridge | None = None
        self._views: dict[str, torch.Tensor] = {}
        self._device: torch.device | None = None

    def newest(self) -> tuple[int, int]:
        state = None if self._fence is None else self._fence.state
        return NOTHING if state is None or state.changing else state.stamp

    def connect(
        self, own: Mapping[str, torch.Tensor], device: torch.device, wait_s: float,
        stopping: Callable[[], object] = lambda: False,
    ) -> dict[str, torch.Tensor] | None:  # fmt: skip
        """The engine's weights, by the checkpoint's names; None if it was told to stop while it waited for them.

        `own` is what this process has loaded: names and shapes must be equal. WeightsTimeout after `wait_s`.
        """
        deadline, pause = time.monotonic() + wait_s, Event()
        while not stopping():
            found = bridge.read(self.bridge_file)
            if found is not None and found.owner.alive and self._attach(found):
                self._views = bridge.map_parts(found, device)
                bridge.check(self._views, own, same_dtype=False)
                self._bridge, self._device = found, device
                return self._views
            if time.monotonic() > deadline:
                who = "no engine has shared its weights" if found is None else f"{found.name} is {found.owner}"
                raise WeightsTimeout(f"{self.bridge_file}: {who} after {wait_s:g} s; is the rollout process up?")
            pause.wait(SEARCH_EVERY_S)
        return None

    def _attach(self, found: bridge.Bridge) -> bool:
        """Whether the fence of that bridge is there; a restarted engine makes its fence before its bridge."""
        fence = Fence.attach(self.fence_file)
        if fence is None:
            return False
        if fence.owner != found.owner:
            fence.close()
            return False
        if fence.learner not in (NOBODY, Mark.mine()) and fence.learner.alive:
            raise UserError(f"{self.fence_file}: another learner ({fence.learner}) has these weights already")
        fence.learner = Mark.mine()
        self._fence = fence
        return True

    def check(self) -> None:
        """WeightsOwnerLost if the engine is gone: what the parameters show is nobody's any more."""
        if self._bridge is not None and not self._bridge.owner.alive:
            raise WeightsOwnerLost(
                f"{self._bridge.name} ({self._bridge.owner}) held the weights and is gone, they with it; this learner "
                "goes on from its checkpoint and log, with the weights of its successor"
            )

    def begin(self, version: int, step: int) -> None:
        """Ask the engine to pause for this version and wait until it has. No weight may change before."""
        fence = self._connected()
        before, state = fence.state, State(version, step, True)
        fence.forget_pause()
        fence.state = state
        deadline, pause = time.monotonic() + self._timeout_s, Event()
        while not fence.paused_for(state):
            self.check()
            if time.monotonic() > deadline:
                fence.state = before
                raise WeightsTimeout(
                    f"{self._owner()} did not pause for version {version} within {self._timeout_s:g} s; nothing changed"
                )
            pause.wait(LOOK_EVERY_S)

    @property
    def begun(self) -> bool:
        """Whether the engine is paused for a version that is not published yet."""
        return self._fence is not None and self._fence.state.changing

    def publish(self, version: int, step: int, named: dict[str, torch.Tensor]) -> None:
        """The weights are at rest, as `version`. Tensors that are no views of the engine's are copied into them."""
        fence = self._connected()
        if not fence.state.changing:
            if version <= fence.state.version:
                raise UserError(f"version {version} is not above {fence.state.version}, which is published")
            self.begin(version, step)
        elif fence.state.version != version:
            raise UserError(f"the fence was begun for version {fence.state.version}, not for {version}")
        self.write(named)
        self.check()
        fence.state = State(version, step, False)

    def write(self, named: Mapping[str, torch.Tensor]) -> int:
        """Copy what is no view of the engine's weights into them, and wait for the device; returns the bytes copied.
        Inside the fence only."""
        import torch

        copied = 0
        with torch.no_grad():
            for name, view in self._views.items():
                if named[name].data_ptr() != view.data_ptr():
                    view.copy_(named[name])
                    copied += view.nbytes
        if self._device is not None:
            devices.synchronize(self._device)
        return copied

    def close(self) -> None:
        """Let go of the weights: the engine may take them away. The views must not be used any more."""
        self._views, self._bridge = {}, None
        if self._fence is not None:
            self._fence.learner = NOBODY
            self._fence.close()
            self._fence = None

    def _connected(self) -> Fence:
        if self._fence is None or self._bridge is None:
            raise UserError(f"{self.bridge_file}: the engine's weights are not mapped yet")
        return self._fence

    def _owner(self) -> str:
        return f"{self._bridge.name} ({self._bridge.owner})" if self._bridge is not None else "the engine"
